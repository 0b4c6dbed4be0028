"""Documents name what is there: files, headings, modules, options, and overrides that the configuration has."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_train import cli
from nvfp4_train.compose import compose
from nvfp4_train.overrides import CONFIGS

ROOT = CONFIGS.parent
ROOMS = ("configs", "data", "launch", "models", "nvfp4_train", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for room in ROOMS for page in (ROOT / room).rglob("*.md"))])
LINK = re.compile(r"\]\(([^)\s]+)\)")
# What stands for something of the reader's own, and files that only the reader has.
OWN = re.compile(r"\.\.\.|\bDIR\b|\bRUN\b|\bNAME\b|OPERAND|^\[")


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def commands(page: Path) -> Iterator[list[str]]:
    """Words of the commands of a page: lines of code blocks, and code within a line."""
    text = page.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
        if line.startswith(("python -m ", "torchrun ", "make ", "sbatch ")):
            yield shlex.split(line, comments=True)


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page.name}: {' '.join(words)}"[:90] for page, words in COMMANDS]
)
def test_commands_are_there(page: Path, words: list[str]) -> None:
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "sbatch":
        assert "launch/slurm.sbatch" in words or "..." in words
    else:
        module = words[words.index("-m") + 1]
        assert importlib.util.find_spec(module) is not None
    if any(OWN.search(word) for word in words):
        return
    name = "train" if "--" in words or words[0] == "sbatch" else words[words.index("-m") + 1].rpartition(".")[2]
    if name in cli.COMMANDS:
        begin = words.index("--") + 1 if "--" in words else words.index("-m") + 2
        arguments = cli.parse_arguments(name, words[begin:])
        compose(arguments.overrides, arguments.config_dirs)


def test_every_metric_is_in_the_table() -> None:
    table = (ROOT / "nvfp4_train" / "README.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    name = re.compile(r'"((?:train|optim|val|time|throughput|memory|data|precision|gap)/\w+)')
    logged = {found for page in (ROOT / "nvfp4_train").rglob("*.py") for found in name.findall(page.read_text())}
    assert len(logged) > 15
    assert [metric for metric in sorted(logged) if metric not in table] == []
