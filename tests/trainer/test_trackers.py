"""wandb: one run, offline where there is no way out, nothing lost on resume, and no failure of it reaches the run."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nvfp4_train.config import LoggingConfig
from nvfp4_train.exits import ExitCode
from nvfp4_train.metrics import read_metrics
from nvfp4_train.trackers import START_SECONDS, NoTracker, has_key, run_id, start_tracker
from nvfp4_train.trainer import train
from tests.trainer.conftest import Make


class FakeWandb(ModuleType):
    """Takes down what is asked of it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished: list[int] = []
        self.online_error: Exception | None = None
        self.log_error: Exception | None = None
        self.Settings = lambda **kwargs: SimpleNamespace(base_url="https://api.example.org", **kwargs)

    def init(self, **kwargs: Any) -> FakeWandb:
        self.inits.append(kwargs)
        if kwargs["mode"] == "online" and self.online_error is not None:
            raise self.online_error
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, metrics: dict[str, Any]) -> None:
        if self.log_error is not None:
            raise self.log_error
        self.logged.append(metrics)

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return fake


def start(folder: Path, config: LoggingConfig, said: list[str], is_main: bool = True) -> Any:
    return start_tracker(config, folder, "quickstart", {"steps": 3}, is_main, said.append)


def test_without_a_key_it_goes_offline_with_tokens_as_axis(wandb: FakeWandb, tmp_path: Path) -> None:
    folder, said = tmp_path / "pair" / "nvfp4", []  # type: ignore[var-annotated]
    folder.mkdir(parents=True)
    tracker = start(folder, LoggingConfig(), said)
    tracker.log({"tokens": 10, "train/loss": 2.0, "optim/grad_norm": float("nan")})
    tracker.finish(0)
    assert [call["mode"] for call in wandb.inits] == ["offline"]
    assert (wandb.inits[0]["group"], wandb.inits[0]["name"], wandb.inits[0]["dir"]) == (
        "pair",
        "quickstart",
        str(folder),
    )
    assert ("*", "tokens") in wandb.axes
    assert wandb.logged == [{"tokens": 10, "train/loss": 2.0, "optim/grad_norm": None}]
    assert wandb.finished == [0]
    assert said == []


def test_the_id_is_kept_for_the_run_that_goes_on(wandb: FakeWandb, tmp_path: Path) -> None:
    for _ in range(2):
        start(tmp_path, LoggingConfig(group="g", name="n"), [])
    first, second = wandb.inits
    assert first["id"] == second["id"] == run_id(tmp_path)
    assert (second["resume"], second["group"], second["name"]) == ("allow", "g", "n")
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other") != first["id"]


@pytest.mark.parametrize("where", ["environment", "netrc"])
def test_with_a_key_it_goes_online(
    where: str, wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_key("https://api.example.org")
    if where == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    else:
        (tmp_path / "netrc").write_text("machine api.example.org login user password xyz\n")
        assert not has_key("https://api.other.org")
    start(tmp_path, LoggingConfig(), [])
    assert [call["mode"] for call in wandb.inits] == ["online"]
    assert wandb.inits[0]["settings"].init_timeout == START_SECONDS


def test_no_network_is_one_warning_and_offline(
    wandb: FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    wandb.online_error = ConnectionError("no such host\nand a traceback")
    said: list[str] = []
    start(tmp_path, LoggingConfig(), said).log({"tokens": 1})
    assert said == ["warning: wandb can't be reached (no such host); going on offline"]
    assert [call["mode"] for call in wandb.inits] == ["online", "offline"]
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"]
    assert wandb.logged == [{"tokens": 1}]


def test_online_without_a_key_says_what_to_do(wandb: FakeWandb, tmp_path: Path) -> None:
    said: list[str] = []
    start(tmp_path, LoggingConfig(wandb="online"), said)
    assert [call["mode"] for call in wandb.inits] == ["offline"]
    assert len(said) == 1
    assert "WANDB_API_KEY" in said[0]


def test_other_ranks_and_disabled_runs_start_nothing(wandb: FakeWandb, tmp_path: Path) -> None:
    assert isinstance(start(tmp_path, LoggingConfig(), [], is_main=False), NoTracker)
    assert isinstance(start(tmp_path, LoggingConfig(wandb="disabled"), []), NoTracker)
    assert wandb.inits == []


def test_a_failure_while_logging_is_said_once_and_ends_tracking(wandb: FakeWandb, tmp_path: Path) -> None:
    said: list[str] = []
    tracker = start(tmp_path, LoggingConfig(), said)
    wandb.log_error = BrokenPipeError("service gone")
    for number in range(3):
        tracker.log({"tokens": number})
    tracker.finish(0)
    assert said == ["warning: wandb stopped taking metrics (service gone); metrics.jsonl goes on"]


def test_the_command_to_upload_can_be_pasted(wandb: FakeWandb, tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    segment = folder / "wandb" / "offline-run-20260101_000000-abc"
    segment.mkdir(parents=True)
    said: list[str] = []
    start(folder, LoggingConfig(), said).finish(0)
    assert shlex.split(said[-1]) == ["wandb", "sync", str(segment)]


def test_a_broken_installation_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    said: list[str] = []
    assert isinstance(start(tmp_path, LoggingConfig(), said), NoTracker)
    assert len(said) == 1


def test_two_offline_segments_of_one_run_are_kept(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real wandb, without network: stopped between checkpoints, so the second segment goes back a step."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    config = make("bf16", "logging.wandb=auto", "evaluation.sequences=0")
    start = time.monotonic()
    assert train(replace(config, stop_after=3)) == ExitCode.DONE
    began = int(time.time())
    while int(time.time()) == began:  # segments are named after the second they begin in
        time.sleep(0.01)
    assert train(config) == ExitCode.DONE
    assert time.monotonic() - start < 60
    folder = Path(str(config.run_dir))
    segments = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(segments) == 2
    kept = run_id(folder)
    assert all(segment.name.endswith(kept) and list(segment.glob("*.wandb")) for segment in segments)
    printed = capsys.readouterr().out
    positions = [printed.rindex(f"wandb sync {segment}") for segment in segments]
    assert positions == sorted(positions)
    assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
