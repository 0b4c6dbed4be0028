"""Sizes, counts and what is refused. No torch, no Megatron."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from models.config import ModelConfig, ModelError
from models.shapes import (
    block_letters,
    block_linears,
    count_block_parameters,
    count_parameters,
    flops_per_token,
    linear_shapes,
    mamba_in_proj_width,
    nearest_multiples,
    num_blocks,
    padded_vocab_size,
    stage_patterns,
    validate,
)
from tests.models.conftest import TINY, load_model_config

NAMES = ("quickstart", "nano", "1b", "nemotron_nano_12b_v2", "nemotron_h_8b")


def test_sizes_are_read_without_torch() -> None:
    program = "import sys, models.shapes; print('torch' in sys.modules, 'megatron' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "blocks", "parameters"),
    [
        ("quickstart", 10, 1_355_904),
        ("nano", 12, 9_861_728),
        ("1b", 32, 1_067_745_920),
        ("nemotron_nano_12b_v2", 62, 12_310_001_152),
        ("nemotron_h_8b", 52, 8_100_852_736),
    ],
)
def test_parameter_counts(name: str, blocks: int, parameters: int) -> None:
    config = load_model_config(name)
    assert num_blocks(config) == blocks
    assert count_parameters(config) == parameters


def test_parameters_of_a_block() -> None:
    config = load_model_config("nemotron_nano_12b_v2")
    assert count_block_parameters(config, "M") == 168_504_704
    assert count_block_parameters(config, "-") == 209_720_320
    assert count_block_parameters(config, "*") == 62_919_680
    assert [block_letters(config).count(letter) for letter in "M-*"] == [28, 28, 6]


def test_tied_embedding_counts_once() -> None:
    difference = count_parameters(TINY) - count_parameters(replace(TINY, tie_embeddings=True))
    assert difference == padded_vocab_size(TINY) * TINY.hidden_size == 112 * 32


@pytest.mark.parametrize("name", ["quickstart", "nano"])
def test_small_models_have_something_to_quantize_everywhere(name: str) -> None:
    config = load_model_config(name)
    for shape in linear_shapes(config)[:-1]:
        split = shape.out_features if shape.role in ("in_proj", "qkv", "fc1") else shape.in_features
        assert shape.in_features % 128 == 0
        assert shape.out_features % 128 == 0
        assert split % 256 == 0, f"{shape.name} at two tensor-parallel ranks"


def test_linear_shapes_in_global_order() -> None:
    shapes = linear_shapes(replace(TINY, pattern="M-|*"))
    assert [(s.name, s.block, s.letter, s.role, s.in_features, s.out_features) for s in shapes] == [
        ("decoder.layers.0.mixer.in_proj", 0, "M", "in_proj", 32, 184),
        ("decoder.layers.0.mixer.out_proj", 0, "M", "out_proj", 64, 32),
        ("decoder.layers.1.mlp.linear_fc1", 1, "-", "fc1", 32, 64),
        ("decoder.layers.1.mlp.linear_fc2", 1, "-", "fc2", 64, 32),
        ("decoder.layers.2.self_attention.linear_qkv", 2, "*", "qkv", 32, 64),
        ("decoder.layers.2.self_attention.linear_proj", 2, "*", "proj", 32, 32),
        ("output_layer", None, None, "output", 32, 112),
    ]


def test_in_proj_width_formula() -> None:
    """hidden 768, head 64, state 128: no multiple of 16, and no business of the model's."""
    sizes = {"hidden_size": 768, "mamba_num_heads": 24, "mamba_head_dim": 64, "mamba_state_dim": 128}
    config = replace(TINY, mamba_num_groups=1, **sizes)
    assert mamba_in_proj_width(config) == 2 * 1536 + 2 * 128 + 24 == 3352
    validate(config)


def test_vocabulary_is_padded_alike_in_every_layout() -> None:
    config = replace(TINY, vocab_size=50257, vocab_multiple=128)
    assert padded_vocab_size(config) == 50304
    for tensor in (1, 2, 8):
        assert padded_vocab_size(config) % tensor == 0
    assert padded_vocab_size(replace(config, vocab_size=50304)) == 50304


def test_nearest_multiples() -> None:
    assert nearest_multiples(100, 8) == "96 or 104"
    assert nearest_multiples(5, 8) == "8"


# ---- what is refused


@pytest.mark.parametrize("name", NAMES)
def test_presets_are_legal(name: str) -> None:
    config = load_model_config(name)
    validate(config, sequence_length=1024, micro_batch=4)
    validate(config, tensor=2, sequence=True, sequence_length=1024)
    validate(config, context=2, sequence_length=1024)


def refusal(config: ModelConfig, *args: int, **kwargs: int) -> str:
    with pytest.raises(ModelError) as error:
        validate(config, *args, **kwargs)
    return str(error.value)


def test_letters_are_refused_by_name() -> None:
    assert "'X' at position 2" in refusal(replace(TINY, pattern="M-X"))
    assert "M (Mamba-2), * (attention), - (feed-forward)" in refusal(replace(TINY, pattern="M-X"))
    assert "mixture-of-experts" in refusal(replace(TINY, pattern="MEM*"))
    assert "not supported yet" in refusal(replace(TINY, pattern="MEM*"))
    assert "multi-token prediction" in refusal(replace(TINY, pattern="M-M*/M"))
    assert "no block" in refusal(replace(TINY, pattern="|"))


def test_groups_and_heads_over_tensor_ranks() -> None:
    message = refusal(replace(TINY, mamba_num_groups=8), 16)
    assert "mamba_num_groups = 8" in message
    assert "parallel.tensor=16" in message
    message = refusal(replace(TINY, mamba_num_heads=24, mamba_num_groups=24, vocab_multiple=128), 16)
    assert "24" in message
    assert "16 or 32" in message
    message = refusal(replace(TINY, pattern="*", num_attention_heads=6, num_query_groups=2), 4)
    assert "num_attention_heads = 6" in message
    assert "4 or 8" in message


def test_local_widths_are_checked() -> None:
    """11008 is legal for 8 ranks, 11012 is not; the padded vocabulary counts too."""
    config = replace(TINY, pattern="-", ffn_hidden_size=11008, vocab_multiple=128)
    validate(config, 8)
    message = refusal(replace(config, ffn_hidden_size=11012), 8)
    assert "11012" in message
    assert "11008 or 11016" in message
    assert "padded vocabulary" in refusal(replace(config, vocab_multiple=1), 8)


def test_groups_that_do_not_divide_heads() -> None:
    message = refusal(replace(TINY, mamba_num_heads=10, mamba_num_groups=4))
    assert "mamba_num_heads=10" in message
    assert "8 or 12" in message
    message = refusal(replace(TINY, num_attention_heads=6, num_query_groups=4))
    assert "num_query_groups=4" in message
    assert "4 or 8" in message


def test_local_convolution_width() -> None:
    config = replace(TINY, mamba_num_heads=4, mamba_head_dim=4, mamba_state_dim=6, mamba_num_groups=2)
    validate(config)  # 16 + 24 = 40 channels
    message = refusal(config, 2)
    assert "20 channels a rank" in message
    assert "multiple of 8" in message
    assert "16 or 24" in message


def test_index_range_of_the_kernels() -> None:
    config = load_model_config("nemotron_nano_12b_v2")
    validate(config, sequence_length=8192, micro_batch=11)
    message = refusal(config, sequence_length=8192, micro_batch=12)
    assert str(12 * 8192 * 22656) in message
    assert str(2**31) in message
    assert "at most 11" in message
    validate(config, 2, sequence_length=8192, micro_batch=12)


def test_pipeline_cuts() -> None:
    message = refusal(replace(TINY, pattern="M" * 30), 1, 4)
    assert "30 blocks" in message
    assert "4 stages" in message
    assert "28 or 32" in message
    message = refusal(replace(TINY, pattern="M-|*M"), 1, 4)
    assert "2 stages" in message
    assert "needs 4" in message
    assert "empty stage" in refusal(replace(TINY, pattern="M-|"), 1, 2)
    assert stage_patterns(replace(TINY, pattern="M-|*M"), 1) == ("M-*M",)
    assert stage_patterns(replace(TINY, pattern="M-M|*"), 2) == ("M-M", "*")
    assert stage_patterns(replace(TINY, pattern="M-*M"), 2) == ("M-", "*M")
    assert stage_patterns(replace(TINY, pattern="M|-|*|M"), 2, 2) == ("M", "-", "*", "M")


@pytest.mark.parametrize("pattern", ["MMMM|M|M-*", "M-M*M-M*"])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
def test_stages_add_up(pattern: str, pipeline: int) -> None:
    config = replace(TINY, pattern=pattern)
    try:
        stages = stage_patterns(config, pipeline)
    except ModelError:
        assert pipeline not in (1, pattern.count("|") + 1)
        return
    assert "".join(stages) == block_letters(config)
    assert sum(count_block_parameters(config, letter) for stage in stages for letter in stage) == sum(
        count_block_parameters(config, letter) for letter in block_letters(config)
    )


def test_sequence_over_ranks() -> None:
    config = load_model_config("nano")
    message = refusal(config, 2, sequence=True, sequence_length=1001)
    assert "1000 or 1002" in message
    message = refusal(config, context=2, sequence_length=1002)
    assert "1000 or 1004" in message
    assert "parallel.sequence=false" in refusal(config, 1, sequence=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 0}, "model.hidden_size=0"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0"),
        ({"recompute": "some"}, "none, selective, full"),
        ({"kernels": "triton"}, "auto, torch, mamba_ssm"),
        ({"mamba_chunk_size": 100}, "16, 32, 64, 128, 256"),
        ({"mamba_conv_width": 5}, "2, 3, 4"),
    ],
)
def test_values(change: dict[str, object], said: str) -> None:
    assert said in refusal(replace(TINY, **change))  # type: ignore[arg-type]


def test_flops_by_hand() -> None:
    config = replace(TINY, pattern="M-*")
    flops = flops_per_token(config, sequence_length=32)
    assert flops.linears["decoder.layers.0.mixer.in_proj"] == 2 * 32 * 184
    assert flops.head == 2 * 32 * 112
    assert flops.attention == 32 * 32 * 2  # half of scores and values: 2 products * 2 * 32 tokens * 4 heads * 8
    assert flops.scan == 2 * 16 * (2 * 12) + 2 * 16 * 64 + 2 * 2 * 64 * 12
    assert flops.convolution == 2 * 4 * (64 + 48)
    assert flops.forward == sum(flops.linears.values()) + flops.attention + flops.scan + flops.convolution
    assert flops.training == 3 * flops.forward
    assert sum(2 * shape.num_weights for shape in block_linears(config, 1)) == 2 * 2 * 32 * 64
