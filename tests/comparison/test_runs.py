"""Reading run folders: what is there, what is broken, what is still being written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nvfp4_train.comparison.runs import CompareError, Switch, config_differences, open_group, open_groups, open_run
from nvfp4_train.config import ConfigError
from tests.comparison.synthetic import config, make_run


def write(folder: Path, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def line(step: int, **more: object) -> str:
    return json.dumps({"step": step, "tokens": 10 * step, "train/loss": 5.0 - step, **more}) + "\n"


def test_columns(tmp_path: Path) -> None:
    more = {"val/loss": 3.5, "data/hash": "ab", "quant/a.layers.0.b/fprop_input/flushed": 0.25}
    run = open_run(write(tmp_path / "r", line(1, **{"data/hash": "aa"}), line(2, **more), line(3)))
    assert run.name == "r"
    assert run.train.steps.tolist() == [1, 2, 3]
    assert run.train.tokens.tolist() == [10, 20, 30]
    assert run.train.losses.tolist() == [4.0, 3.0, 2.0]
    assert (run.val.tokens.tolist(), run.val.losses.tolist()) == ([20], [3.5])
    assert run.hashes == {1: "aa", 2: "ab"}
    assert run.quant == {"quant/a.layers.0.b/fprop_input/flushed": 0.25}
    assert run.quant_steps == dict.fromkeys(run.quant, 2)
    assert (run.config, run.precision, run.notes) == (None, None, ())


def test_a_torn_last_line_is_left_out_and_noted(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "r", line(1), line(2), line(3)[:25]))
    assert run.train.steps.tolist() == [1, 2]
    assert "line 3" in run.notes[0]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", line(1), line(2)[:20] + "\n", line(3))
    with pytest.raises(CompareError, match=r"r/metrics\.jsonl:2: not JSON"):
        open_run(folder)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("[1, 2]\n", "not a JSON object but list"),
        ('{"tokens": 10, "train/loss": 1.0}\n', "step is None"),
        ('{"step": 1, "tokens": 1.5, "train/loss": 1.0}\n', "tokens is 1.5"),
        ('{"step": 1, "tokens": 10, "train/loss": "low"}\n', "train/loss is 'low'"),
    ],
)
def test_lines_that_are_no_metrics(tmp_path: Path, bad: str, said: str) -> None:
    with pytest.raises(CompareError, match=r"metrics\.jsonl:1: ") as error:
        open_run(write(tmp_path / "r", bad, line(2)))
    assert said in str(error.value)


def test_losses_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    lines = [line(1), line(2, **{"train/loss": None}), line(3, **{"train/loss": float("nan")}), line(4)]
    run = open_run(write(tmp_path / "r", *lines))
    assert np.isnan(run.train.losses).tolist() == [False, True, True, False]
    assert run.train.finite().steps.tolist() == [1, 4]
    assert "2 of 4 steps" in run.notes[0]


def test_the_later_of_two_lines_of_a_step_counts(tmp_path: Path) -> None:
    run = open_run(write(tmp_path / "r", line(1), line(2), line(2, **{"train/loss": 9.0}), line(3)))
    assert run.train.losses.tolist() == [4.0, 9.0, 2.0]


def test_tokens_must_grow(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="tokens do not grow at step 3"):
        open_run(write(tmp_path / "r", line(1), line(2), line(3, tokens=20)))


@pytest.mark.parametrize("lines", [[], ['{"step": 1, "tokens": 10, "val/loss": 2.0}\n']])
def test_metrics_without_a_training_loss(tmp_path: Path, lines: list[str]) -> None:
    with pytest.raises(CompareError, match="no line holds train/loss"):
        open_run(write(tmp_path / "r", *lines))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run folder"):
        open_run(tmp_path)


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "r", line(1))
    (folder / "config.yaml").write_text("a: [1\n")
    with pytest.raises(CompareError, match=r"r/config\.yaml: not readable"):
        open_run(folder)
    (folder / "config.yaml").write_text("just text\n")
    with pytest.raises(CompareError, match="wanted keys and values, got str"):
        open_run(folder)


def test_switches_of_precision(tmp_path: Path) -> None:
    def passes(forward: str, backward: str) -> dict[str, str]:
        return {"precision/forward": forward, "precision/backward": backward}

    start, late = passes("recipe", "recipe"), passes("bf16", "recipe")
    every_line = open_run(write(tmp_path / "a", line(1, **start), line(2, **start), line(3, **late), line(4, **late)))
    at_the_switch = open_run(write(tmp_path / "b", line(1), line(2), line(3, **late), line(4)))
    assert every_line.switches == at_the_switch.switches == (Switch(3, 30, "forward bf16, backward recipe"),)


def test_a_recipe_that_changed_on_resume(tmp_path: Path) -> None:
    passes = {"precision/forward": "recipe", "precision/backward": "recipe"}
    lines = [line(1, **passes), line(2), line(3, **passes, **{"precision/recipe": "fp8_block"}), line(4, **passes)]
    run = open_run(write(tmp_path / "a", *lines))
    assert run.switches == (Switch(3, 30, "recipe fp8_block"),)
    assert run.notes == ("recipe changed to fp8_block at step 3",)
    again = open_run(write(tmp_path / "b", *lines, line(5, **{"precision/recipe": "bf16"})))
    assert again.switches == (Switch(3, 30, "recipe fp8_block"), Switch(5, 50, "recipe bf16"))
    assert again.notes == ("recipe changed to fp8_block at step 3", "recipe changed to bf16 at step 5")
    # A changed setting leaves the name as it was; of two lines of a step, the later one counts.
    same_name = [line(5, **{"precision/recipe": "fp8_block"}), line(7, **{"precision/forward": "bf16"}), line(6)]
    more = open_run(write(tmp_path / "c", *lines, *same_name, line(6, **{"precision/recipe": "nvfp4"})))
    assert [(switch.step, switch.text) for switch in more.switches] == [
        (3, "recipe fp8_block"),
        (5, "recipe fp8_block"),
        (6, "recipe nvfp4"),
        (7, "forward bf16"),
    ]
    later = [line(3, **{"precision/recipe": name}) for name in ("fp8_block", "mxfp4")]
    assert open_run(write(tmp_path / "d", line(1), *later)).switches == (Switch(3, 30, "recipe mxfp4"),)


def test_seeds_by_folder_and_by_commas(tmp_path: Path) -> None:
    values = np.array([3.0, 2.0])
    for seed in (1, 2):
        make_run(tmp_path / "all" / f"s{seed}", values, settings=config(seed))
    (tmp_path / "all" / "notes").mkdir()
    by_folder = open_group(str(tmp_path / "all"))
    assert (by_folder.name, [run.seed for run in by_folder.runs]) == ("all", [1, 2])
    by_commas = open_group(f"{tmp_path / 'all' / 's2'},{tmp_path / 'all' / 's1'}")
    assert (by_commas.name, [run.seed for run in by_commas.runs]) == ("s2,s1", [2, 1])


def test_a_comma_in_a_folder_name_is_no_list(tmp_path: Path) -> None:
    make_run(tmp_path / "a,b", np.array([3.0, 2.0]))
    assert open_group(str(tmp_path / "a,b")).name == "a,b"


def test_runs_of_one_argument_differ_in_their_seed_alone(tmp_path: Path) -> None:
    values = np.array([3.0, 2.0])
    make_run(tmp_path / "a", values, settings=config(1))
    make_run(tmp_path / "b", values, settings=config(2, steps=5, run_dir="/elsewhere"))
    make_run(tmp_path / "c", values, settings=config(1))
    make_run(tmp_path / "d", values)
    with pytest.raises(CompareError, match="a and b differ in steps;"):
        open_group(f"{tmp_path}/a,{tmp_path}/b")
    with pytest.raises(CompareError, match="seed 1 is there more than once"):
        open_group(f"{tmp_path}/a,{tmp_path}/c")
    with pytest.raises(CompareError, match="d without config"):
        open_group(f"{tmp_path}/a,{tmp_path}/d")


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="neither a run folder"):
        open_group(str(tmp_path))
    with pytest.raises(CompareError, match="missing: no run folder"):
        open_group(str(tmp_path / "missing"))


def test_folders_of_one_name_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    for place in ("x/run", "y/run", "y/deep/run", "z/deep/run", "z/other"):
        make_run(tmp_path / place, np.array([3.0, 2.0]))

    def names(*places: str) -> list[tuple[str, str]]:
        return [(group.name, group.runs[0].name) for group in open_groups([str(tmp_path / place) for place in places])]

    assert names("x/run", "z/other") == [("run", "run"), ("other", "other")]
    assert names("x/run", "y/run", "z/other") == [("x/run", "x/run"), ("y/run", "y/run"), ("other", "other")]
    assert names("x/run", "y/deep/run", "z/deep/run") == [
        ("x/run", "x/run"),
        ("y/deep/run", "y/deep/run"),
        ("z/deep/run", "z/deep/run"),
    ]
    assert names("x/run", "x/run") == [("run", "run")] * 2
    assert names("x/run", "y/../x/run", "y/run") == [("x/run", "x/run")] * 2 + [("y/run", "y/run")]


def test_seeds_of_one_name_have_the_shortest_names_that_tell_them_apart(tmp_path: Path) -> None:
    for group in ("bf16", "nvfp4"):
        for seed in (1, 2):
            make_run(tmp_path / group / f"s{seed}", np.array([3.0, 2.0]), settings=config(seed))
    by_folder = open_groups([str(tmp_path / "bf16"), str(tmp_path / "nvfp4")])
    by_commas = open_groups([f"{tmp_path}/{group}/s2,{tmp_path}/{group}/s1" for group in ("bf16", "nvfp4")])
    assert [group.name for group in by_folder] == ["bf16", "nvfp4"]
    assert [group.name for group in by_commas] == ["bf16/s2,bf16/s1", "nvfp4/s2,nvfp4/s1"]
    across = [f"{tmp_path}/bf16/s1,{tmp_path}/nvfp4/s2", str(tmp_path / "bf16" / "s2")]
    assert [group.name for group in open_groups(across)] == ["s1,s2", "s2"]
    make_run(tmp_path / "other" / "s1", np.array([3.0, 2.0]), settings=config(3))
    assert open_groups([f"{tmp_path}/bf16/s1,{tmp_path}/other/s1"])[0].name == "bf16/s1,other/s1"
    assert [run.name for group in by_folder for run in group.runs] == ["bf16/s1", "bf16/s2", "nvfp4/s1", "nvfp4/s2"]


def test_config_differences_leave_out_places(tmp_path: Path) -> None:
    values = np.array([3.0, 2.0])
    make_run(tmp_path / "a", values, settings=config(1, run_dir="a", logging={"name": "a"}, optimizer={"lr": 1.0}))
    make_run(tmp_path / "b", values, settings=config(1, run_dir="b", logging={"name": "b"}, optimizer={"lr": 2.0}))
    found = config_differences(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert found == {"optimizer.lr": (1.0, 2.0)}
