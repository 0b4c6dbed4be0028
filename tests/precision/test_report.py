"""The precision report: coverage, what is not as published, and the lines at start."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.config import ModelConfig
from models.shapes import flops_per_token, linear_shapes
from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.phases import resolve
from nvfp4_train.precision.report import block_ranges, report, summary
from tests.precision.recipe_files import NAMES, recipe, shapes

PATTERN = "M-M*-M-M*-"


def made(name: str, *overrides: str, flops: float = 1e9, **model: Any) -> dict[str, Any]:
    config = recipe(name, *overrides)
    pattern = model.pop("pattern", PATTERN)
    decided = assign(config, shapes(pattern, **model), 1)
    return report(config, decided, flops, resolve(config.phases, 100, 64))


def test_coverage_of_two_linears_by_hand() -> None:
    """fc1 in NVFP4, fc2 and the output layer in BF16: 256 * 512 of 2 * 256 * 512 + 256 * 384 products."""
    found = made("nvfp4", "bf16_blocks.last=0", "rules=[{role: fc2, format: bf16}]", pattern="-", flops=6 * 1_000_000)
    linear = 2 * 256 * 512 + 256 * 384
    assert found["coverage"]["linear_percent"] == pytest.approx(100 * 256 * 512 / linear)
    assert found["coverage"]["total_percent"] == pytest.approx(100 * 256 * 512 / 1_000_000)
    assert found["coverage"]["by_format"] == {
        "bf16": pytest.approx(100 * (256 * 512 + 256 * 384) / linear),
        "nvfp4": pytest.approx(100 * 256 * 512 / linear),
    }


def test_each_gemm_counts_a_third() -> None:
    whole = made("nvfp4", "bf16_blocks.last=0")["coverage"]
    for name, part in (("nvfp4_fwd_bf16_bwd", 1 / 3), ("bf16_fwd_nvfp4_bwd", 2 / 3)):
        coverage = made(name, "bf16_blocks.last=0")["coverage"]
        assert coverage["linear_percent"] == pytest.approx(whole["linear_percent"] * part)
    mixed = made("mxfp8_fwd_nvfp4_bwd", "bf16_blocks.last=0")["coverage"]
    assert mixed["linear_percent"] == pytest.approx(whole["linear_percent"])
    assert mixed["by_format"]["nvfp4"] == pytest.approx(2 * mixed["by_format"]["mxfp8"])


def test_a_gemm_with_one_operand_in_bf16_is_not_in_low_precision() -> None:
    found = made("nvfp4", "bf16_blocks.last=0", "fprop.input.format=bf16", "fprop.input.tile=null")["coverage"]
    whole = made("nvfp4", "bf16_blocks.last=0")["coverage"]
    assert found["linear_percent"] == pytest.approx(whole["linear_percent"] * 2 / 3)
    assert found["by_format"]["bf16 x nvfp4"] == pytest.approx(whole["linear_percent"] / 3)


def test_coverage_of_the_published_12b() -> None:
    """62 blocks with the first 2 and the last 8 in BF16."""
    model = ModelConfig(
        pattern="M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M-",
        hidden_size=5120, ffn_hidden_size=20480, num_attention_heads=40, num_query_groups=8, head_dim=128,
        mamba_num_heads=128, mamba_head_dim=80, mamba_state_dim=128, mamba_num_groups=8, vocab_size=131072,
    )  # fmt: skip
    linears = linear_shapes(model)
    config = recipe("nvfp4", "bf16_blocks.first=2", "bf16_blocks.last=8")
    flops = flops_per_token(model, 8192)
    found = report(config, assign(config, linears), flops.training)
    kept = sum(s.num_weights for s in linears if s.block is None or s.block < 2 or s.block >= 54)
    every = sum(shape.num_weights for shape in linears)
    assert found["coverage"]["linear_percent"] == pytest.approx(100 * (1 - kept / every))
    assert found["coverage"]["total_percent"] == pytest.approx(100 * 6 * (every - kept) / flops.training)
    assert 70 < found["coverage"]["total_percent"] < found["coverage"]["linear_percent"] < 80
    lines = summary(found)
    assert "  M in_proj  nvfp4 x23, bf16 x5 (blocks 0, 54, 56, 58, 60)" in lines
    assert "  * qkv      nvfp4 x6" in lines
    assert len(lines) == 8


@pytest.mark.parametrize("name", NAMES)
def test_the_report_is_whole_and_is_json(name: str) -> None:
    found = json.loads(json.dumps(made(name)))
    config = recipe(name)
    assert (found["recipe"], found["source"], found["backend"]) == (name, config.source, "auto")
    assert len(found["linears"]) == len(shapes(PATTERN))
    for linear, shape in zip(found["linears"], shapes(PATTERN), strict=True):
        assert [linear[key] for key in ("name", "block", "letter", "role", "in_features", "out_features")] == [
            shape.name, shape.block, shape.letter, shape.role, shape.in_features, shape.out_features,
        ]  # fmt: skip
        assert linear["decided_by"]
        assert bool(linear["reason"]) == (linear["format"] == "bf16")
    assert found["departures"] == []
    assert len(summary(found)) <= 12


def test_operands_are_described_in_full() -> None:
    found = made("nvfp4", "rotation=64")["linears"][0]
    assert found["wgrad"]["format"] == "nvfp4"
    assert found["wgrad"]["gradient"] == {
        "format": "nvfp4", "tile": (1, 16), "rounding": "stochastic", "rotation": 64, "scaling": "tensor",
        "four_over_six": None, "element": None, "signs": "fixed", "scale_rounding": "up", "power_of_two": False,
        "correction": None, "source": "original",
    }  # fmt: skip
    assert found["fprop"]["weight"]["tile"] == (16, 16)
    last = made("nvfp4")["linears"][-1]
    assert last["dgrad"]["format"] == last["dgrad"]["weight"]["format"] == "bf16"


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        ("nvfp4", ["rotation=null"], "left out: rotation (published: 16)"),
        ("nvfp4", ["gradient_rounding=nearest"], "left out: stochastic rounding of gradients (published: stochastic)"),
        ("nvfp4_four_over_six", ["four_over_six=null"], "left out: four over six (published: mse)"),
        ("nvfp4", ["rotation=64"], "changed: rotation 64 (published: 16)"),
        ("nvfp4", ["weight_tile=[1, 16]"], "changed: weight tile [1,16] (published: [16,16])"),
        ("nvfp4", ["four_over_six=mae"], "added: four over six mae (published: null)"),
        ("nvfp4_four_over_six", ["four_over_six=mae"], "changed: four over six mae (published: mse)"),
        (
            "mxfp4",
            ["rotation=null", "weight_tile=[1, 32]"],
            "left out: rotation (published: 32); changed: weight tile [1,32] (published: [32,32])",
        ),
    ],
)
def test_what_is_not_as_published_is_one_line(name: str, overrides: list[str], line: str) -> None:
    found = made(name, *overrides)
    assert summary(found)[-1] == line
    assert [departure["override"] for departure in found["departures"]] == [
        text.partition("=")[0] for text in overrides
    ]


def test_lines_at_start() -> None:
    found = made("nemotron3_super", ffn=1000, in_proj=1288)
    assert summary(found) == [
        f"precision nemotron3_super (auto): {found['coverage']['linear_percent']:.1f}% of linear GEMM FLOPs and "
        f"{found['coverage']['total_percent']:.1f}% of all FLOPs in low precision",
        "  M in_proj  bf16 x4",
        "  M out_proj mxfp8 x4",
        "  - fc1      bf16 x4",
        "  - fc2      bf16 x4",
        "  * qkv      bf16 x2",
        "  * proj     bf16 x2",
        "    output   bf16 x1",
        "  in_proj in BF16: 2 * d_inner + 2 * groups * state + heads = 1288 is no multiple of 16 "
        "(nearest 1280 and 1296)",
        "  fc1, fc2 in BF16: model.ffn_hidden_size = 1000 is no multiple of 16 (nearest 992 and 1008)",
    ]


def test_rules_are_listed_with_what_they_decided() -> None:
    found = made("nemotron3_super", "rules=[{match: '*.0.*', format: bf16}]", pattern="M-M-M-M-")
    assert found["rules"] == [{"format": "bf16", "match": "*.0.*", "letter": None, "role": None, "decided": 2}]
    assert [(rule["role"], rule["decided"]) for rule in found["recipe_rules"]] == [
        ("qkv", 0),
        ("proj", 0),
        ("out_proj", 2),
    ]
    assert summary(found)[-1] == "unused rules of the recipe: 2 of 3 decide nothing here"


def test_phases_are_in_the_report_with_their_steps() -> None:
    found = made("nvfp4", "phases=[{start: 0.82, forward: bf16}]")
    assert found["phases"] == [
        {"step": 1, "start": "the start", "forward": "recipe", "backward": "recipe"},
        {"step": 83, "start": "0.82 of the run", "forward": "bf16", "backward": "recipe"},
    ]


def test_the_backend_that_was_chosen_is_named() -> None:
    config = recipe("nvfp4")
    found = report(config, assign(config, shapes(PATTERN)), 1e9, backend="emulated")
    assert summary(found)[0].startswith("precision nvfp4 (emulated): ")
    assert found["phases"] == []


@pytest.mark.parametrize(("blocks", "text"), [([9], "9"), ([0, 1, 2, 9], "0-2, 9"), ([3, 1], "1, 3"), ([4, 5], "4-5")])
def test_block_ranges(blocks: list[int], text: str) -> None:
    assert block_ranges(blocks) == text


def test_phases_are_on_the_screen() -> None:
    phases = "phases=[{start: 0.82, forward: bf16}, {start: 90, forward: recipe, backward: bf16}]"
    assert summary(made("nvfp4", phases))[-2:] == [
        "phase: from step 83 (0.82 of the run) on, forward in BF16, backward as the recipe says",
        "phase: from step 91 (90 steps) on, forward as the recipe says, backward in BF16",
    ]
    assert (
        "from step 1 (0 steps) on, forward in BF16" in summary(made("nvfp4", "phases=[{start: 0, forward: bf16}]"))[-1]
    )
    assert not any("phase:" in line for line in summary(made("nvfp4")))
