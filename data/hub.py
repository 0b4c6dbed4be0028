"""Data sets and tokenizers of the Hugging Face hub, named `hub:NAME`; what can't be reached says how to get it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import DataError
from data.quiet import heard

HUB = "hub:"
PAUSES = (1.0, 4.0, 15.0)  # seconds between tries


@dataclass(frozen=True)
class HubDataset:
    """`hub:NAME`, `hub:NAME:SUBSET`, `hub:NAME@REVISION` or both: its training split."""

    name: str
    subset: str | None
    revision: str | None

    def version(self) -> str:
        """What changes when the data set does. Raises DataError where the hub can't be asked."""
        with heard("datasets"):
            import datasets

            try:
                return str(
                    _patiently(datasets.load_dataset_builder, self.name, self.subset, revision=self.revision).hash
                )
            except Exception as error:  # no common class: of datasets, of huggingface_hub, of the network below
                raise self._unreachable(_reason(error), error) from error

    def rows(self, text_field: str, stream: bool) -> Iterator[Any]:
        """The value of `text_field` of every row, in order; never some of them alone.

        Where a connection breaks in the middle of the stream, the libraries ask again for some minutes.

        Raises:
            DataError: no such field, or out of reach.
        """
        read = 0
        with heard("datasets") as said:
            import datasets

            options = {"revision": self.revision, "split": "train", "streaming": stream}
            try:
                loaded = _patiently(datasets.load_dataset, self.name, self.subset, **options)
                columns = loaded.column_names
                if columns is not None and text_field not in columns:
                    raise DataError(
                        f"data.path: {self} has no column {text_field!r}; its columns are "
                        f"{', '.join(map(repr, columns))}. Set data.text_field to the one that holds the text."
                    )
                for row in loaded:
                    yield row.get(text_field)
                    read += 1
            except DataError:
                raise
            except Exception as error:
                reason = (
                    said[-1].rstrip(".") if said else _reason(error)
                )  # of a damaged file, what is said alone has its name
                raise self._unreachable(f"after row {read:,}: {reason}" if read else reason, error) from error

    def _unreachable(self, reason: str, error: Exception) -> DataError:
        if any(isinstance(one, PermissionError) for one in _chain(error)):
            return DataError(
                f"data.path: {self} can't be read, for the hub's libraries can't keep what they load: {reason}. Set "
                "HF_HOME to a folder of your own."
            )
        return DataError(
            f"data.path: {self} can't be read from the hub: {reason}. Check its name and the network, and try again; "
            f"on a machine without one, download it elsewhere (`hf download --repo-type dataset {self.name}`) and "
            "give the folder of its files, or the folder that `prepare` wrote."
        )

    def __str__(self) -> str:
        subset, revision = f":{self.subset}" if self.subset else "", f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.name}{subset}{revision}"


def _patiently(ask: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What it answers; asked again where the hub is busy or broken for a moment."""
    for seconds in PAUSES:
        try:
            return ask(*arguments, **options)
        except Exception as error:
            if not any(_passes(one) for one in _chain(error)):
                raise
        time.sleep(seconds)
    return ask(*arguments, **options)


def _passes(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status in (408, 429) or status >= 500


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, what caused it, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: Exception) -> str:
    """Of the first cause of it: what is raised on top often says nothing but that something was."""
    first = list(_chain(error))[-1] if error.__cause__ is not None else error
    return " ".join(str(first).split()).rstrip(".") or type(first).__name__


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
