"""The hybrid Mamba-Transformer: Megatron-Core's HybridModel from a specification of our own.

The linear classes are given from outside (`LinearClasses`). Parameters are FP32 throughout; the residual stream and the
inputs and outputs of linears are BF16; norms, the scan, softmax and the loss are FP32 inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from models.attention import AttentionKernel, CausalAttention, choose_attention, compare_attention, torch_attention
from models.config import ModelConfig
from models.initialization import initialize
from models.kernels import choose_kernels, compare_kernels
from models.mamba import Mamba2Mixer, MambaKernels, torch_core
from models.megatron_config import megatron_config
from models.megatron_cpu import megatron_device
from models.norm import ACTIVATION_DTYPE, BlockNorm, NormFunction, RMSNorm
from models.pointwise import Pointwise, choose_pointwise, compare_pointwise
from models.shapes import ATTENTION, BLOCK_LINEARS, MAMBA, padded_vocab_size, stage_patterns, validate

_BLOCK_NAME = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
LINEAR_PATHS = tuple(path for pair in BLOCK_LINEARS.values() for path, _ in pair)
_EMBEDDING = "embedding.word_embeddings.weight"
_NO_DECAY = ("A_log", "D", "dt_bias", "conv1d_weight", "conv1d_bias", "bias")


@dataclass(frozen=True)
class LinearClasses:
    """The linear layers to build with: subclasses of Megatron's ColumnParallelLinear and RowParallelLinear."""

    column: type
    row: type


class MambaBlock(MambaLayer):
    """x + mixer(norm(x)). Megatron's own casts x to the parameters' type first: FP32 here, of BF16 numbers."""

    def forward(self, hidden_states: Tensor, *_unused: Any, packed_seq_params: Any = None, **_not_used: Any) -> Tensor:
        """[s, b, hidden], BF16, in and out; attention masks and inference contexts mean nothing here."""
        normalized, residual = self.norm(hidden_states)
        mixed = self.mixer(normalized, packed_seq_params=packed_seq_params)
        with self.bias_dropout_add_exec_handler():
            added: Tensor = self.mamba_bda(self.training, self.config.bias_dropout_fusion)(mixed, residual, 0.0)
        return added


class LanguageStack(HybridStack):
    """The blocks and the final norm. Megatron's stack takes the norm from Transformer Engine; ours is our own."""

    def __init__(
        self, config: TransformerConfig, *args: Any, norm: NormFunction, post_layer_norm: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon, function=norm)

    def forward(self, hidden_states: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """[s, b, hidden]: the embedding's FP32 rows on the first stage, BF16 from there on."""
        if self.pre_process:
            assert hidden_states is not None, "the first stage needs the embedding's output"
            hidden_states = hidden_states.to(ACTIVATION_DTYPE)
        return super().forward(hidden_states, *args, **kwargs)


class LanguageModel(HybridModel):
    """HybridModel whose output layer is one of the given linears and whose padded vocabulary is out of the loss."""

    output_layer: Any

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec,
        linears: LinearClasses,
        model: ModelConfig,
        pointwise: Pointwise,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, spec, vocab_size=padded_vocab_size(model), position_embedding_type="none", **kwargs)
        self.real_vocab_size = model.vocab_size
        self.pointwise = pointwise
        if self.post_process:
            self._replace_output_layer(config, linears.column)

    def _replace_output_layer(self, config: TransformerConfig, column: type) -> None:
        """HybridModel names Megatron's class itself: put the given one in its place, with the marks of its weight."""
        marks = vars(self.output_layer.weight) if self.output_layer.weight is not None else {}
        self.output_layer = column(
            config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_bias_add=False,
            gather_output=False,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            tp_group=self.pg_collection.tp,
            name="output_layer",
        )
        for name, value in marks.items():
            setattr(self.output_layer.weight, name, value)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Loss of every token, or logits.

        Args:
            input_ids: [b, s] token ids.
            position_ids, attention_mask: not used: there are no position embeddings, and attention is causal.
            labels: [b, s] next tokens, or None for logits.
            documents: [b, s] int32, the number of each token's document in its row, never falling: attention,
                convolution and state stay within a document. Whole rows on every context rank, on every pipeline stage.
                None: one document a row.

        Returns:
            [b, s] FP32 cross entropy in nats; [b, s, padded vocabulary / tensor ranks] BF16 logits without labels;
            [s, b, hidden] BF16 on a pipeline stage that is not the last.
        """
        if documents is not None:  # the name under which Megatron's layers hand it on
            kwargs["packed_seq_params"] = PackedSeqParams(qkv_format="sbhd", seq_idx=documents)
        return super().forward(input_ids, position_ids, attention_mask, labels=labels, **kwargs)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """[b, s] labels and [s, b, vocabulary / tensor ranks] logits to [b, s] FP32 nats."""
        return self.pointwise.cross_entropy(logits, labels.t().contiguous(), self.pg_collection.tp).t().contiguous()

    def _scale_logits(self, logits: Tensor) -> Tensor:
        """The only step between output layer and loss: padded rows get -inf, so they never win and take no loss."""
        local = logits.shape[-1]
        first = 0 if local == self.vocab_size else self.tp_group.rank() * local
        real = max(0, min(local, self.real_vocab_size - first))
        if real == local:
            return logits
        padding = torch.arange(local, device=logits.device) >= real
        return logits.masked_fill(padding, float("-inf"))


def build_model(
    config: ModelConfig,
    linears: LinearClasses,
    *,
    sequence_length: int,
    seed: int,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: bool = False,
    context: int = 1,
    virtual_pipeline: int = 1,
    virtual_stage: int | None = None,
    device: str | torch.device = "cpu",
) -> HybridModel:
    """This rank's share of the model, with its initial weights.

    Megatron's process groups must stand (`parallel_state.initialize_model_parallel`), and its random-state tracker.

    Args:
        config: the model.
        linears: classes of every linear layer, the output layer included.
        sequence_length: tokens of a sequence, over all context ranks.
        seed: of the initial weights, which do not depend on the layout.
        tensor, pipeline, sequence, context, virtual_pipeline: the layout, as in `validate`.
        virtual_stage: which of a rank's `virtual_pipeline` model chunks to build.
        device: `cpu`, `cuda`, or `meta` for a model without memory and without weights.

    Raises:
        ModelError: a model that can't be built or split this way, or kernels that are not there or compute wrongly.
    """
    device = torch.device(device)
    layout = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence, "context": context}
    validate(config, **layout, virtual_pipeline=virtual_pipeline, sequence_length=sequence_length)  # type: ignore[arg-type]
    kernels, pointwise, attention = _trusted_kernels(config, device)
    with megatron_device(), torch.device(device):
        model = LanguageModel(
            megatron_config(config, device, pointwise, virtual_pipeline=virtual_pipeline, **layout),  # type: ignore[arg-type]
            _specification(config, linears, kernels, pointwise, attention),
            linears,
            config,
            pointwise,
            max_sequence_length=sequence_length,
            share_embeddings_and_output_weights=config.tie_embeddings,
            **_place(stage_patterns(config, pipeline, virtual_pipeline), pipeline, virtual_pipeline, virtual_stage),
        )
    if device.type != "meta":
        rank = parallel_state.get_tensor_model_parallel_rank()
        initialize(initial_names(model), seed=seed, config=config, rank=rank, ranks=tensor)
    return model


def _place(stages: Sequence[str], pipeline: int, virtual_pipeline: int, virtual_stage: int | None) -> dict[str, Any]:
    """Where the model chunk stands among the stages of the pattern, in Megatron's words."""
    assert (virtual_stage is None) == (virtual_pipeline == 1), "virtual_stage goes with virtual_pipeline"
    stage = (virtual_stage or 0) * pipeline + parallel_state.get_pipeline_model_parallel_rank()
    return {
        "hybrid_layer_pattern": "|".join(stages),
        "pre_process": stage == 0,
        "post_process": stage == len(stages) - 1,
        "vp_stage": virtual_stage,
    }


def _trusted_kernels(config: ModelConfig, device: torch.device) -> tuple[MambaKernels, Pointwise, AttentionKernel]:
    """What computes outside the linears; where it is not PyTorch, compared with it first."""
    kernels = choose_kernels(config, device)
    if kernels.core is not torch_core and MAMBA in config.pattern:
        compare_kernels(config, kernels, device)
    pointwise = choose_pointwise(config, device)
    if pointwise.fused:
        compare_pointwise(config, pointwise, device)
    attention = choose_attention(config, device)
    if attention.function is not torch_attention and ATTENTION in config.pattern:
        compare_attention(config, attention, device)
    return kernels, pointwise, attention


def _specification(
    config: ModelConfig,
    linears: LinearClasses,
    kernels: MambaKernels,
    pointwise: Pointwise,
    attention_kernel: AttentionKernel,
) -> ModuleSpec:
    """What each letter of the pattern is built from."""
    mixer = _mixer(config, linears, kernels, pointwise)
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linears.column,
            core_attention=ModuleSpec(module=CausalAttention, params={"kernel": attention_kernel}),
            linear_proj=linears.row,
        ),
    )
    feed_forward = partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=linears.column, linear_fc2=linears.row)
    )
    block_norm = partial(BlockNorm, function=pointwise.block_norm)
    return ModuleSpec(
        module=LanguageStack,
        params={"norm": pointwise.norm},
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaBlock,
                submodules=MambaLayerSubmodules(norm=block_norm, mixer=mixer, mamba_bda=get_bias_dropout_add),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=block_norm, self_attention=attention, self_attn_bda=get_bias_dropout_add
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=block_norm, mlp=feed_forward, mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )


def _mixer(config: ModelConfig, linears: LinearClasses, kernels: MambaKernels, pointwise: Pointwise) -> ModuleSpec:
    """What computes in a Mamba block."""
    return ModuleSpec(
        module=Mamba2Mixer,
        params={
            "conv_width": config.mamba_conv_width,
            "chunk_size": config.mamba_chunk_size,
            "kernels": kernels,
            "norm": pointwise.norm,
        },
        submodules=MambaMixerSubmodules(in_proj=linears.column, out_proj=linears.row),
    )


def global_name(model: HybridModel, name: str) -> str:
    """A module's or parameter's name with the block number counted over all pipeline stages, from 0."""
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return name
    block = model.decoder.layers[int(match[2])].layer_number - 1
    return f"{match[1]}{block}{match[3]}"


def named_linears(model: HybridModel) -> dict[str, nn.Module]:
    """The rank's linear layers by global name in the order in which they run, the output layer included."""
    found = {global_name(model, name): module for name, module in model.named_modules()}
    names = [
        f"decoder.layers.{layer.layer_number - 1}.{path}" for layer in model.decoder.layers for path in LINEAR_PATHS
    ]
    return {name: found[name] for name in [*names, "output_layer"] if name in found}


def initial_names(model: HybridModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by global name; the last stage's copy of a tied embedding goes by the embedding's name."""
    for name, parameter in model.named_parameters():
        tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
        yield (_EMBEDDING if tied else global_name(model, name)), parameter


def no_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether a parameter takes no weight decay: A_log, D, dt_bias, norms, biases and the convolution."""
    leaf = name.rsplit(".", 1)[-1]
    return leaf in _NO_DECAY or parameter.dim() == 1


def describe_kernels(model: HybridModel) -> list[str]:
    """What runs this rank's Mamba blocks, and what runs between the linears, as lines to print at start."""
    mixers = {module.kernels.description for module in model.modules() if isinstance(module, Mamba2Mixer)}
    attention = {module.kernel.description for module in model.modules() if isinstance(module, CausalAttention)}
    return [*sorted(mixers), *sorted(attention), model.pointwise.description]
