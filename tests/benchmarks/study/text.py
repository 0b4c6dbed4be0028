"""The text of the study: prepared where it is not there yet, and what it consists of, package by package."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata

from data.corpus import Corpus
from data.prepare import prepare
from data.training import train_tokenizer
from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError

FILE, TOKENIZER = "corpus.csv", "tokenizer.json"


def prepared(overrides: Sequence[str], say: Callable[[str], None]) -> Corpus:
    """The corpus of `experiment=nano` with these overrides; its tokenizer.json is trained first if it is not there.

    Raises ConfigError where there are several sources.
    """
    config = compose(["experiment=nano", *overrides])
    sources = config.data.blended()
    if len(sources) > 1:
        raise ConfigError("The study reads one source; give data.path.")
    data = config.data.of_source(sources[0])
    if data.tokenizer.endswith(".json"):
        train_tokenizer(data, replace(config.tokenizer, train=data.tokenizer), say)
    return prepare(data, say=say)


def shared_overrides(corpus: Corpus) -> list[str]:
    """What makes a run read the prepared corpus without looking for its source."""
    tokenizer = corpus.path / "tokenizer.json"
    return [f"data.path={corpus.path}", f"data.tokenizer={tokenizer if tokenizer.is_file() else corpus.tokenizer}"]


def describe(corpus: Corpus) -> str:
    """One sentence."""
    files, size = len(corpus.source.files), sum(file.size for file in corpus.source.files)
    packages = len({file.name.partition("/")[0] for file in corpus.source.files})
    tokens, text = corpus.train.tokens, corpus.train.bytes
    return (
        f"The text: {size / 1e6:.0f} MB in {files:,} files of {packages} packages (`study/{FILE}` lists them with "
        f"their hashes); {tokens / 1e6:.0f}M tokens to train on, {text / tokens:.2f} bytes each, and "
        f"{corpus.validation.tokens / 1e6:.1f}M held out; corpus {corpus.hash[:12]}."
    )


def to_csv(corpus: Corpus) -> str:
    """Each top-level package: its distribution and version where it is installed, files, bytes, hash of its files'."""
    versions = {
        name: " ".join(f"{one} {metadata.version(one)}" for one in sorted(set(distributions)))
        for name, distributions in metadata.packages_distributions().items()
    }
    packages: dict[str, list[tuple[int, str]]] = {}
    for file in corpus.source.files:
        packages.setdefault(file.name.partition("/")[0], []).append((file.size, f"{file.name} {file.sha256}"))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["package", "distribution", "files", "bytes", "sha256"])
    for name, files in sorted(packages.items()):
        digest = hashlib.sha256("\n".join(text for _, text in files).encode()).hexdigest()
        writer.writerow([name, versions.get(name, ""), len(files), sum(size for size, _ in files), digest[:16]])
    return buffer.getvalue()
