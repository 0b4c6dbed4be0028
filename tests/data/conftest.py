"""Sources and tokenizers that the data room's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from data.config import DataConfig

MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A DataConfig for a source: small batches, prepared under the test's own folder."""

    def make(path: Path | str, **changes: Any) -> DataConfig:
        values: dict[str, Any] = {"sequence_length": 32, "global_batch": 8, "micro_batch": 2, "validation_share": 0.1}
        return DataConfig(path=str(path), prepared=str(tmp_path / "prepared"), **{**values, **changes})

    return make


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    """One good line a text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def numbered(count: int, size: int = 60) -> list[str]:
    """Different texts of about `size` characters."""
    return [(f"document {i}: " + "the quick brown fox jumps over the lazy dog " * size)[:size] for i in range(count)]


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE whose file asks for what must not happen: truncation, padding and a begin token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|begin|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(numbered(20), trainer)
    tokenizer.add_tokens(["ADDED"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def large_vocabulary_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70000 words, `w0` to `w69998`, and the end-of-document token as the last id."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(69_999)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    path = tmp_path_factory.mktemp("tokenizer") / "words.json"
    tokenizer.save(str(path))
    return path
