"""The command from run folders to files and exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvfp4_train.compare import main
from nvfp4_train.comparison import dashboard, pictures, report
from tests.comparison.synthetic import TOKENS_PER_STEP, config, losses, make_run, true_loss

FILES = {"compare.json", "loss.png", "gap.png", "report.html"}
STEPS = 400
ROOT = Path(report.__file__).parents[2]


def validation(gap: float) -> dict[int, float]:
    return {step: float(true_loss(step * TOKENS_PER_STEP)) * (1 + gap / 100) for step in range(20, STEPS + 1, 20)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders: base; a (+1%, paired), long and short ones, other seeds, one without a config, one that diverged."""
    folder = tmp_path_factory.mktemp("runs")
    curve = {own: losses(steps=STEPS, own_seed=own, gap=gap) for own, gap in ((0, 0.0), (1, 1.0), (2, -0.5))}
    other = config(precision={"name": "mxfp4"})
    make_run(folder / "base", curve[0], settings=config(), val=validation(0))
    make_run(folder / "a", curve[1], settings=other, val=validation(3.0))
    make_run(folder / "better", curve[2], settings=other)
    make_run(folder / "short", curve[1][:200], settings=other)
    make_run(folder / "bare", curve[1])
    make_run(folder / "one", curve[1][:1], settings=other)
    make_run(folder / "late", curve[1], settings=other, first_step=5000)
    make_run(folder / "other_seed", losses(steps=STEPS, batch_seed=9, own_seed=9), settings=config(9), batch_seed=9)
    for name, bad in (
        ("diverged", slice(300, 400)),
        ("ends_badly", [399]),
        ("most_bad", slice(365, 395)),
        ("skipped", [50, 390]),
    ):
        values = curve[1].copy()
        values[bad] = np.nan
        make_run(folder / name, values, settings=other)
    for seed in (1, 2, 3):
        own = losses(steps=STEPS, batch_seed=seed, own_seed=10 + seed)
        make_run(folder / "base_seeds" / f"s{seed}", own, settings=config(seed), batch_seed=seed)
        own = losses(steps=STEPS, batch_seed=seed, own_seed=20 + seed, gap=2.0)
        settings = config(seed, precision={"name": "mxfp4"})
        make_run(folder / "run_seeds" / f"s{seed}", own, settings=settings, batch_seed=seed)
    return folder


@pytest.fixture
def real_pictures() -> None:
    """For tests that look at the pictures; drawing them takes most of a comparison's time."""


@pytest.fixture(autouse=True)
def quick_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures for all other tests."""
    if "real_pictures" not in request.fixturenames:
        monkeypatch.setattr(pictures, "png", lambda figure: b"a picture")
        monkeypatch.setattr(report, "png", lambda figure: b"a picture")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def compare(runs: Path, names: str, out: Path, *options: str) -> int:
    return main([*(str(runs / name) for name in names.split()), "--out", str(out), *options])


def result(out: Path) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((out / "compare.json").read_text(), parse_constant=refuse)


def test_a_baseline_without_any_loss_is_refused(
    runs: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "zero", np.zeros(STEPS), settings=config())
    assert main([str(tmp_path / "zero"), str(runs / "a"), "--out", str(out)]) == 2
    assert "its training loss is 0 over the last 10%" in capsys.readouterr().err


def test_a_paired_run(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "base a", out) == 0
    found = result(out)
    assert found["baseline"] == "base"
    (run,) = found["runs"]
    assert (run["name"], run["paired"], run["reasons"]) == ("a", True, [])
    train, val = run["gap"]["train"], run["gap"]["val"]
    assert train["value"] == pytest.approx(1.0, abs=0.15)
    assert train["low"] < train["value"] < train["high"]
    assert val["value"] == pytest.approx(3.0)
    assert (val["low"], val["high"]) == (pytest.approx(3.0, abs=0.1), pytest.approx(3.0, abs=0.1))
    assert run["tokens_to_match"] > 1.05
    assert run["seeds"] == [1]
    assert {path.name for path in out.iterdir()} == FILES
    printed = capsys.readouterr().out
    assert re.search(r"a .*yes.*\+\d\.\d+ ± 0\.\d+.*\+3\.000", printed)
    assert "does not say how far another seed would land" in printed
    assert "does not say how far another seed would land" in (out / "report.html").read_text()


def test_a_terminal_that_lacks_the_arrow(runs: Path, out: Path) -> None:
    command = [sys.executable, "-m", "nvfp4_train.compare", str(runs / "base"), str(runs / "a"), "--out", str(out)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"loss: baseline -> run", done.stdout)
    assert re.search(r"a .*yes.*\d -> \d.*\+\d\.\d+ \+- 0\.\d+", done.stdout)


def test_several_runs_at_once(runs: Path, out: Path) -> None:
    assert compare(runs, "base a better short", out) == 0
    by_name = {run["name"]: run for run in result(out)["runs"]}
    assert list(by_name) == ["a", "better", "short"]
    assert by_name["better"]["gap"]["train"]["value"] == pytest.approx(-0.5, abs=0.15)
    assert by_name["better"]["tokens_to_match"] < 1
    assert by_name["better"]["gap"]["val"] is None
    assert by_name["short"]["gap"]["train"]["value"] == pytest.approx(1.0, abs=0.2)
    short = by_name["short"]["loss"]["train"]["baseline"]
    assert short == pytest.approx(float(true_loss(TOKENS_PER_STEP * np.arange(181, 201)).mean()), abs=0.03)


def test_seeds(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "base_seeds run_seeds", out) == 0
    assert "another seed" not in capsys.readouterr().out
    (run,) = result(out)["runs"]
    assert (run["name"], run["seeds"], run["band"], run["paired"]) == ("run_seeds", [1, 2, 3], "seeds", True)
    assert run["gap"]["train"]["low"] < 2.0 < run["gap"]["train"]["high"]
    seeds_of_both = f"{runs}/base_seeds/s1,{runs}/base_seeds/s3"
    assert main([seeds_of_both, str(runs / "run_seeds"), "--out", str(out)]) == 0
    (run,) = result(out)["runs"]
    assert run["seeds"] == [1, 3]
    assert run["notes"] == ["s2 (seed 2) has no partner and is left out"]


@pytest.mark.parametrize(
    ("name", "said"), [("bare", "bare has no config.yaml"), ("other_seed", "seed differs: 1 and 9")]
)
def test_unpaired_runs_are_refused_unless_asked_for(
    runs: Path, out: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert compare(runs, f"base {name}", out) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
    assert compare(runs, f"base {name}", out, "--unpaired") == 0
    (run,) = result(out)["runs"]
    assert not run["paired"]
    assert any(said in reason for reason in run["reasons"])
    assert said in capsys.readouterr().out


def test_one_unpaired_run_among_paired_ones(runs: Path, out: Path) -> None:
    assert compare(runs, "base a bare", out) == 2
    assert compare(runs, "base a bare", out, "--unpaired") == 0
    assert [run["paired"] for run in result(out)["runs"]] == [True, False]


@pytest.mark.parametrize(
    ("names", "limit", "code"),
    [
        ("base short", "2", 0),
        ("base short", "0.5", 3),
        ("base a", "2", 3),  # the validation gap is 3%
        ("base a", "3.5", 0),
        ("base better", "0", 0),
        ("base better short", "0.5", 3),
        ("base diverged", "99", 3),
    ],
)
def test_max_gap(runs: Path, out: Path, names: str, limit: str, code: int) -> None:
    assert compare(runs, names, out, "--max-gap", limit) == code
    assert {path.name for path in out.iterdir()} == FILES


def test_a_run_that_diverged(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "base diverged", out) == 0
    (run,) = result(out)["runs"]
    assert run["gap"]["train"] is None
    assert run["tokens_to_match"] is None
    assert any("diverged" in note for note in run["notes"])
    assert "diverged" in capsys.readouterr().out
    assert compare(runs, "base ends_badly most_bad", out) == 0
    assert [run["gap"]["train"] for run in result(out)["runs"]] == [None, None]
    assert compare(runs, "diverged base", out) == 2
    assert "the baseline diverged" in capsys.readouterr().err


def test_a_run_that_skipped_steps(runs: Path, out: Path) -> None:
    assert compare(runs, "base skipped", out) == 0
    (run,) = result(out)["runs"]
    assert run["gap"]["train"]["value"] == pytest.approx(1.0, abs=0.15)
    assert "skipped: 2 of 400 steps have no finite training loss and are left out" in run["notes"]


def test_a_single_step(runs: Path, out: Path) -> None:
    assert compare(runs, "base one", out) == 0
    (run,) = result(out)["runs"]
    assert run["gap"]["train"]["low"] is None
    assert any("too few" in note for note in run["notes"])


def test_nothing_in_common(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "base late", out, "--unpaired") == 2
    assert "nothing at equal tokens" in capsys.readouterr().err


@pytest.mark.parametrize("names", ["base missing", "missing a"])
def test_missing_folders(runs: Path, out: Path, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, names, out) == 2
    assert "missing: no run folder" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["nan", "much"])
def test_max_gap_must_be_a_number(runs: Path, out: Path, limit: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        compare(runs, "base a", out, "--max-gap", limit)
    assert exit_info.value.code == 2


def test_only_an_earlier_comparison_is_overwritten(
    runs: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(runs, "base a", out) == 0
    (out / "notes.txt").write_text("mine")
    assert compare(runs, "base better", out) == 0
    assert result(out)["runs"][0]["name"] == "better"
    assert (out / "notes.txt").read_text() == "mine"

    strangers = [("loss.png", "mine"), ("compare.json", '{"a": 1}'), ("compare.json", "not JSON")]
    for number, (name, content) in enumerate(strangers):
        others = tmp_path / f"others-{number}"
        others.mkdir()
        (others / name).write_text(content)
        assert compare(runs, "base a", others) == 2
        assert [(path.name, path.read_text()) for path in others.iterdir()] == [(name, content)]
    assert compare(runs, "base a", out / "notes.txt") == 2
    assert "is a file" in capsys.readouterr().err


def test_a_run_folder_is_no_place_for_a_comparison(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "mine", losses(steps=20), settings=config())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert compare(runs, "base a", folder) == 2
    said = capsys.readouterr().err
    assert f"--out {folder}: is a run folder" in said
    assert f"for example {folder / 'comparison'}." in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert compare(runs, "base a", folder / "comparison") == 0


def test_a_changed_recipe_is_noted_everywhere(
    runs: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {3: {"precision/recipe": "fp8_block"}}
    folder = make_run(
        tmp_path / "resumed", losses(steps=STEPS, own_seed=1), settings=config(), extra=changed, val=validation(1.0)
    )
    assert main([str(runs / "base"), str(folder), "--out", str(out)]) == 0
    note = "resumed: recipe changed to fp8_block at step 3"
    assert note in capsys.readouterr().out.splitlines()
    assert result(out)["runs"][0]["notes"] == [note]
    assert f"<p>{note}</p>" in (out / "report.html").read_text()


def test_a_run_against_itself(runs: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs, "base a/../base", out) == 0
    found = result(out)
    note = "base: baseline and run are the same folder, and a run has no gap to itself"
    assert (found["baseline"], found["runs"][0]["name"], found["runs"][0]["notes"]) == ("base", "base", [note])
    said = capsys.readouterr().out
    assert note in said.splitlines()
    assert str(runs) not in said
    assert compare(runs, "base a", out) == 0
    assert result(out)["runs"][0]["notes"] == []


def test_the_page_needs_no_network_and_no_scripts(runs: Path, tmp_path: Path, real_pictures: None) -> None:
    odd = tmp_path / "<b>odd & co"
    quant = {
        f"quant/decoder.layers.{block}.mixer.out_proj/fprop_input/{name}": 0.1 * block
        for block in range(3)
        for name in ("flushed", "sqnr_db")
    }
    settings = config(precision={"name": "x"}, optimizer={"lr": 0.5})
    make_run(odd, losses(steps=STEPS, own_seed=4), settings=settings, extra={STEPS: quant})
    precision = {
        "recipe": "x",
        "coverage": {"linear_percent": 81.25, "total_percent": 63.0, "by_format": {"nvfp4": 81.25}},
    }
    (odd / "precision.json").write_text(json.dumps(precision))
    assert main([str(runs / "base"), str(odd), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert not re.search(r"https?://|<script|<link|<b>odd", page)
    assert "&lt;b&gt;odd &amp; co" in page
    sources = re.findall(r'src="([^"]{22})', page)
    assert sources == ["data:image/png;base64,"] * 4  # loss, gap, flushed, SQNR
    for text in ("81.2", "63.0", "optimizer.lr", "0.5", "nvfp4"):
        assert text in page


def test_pictures_are_whole(runs: Path, out: Path, real_pictures: None) -> None:
    compare(runs, "base a", out)
    for name in ("loss.png", "gap.png"):
        content = (out / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert content.endswith(b"IEND\xaeB\x60\x82")


class FakeTracker:
    """Keeps what it is given, or fails."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self.finished = False

    def log(self, metrics: dict[str, Any]) -> None:
        self.logged |= metrics

    def finish(self, exit_code: int) -> None:
        self.finished = True


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeTracker, list[Any]]:
    fake, calls = FakeTracker(), []

    def start(*arguments: Any) -> FakeTracker:
        calls.append(arguments)
        return fake

    monkeypatch.setattr(dashboard, "start_tracker", start)
    return fake, calls


def test_wandb_gets_table_pictures_and_page(
    runs: Path, out: Path, tracker: tuple[FakeTracker, list[Any]], real_pictures: None
) -> None:
    fake, calls = tracker
    assert compare(runs, "base a", out, "--wandb") == 0
    assert set(fake.logged) == {"compare/table", "compare/loss", "compare/gap", "compare/report"}
    assert fake.logged["compare/table"].data[0][0] == "a"
    assert fake.finished
    ((logging, folder, name, *_),) = calls
    assert (logging.group, folder, name) == (runs.name, out, "compare a to base")


def test_wandb_is_never_in_the_way(
    runs: Path, out: Path, tracker: tuple[FakeTracker, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(metrics: dict[str, Any]) -> None:
        raise RuntimeError("no room")

    tracker[0].log = fail  # type: ignore[method-assign]
    assert compare(runs, "base a", out, "--wandb") == 0
    assert "warning: the comparison is not in wandb (" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["compare", "health"])
def test_help_imports_nothing_heavy(module: str) -> None:
    code = (
        f"import sys\nfrom nvfp4_train.{module} import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'wandb', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_comparing_imports_neither_torch_nor_pyplot(runs: Path, out: Path) -> None:
    code = (
        "import sys\nfrom nvfp4_train.compare import main\nassert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'matplotlib.pyplot', 'wandb'} & set(sys.modules)"
    )
    arguments = [str(runs / "base"), str(runs / "a"), "--out", str(out)]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
