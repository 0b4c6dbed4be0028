"""The study's text: prepared once with a tokenizer of its own, and listed package by package."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

from nvfp4_train.compose import compose
from tests.benchmarks.study import text


def test_text_is_prepared_once_and_listed_by_package(tmp_path: Path) -> None:
    source = tmp_path / "installed"
    for package, count in {"alpha": 3, "beta": 9}.items():
        (source / package).mkdir(parents=True)
        for number in range(count):
            (source / package / f"m{number}.py").write_text(f"def {package}_{number}(x):\n    return x + {number}\n")
    overrides = [f"data.path={source}", f"data.prepared={tmp_path / 'corpora'}", "tokenizer.vocab_size=270",
                 f"data.tokenizer={tmp_path / 't.json'}", "data.validation_share=.2"]  # fmt: skip
    said: list[str] = []
    corpus = text.prepared(overrides, said.append)
    assert text.prepared(overrides, said.append) == corpus
    assert f"tokenizer: {tmp_path / 't.json'} is there already" in said
    assert corpus.vocab_size == 270
    alpha, beta = csv.DictReader(text.to_csv(corpus).splitlines())
    assert (alpha["package"], alpha["files"], beta["package"], beta["files"]) == ("alpha", "3", "beta", "9")
    files = [source / "alpha" / f"m{number}.py" for number in range(3)]
    assert int(alpha["bytes"]) == sum(file.stat().st_size for file in files)
    listing = "\n".join(f"alpha/{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files)
    assert alpha["sha256"] == hashlib.sha256(listing.encode()).hexdigest()[:16]
    assert "in 12 files of 2 packages" in text.describe(corpus)
    shared = compose(["experiment=nano", *overrides, *text.shared_overrides(corpus)]).data
    assert (shared.path, shared.tokenizer) == (str(corpus.path), str(corpus.path / "tokenizer.json"))
