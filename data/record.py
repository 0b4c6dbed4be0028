"""What a run reads, as one JSON object: written beside the run, enough to open the same samples again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data.blending import Blend, Phase
from data.config import DataError
from data.corpus import TRAIN, VALIDATION, open_corpus
from data.loading import Datasets, OpenSource
from data.refusals import why
from data.samples import VALIDATION_SEED, open_samples

FILE = "data.json"
FORMAT = 1


def to_record(datasets: Datasets, *, global_batch: int, step: int, samples: int) -> dict[str, Any]:
    """The record of a run that has read `samples` samples after `step` steps and goes on from there."""
    return {
        "format": FORMAT,
        "seed": datasets.seed,
        "sequence_length": datasets.sequence_length,
        "packing": datasets.packing,
        "global_batch": global_batch,
        "train_samples": datasets.train_samples,
        "step": step,
        "samples": samples,
        "sources": [
            {"name": source.name, "corpus": str(source.corpus.path), "hash": source.corpus.hash}
            for source in datasets.sources
        ],
        "phases": [{"start": phase.start, "weights": list(phase.weights)} for phase in datasets.blend.phases],
    }


def read_record(run: Path) -> dict[str, Any]:
    """The record in a run's folder. Raises DataError where there is none or it can't be read."""
    file = run / FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise DataError(f"{file} is of format {record['format']}; this code reads format {FORMAT}.")
    except OSError as error:
        raise DataError(f"can't read {file}: {why(error, file)}. Give the folder of a run that took a step.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{file} is damaged: {error}.") from error
    assert isinstance(record, dict)
    return record


def open_record(record: dict[str, Any]) -> Datasets:
    """The samples of the run again.

    Raises:
        DataError: a corpus is gone or is another one now.
    """
    length, seed, packing = record["sequence_length"], record["seed"], record["packing"]
    sources = []
    for source in record["sources"]:
        corpus = open_corpus(source["corpus"])
        if corpus.hash != source["hash"]:
            raise DataError(
                f"{corpus.path} holds other tokens (hash {corpus.hash[:12]}) than those that the run read as "
                f"{source['name']} ({source['hash'][:12]}). Prepare the run's own text again."
            )
        train = open_samples(corpus, TRAIN, length, seed, packing)
        validation = open_samples(corpus, VALIDATION, length, VALIDATION_SEED, packing)
        sources.append(OpenSource(source["name"], corpus, train, validation, validation.per_epoch))
    blend = Blend([Phase(phase["start"], tuple(phase["weights"])) for phase in record["phases"]])
    return Datasets(tuple(sources), blend, length, packing, record["train_samples"], seed)
