"""What the study trains: every row composes, once a seed, and its share above 4 bits is the one counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_train.compose import compose
from nvfp4_train.config import RunConfig
from tests.benchmarks.study.cells import (
    CORE,
    LONG,
    MAIN,
    TUNE,
    Cell,
    Plan,
    above_four_bits,
    by_sensitivity,
    cells,
    choose_blocks,
    rows,
)
from tests.benchmarks.study.store import Store

PAGES = Path(__file__).parents[2] / "configs" / "precision"
KEPT = Path(__file__).parent / "results" / "study"
# Weights of the blocks of nano, M-M-M*-M-M*-: in_proj and out_proj, fc1 and fc2, qkv and proj; and of its head
M, MLP, ATTENTION, HEAD = 393_216 + 131_072, 524_288, 196_608, 256 * 8192
ALL = 5 * M + 5 * MLP + 2 * ATTENTION


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan.make(MAIN, [], "corpus")


def config_of(plan: Plan, name: str) -> RunConfig:
    (row,) = [row for row in rows() if row.name == name]
    return plan.config_of(Cell(MAIN, row, 1))


def test_every_recipe_and_each_variant_is_a_row() -> None:
    names = [row.name for row in rows()]
    assert sorted(name for name in names if "," not in name and " " not in name) == sorted(
        path.stem for path in PAGES.glob("*.yaml")
    )
    assert len([name for name in names if name.startswith("nvfp4, ")]) == 8
    assert len(set(names)) == len(names)


def test_the_core_comes_first_with_all_its_seeds_and_each_cell_once() -> None:
    main = cells(MAIN)
    assert [(cell.seed, cell.row.name) for cell in main[:12]] == [(seed, row) for seed in (1, 2, 3) for row in CORE]
    assert {cell.seed for cell in main[12:]} == {1, 2}
    assert len({cell.name for cell in main}) == len(main) == 12 + 2 * (len(rows()) - 4)
    assert [cell.name for cell in cells(LONG)] == [cell.name.replace("main", "long") for cell in main[:12]]
    assert {cell.row.overrides[0] for cell in cells(TUNE)} == {"precision=bf16"}


def test_a_cell_is_one_set_of_overrides_that_the_command_line_takes(plan: Plan) -> None:
    (row,) = [row for row in rows() if row.name == "nvfp4, late both"]
    typed = plan.overrides(Cell(MAIN, row, 2), Path("/runs/x"))
    assert "precision.phases=[{start: 0.82, forward: bf16, backward: bf16}]" in typed
    config = compose(typed)
    assert (config.name, config.seed, config.steps, config.run_dir) == ("nano", 2, 1505, "/runs/x")
    assert (config.logging.health_every, config.checkpoint.every) == (1505, 0)
    recipe = compose([*typed, "precision.rotation=null", "precision.weight_tile=[1,16]"]).precision
    variants = {row.name: row.overrides[1:] for row in rows()}
    assert variants["nvfp4, no rotation"] == ("precision.rotation=null",)
    assert variants["nvfp4, 1x16 weights"] == ("precision.weight_tile=[1,16]",)
    assert (recipe.wgrad.input.rotation, recipe.dgrad.weight.tile) == (None, (1, 16))


def test_the_runs_that_are_kept_are_of_the_table_as_it_would_be_trained_now() -> None:
    """A changed default of the model, the optimizer or the schedule would begin the table anew, unseen."""
    found = {(one.setup, one.corpus) for one in Store(KEPT).records() if one.table == MAIN.name}
    assert found == {(Plan.make(MAIN, [], corpus).setup, corpus) for _, corpus in found}


def test_the_setup_is_what_runs_share_besides_their_seed(plan: Plan) -> None:
    again = Plan.make(MAIN, ["data.micro_batch=16", "model.kernels=torch", "seed=7"], "corpus")
    assert again.setup == plan.setup
    others = [
        Plan.make(LONG, [], "corpus"),
        Plan.make(MAIN, ["optimizer.lr=1e-4"], "corpus"),
        replace(plan, corpus="b"),
    ]
    assert others[0].config.steps == 3762
    assert len({plan.setup, *(other.setup for other in others)}) == 4


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("bf16", 1.0),
        ("nvfp4", (ATTENTION + MLP) / ALL),
        ("nvfp4, BF16 blocks first", (M + MLP) / ALL),
        ("nvfp4_fwd_bf16_bwd", 1 - (ALL - ATTENTION - MLP) / ALL / 3),
        ("4/6 late", (1505 - 1084) / 1505 / 3),
    ],
)
def test_share_above_four_bits(plan: Plan, name: str, share: float) -> None:
    config = config_of(plan, name)
    assert above_four_bits(config, output_layer=False) == pytest.approx(100 * share)
    with_output = (share * ALL + HEAD) / (ALL + HEAD)
    assert above_four_bits(config, output_layer=True) == pytest.approx(100 * with_output)


def test_blocks_are_chosen_by_loss_a_flop_within_the_limit(plan: Plan) -> None:
    flat = dict.fromkeys(range(12), 1e-3)
    assert choose_blocks(flat, plan.config, 10) == [5, 10]  # the attention blocks are the smallest
    assert choose_blocks(flat | {2: 1e-1}, plan.config, 10) == [2]
    assert choose_blocks(flat | {2: 1e-1}, plan.config, 13) == [2, 5]
    assert choose_blocks(dict.fromkeys(range(12), -1e-3), plan.config, 10) == []


def test_measured_blocks_make_candidates(plan: Plan) -> None:
    measured = {5: 1e-2, 2: 2e-2, 0: 1e-3}
    whole, late = by_sensitivity(measured)
    assert (whole.candidate, late.candidate) == (True, True)
    assert "blocks 5 in BF16" in whole.what  # block 2 loses less a weight, and both together are above 10%
    config = plan.config_of(Cell(MAIN, late, 1))
    switched = (1505 - 1235) / 1505 / 3
    share = 100 * (switched + (1 - switched) * ATTENTION / ALL)
    assert above_four_bits(config, output_layer=False) == pytest.approx(share)
    assert share < 10
    assert by_sensitivity({}) == by_sensitivity({2: -1.0}) == ()
