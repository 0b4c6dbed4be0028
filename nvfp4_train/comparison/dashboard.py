"""A comparison as a wandb run, in the group of the runs it compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvfp4_train.comparison.report import HEADINGS, table_rows
from nvfp4_train.comparison.result import Comparison
from nvfp4_train.config import LoggingConfig
from nvfp4_train.trackers import start_tracker


def log_comparison(
    comparison: Comparison, folder: Path, files: Mapping[str, bytes], say: Callable[[str], None]
) -> None:
    """Log table, pictures and page. Whatever fails is said in one line and changes nothing else.

    `folder` keeps the id of the wandb run, so that comparing again into it updates that run. Project and group are
    the baseline's.
    """
    baseline = comparison.baseline.runs[0]
    logging: Mapping[str, Any] = (baseline.config or {}).get("logging") or {}
    config = LoggingConfig(
        project=logging.get("project") or LoggingConfig.project,
        group=logging.get("group") or baseline.path.resolve().parent.name,
    )
    name = f"compare {', '.join(run.name for run in comparison.runs)} to {comparison.baseline.name}"
    tracker = start_tracker(config, folder, name, comparison.to_json(), True, say)
    try:
        import wandb

        table = wandb.Table(columns=list(HEADINGS), data=[list(row) for row in table_rows(comparison)])
        images = {f"compare/{picture}": wandb.Image(str(folder / f"{picture}.png")) for picture in ("loss", "gap")}
        page = wandb.Html(files["report.html"].decode(), inject=False)
        tracker.log({"compare/table": table, **images, "compare/report": page})
    except Exception as error:  # the files are written; a dashboard is not worth an exit code
        say(f"warning: the comparison is not in wandb ({error})")
    tracker.finish(0)
