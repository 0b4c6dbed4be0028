"""What a model's sizes are and whether they are legal, without building it. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from models.config import ModelConfig, ModelError

MAMBA, ATTENTION, FEED_FORWARD, STAGE_CUT = "M", "*", "-", "|"
NOT_YET = {
    "E": "a mixture-of-experts block",
    "/": "the start of multi-token prediction",
    "G": "a gated delta net block",
    "D": "a sparse attention block",
    "+": "a latent attention block",
}
RECOMPUTE = ("none", "selective", "full")
KERNELS = ("auto", "torch", "mamba_ssm")
CHUNK_SIZES = (16, 32, 64, 128, 256)
CONV_WIDTHS = (2, 3, 4)
CONV_ALIGNMENT = 8
MAX_ELEMENTS = 2**31

# The two linears of a block in the order in which they run: path inside the block, and role.
BLOCK_LINEARS = {
    MAMBA: (("mixer.in_proj", "in_proj"), ("mixer.out_proj", "out_proj")),
    ATTENTION: (("self_attention.linear_qkv", "qkv"), ("self_attention.linear_proj", "proj")),
    FEED_FORWARD: (("mlp.linear_fc1", "fc1"), ("mlp.linear_fc2", "fc2")),
}


@dataclass(frozen=True)
class LinearShape:
    """One linear layer of the whole, unsharded model: Y [tokens, out_features] = X [tokens, in_features] W^T.

    Attributes:
        name: global module path; block numbers count from 0 over all pipeline stages.
        block: number of the block it sits in, None for the output layer.
        letter: the block's letter in the pattern, None for the output layer.
        role: in_proj, out_proj, qkv, proj, fc1, fc2 or output.
    """

    name: str
    block: int | None
    letter: str | None
    role: str
    in_features: int
    out_features: int

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return self.in_features * self.out_features


def block_letters(config: ModelConfig) -> str:
    """The pattern without pipeline cuts: one letter a block, in global order."""
    return config.pattern.replace(STAGE_CUT, "")


def num_blocks(config: ModelConfig) -> int:
    """Number of blocks over all pipeline stages."""
    return len(block_letters(config))


def padded_vocab_size(config: ModelConfig) -> int:
    """Rows of embedding and output layer: `vocab_size` rounded up to `vocab_multiple`, equal in every layout."""
    return -(-config.vocab_size // config.vocab_multiple) * config.vocab_multiple


def mamba_inner_size(config: ModelConfig) -> int:
    """d_inner: width of what a Mamba block scans."""
    return config.mamba_num_heads * config.mamba_head_dim


def mamba_group_width(config: ModelConfig) -> int:
    """Width of B (and of C): groups * state."""
    return config.mamba_num_groups * config.mamba_state_dim


def mamba_conv_channels(config: ModelConfig) -> int:
    """Channels of the causal convolution: x, B and C."""
    return mamba_inner_size(config) + 2 * mamba_group_width(config)


def mamba_in_proj_width(config: ModelConfig) -> int:
    """Out-features of in_proj: z, x, B, C and dt, that is 2 * d_inner + 2 * groups * state + heads."""
    return 2 * mamba_inner_size(config) + 2 * mamba_group_width(config) + config.mamba_num_heads


def query_width(config: ModelConfig) -> int:
    """Width of the queries: heads * head size."""
    return config.num_attention_heads * config.head_dim


def qkv_width(config: ModelConfig) -> int:
    """Out-features of linear_qkv: queries, keys and values."""
    return query_width(config) + 2 * config.num_query_groups * config.head_dim


def block_linears(config: ModelConfig, block: int) -> tuple[LinearShape, ...]:
    """The two linears of a block, in the order in which they run."""
    letter, hidden = block_letters(config)[block], config.hidden_size
    inner, width = {
        MAMBA: (mamba_inner_size(config), mamba_in_proj_width(config)),
        ATTENTION: (query_width(config), qkv_width(config)),
        FEED_FORWARD: (config.ffn_hidden_size, config.ffn_hidden_size),
    }[letter]
    (first, first_role), (second, second_role) = BLOCK_LINEARS[letter]
    prefix = f"decoder.layers.{block}"
    return (
        LinearShape(f"{prefix}.{first}", block, letter, first_role, hidden, width),
        LinearShape(f"{prefix}.{second}", block, letter, second_role, inner, hidden),
    )


def linear_shapes(config: ModelConfig) -> tuple[LinearShape, ...]:
    """Every linear of the model in global order, the output layer last. Sizes are unsharded."""
    return tuple(_linears(config))


def _linears(config: ModelConfig) -> Iterator[LinearShape]:
    for block in range(num_blocks(config)):
        yield from block_linears(config, block)
    yield LinearShape("output_layer", None, None, "output", config.hidden_size, padded_vocab_size(config))


def count_block_parameters(config: ModelConfig, letter: str) -> int:
    """Parameters of one block with its norm, in closed form."""
    hidden = config.hidden_size
    if letter == MAMBA:
        inner, heads = mamba_inner_size(config), config.mamba_num_heads
        projections = hidden * mamba_in_proj_width(config) + inner * hidden
        convolution = mamba_conv_channels(config) * (config.mamba_conv_width + 1)
        return projections + convolution + 3 * heads + inner + hidden  # 3: A_log, D, dt_bias; then two norms
    if letter == ATTENTION:
        return hidden * qkv_width(config) + query_width(config) * hidden + hidden
    assert letter == FEED_FORWARD, f"unknown letter {letter!r}"
    return 2 * hidden * config.ffn_hidden_size + hidden


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model in closed form; a tied embedding counts once."""
    blocks = sum(count_block_parameters(config, letter) for letter in block_letters(config))
    vocabulary = padded_vocab_size(config) * config.hidden_size
    return blocks + config.hidden_size + vocabulary * (1 if config.tie_embeddings else 2)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one token's forward pass, a multiply and an add counted as two.

    Counted are matrix products and the convolution; norms, activations, softmax and other elementwise work are not.

    Attributes:
        sequence_length: tokens of a sequence; attention grows with it.
        linears: by linear name, 2 * in-features * out-features, the output layer included.
        attention: scores and values of all attention blocks. Causal: half of the full square is counted.
        scan: products of the chunked Mamba-2 scan: C B^T and its product with x over the full square of a chunk, chunk
            states, and their read-out.
        convolution: the causal convolutions.
    """

    sequence_length: int
    linears: dict[str, int]
    attention: int
    scan: int
    convolution: int

    @property
    def head(self) -> int:
        """The output layer's share."""
        return self.linears["output_layer"]

    @property
    def forward(self) -> int:
        """All of a token's forward pass."""
        return sum(self.linears.values()) + self.attention + self.scan + self.convolution

    @property
    def training(self) -> int:
        """Forward and backward: every forward product has two of its size backward. Recompute is not counted."""
        return 3 * self.forward


def flops_per_token(config: ModelConfig, sequence_length: int) -> Flops:
    """Exact closed form of a token's operations, by part; see `Flops` for what is counted."""
    letters = block_letters(config)
    inner, group_width = mamba_inner_size(config), mamba_group_width(config)
    chunk = min(config.mamba_chunk_size, sequence_length)
    scan = 2 * chunk * (group_width + inner) + 4 * inner * config.mamba_state_dim
    convolution = 2 * config.mamba_conv_width * mamba_conv_channels(config)
    attention = 2 * sequence_length * query_width(config)  # half of 2 products * 2 operations * sequence * width
    return Flops(
        sequence_length=sequence_length,
        linears={shape.name: 2 * shape.num_weights for shape in linear_shapes(config)},
        attention=attention * letters.count(ATTENTION),
        scan=scan * letters.count(MAMBA),
        convolution=convolution * letters.count(MAMBA),
    )


def nearest_multiples(value: int, multiple: int) -> str:
    """The legal values around an illegal one, as text: `96 or 104`."""
    lower = value // multiple * multiple
    return f"{lower} or {lower + multiple}" if lower else f"{multiple}"


def stage_patterns(config: ModelConfig, pipeline: int, virtual_pipeline: int = 1) -> tuple[str, ...]:
    """Letters of every pipeline segment, in global order; segment i runs on rank i % pipeline.

    One segment holds all blocks, whatever the cuts. More than one follow the cuts, or are equal where there are none.

    Raises:
        ModelError: the cuts, or the number of blocks, do not fit the number of segments.
    """
    segments, letters = pipeline * virtual_pipeline, block_letters(config)
    if segments == 1:
        return (letters,)
    cuts = config.pattern.count(STAGE_CUT)
    stages = f"pipeline {pipeline}" + (f" x virtual_pipeline {virtual_pipeline}" if virtual_pipeline > 1 else "")
    if cuts == 0:
        if len(letters) % segments:
            raise ModelError(
                f"model.pattern has {len(letters)} blocks, which {segments} stages ({stages}) can't share equally: use "
                f"{nearest_multiples(len(letters), segments)} blocks, or cut the pattern with {segments - 1} '|'"
            )
        size = len(letters) // segments
        return tuple(letters[start : start + size] for start in range(0, len(letters), size))
    if cuts + 1 != segments:
        raise ModelError(
            f"model.pattern={config.pattern!r} has {cuts + 1} stages ({cuts} '|'), but {stages} needs {segments}: "
            f"write {segments - 1} '|', or set parallel.pipeline={cuts + 1}"
        )
    return tuple(config.pattern.split(STAGE_CUT))


def validate(
    config: ModelConfig,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: bool = False,
    context: int = 1,
    *,
    virtual_pipeline: int = 1,
    sequence_length: int | None = None,
    micro_batch: int | None = None,
) -> None:
    """Refuse a model that can't be built, or can't be split over `tensor`, `pipeline` and `context` ranks.

    Widths that a low-precision format can't take are no matter of the model: such linears stay in BF16.

    Args:
        config: the model.
        tensor, pipeline, virtual_pipeline, context: numbers of ranks (or stages a rank) the model is split over.
        sequence: sequence parallelism beside tensor parallelism.
        sequence_length: tokens of a sequence, when known; checked against the ranks that share it.
        micro_batch: sequences of a micro-batch, when known; with `sequence_length` checked against the index range of
            the kernels.

    Raises:
        ModelError: the value, why it is refused, and what to write instead.
    """
    _check_values(config)
    stages = stage_patterns(config, pipeline, virtual_pipeline)
    if not all(stages):
        raise ModelError(f"model.pattern={config.pattern!r} has an empty stage: put at least one block between two '|'")
    if MAMBA in config.pattern:
        _check_mamba(config, tensor, context)
    if ATTENTION in config.pattern:
        _check_attention(config, tensor)
    if FEED_FORWARD in config.pattern:
        _check_split("model.ffn_hidden_size", config.ffn_hidden_size, tensor)
    _check_split(
        "the padded vocabulary (model.vocab_size rounded up to model.vocab_multiple)", padded_vocab_size(config), tensor
    )
    if sequence and tensor == 1:
        raise ModelError(
            "parallel.sequence=true with parallel.tensor=1: sequence parallelism shares tokens among tensor-parallel "
            "ranks, and there is one. Write parallel.sequence=false, or parallel.tensor=2 or more"
        )
    if sequence_length is not None:
        _check_sequence(config, sequence_length, micro_batch, tensor, sequence, context)


def _check_values(config: ModelConfig) -> None:
    """Letters, positive sizes and choices."""
    legal = f"{MAMBA} (Mamba-2), {ATTENTION} (attention), {FEED_FORWARD} (feed-forward) and {STAGE_CUT} (pipeline cut)"
    for position, letter in enumerate(config.pattern):
        if letter in NOT_YET:
            raise ModelError(
                f"model.pattern: {letter!r} at position {position} is {NOT_YET[letter]}, not supported yet. Use {legal}"
            )
        if letter not in (MAMBA, ATTENTION, FEED_FORWARD, STAGE_CUT):
            raise ModelError(
                f"model.pattern: unknown letter {letter!r} at position {position} of {config.pattern!r}. Use {legal}"
            )
    if not block_letters(config):
        raise ModelError(f"model.pattern={config.pattern!r} has no block. Use {legal}, for example M-M*-")
    for field in (
        "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim", "mamba_num_heads",
        "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "vocab_size", "vocab_multiple",
        "init_residuals_per_block",
    ):  # fmt: skip
        if getattr(config, field) < 1:
            raise ModelError(f"model.{field}={getattr(config, field)}: must be at least 1")
    for field in ("norm_eps", "init_std"):
        if not 0 < getattr(config, field) < 1:
            raise ModelError(
                f"model.{field}={getattr(config, field)}: must lie between 0 and 1, for example 1e-5 or 0.02"
            )
    choices = {
        "recompute": RECOMPUTE,
        "kernels": KERNELS,
        "mamba_chunk_size": CHUNK_SIZES,
        "mamba_conv_width": CONV_WIDTHS,
    }
    for field, values in choices.items():
        if getattr(config, field) not in values:
            raise ModelError(f"model.{field}={getattr(config, field)}: must be one of {', '.join(map(str, values))}")


def _check_split(what: str, value: int, ranks: int) -> None:
    if value % ranks:
        raise ModelError(
            f"{what} = {value} can't be shared equally by parallel.tensor={ranks} ranks: use "
            f"{nearest_multiples(value, ranks)}, or a parallel.tensor that divides {value}"
        )


def _check_groups(heads_name: str, heads: int, groups_name: str, groups: int) -> None:
    if heads % groups:
        raise ModelError(
            f"{heads_name}={heads} is not a multiple of {groups_name}={groups}: every group serves equally many heads. "
            f"Use {nearest_multiples(heads, groups)} heads, or a number of groups that divides {heads}"
        )


def _check_attention(config: ModelConfig, tensor: int) -> None:
    heads, groups = config.num_attention_heads, config.num_query_groups
    _check_groups("model.num_attention_heads", heads, "model.num_query_groups", groups)
    _check_split("model.num_attention_heads", heads, tensor)
    _check_split("model.num_query_groups", groups, tensor)


def _check_mamba(config: ModelConfig, tensor: int, context: int) -> None:
    heads, groups = config.mamba_num_heads, config.mamba_num_groups
    _check_groups("model.mamba_num_heads", heads, "model.mamba_num_groups", groups)
    _check_split("model.mamba_num_groups", groups, tensor)
    _check_split("model.mamba_num_heads", heads, tensor)
    if (heads // tensor) % context:
        raise ModelError(
            f"model.mamba_num_heads={heads} over parallel.tensor={tensor} leaves {heads // tensor} heads, which "
            f"parallel.context={context} ranks can't share equally: use {nearest_multiples(heads, tensor * context)}"
        )
    local_groups = groups // tensor
    if local_groups % context and context % local_groups:
        raise ModelError(
            f"model.mamba_num_groups={groups} over parallel.tensor={tensor} leaves {local_groups} groups for "
            f"parallel.context={context} ranks: one of the two must be a multiple of the other"
        )
    channels = mamba_conv_channels(config)
    if (channels // tensor) % CONV_ALIGNMENT:
        raise ModelError(
            f"the Mamba convolution has {channels // tensor} channels a rank (heads * head size + 2 * groups * state = "
            f"{channels} over parallel.tensor={tensor}); the kernels need a multiple of {CONV_ALIGNMENT}, for example "
            f"{nearest_multiples(channels // tensor, CONV_ALIGNMENT)}: change "
            "model.mamba_state_dim or model.mamba_head_dim"
        )


def _check_sequence(
    config: ModelConfig, length: int, micro_batch: int | None, tensor: int, sequence: bool, context: int
) -> None:
    # Causal attention balances its work by giving every context rank an early and a late piece of the sequence.
    pieces = (2 * context if context > 1 else 1) * (tensor if sequence else 1)
    if length % pieces:
        raise ModelError(
            f"data.sequence_length={length} can't be shared equally: parallel.context={context}, "
            f"parallel.tensor={tensor} and parallel.sequence={str(sequence).lower()} cut it into {pieces} pieces. Use "
            f"{nearest_multiples(length, pieces)}"
        )
    if micro_batch is None or MAMBA not in config.pattern:
        return
    width = mamba_in_proj_width(config) // (tensor * context)
    product = micro_batch * length * width
    if product >= MAX_ELEMENTS:
        largest = (MAX_ELEMENTS - 1) // (length * width)
        raise ModelError(
            f"data.micro_batch={micro_batch} * data.sequence_length={length} * in_proj width {width} a rank = "
            f"{product} elements, and the scan kernels index with 32 bits (limit {MAX_ELEMENTS}): use "
            + (f"a micro-batch of at most {largest}" if largest else "a shorter sequence")
            + ", or more tensor or context ranks"
        )
