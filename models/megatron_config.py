"""The model and its layout in Megatron-Core's words."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from models.config import ModelConfig
from models.norm import ACTIVATION_DTYPE
from models.pointwise import Pointwise
from models.shapes import num_blocks

# `model.recompute` in Megatron's words.
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
# Fusions that need Apex or Transformer Engine.
_NOT_FUSED = {
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}


def megatron_config(
    config: ModelConfig,
    device: torch.device,
    pointwise: Pointwise,
    *,
    tensor: int,
    pipeline: int,
    sequence: bool,
    context: int,
    virtual_pipeline: int,
) -> TransformerConfig:
    """Our model in Megatron's words."""
    # Interleaved stages that batch their sends mix up activations and gradients.
    interleaved: dict[str, Any] = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if virtual_pipeline > 1 else {}
    return TransformerConfig(
        is_hybrid_model=True,
        activation_func=pointwise.squared_relu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=ACTIVATION_DTYPE,
        bf16=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
        context_parallel_size=context,
        sequence_parallel=sequence,
        use_cpu_initialization=device.type != "cuda",
        perform_initialization=False,
        transformer_impl="local",
        **_sizes(config),
        **_NOT_FUSED,
        **_RECOMPUTE[config.recompute],
        **interleaved,
    )


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": num_blocks(config),
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.head_dim,
        "mamba_num_heads": config.mamba_num_heads,
        "mamba_head_dim": config.mamba_head_dim,
        "mamba_state_dim": config.mamba_state_dim,
        "mamba_num_groups": config.mamba_num_groups,
        "layernorm_epsilon": config.norm_eps,
    }
