"""What a model is made of, as a frozen dataclass. No torch here: commands read it before any heavy import."""

from __future__ import annotations

from dataclasses import dataclass


class ModelError(ValueError):
    """A user's mistake about the model: says what was wrong, why, and what to write instead."""


@dataclass(frozen=True)
class ModelConfig:
    """A hybrid stack. One letter of `pattern` is one block: `M` Mamba-2, `*` attention, `-` feed-forward; `|` cuts
    pipeline stages.

    Attributes:
        pattern: for example `M-M*-`.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width inside a feed-forward block (squared ReLU).
        num_attention_heads, num_query_groups, head_dim: attention sizes (grouped queries).
        mamba_num_heads, mamba_head_dim, mamba_state_dim, mamba_num_groups: Mamba-2 sizes; d_inner = heads * head size.
        mamba_conv_width: taps of the causal convolution.
        mamba_chunk_size: tokens a chunk of the scan.
        vocab_size: token ids run from 0 to vocab_size - 1.
        vocab_multiple: the embedding is padded to a multiple of this; padded logits never win and get no loss.
        tie_embeddings: the output head shares the embedding's weight.
        norm_eps: epsilon of every RMSNorm.
        init_std: standard deviation of initial linear weights. Projections back into the residual stream get
            init_std / sqrt(init_residuals_per_block * blocks).
        init_residuals_per_block: 1 for a block that adds to the stream once, as all here do and as Megatron-Core counts
            in hybrid models; 2 as it counts in Transformers, whose layers add twice.
        recompute: none, selective or full activation recompute.
        kernels: auto, torch or mamba_ssm; the choice is announced.
    """

    pattern: str
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_state_dim: int
    mamba_num_groups: int
    vocab_size: int
    mamba_conv_width: int = 4
    mamba_chunk_size: int = 128
    vocab_multiple: int = 128
    tie_embeddings: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    init_residuals_per_block: int = 1
    recompute: str = "none"
    kernels: str = "auto"
