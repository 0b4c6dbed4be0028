"""The data group's files hold exactly the schema's keys, with values of its types; a look at the schema is cheap."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import configs
from data.config import PACKINGS, DataConfig
from nvfp4_train.compose import compose
from nvfp4_train.layout import phase_steps
from nvfp4_train.schema import from_mapping

FILES = sorted(Path(configs.__file__).parent.glob("data/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_keys_and_types_are_those_of_the_schema(file: Path) -> None:
    config = from_mapping(DataConfig, yaml.safe_load(file.read_text(encoding="utf-8")), "data")
    assert config.global_batch % config.micro_batch == 0
    assert 0 < config.validation_share < 1
    assert config.packing in PACKINGS
    assert config.blended()


def test_the_example_to_copy_shows_every_key_of_one_source() -> None:
    shown = set(yaml.safe_load((FILES[0].parent / "own.yaml").read_text()))
    assert shown == {field.name for field in fields(DataConfig)} - {"sources", "phases"}


def test_the_three_phases_of_the_published_run_are_a_file() -> None:
    config = compose(["experiment=nemotron_nano_12b_v2", "data=three_phases"])
    assert [round(start / config.steps, 6) for start in phase_steps(config)] == [0.7, 0.9]
    assert all(len(phase.weights) == len(config.data.sources) for phase in config.data.phases)


def test_builtin_is_the_default_source() -> None:
    assert [file.stem for file in FILES] == ["builtin", "own", "packages", "three_phases"]
    assert DataConfig(**yaml.safe_load(FILES[0].read_text())).path == "builtin"


def test_looking_at_a_corpus_imports_neither_torch_nor_megatron() -> None:
    heavy = "{'torch', 'megatron', 'datasets', 'tokenizers'}"
    code = f"import data.prepare, data.corpus, data.loading, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
