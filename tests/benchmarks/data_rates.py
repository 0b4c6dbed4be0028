"""Data as a table: preparation against the `tokenizers` library alone, reading, start-up by number of files, memory.

    python -m tests.benchmarks.data_rates [--only SECTION] [--megabytes N] [--vocabulary N] [--large N]

Text is the built-in corpus, again and again, as JSON lines. Preparation (reading, checking, tokenizing, writing,
merging, starting processes) and the library (its own batches of the same documents, all in memory, on the same cores)
run by turns, so that other load on the machine weighs on both; medians of the ratios are printed, of wall time and of
CPU time. Reading is of CPU time, and of wall time beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.config import PACKINGS, DataConfig, TokenizerTraining
from data.loading import build_datasets, train_batches
from data.prepare import prepare
from data.readers import Document, read_documents
from data.sources import find_source
from data.training import train_tokenizer

PAIRS = 3
SAMPLES = 4000  # read for a rate
LENGTH = 4096
FILES = (1, 100, 10_000)
DOCUMENT_SIZES = (200, 1000, 20_000)
CORES = len(os.sched_getaffinity(0))


def seconds() -> np.ndarray:
    """Wall time, and CPU time of this process and those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return np.array([time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)])


def silent(line: str) -> None:
    """No lines of progress."""


def config_of(path: Path, root: Path, **changes: object) -> DataConfig:
    """A source in `root`."""
    made = DataConfig(str(path), str(root / "prepared"), sequence_length=LENGTH, global_batch=8, micro_batch=8)
    return replace(made, **changes)  # type: ignore[arg-type]


def documents() -> Iterator[str]:
    """The built-in corpus without end."""
    texts = [one.text for one in read_documents(find_source("builtin"), "text") if isinstance(one, Document)]
    while True:
        yield from texts


def write_files(folder: Path, megabytes: float, count: int) -> list[str]:
    """JSON lines in `count` files of equal size; the documents."""
    folder.mkdir()
    stream, written = documents(), []
    for number in range(count):
        with (folder / f"{number:05d}.jsonl").open("w") as out:
            size = 0
            while size < megabytes * 1e6 / count:
                text = next(stream)[: int(megabytes * 1e6 / count)]
                out.write(json.dumps({"text": text}) + "\n")
                written.append(text)
                size += len(text)
    return written


def preparation(root: Path, chosen: argparse.Namespace) -> Iterator[str]:
    """Rows: our rate over the library's, for several files and for one."""
    from tokenizers import Tokenizer

    file = train_tokenizer(
        config_of(Path("builtin"), root), TokenizerTraining(str(root / "bpe.json"), chosen.vocabulary), silent
    )
    for count in (2 * CORES, 1):
        folder = root / f"files-{count}"
        texts = write_files(folder, chosen.megabytes, count)
        size = sum(len(text.encode()) for text in texts) / 1e6
        pairs = []
        for turn in range(PAIRS):
            library = Tokenizer.from_file(str(file))  # anew: it remembers words
            before = seconds()
            for first in range(0, len(texts), 1024):
                library.encode_batch_fast(texts[first : first + 1024], add_special_tokens=False)
            between = seconds()
            prepare(config_of(folder, root / str(turn), tokenizer=str(file), validation_share=0.01), say=silent)
            pairs.append((between - before, seconds() - between))
        alone, ours = (statistics.median(pair[i][0] for pair in pairs) for i in range(2))
        wall, cpu = (statistics.median(one[i] / other[i] for one, other in pairs) for i in range(2))
        yield f"| {count} of {size / count:.0f} MB | {size / alone:.2f} | {size / ours:.2f} | {wall:.0%} | {cpu:.0%} |"


def reading(root: Path, chosen: argparse.Namespace) -> Iterator[str]:
    """Rows: tokens a second of one process, by packing and size of document."""
    for size in DOCUMENT_SIZES:
        path = root / f"documents-{size}.jsonl"
        text = (
            "".join(text for text, _ in zip(documents(), range(1500), strict=False)).encode("ascii", "ignore").decode()
        )
        with path.open("w") as out:
            for start in range(0, SAMPLES * LENGTH // 2, size):
                place = start % (len(text) - size)
                out.write(json.dumps({"text": text[place : place + size]}) + "\n")
        corpus = prepare(config_of(path, root), say=silent)
        cells = []
        for packing in PACKINGS:
            config = config_of(path, root, packing=packing)
            datasets = build_datasets([corpus], config, seed=1, train_samples=SAMPLES, validation_samples=1)
            batches = train_batches(datasets, config, consumed_samples=0)
            next(batches)
            cpu, wall = time.process_time(), time.perf_counter()
            tokens = sum(batch["tokens"].numel() for batch in batches)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            cells.append(f"{tokens / cpu / 1e6:.0f} ({tokens / wall / 1e6:.0f})")
        yield f"| {size:,} | {' | '.join(cells)} |"


def start_up(root: Path, chosen: argparse.Namespace) -> Iterator[str]:
    """Rows: seconds to prepare, to find prepared, and to open for reading, by the number of source files."""
    for count in FILES:
        folder = root / f"start-{count}"
        write_files(folder, max(4, count * 1e-3), count)
        config, seconds = config_of(folder, root), []
        for _ in range(2):
            start = time.perf_counter()
            corpus = prepare(config, say=silent)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        datasets = build_datasets([corpus], config, seed=1, train_samples=1000, validation_samples=1)
        next(train_batches(datasets, config, consumed_samples=0))
        yield f"| {count:,} | {seconds[0]:.2f} | {seconds[1]:.2f} | {time.perf_counter() - start:.3f} |"


PEAK = """
import sys, time
from data.config import DataConfig
from data.prepare import prepare
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
before = peak()
start = time.perf_counter()
corpus = prepare(DataConfig(sys.argv[1], sys.argv[2], 8, 1, 1), say=lambda line: None)
print(corpus.train.tokens, peak() - before, time.perf_counter() - start)
"""


def memory(root: Path, chosen: argparse.Namespace) -> Iterator[str]:
    """A row: peak memory over the imports while one large text file is prepared as bytes."""
    path = root / "large.txt"
    with path.open("w", encoding="utf-8") as out:
        stream, size = documents(), 0
        while size < chosen.large * 1e6:
            size += out.write(next(stream))
    command = [sys.executable, "-c", PEAK, str(path), str(root / "prepared")]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    yield f"| {size / 1e6:,.0f} MB | {int(done[1]) / 1024:.0f} MiB | {size / 1e6 / float(done[2]):.0f} |"


# Of each: title and head of the table, its columns, its rows.
SECTIONS: dict[str, tuple[str, int, Callable[[Path, argparse.Namespace], Iterator[str]]]] = {
    "preparation": (
        f"Preparation, BPE of {{vocabulary}} ids, {CORES} cores\n\n"
        "| files | library, MB/s | prepare, MB/s | of it | of it by CPU time |",
        5,
        preparation,
    ),
    "reading": (
        f"Reading, million tokens/s of CPU (wall) a process, rows of {LENGTH}\n\n"
        f"| tokens a document | {' | '.join(PACKINGS)} |",
        4,
        reading,
    ),
    "start-up": ("Start-up, seconds\n\n| source files | prepare | found prepared | open and read |", 4, start_up),
    "memory": ("Memory over the imports\n\n| one text file | peak | MB/s |", 3, memory),
}


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--megabytes", type=float, default=60, help="of text, for preparation")
    arguments.add_argument("--vocabulary", type=int, default=8192)
    arguments.add_argument("--large", type=int, default=512, help="megabytes of the one large file")
    arguments.add_argument("--only", choices=list(SECTIONS), help="one section; all by default")
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in [chosen.only] if chosen.only else SECTIONS:
            head, columns, rows = SECTIONS[name]
            print(f"\n## {head.format(**vars(chosen))}\n|{'---|' * columns}", flush=True)
            for row in rows(Path(folder), chosen):
                print(row, flush=True)


if __name__ == "__main__":
    main()
