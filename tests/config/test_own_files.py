"""Files of a user's own behind --config-dir: what is wrong in one is said by its name, with what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError
from nvfp4_train.overrides import CONFIGS

NVFP4 = (CONFIGS / "precision" / "nvfp4.yaml").read_text()


def own(folder: Path, group: str, text: str) -> Path:
    (folder / group).mkdir(parents=True)
    (folder / group / "mine.yaml").write_text(text)
    return folder


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(overrides, [folder])
    return str(error.value)


def test_a_copied_recipe_has_a_name_of_its_own(tmp_path: Path) -> None:
    folder = own(tmp_path, "precision", NVFP4)
    message = refusal(folder, "precision=mine")
    assert message.startswith("precision=mine: calls itself nvfp4, which is another recipe")
    assert "Write name: mine" in message
    assert "name: mxfp4" in refusal(folder, "precision=mxfp4", "precision.name=nvfp4")
    (folder / "precision" / "mine.yaml").write_text(NVFP4.replace("name: nvfp4", "name: mine"))
    assert compose(["precision=mine"], [folder]).precision.name == "mine"
    assert compose(["precision=mine", "precision.name=other"], [folder]).precision.name == "other"


def test_a_misspelt_key_that_others_refer_to(tmp_path: Path) -> None:
    text = NVFP4.replace("name: nvfp4", "name: mine").replace("\nrotation: 16", "\nrotaton: 16")
    message = refusal(own(tmp_path, "precision", text), "precision=mine")
    assert message.startswith("precision.rotaton: there is no such key. Did you mean precision.rotation")


def test_a_reference_to_nothing_is_not_its_own_suggestion(tmp_path: Path) -> None:
    text = NVFP4.replace("name: nvfp4", "name: mine").replace("\nrotation: 16", "")
    message = refusal(own(tmp_path, "precision", text), "precision=mine")
    assert "refers to ${precision.rotation}, which does not exist" in message
    assert "mean precision.rotation " not in message


@pytest.mark.parametrize("group", ["experiment", "debug"])
def test_an_experiment_without_its_first_line(tmp_path: Path, group: str) -> None:
    folder = own(tmp_path, group, "steps: 4\n")
    message = refusal(folder, f"{group}=mine")
    assert message.startswith(f"{group}=mine: its keys came out as {group}.steps")
    assert "# @package _global_" in message
    (folder / group / "mine.yaml").write_text("# @package _global_\nsteps: 4\n")
    if group == "experiment":
        assert compose(["experiment=mine"], [folder]).steps == 4


def test_a_choice_in_a_file_that_does_not_exist(tmp_path: Path) -> None:
    folder = own(tmp_path, "experiment", "# @package _global_\ndefaults:\n  - override /model: nan\n")
    message = refusal(folder, "experiment=mine")
    assert message.startswith("model=nan: the defaults of a chosen file ask for it, and there is no such model.")
    assert "Did you mean nano? There are: 1b, nano, nemotron_h_8b, nemotron_nano_12b_v2, quickstart." in message


def test_where_a_file_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(NVFP4)
    assert f"Looked for precision/mine.yaml in {tmp_path} too." in refusal(tmp_path, "precision=mine")
