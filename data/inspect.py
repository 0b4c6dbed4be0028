"""`python -m data.inspect RUN --step N`: a step's batch as text, from the run's record and the corpora it names."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.config import DataError
from data.corpus import Corpus
from data.loading import Datasets, batch_hash
from data.quiet import show_any_letter
from data.record import open_record, read_record
from data.samples import Row
from data.tokenizers import BYTE, Tokenizer, copy_name, load_tokenizer

MISTAKE = 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="data.inspect", description="Shows the text that a run trained on at one step.")
    made.add_argument("run", metavar="RUN", type=Path, help="run folder")
    made.add_argument("--step", metavar="N", type=int, required=True, help="step, counted from 1")
    made.add_argument("--sample", metavar="I", type=int, help="one sample of the batch alone, counted from 0")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = parser().parse_args(argv)
    show_any_letter()  # text is of any language
    try:
        for line in inspect(arguments.run, arguments.step, arguments.sample):
            print(line)
        sys.stdout.flush()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def inspect(run: Path, step: int, sample: int | None = None) -> Iterator[str]:
    """Lines that show the global batch of `step`: its hash beside the one that was logged, then each sample.

    Raises:
        DataError: no such run, step or sample, or a corpus that is gone or changed.
    """
    record = read_record(run)
    datasets, size = open_record(record), record["global_batch"]
    first = record["samples"] + (step - 1 - record["step"]) * size
    if not 0 <= first < datasets.train_samples:
        raise DataError(f"--step {step}: the run has steps 1 to {step + (datasets.train_samples - 1 - first) // size}.")
    if sample is not None and not 0 <= sample < size:
        raise DataError(f"--sample {sample}: a batch has samples 0 to {size - 1}.")
    rows = [datasets[i] for i in range(first, first + size)]
    found, logged = batch_hash([row["tokens"] for row in rows]), _logged_hash(run, step)
    seen = {None: "not logged", found: "as the run logged"}.get(logged, f"but the run logged {logged}")
    yield f"step {step}: samples {first:,} to {first + size - 1:,}, data/hash {found} ({seen})"
    for i in range(size) if sample is None else (sample,):
        yield from _sample(datasets, first + i, i, rows[i])


def _sample(datasets: Datasets, number: int, place: int, row: Row) -> Iterator[str]:
    source, index = datasets.blend.locate(number)
    opened = datasets.sources[source]
    epoch, line = divmod(index, opened.train.per_epoch)
    targets = int(row["loss_mask"].sum())
    yield f"\n--- sample {place}: {opened.name}, epoch {epoch + 1}, row {line:,}, {targets} targets"
    tokenizer, tokens = _tokenizer(opened.corpus), row["tokens"].tolist()
    end = int(row["loss_mask"].nonzero()[0].max(initial=-1)) + 1  # what follows is padding
    start = 0
    for i in range(end):
        if tokens[i] == opened.corpus.eod:
            yield f"{tokenizer.decode(tokens[start:i])}\n--- end of document"
            start = i + 1
        elif "documents" in row and i and row["documents"][i] != row["documents"][i - 1] and start < i:
            yield f"{tokenizer.decode(tokens[start:i])}\n--- next document"
            start = i
    if start < end:
        yield tokenizer.decode(tokens[start:end])


def _tokenizer(corpus: Corpus) -> Tokenizer:
    return load_tokenizer(BYTE if corpus.tokenizer == BYTE else str(corpus.path / copy_name(corpus.tokenizer)))


def _logged_hash(run: Path, step: int) -> Any:
    """`data/hash` of a step in the run's metrics, None where it is not there."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            metrics = json.loads(line)
        except ValueError:
            continue
        if metrics.get("step") == step:
            return metrics.get("data/hash")
    return None


if __name__ == "__main__":
    sys.exit(main())
