"""Phases: which step is the first in which passes, and what is refused."""

from __future__ import annotations

import re

import pytest

from nvfp4_train.precision.assignment import assign
from nvfp4_train.precision.config import Phase, PrecisionError
from nvfp4_train.precision.phases import Passes, check_something_runs, resolve
from tests.precision.recipe_files import recipe, shapes

RECIPE, LATE = Passes("recipe", "recipe"), Passes("bf16", "recipe")


def test_without_phases_the_recipe_runs_throughout() -> None:
    schedule = resolve((), 100, 64)
    assert [schedule.at(step) for step in (1, 50, 100)] == [RECIPE] * 3
    assert schedule.switches == ()


@pytest.mark.parametrize("start", [0.82, 82, "82 steps", "5248 tokens", "5.248K tokens"])
def test_the_late_switch_begins_after_the_step_it_names(start: float | int | str) -> None:
    schedule = resolve((Phase(start, forward="bf16"),), 100, 64)
    assert [schedule.at(step) for step in (1, 82, 83, 100)] == [RECIPE, RECIPE, LATE, LATE]
    (switch,) = schedule.switches
    assert switch.step == 83
    assert "step 83" in switch.text
    assert "forward in BF16, backward as the recipe says" in switch.text


def test_a_start_between_two_steps_waits_for_the_next() -> None:
    assert resolve((Phase("5249 tokens", forward="bf16"),), 100, 64).switches[0].step == 84
    assert resolve((Phase(0.5, forward="bf16"),), 5, 64).switches[0].step == 4


def test_what_a_phase_leaves_out_stays() -> None:
    phases = (Phase(10, backward="bf16"), Phase(20, forward="bf16"), Phase(30, backward="recipe"), Phase(40, "recipe"))
    schedule = resolve(phases, 100, 64)
    assert [schedule.at(step) for step in (10, 11, 21, 31, 41)] == [
        RECIPE,
        Passes("recipe", "bf16"),
        Passes("bf16", "bf16"),
        LATE,
        RECIPE,
    ]
    assert [switch.step for switch in schedule.switches] == [11, 21, 31, 41]


def test_a_phase_from_the_start_is_no_switch() -> None:
    schedule = resolve((Phase(0, forward="bf16"), Phase(0.5, forward="recipe")), 10, 64)
    assert [schedule.at(step) for step in (1, 5, 6)] == [LATE, LATE, RECIPE]
    assert [switch.step for switch in schedule.switches] == [6]


@pytest.mark.parametrize(
    ("phases", "parts"),
    [
        ([Phase(20, "bf16"), Phase(10, "recipe")], ["precision.phases[1]", "10", "step 11", "step 21", "in order"]),
        ([Phase(20, "bf16"), Phase(0.2, "recipe")], ["precision.phases[1]", "step 21", "of its own"]),
        ([Phase(0, "bf16"), Phase(0, "recipe")], ["precision.phases[1]", "step 1"]),
        ([Phase(100, "bf16")], ["precision.phases[0]", "100 steps", "never begin", "latest start is 99,", "0.99 of"]),
        ([Phase(0.995, "bf16")], ["0.995", "100 steps", "latest start is 99,", "0.99 of"]),
        ([Phase("1M tokens", "bf16")], ["precision.phases[0]", "15625 steps", "6,400 tokens"]),
        ([Phase("soon", "bf16")], ["precision.phases[0].start", "'soon'", "8.2T tokens"]),
        ([Phase(-1, "bf16")], ["precision.phases[0].start", "-1"]),
        ([Phase(0.5, "recipe")], ["precision.phases[0]", "changes nothing"]),
        ([Phase(0.5, "bf16"), Phase(0.8, "bf16")], ["precision.phases[1]", "changes nothing"]),
    ],
)
def test_refusals(phases: list[Phase], parts: list[str]) -> None:
    with pytest.raises(PrecisionError) as error:
        resolve(phases, 100, 64)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("steps", [2, 3, 7, 10, 1000, 12345])
def test_the_latest_start_that_is_named_begins(steps: int) -> None:
    with pytest.raises(PrecisionError) as error:
        resolve([Phase(steps, "bf16")], steps, 64)
    found = re.search(r"latest start is (\d+), .*\(or (\S+) of the run\)", str(error.value))
    assert found is not None
    assert [stage.step for stage in resolve([Phase(int(found[1]), "bf16")], steps, 64).switches] == [steps]
    assert resolve([Phase(float(found[2]), "bf16")], steps, 64).at(steps) == LATE


@pytest.mark.parametrize(
    ("name", "phases", "refused"),
    [
        ("nvfp4", "[{start: 0, forward: bf16, backward: bf16}]", True),
        ("nvfp4", "[{start: 0, forward: bf16}]", False),
        ("nvfp4", "[{start: 0, forward: bf16, backward: bf16}, {start: 0.5, backward: recipe}]", False),
        ("nvfp4", "[{start: 1, forward: bf16, backward: bf16}]", False),
        ("bf16_fwd_nvfp4_bwd", "[{start: 0, backward: bf16}]", True),
        ("nvfp4_fwd_bf16_bwd", "[{start: 0, forward: bf16}]", True),
    ],
)
def test_phases_that_leave_nothing_of_the_recipe_are_refused(name: str, phases: str, refused: bool) -> None:
    config = recipe(name, f"phases={phases}")
    schedule, decided = resolve(config.phases, 100, 64), assign(config, shapes("M-M*-M-M*-"), 1)
    if not refused:
        check_something_runs(schedule, decided, name)
        return
    with pytest.raises(PrecisionError, match=f"all of recipe {name} to BF16 from step 1"):
        check_something_runs(schedule, decided, name)


def test_a_recipe_in_bf16_has_nothing_to_check() -> None:
    config = recipe("bf16")
    check_something_runs(resolve((), 100, 64), assign(config, shapes("M-M*-M-M*-"), 1), "bf16")
