"""Trains a tokenizer: byte-level BPE of the `tokenizers` library, from the text that is not held out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from data.config import DataConfig, DataError, TokenizerTraining
from data.durable import flush
from data.readers import Document, read_documents
from data.refusals import why
from data.sources import find_source
from data.splitting import position
from data.tokenizers import BYTE, EOD_TOKENS, load_tokenizer

BYTES = 256

Say = Callable[[str], None]


def train_tokenizer(config: DataConfig, training: TokenizerTraining, say: Say) -> Path:
    """Writes `training.train`, a tokenizer.json made from the sources of `config`, and returns its path.

    Several sources give equal parts of the text. What can't be read is passed over here and named by the preparation.
    A file that is there already is the tokenizer where `config` names it, too.

    Raises:
        DataError: another file is there already, or one of another size, or the settings or the text make no tokenizer.
    """
    assert training.train is not None, "nowhere to write to"
    path = Path(training.train)
    if path.exists() and config.tokenizer == training.train:
        size = load_tokenizer(config.tokenizer).vocab_size
        if size != training.vocab_size:
            raise DataError(
                f"tokenizer.train: {path} is there already and has {size} ids, not {training.vocab_size}. Write "
                f"tokenizer.vocab_size={size} to use it, or name another file in tokenizer.train and data.tokenizer."
            )
        say(f"tokenizer: {path} is there already")
        return path
    _check(path, config, training)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=training.vocab_size,
        special_tokens=list(training.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    say(f"tokenizer: learning {training.vocab_size:,} ids from up to {training.megabytes:,} MB of text")
    tokenizer.train_from_iterator(_texts(config, training.megabytes * 10**6), trainer)
    size = tokenizer.get_vocab_size()
    if size < training.vocab_size:
        raise DataError(
            f"tokenizer.vocab_size={training.vocab_size}: the text has merges for {size} ids alone. Write "
            f"tokenizer.vocab_size={size} or less, or give more text."
        )
    _write(path, tokenizer.to_str(pretty=True))
    say(f"tokenizer: wrote {path}; the model needs model.vocab_size={size} or more")
    return path


def _check(path: Path, config: DataConfig, training: TokenizerTraining) -> None:
    if path.exists():
        raise DataError(
            f"tokenizer.train: {path} is there already and is not overwritten. Use it with data.tokenizer={path}, or "
            "name another file."
        )
    if config.tokenizer not in (BYTE, training.train):
        raise DataError(
            f"tokenizer.train={path} and data.tokenizer={config.tokenizer} are two tokenizers. Leave one of them out; "
            "what is trained is used for the preparation that follows."
        )
    if "" in training.special_tokens or len(set(training.special_tokens)) < len(training.special_tokens):
        raise DataError(
            f"tokenizer.special_tokens={list(training.special_tokens)} names one twice, or nothing. Give each its own "
            "text."
        )
    if not set(training.special_tokens) & set(EOD_TOKENS):
        raise DataError(
            f"tokenizer.special_tokens={list(training.special_tokens)} has none that ends a document. Name one of "
            f"{' '.join(EOD_TOKENS)}."
        )
    least = BYTES + len(training.special_tokens)
    if training.vocab_size < least:
        raise DataError(
            f"tokenizer.vocab_size={training.vocab_size} is below {least}: {BYTES} bytes and "
            f"{len(training.special_tokens)} special tokens."
        )


def _texts(config: DataConfig, limit: int) -> Iterator[str]:
    """Documents that are trained on, up to `limit` bytes over all sources."""
    sources = config.blended()
    for source in sources:
        settings, left = config.of_source(source), limit // len(sources)
        assert settings.path is not None
        for document in read_documents(find_source(settings.path), settings.text_field, stream=settings.stream):
            if not isinstance(document, Document):
                continue
            content = document.text.encode("utf-8")
            if position(content) < config.validation_share:
                continue
            left -= len(content)
            if left < 0:
                break
            yield document.text


def _write(path: Path, text: str) -> None:
    """The whole file or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.rename(path)
    except OSError as error:
        raise DataError(
            f"tokenizer.train: can't write {path}: {why(error, path)}. Name a file in another folder."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
