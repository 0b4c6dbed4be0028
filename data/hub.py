"""Data sets and tokenizers of the Hugging Face hub, named `hub:NAME`; what can't be reached says how to get it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import DataError
from data.quiet import quiet_logger

HUB = "hub:"


@dataclass(frozen=True)
class HubDataset:
    """`hub:NAME`, `hub:NAME:SUBSET`, `hub:NAME@REVISION` or both: its training split."""

    name: str
    subset: str | None
    revision: str | None

    def version(self) -> str:
        """What changes when the data set does. Raises DataError where the hub can't be asked."""
        with quiet_logger("datasets"):
            import datasets

            try:
                return str(datasets.load_dataset_builder(self.name, self.subset, revision=self.revision).hash)
            except Exception as error:  # no common class: of datasets, of huggingface_hub, of the network below
                raise self._unreachable(error) from error

    def rows(self, text_field: str, stream: bool) -> Iterator[Any]:
        """The value of `text_field` of every row, in order. Raises DataError: no such field, or out of reach."""
        with quiet_logger("datasets"):
            import datasets

            try:
                loaded = datasets.load_dataset(
                    self.name, self.subset, revision=self.revision, split="train", streaming=stream
                )
                columns = loaded.column_names
                if columns is not None and text_field not in columns:
                    raise DataError(
                        f"data.path: {self} has no column {text_field!r}; its columns are "
                        f"{', '.join(map(repr, columns))}. Set data.text_field to the one that holds the text."
                    )
                for row in loaded:
                    yield row.get(text_field)
            except DataError:
                raise
            except Exception as error:
                raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> DataError:
        reason = _reason(error)
        return DataError(
            f"data.path: {self} can't be read from the hub: {reason}. Check its name and the network; on a machine "
            f"without one, download it elsewhere (`hf download --repo-type dataset {self.name}`) and give the folder "
            "of its files, or the folder that `prepare` wrote."
        )

    def __str__(self) -> str:
        subset, revision = f":{self.subset}" if self.subset else "", f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.name}{subset}{revision}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def is_hub(path: str) -> bool:
    """Whether a path names something of the hub."""
    return path.startswith(HUB)


def parse_hub(path: str) -> HubDataset:
    """Reads `hub:NAME[:SUBSET][@REVISION]`."""
    rest, _, revision = path.removeprefix(HUB).partition("@")
    name, _, subset = rest.partition(":")
    if not name:
        raise DataError(f"data.path: {path!r} names no data set. Write hub:NAME, as in hub:roneneldan/TinyStories.")
    return HubDataset(name, subset or None, revision or None)


def download_tokenizer(name: str) -> Path:
    """The tokenizer.json of a model of the hub, from the local cache where it is there.

    Raises:
        DataError: it can't be reached and is not in the cache.
    """
    from huggingface_hub import hf_hub_download

    model, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(hf_hub_download(model, "tokenizer.json", revision=revision or None))
    except Exception as error:
        reason = _reason(error)
        raise DataError(
            f"data.tokenizer: the tokenizer.json of {name} is neither in the cache nor within reach: {reason}. Check "
            f"name and network; on a machine without one, copy it from another (`hf download {model} tokenizer.json`) "
            "and give its path."
        ) from error
