"""Who decides a linear's precision, and which widths fit."""

from __future__ import annotations

import pytest

from nvfp4_train.precision.assignment import LinearPrecision, assign, recipe_gemms
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.fit import needed_multiples
from nvfp4_train.precision.recipes import standard_gemms
from tests.precision.recipe_files import NAMES, Shape, recipe, shapes

PATTERN = "M-M*-M-M*-"


def assigned(
    name: str, *overrides: str, tensor: int = 1, pattern: str = PATTERN, **widths: int
) -> dict[str, LinearPrecision]:
    decided = assign(recipe(name, *overrides), shapes(pattern, **widths), tensor)
    return {linear.name if linear.block is None else f"{linear.block}.{linear.role}": linear for linear in decided}


def in_bf16(operand: str) -> tuple[str, str]:
    """The overrides that leave one operand unquantized."""
    return f"{operand}.format=bf16", f"{operand}.tile=null"


def test_without_rules_the_recipe_decides_all_but_the_output_layer_and_the_last_blocks() -> None:
    config = recipe("nvfp4")
    decided = assign(config, shapes(PATTERN))
    assert [linear.name for linear in decided] == [shape.name for shape in shapes(PATTERN)]
    for linear in decided:
        if linear.block is not None and linear.block < 8:
            assert (linear.format, linear.decided_by, linear.reason) == ("nvfp4", "recipe nvfp4", "")
            assert (linear.fprop, linear.dgrad, linear.wgrad) == (config.fprop, config.dgrad, config.wgrad)
        else:
            assert (linear.format, linear.fprop, linear.dgrad, linear.wgrad) == ("bf16", None, None, None)
    assert decided[-1].decided_by == "output layer"
    assert decided[-2].decided_by == "precision.bf16_blocks"
    assert decided[-2].reason == "the last 2 of 10 blocks stay in BF16"


def test_the_order_of_decision() -> None:
    """User's rules, then BF16 blocks, then the recipe's rules, then the recipe: each level wins over all below it."""
    found = assigned(
        "nemotron3_super",
        "bf16_blocks.first=1",
        "rules=[{match: 'decoder.layers.0.*in_proj', format: mxfp8}, {letter: '*', format: recipe}, "
        "{role: fc1, format: bf16}]",
    )
    assert found["0.in_proj"].format == "mxfp8"
    assert found["0.in_proj"].decided_by == "precision.rules[0] (match decoder.layers.0.*in_proj -> mxfp8)"
    assert found["0.out_proj"].format == "bf16"
    assert found["0.out_proj"].reason == "the first 1 of 10 blocks stay in BF16"
    assert [found[f"{block}.{role}"].format for block in (3, 8) for role in ("qkv", "proj")] == ["nvfp4"] * 4
    assert [found[f"{block}.fc1"].format for block in (1, 4, 6, 9)] == ["bf16"] * 4
    assert found["1.fc1"].reason == "precision.rules[2] (role fc1 -> bf16) says so"
    assert found["2.out_proj"].format == "mxfp8"
    assert found["2.out_proj"].decided_by == "precision.recipe_rules[2] (letter M, role out_proj -> mxfp8)"
    assert found["1.fc2"].format == "nvfp4"
    assert found["9.fc2"].format == "bf16"


def test_of_several_rules_the_first_decides() -> None:
    rules = "rules=[{match: '*.1.mlp.*', format: mxfp4}, {role: fc1, format: mxfp8}, {letter: '-', format: fp8_block}]"
    found = assigned("nvfp4", rules, "bf16_blocks.last=0")
    assert [found[key].format for key in ("1.fc1", "1.fc2", "4.fc1", "4.fc2")] == [
        "mxfp4",
        "mxfp4",
        "mxfp8",
        "fp8_block",
    ]
    assert found["4.fc1"].fprop == standard_gemms("mxfp8").fprop
    assert found["4.fc2"].wgrad == standard_gemms("fp8_block").wgrad


def test_conditions_of_one_rule_must_all_hold() -> None:
    found = assigned("bf16", "rules=[{letter: M, role: out_proj, match: '*.layers.[25].*', format: nvfp4}]")
    assert [key for key, linear in found.items() if linear.format != "bf16"] == ["2.out_proj", "5.out_proj"]


def test_recipe_as_a_rules_format_has_the_overrides_and_nvfp4_has_the_published_operands() -> None:
    rules = "rules=[{match: '*.9.*fc1', format: recipe}, {match: '*.9.*fc2', format: nvfp4}]"
    found = assigned("nvfp4", "rotation=null", rules)
    assert found["9.fc1"].wgrad == recipe("nvfp4", "rotation=null").wgrad
    assert found["9.fc2"].wgrad == recipe("nvfp4").wgrad


def test_the_output_layer_is_quantized_when_a_rule_asks() -> None:
    assert assigned("nvfp4", "rules=[{role: output, format: mxfp8}]")["output_layer"].format == "mxfp8"
    assert assigned("nvfp4", "rules=[{match: '*', format: mxfp8}]")["output_layer"].format == "mxfp8"
    assert assigned("nvfp4", "rules=[{match: 'decoder.*', format: mxfp8}]")["output_layer"].format == "bf16"


@pytest.mark.parametrize(
    ("pattern", "first", "last", "kept"),
    [
        ("M-M*-M-M*-", 0, 0.15, [8, 9]),
        ("M-M*-M-M", 1, 2, [0, 6, 7]),
        ("M-M*", 0, 0.15, [3]),
        ("M-M*-M-M*-", 0.1, 0.3, [0, 7, 8, 9]),
        ("M-M*-M-M*-", 0, 0, []),
        ("M-M*-M-M*-", 4.0, 5, [0, 1, 2, 3, 5, 6, 7, 8, 9]),
    ],
)
def test_blocks_at_both_ends_by_count_or_share(pattern: str, first: float, last: float, kept: list[int]) -> None:
    config = recipe("nvfp4", f"bf16_blocks.first={first}", f"bf16_blocks.last={last}")
    decided = assign(config, shapes(pattern))
    assert sorted({linear.block for linear in decided if linear.decided_by == "precision.bf16_blocks"}) == kept  # type: ignore[type-var]
    assert all(linear.format == "nvfp4" for linear in decided if linear.block is not None and linear.block not in kept)


def test_fp8_keeps_blocks_from_8_blocks_on() -> None:
    small, large = assigned("fp8_block", pattern="M-M*-M-"), assigned("fp8_block", pattern="M-M*-M-M")
    assert {linear.format for key, linear in small.items() if key != "output_layer"} == {"fp8_block"}
    assert sorted(
        {linear.block for linear in large.values() if linear.format == "bf16" and linear.block is not None}
    ) == [0, 6, 7]
    asked = assigned("fp8_block", "bf16_blocks.last=1", pattern="M-M*-M-")
    assert {linear.block for linear in asked.values() if linear.format == "bf16"} == {6, None}


@pytest.mark.parametrize(("first", "last", "said"), [(5, 6, "5 + 6"), (0.51, 0.5, "6 + 5"), (11, 0, "11 + 0")])
def test_more_bf16_blocks_than_blocks_are_refused(first: float, last: float, said: str) -> None:
    config = recipe("nvfp4", f"bf16_blocks.first={first}", f"bf16_blocks.last={last}")
    with pytest.raises(PrecisionError) as error:
        assign(config, shapes(PATTERN))
    for part in (f"first={first}", f"last={last}", said, "the model has 10", "less than 10"):
        assert part in str(error.value)


def test_all_blocks_in_bf16_quantize_nothing_and_are_refused() -> None:
    config = recipe("nvfp4", "bf16_blocks.first=5", "bf16_blocks.last=5")
    with pytest.raises(PrecisionError, match="Recipe nvfp4 would quantize nothing: all 21 linears stay in BF16"):
        assign(config, shapes(PATTERN))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "bf16"])
def test_every_recipe_refuses_to_run_without_quantizing(name: str) -> None:
    with pytest.raises(PrecisionError, match=f"{name} would quantize nothing"):
        assign(recipe(name, "rules=[{match: '*', format: bf16}]"), shapes(PATTERN))


def test_bf16_quantizes_nothing_and_that_is_right() -> None:
    decided = assign(recipe("bf16"), shapes(PATTERN))
    assert {linear.format for linear in decided} == {"bf16"}
    assert decided[0].reason == "recipe bf16 is BF16 throughout"


def test_a_rule_that_asks_for_4_bits_on_bf16_must_get_them_somewhere() -> None:
    with pytest.raises(PrecisionError, match="would quantize nothing"):
        assign(recipe("bf16", "rules=[{role: fc1, format: nvfp4}]"), shapes("M-", ffn=500))


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_quantizes_a_model_of_multiples_of_128(name: str) -> None:
    found = assigned(name)
    quantized = [key for key, linear in found.items() if linear.format != "bf16"]
    last = {"fp8_block", "fp8_current", "fp8_delayed"}
    count = {"bf16": 0, "nemotron3_super": 14, "mxfp8": 20, **dict.fromkeys(last, 14)}.get(name, 16)
    assert len(quantized) == count
    assert not any("no multiple" in linear.reason for linear in found.values())


def test_one_name_for_three_gemms() -> None:
    first = {name: assigned(name)["2.in_proj"] for name in NAMES}
    assert first["quartet2"].format == "nvfp4"
    assert first["nvfp4_fwd_bf16_bwd"].format == "nvfp4 fwd, bf16 bwd"
    assert first["bf16_fwd_nvfp4_bwd"].format == "bf16 fwd, nvfp4 bwd"
    assert first["mxfp8_fwd_nvfp4_bwd"].format == "mxfp8 fwd, nvfp4 bwd"
    assert first["nvfp4_fwd_mxfp8_bwd"].gemm_formats == {"fprop": "nvfp4", "dgrad": "mxfp8", "wgrad": "mxfp8"}
    mixed = assigned("nvfp4", *in_bf16("fprop.input"), *in_bf16("dgrad.weight"))["2.in_proj"]
    assert mixed.gemm_formats == {"fprop": "bf16 x nvfp4", "dgrad": "nvfp4 x bf16", "wgrad": "nvfp4"}
    assert mixed.format == "bf16 x nvfp4 fwd, nvfp4 x bf16 and nvfp4 bwd"


def test_bf16_on_decoded_operands_is_no_plain_bf16() -> None:
    mixed = assigned("nvfp4_fwd_bf16_bwd")["2.in_proj"]
    assert mixed.dgrad is not None
    assert mixed.dgrad.weight.source == "decoded"
    other = assigned("bf16_fwd_nvfp4_bwd")["2.in_proj"]
    assert other.fprop is None
    assert other.dgrad is not None


# ---- rules that decide nothing


@pytest.mark.parametrize(
    ("rules", "parts"),
    [
        ("[{match: '*.outproj', format: bf16}]", ["rules[0] (match *.outproj -> bf16) matches no", "*.out_proj"]),
        ("[{match: 'decoder.layer.3.*', format: bf16}]", ["matches no linear", "decoder.layers."]),
        ("[{match: 'out_proj', format: bf16}]", ["whole names", "*.out_proj"]),
        ("[{match: 'decoder.layers.12.*', format: bf16}]", ["matches no linear", "decoder.layers.1."]),
        ("[{letter: '*', format: bf16}]", ["matches no linear", "blocks -, M"]),
        ("[{role: qkv, format: bf16}]", ["matches no linear", "roles"]),
        ("[{letter: M, role: fc1, format: bf16}]", ["matches no linear", "no linear meets all"]),
        (
            "[{letter: M, format: bf16}, {role: out_proj, format: mxfp8}]",
            ["rules[1] (role out_proj -> mxfp8)", "decides nothing", "letter M -> bf16", "Write it before"],
        ),
        (
            "[{role: fc1, format: bf16}, {role: fc2, format: bf16}, {letter: '-', format: mxfp8}]",
            ["rules[2]", "decides nothing", "role fc1 -> bf16 and role fc2 -> bf16"],
        ),
    ],
)  # fmt: skip
def test_a_users_rule_that_decides_nothing_is_refused(rules: str, parts: list[str]) -> None:
    with pytest.raises(PrecisionError) as error:
        assign(recipe("nvfp4", f"rules={rules}"), shapes("M-M-M-M-"))
    for part in parts:
        assert part in str(error.value)


def test_a_rule_that_is_shadowed_in_part_is_fine() -> None:
    found = assigned("nvfp4", "rules=[{match: '*.0.*', format: bf16}, {role: in_proj, format: mxfp8}]")
    assert (found["0.in_proj"].format, found["2.in_proj"].format) == ("bf16", "mxfp8")


def test_a_recipes_own_rule_may_match_nothing() -> None:
    assert assigned("nemotron3_super", pattern="M-M-")["0.out_proj"].format == "mxfp8"


# ---- widths


@pytest.mark.parametrize(
    ("name", "into", "out"),
    [
        ("bf16", 1, 1),
        ("nvfp4", 16, 16),
        ("mxfp4", 32, 32),
        ("mxfp8", 32, 32),
        ("fp8_block", 16, 16),
        ("fp8_current", 16, 16),
        ("fp8_delayed", 16, 16),
        ("quartet2", 16, 128),
        ("nvfp4_fwd_bf16_bwd", 16, 1),
        ("bf16_fwd_nvfp4_bwd", 1, 16),
        ("mxfp8_fwd_nvfp4_bwd", 32, 16),
        ("nvfp4_fwd_mxfp8_bwd", 16, 32),
    ],
)
def test_what_widths_must_be_multiples_of(name: str, into: int, out: int) -> None:
    """In-features are contracted by fprop, out-features by dgrad; tokens, contracted by wgrad, are padded."""
    config = recipe(name)
    assert needed_multiples(recipe_gemms(config)) == (into, out)


def test_square_weight_tiles_count_in_both_directions() -> None:
    config = recipe("nvfp4_fwd_bf16_bwd", "weight_tile=[16, 16]")
    assert needed_multiples(recipe_gemms(config)) == (16, 16)
    config = recipe("bf16_fwd_nvfp4_bwd", "weight_tile=[16, 16]")
    assert needed_multiples(recipe_gemms(config)) == (16, 16)


def test_a_rotation_of_tokens_asks_nothing_of_widths() -> None:
    config = recipe("nvfp4", "rotation=128")
    assert needed_multiples(recipe_gemms(config)) == (16, 16)


def test_a_rotation_of_features_asks_for_whole_groups() -> None:
    config = recipe("nvfp4", "weight_tile=[1, 16]", "dgrad.gradient.rotation=64", "dgrad.weight.rotation=64")
    assert needed_multiples(recipe_gemms(config)) == (16, 64)


def test_hidden_size_1000_keeps_every_linear_in_bf16_and_is_refused() -> None:
    with pytest.raises(PrecisionError) as error:
        assign(recipe("nvfp4"), shapes(PATTERN, hidden=1000))
    for part in ("would quantize nothing", "model.hidden_size = 1000 is no multiple of 16 (nearest 992 and 1008)"):
        assert part in str(error.value)


def test_one_width_that_does_not_fit_keeps_its_linears_alone() -> None:
    found = assigned("mxfp8", ffn=1008)
    assert found["1.fc1"].format == "bf16"
    assert found["1.fc1"].fprop is None
    assert found["1.fc1"].decided_by == "recipe mxfp8"
    assert found["1.fc1"].reason == "model.ffn_hidden_size = 1008 is no multiple of 32 (nearest 992 and 1024)"
    assert found["1.fc2"].reason == found["1.fc1"].reason
    assert found["0.in_proj"].format == "mxfp8"


def test_mamba_in_proj_that_does_not_fit_is_reported_with_its_formula() -> None:
    """Hidden 768, head size 64, state 128, one group: 2 * 1536 + 2 * 128 + 24 = 3352, which is 8 modulo 16."""
    found = assigned("nvfp4", hidden=768, inner=1536, in_proj=3352)
    assert found["0.in_proj"].format == "bf16"
    assert found["0.in_proj"].reason == (
        "2 * d_inner + 2 * groups * state + heads = 3352 is no multiple of 16 (nearest 3344 and 3360)"
    )
    assert found["0.out_proj"].format == "nvfp4"
    with pytest.raises(PrecisionError, match="groups \\* state \\+ heads = 3352"):
        assign(recipe("nvfp4", "rules=[{role: out_proj, format: bf16}]"), shapes("MM", 768, in_proj=3352))


def test_widths_are_those_of_a_tensor_parallel_rank() -> None:
    """11008 is 16 * 688 and 128 * 86, but a rank of 8 holds 1376, which is no multiple of 128."""
    assert assigned("fp8_block", ffn=11008)["1.fc1"].format == "fp8_block"
    found = assigned("fp8_block", ffn=11008, tensor=8, hidden=1024, inner=2048, in_proj=5120)
    reason = (
        "model.ffn_hidden_size = 11008, 1376 per rank at parallel.tensor=8, "
        "is no multiple of 128 (nearest 10240 and 11264)"
    )
    assert found["1.fc1"].reason == reason  # out-features, column-parallel
    assert found["1.fc2"].reason == reason  # in-features, row-parallel
    assert found["2.in_proj"].format == "fp8_block"  # its in-features are whole on every rank


def test_the_side_that_is_not_shared_is_not_divided() -> None:
    one = Shape("decoder.layers.0.mlp.linear_fc1", 0, "-", "fc1", 128, 1024)
    two = Shape("decoder.layers.0.mlp.linear_fc2", 0, "-", "fc2", 1024, 128)
    decided = assign(recipe("fp8_block"), [one, two], 8)
    assert [linear.format for linear in decided] == ["fp8_block"] * 2


def test_a_width_smaller_than_the_block_names_what_is_legal() -> None:
    found = assigned("mxfp8", ffn=16)
    assert found["1.fc1"].reason == "model.ffn_hidden_size = 16 is no multiple of 32 (nearest 32 and 64)"


def test_the_last_fp8_block_of_a_width_may_be_partial_but_not_that_of_a_rank() -> None:
    """22688 is 128 * 177 + 32. Two ranks would have blocks that one process has not."""
    assert assigned("fp8_block", in_proj=22688)["2.in_proj"].format == "fp8_block"
    assert assigned("fp8_block", in_proj=22688, tensor=2)["2.in_proj"].reason == (
        "2 * d_inner + 2 * groups * state + heads = 22688, 11344 per rank at parallel.tensor=2, "
        "is no multiple of 128 (nearest 22528 and 22784)"
    )
    misfit = assigned("fp8_block", in_proj=22680)["2.in_proj"].reason
    assert misfit.endswith("= 22680 is no multiple of 16 (nearest 22672 and 22688)")


def test_a_rule_whose_format_does_not_fit_keeps_bf16_and_says_so() -> None:
    found = assigned("nvfp4", "rules=[{role: fc1, format: mxfp8}]", ffn=1008)
    assert found["1.fc1"].decided_by == "precision.rules[0] (role fc1 -> mxfp8)"
    assert found["1.fc1"].reason == "model.ffn_hidden_size = 1008 is no multiple of 32 (nearest 992 and 1024)"
    assert found["1.fc2"].format == "nvfp4"
