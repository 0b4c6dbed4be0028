"""Memory a rank needs, in closed form, without allocating anything. No torch here.

Counted is what training holds in tensors; what libraries take for themselves (a CUDA context, Python) is not.

Parameters: 16 bytes each, the FP32 weight, its gradient and Adam's two moments.

Weights as the GEMMs take them, made once a step: 2 bytes a value on a GPU, 4 on a CPU and for FP8 blocks; one copy of a
linear whose forward and dgrad multiply the same values (16x16 and 128x128 tiles, whole-tensor scales, BF16), else two.
FP8 on FP8 tensor cores: two copies of 1 byte.

Activations kept for the backward pass, bytes a token, h the hidden size, f the FFN's, q and k the widths of queries and
of keys, i Mamba's inner width, P its projection's, c its convolution's channels, n its state, V the padded vocabulary:

                                             with kernels     in plain torch
    norm before each block and at the end    4 h              6 h (FP32 input); on a CPU 10 h
    -   feed-forward                         4 f              4 f
    *   attention                            2 (q + 2 k) + 2 q + 2 k as the products take them, 4 q + 4 a head after;
                                             on a CPU 8 q + 8 k + 2 q + 4 a head
    M   Mamba                                2 P + 6 i        4 P + 8 c + 8 a head + 18 i + 4 i n / chunk
    the loss                                 2 V              4 V

An operand that is kept quantized takes 4 bytes instead of 2 on a CPU, 1 as codes of FP8 tensor cores.
`model.recompute=full` keeps 2 h a block, and one block at a time in full; `selective` keeps the inputs of feed-forward
and attention products alone.

Working memory: the largest that one linear's backward pass needs beside all this: its output's gradient, that as both
GEMMs take it where it is quantized, its input's gradient and the FP32 stand-in of its weight gradient; on a CPU, FP32
forms of the output and its gradient. Recorded CUDA graphs keep activations and working memory between steps; what runs
without them (an evaluation, a step whose health is sampled) needs no more, and where both have no room the graphs are
dropped first. Adam's own temporaries, 4 bytes a parameter on a CPU and none on a GPU, come when
the activations are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.config import ModelConfig
from models.shapes import (
    ATTENTION,
    MAMBA,
    block_letters,
    count_parameters,
    mamba_conv_channels,
    mamba_in_proj_width,
    mamba_inner_size,
    num_blocks,
    padded_vocab_size,
    query_width,
)
from nvfp4_train.precision.assignment import LinearPrecision
from nvfp4_train.precision.fit import ROW_PARALLEL_ROLES
from nvfp4_train.precision.formats import FP8_FORMATS, layout_independent

PARAMETER_PARTS = {"weights": 4, "gradients": 4, "moments": 8}


@dataclass(frozen=True)
class Machine:
    """What the sizes depend on besides model and recipe. `kernels`: mamba_ssm or torch; `native`: FP8 tensor cores."""

    cuda: bool = True
    kernels: str = "mamba_ssm"
    native: bool = False

    @property
    def fused(self) -> bool:
        """Whether norms and the loss run as kernels that keep BF16 alone."""
        return self.cuda and self.kernels != "torch"


@dataclass(frozen=True)
class Memory:
    """Bytes a rank needs, by part. `activations`: of one micro-batch; `working`: beside them, at the largest linear."""

    weights: int
    gradients: int
    moments: int
    weight_cache: int
    activations: int
    working: int
    optimizer_step: int

    @property
    def total(self) -> int:
        """The most that is held at once: in a backward pass, or in the optimizer's step after it."""
        held = self.weights + self.gradients + self.moments + self.weight_cache
        return held + max(self.activations + self.working, self.optimizer_step)


def memory(
    model: ModelConfig, assignments: Sequence[LinearPrecision], tokens: int, machine: Machine = Machine()
) -> Memory:
    """What one rank holds that has the whole model and micro-batches of `tokens` tokens."""
    parameters = count_parameters(model)
    states = {part: size * parameters for part, size in PARAMETER_PARTS.items()}
    cache = sum(_cached_weight(linear, machine) for linear in assignments)
    return Memory(
        **states,
        weight_cache=cache,
        activations=round(tokens * activation_bytes(model, assignments, machine)),
        working=_working(assignments, tokens, machine),
        optimizer_step=0 if machine.cuda else 4 * parameters,
    )


@dataclass(frozen=True)
class Place:
    """Where a rank stands that holds a part of a run.

    Attributes:
        blocks: numbers of the blocks of its pipeline stage.
        last: whether the output layer and the loss are there.
        parameters: elements of its parameters.
        tensor, sequence: tensor-parallel ranks, and whether they share tokens too.
        sharing: ranks that share its moments.
        kept: how many forward passes of the whole stage wait for their backward pass at most.
    """

    blocks: tuple[int, ...]
    last: bool
    parameters: int
    tensor: int = 1
    sequence: bool = False
    sharing: int = 1
    kept: float = 1.0


def rank_memory(model: ModelConfig, assignments: Sequence[LinearPrecision], tokens: int, place: Place) -> Memory:
    """What a GPU with Mamba kernels holds at `place`; `tokens`: of its micro-batches, on its context rank."""
    letters = block_letters(model)
    ranks = place.tensor
    local = replace(
        model,
        pattern="".join(letters[block] for block in place.blocks),
        hidden_size=model.hidden_size // (ranks if place.sequence else 1),
        ffn_hidden_size=model.ffn_hidden_size // ranks,
        num_attention_heads=model.num_attention_heads // ranks,
        num_query_groups=model.num_query_groups // ranks,
        mamba_num_heads=model.mamba_num_heads // ranks,
        mamba_num_groups=model.mamba_num_groups // ranks,
        vocab_size=padded_vocab_size(model) // ranks if place.last else 0,
        vocab_multiple=1,
    )
    linears = [
        replace(
            linear,
            in_features=linear.in_features // (ranks if linear.role in ROW_PARALLEL_ROLES else 1),
            out_features=linear.out_features // (1 if linear.role in ROW_PARALLEL_ROLES else ranks),
        )
        for linear in assignments
        if (place.last if linear.block is None else linear.block in place.blocks)
    ]
    sharing = {"weights": 1, "gradients": 1, "moments": place.sharing}
    return Memory(
        **{part: size * place.parameters // sharing[part] for part, size in PARAMETER_PARTS.items()},
        weight_cache=sum(_cached_weight(linear, Machine()) for linear in linears),
        activations=round(place.kept * tokens * activation_bytes(local, linears)),
        working=_working(linears, tokens, Machine()),
        optimizer_step=0,
    )


def _value_size(linear: LinearPrecision, gemm: str, operand: str, machine: Machine) -> int:
    """Bytes of one value as a GEMM takes it."""
    if machine.native and linear.operands[gemm][operand].format in FP8_FORMATS:
        return 1
    return 4 if not machine.cuda or linear.operands[gemm][operand].format == "fp8_block" else 2


def _cached_weight(linear: LinearPrecision, machine: Machine) -> int:
    forward, backward = linear.operands["fprop"]["weight"], linear.operands["dgrad"]["weight"]
    shared = forward == backward and layout_independent(forward)
    native = machine.native and forward.format in FP8_FORMATS
    gemms = ("fprop",) if shared and not native else ("fprop", "dgrad")
    return (
        linear.in_features * linear.out_features * sum(_value_size(linear, gemm, "weight", machine) for gemm in gemms)
    )


def _working(assignments: Sequence[LinearPrecision], tokens: int, machine: Machine) -> int:
    """What the backward pass of one linear needs, of the one that needs most."""

    def needed(linear: LinearPrecision) -> int:
        quantized = sum(linear.operands[gemm]["gradient"].format != "bf16" for gemm in ("dgrad", "wgrad"))
        output = 2 + 2 * quantized if machine.fused else 10
        return tokens * (output * linear.out_features + 2 * linear.in_features)

    return max(needed(linear) + 4 * linear.in_features * linear.out_features for linear in assignments)


def activation_bytes(model: ModelConfig, assignments: Sequence[LinearPrecision], machine: Machine = Machine()) -> float:
    """Bytes a token of what the forward pass keeps for the backward pass, with the block that full recompute holds."""
    norm = (4 if machine.fused else 6 if machine.cuda else 10) * model.hidden_size
    ends = norm + (2 if machine.fused else 4) * padded_vocab_size(model)
    blocks = [norm + block_bytes(model, letter, machine) for letter in block_letters(model)]
    if not machine.cuda:  # of these, 2 bytes a value are counted in the blocks
        for linear in assignments:
            if linear.block is not None and kept_quantized(linear):
                blocks[linear.block] += 2 * linear.in_features
    if machine.native and model.recompute == "none":
        for linear in assignments:
            if linear.block is not None and kept_quantized_natively(linear):
                blocks[linear.block] -= linear.in_features
    if model.recompute == "full":
        return ends + 2 * model.hidden_size * num_blocks(model) + max(blocks)
    return ends + sum(blocks)


def kept_quantized(linear: LinearPrecision) -> bool:
    """Whether the forward pass keeps the values it multiplied, not the input itself."""
    forward, backward = linear.operands["fprop"]["input"], linear.operands["wgrad"]["input"]
    if forward.format == "bf16":
        return False
    return backward.source == "decoded" or (forward == backward and layout_independent(forward))


def kept_quantized_natively(linear: LinearPrecision) -> bool:
    """Whether the forward pass keeps codes of the input for FP8 tensor cores, made together with fprop's."""
    forward, backward = linear.operands["fprop"]["input"], linear.operands["wgrad"]["input"]
    return forward == backward and forward.format in FP8_FORMATS


def block_bytes(model: ModelConfig, letter: str, machine: Machine) -> float:
    """Bytes a token that one block keeps besides its norm."""
    selective = model.recompute == "selective"
    if letter == ATTENTION:
        query, key, heads = query_width(model), model.num_query_groups * model.head_dim, model.num_attention_heads
        packed = 2 * (query + 2 * key) + 2 * query + 2 * key
        if selective:
            return packed + 2 * query
        return packed + 4 * query + 4 * heads if machine.cuda else 10 * query + 8 * key + 4 * heads
    if letter != MAMBA:
        return 0 if selective else 4 * model.ffn_hidden_size
    inner, projected = mamba_inner_size(model), mamba_in_proj_width(model)
    if machine.fused:
        return 2 * projected + 6 * inner
    scan = 4 * inner * model.mamba_state_dim / model.mamba_chunk_size
    return 4 * projected + 8 * mamba_conv_channels(model) + 8 * model.mamba_num_heads + 18 * inner + scan


def by_recompute(
    model: ModelConfig, assignments: Sequence[LinearPrecision], tokens: int, machine: Machine = Machine()
) -> dict[str, int]:
    """Activations of a micro-batch for each setting of `model.recompute`."""
    return {
        mode: round(tokens * activation_bytes(replace(model, recompute=mode), assignments, machine))
        for mode in ("none", "selective", "full")
    }
