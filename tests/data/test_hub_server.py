"""A hub that fails in the middle: the whole text or none, and the failure named. It stands on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare import prepare
from tests.data.conftest import MakeConfig, numbered, write_jsonl
from tests.data.hub_server import hub_of

# In a process of its own: the libraries read the hub's address when they are imported.
PROGRAM = """
import json, sys
import data.hub
from data.config import DataConfig, DataError
from data.prepare import prepare
data.hub.PAUSES = (0.1,)
for name in sys.argv[2:]:
    for stream in (True, False):
        config = DataConfig(f"hub:org/{name}", f"{sys.argv[1]}/{stream}", 32, 8, 2, validation_share=0.1, stream=stream)
        try:
            print(json.dumps([name, stream, prepare(config, say=lambda line: None).hash]))
        except DataError as error:
            print(json.dumps([name, stream, str(error)]))
"""


Found = dict[tuple[str, bool], str]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("texts") / "a.jsonl", numbered(100))


@pytest.fixture(scope="module")
def found(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What became of data sets, streamed and downloaded: the corpus's hash, or the message."""
    folder = tmp_path_factory.mktemp("hub")
    pq.write_table(pa.table({"text": numbered(100)}), folder / "a")
    whole = (folder / "a").read_bytes()
    files = {name: {"train.jsonl": texts.read_bytes()} for name in ("cut", "busy", "short")}
    files["damaged"] = {"train-0.parquet": whole, "train-1.parquet": whole[: len(whole) // 2]}
    with hub_of(files) as (address, asked):
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(folder / "hf"), "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", PROGRAM, str(folder / "prepared"), *files]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert min(asked["cut"], asked["busy"]) > 1  # both refused, and were asked again
    corpora = [path for path in (folder / "prepared").glob("*/*") if path.is_dir()]
    said = {(name, stream): what for name, stream, what in map(json.loads, done.stdout.splitlines())}
    assert len(corpora) == sum(len(what) == 64 for what in said.values())  # where something failed there is none
    return said


@pytest.fixture
def whole(texts: Path, make_config: MakeConfig) -> str:
    """The hash of all of the text."""
    return prepare(make_config(texts), say=lambda line: None).hash


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["cut", "busy"])
def test_a_connection_that_breaks_and_a_hub_that_is_busy_lose_nothing(
    found: Found, whole: str, name: str, stream: bool
) -> None:
    assert found[name, stream] == whole


@pytest.mark.parametrize("stream", [True, False])
def test_a_damaged_file_is_named_and_no_corpus_is_made(found: Found, stream: bool) -> None:
    said = found["damaged", stream]
    assert said.startswith(
        f"data.path: hub:org/damaged can't be read from the hub: {'after row 100: ' * stream}Failed to read file "
    )
    assert "train-1.parquet' with error ArrowInvalid: " in said
    assert "Check its name and the network, and try again" in said


def test_an_answer_that_holds_less_than_the_file_is_never_taken_for_it(found: Found, whole: str) -> None:
    assert found["short", True] == whole  # the rest is asked for
    assert "file should be of size" in found["short", False]
