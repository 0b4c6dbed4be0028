"""The data group's files hold exactly the schema's keys, with values of its types; a look at the schema is cheap."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

import configs
from data.config import DataConfig

FILES = sorted(Path(configs.__file__).parent.glob("data/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_keys_and_types_are_the_schema(file: Path) -> None:
    values = yaml.safe_load(file.read_text())
    types = {field.name: field.type for field in fields(DataConfig)}
    assert {name: type(value).__name__ for name, value in values.items()} == types
    assert values["global_batch"] % values["micro_batch"] == 0
    assert 0 < values["validation_share"] < 1


def test_builtin_is_the_default_source() -> None:
    assert [file.stem for file in FILES] == ["builtin", "own"]
    assert DataConfig(**yaml.safe_load(FILES[0].read_text())).path == "builtin"


def test_looking_at_a_corpus_imports_neither_torch_nor_megatron() -> None:
    heavy = "{'torch', 'megatron', 'datasets', 'tokenizers'}"
    code = f"import data.prepare, data.corpus, data.loading, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
