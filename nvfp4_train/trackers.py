"""wandb, never in the way: bounded waits, one warning, then offline; its failures never touch the run. No torch."""

from __future__ import annotations

import netrc
import os
import secrets
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from nvfp4_train.config import LoggingConfig
from nvfp4_train.metrics import Metrics, finite_or_none

START_SECONDS = 10  # how long an online start may take before the run goes on offline
FINISH_SECONDS = 30  # how long the last uploads may take
RUN_ID = "wandb_id"


class Tracker(Protocol):
    """Where metrics go besides `metrics.jsonl`."""

    def log(self, metrics: Metrics) -> None:
        """Hand over one step's metrics; returns at once and never raises."""

    def finish(self, exit_code: int) -> None:
        """Close, waiting a bounded time for what is still on its way."""


class NoTracker:
    """Does nothing, so that nobody asks whether there is a tracker."""

    def log(self, metrics: Metrics) -> None:
        """Nothing."""

    def finish(self, exit_code: int) -> None:
        """Nothing."""


class WandbTracker:
    """One wandb run. Its x-axis is `tokens`; wandb's own step is left alone: a resumed run may go back."""

    def __init__(self, run: Any, folder: Path, say: Callable[[str], None]) -> None:
        self._run: Any | None = run
        self._folder = folder
        self._say = say
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")

    def log(self, metrics: Metrics) -> None:
        """See `Tracker`; the first failure is said and ends the tracking."""
        if self._run is None:
            return
        try:
            self._run.log({name: finite_or_none(value) for name, value in metrics.items()})
        except Exception as error:
            self._say(f"warning: wandb stopped taking metrics ({_first_line(error)}); metrics.jsonl goes on")
            self._run = None

    def finish(self, exit_code: int) -> None:
        """See `Tracker`; prints how to upload what lies offline, all segments of the run in their order."""
        if self._run is not None:
            try:
                self._run.finish(exit_code=exit_code)
            except Exception as error:
                self._say(f"warning: wandb did not finish ({_first_line(error)})")
        segments = sorted((self._folder / "wandb").glob("offline-run-*"))
        if segments:
            self._say("to upload to wandb, in this order:")
            for segment in segments:
                self._say(f"  wandb sync {shlex.quote(str(segment))}")


def start_tracker(
    config: LoggingConfig, folder: Path, name: str, settings: dict[str, Any], is_main: bool, say: Callable[[str], None]
) -> Tracker:
    """The tracker that `config.wandb` asks for; one that does nothing when disabled and on all ranks but the main one.

    A run id is made once and kept in the run folder, so that a resumed run is the same run in wandb.

    Args:
        name: of the run, where `config.name` is None. The group is `config.group`, or the folder above the run folder.
        settings: the run's whole configuration.
    """
    if config.wandb == "disabled" or not is_main:
        return NoTracker()
    try:
        import wandb
    except Exception as error:  # a broken installation must not stop a run
        say(f"warning: wandb can't be imported ({_first_line(error)}); metrics.jsonl alone is written")
        return NoTracker()
    key = has_key(wandb.Settings().base_url)
    if config.wandb == "online" and not key:
        say("warning: logging.wandb=online without a key: run `wandb login` or set WANDB_API_KEY; going on offline")

    def start(mode: Literal["online", "offline"]) -> Tracker:
        run = _init(mode, folder, config.project, config.group or folder.parent.name, config.name or name, settings)
        return WandbTracker(run, folder, say)

    if key and config.wandb in ("auto", "online"):
        try:
            return start("online")
        except Exception as error:
            say(f"warning: wandb can't be reached ({_first_line(error)}); going on offline")
    try:
        return start("offline")
    except Exception as error:
        say(f"warning: wandb did not start ({_first_line(error)}); metrics.jsonl alone is written")
        return NoTracker()


def _init(
    mode: Literal["online", "offline"], folder: Path, project: str, group: str, name: str, settings: dict[str, Any]
) -> Any:
    """A wandb run that prints nothing, records no code and bounds every wait."""
    import wandb

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wandb.init(
            dir=str(folder),
            id=run_id(folder),
            resume="allow",
            mode=mode,
            project=project,
            group=group,
            name=name,
            config=settings,
            settings=wandb.Settings(
                init_timeout=START_SECONDS,
                login_timeout=START_SECONDS,
                finish_timeout=FINISH_SECONDS,
                x_service_wait=START_SECONDS,
                silent=True,
                console="off",
                disable_code=True,
            ),
        )


def has_key(base_url: str) -> bool:
    """True where wandb would find a key without asking: WANDB_API_KEY, or a netrc entry for its host."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(urlparse(base_url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(folder: Path) -> str:
    """The wandb id kept in the run folder, drawn the first time."""
    path = folder / RUN_ID
    if not path.exists():
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
