"""Composition: groups, overrides, experiments, paths, and everything a user can write wrong there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from models.shapes import count_parameters
from nvfp4_train.compose import compose, compose_precision, replaced
from nvfp4_train.config import ConfigError
from nvfp4_train.overrides import expand_sweeps, find_groups


def refused(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (ConfigError or a room's own)
        compose(list(overrides), config_dirs)
    message = str(error.value)
    assert len(message.splitlines()) <= 3, message
    return message


def test_the_default_is_the_quickstart_in_nvfp4() -> None:
    config = compose()
    assert (config.name, config.precision.name, config.model.pattern) == ("quickstart", "nvfp4", "M-M*-M-M*-")
    assert (config.model.hidden_size, config.data.sequence_length, config.model.vocab_size) == (128, 256, 257)
    assert config.data.path == "builtin"
    assert config.run_dir is None


@pytest.mark.parametrize(
    ("experiment", "sizes"),
    [
        ("quickstart", (10, 128, 256)),
        ("nano", (None, None, 1024)),
        ("1b", (32, 2048, 4096)),
        ("nemotron_nano_12b_v2", (62, 5120, 8192)),
        ("nemotron_h_8b", (52, 4096, 8192)),
    ],
)
def test_experiments_compose(experiment: str, sizes: tuple[int | None, int | None, int]) -> None:
    config = compose([f"experiment={experiment}"])
    blocks, hidden, length = sizes
    assert config.name == experiment
    assert blocks in (None, len(config.model.pattern))
    assert hidden in (None, config.model.hidden_size)
    assert config.data.sequence_length == length


def test_nano_reads_installed_packages_in_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    config = compose(["experiment=nano"], base=tmp_path)
    assert (config.data.path, config.data.tokenizer) == ("packages", str(tmp_path / "corpora" / "packages-8k.json"))
    assert config.tokenizer.vocab_size == config.model.vocab_size
    tokens = config.steps * config.data.global_batch * config.data.sequence_length
    assert 10 <= tokens / count_parameters(config.model) < 10.01


def test_the_published_training_of_the_12b() -> None:
    config = compose(["experiment=nemotron_nano_12b_v2"])
    assert (config.data.global_batch, config.data.sequence_length) == (736, 8192)
    assert config.steps == 10**13 // (736 * 8192)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (4.5e-4, 0.9, 0.95, 0.1)
    assert optimizer.lr * config.schedule.min_lr_ratio == pytest.approx(4.5e-6)
    assert config.schedule.decay == 0.2


@pytest.mark.parametrize(
    ("experiment", "precision", "first", "last"),
    [
        ("nemotron_nano_12b_v2", "nvfp4", 2, 8),
        ("nemotron_nano_12b_v2", "mxfp4", 2, 8),
        ("nemotron_h_8b", "nvfp4", 0, 8),
        ("quickstart", "nvfp4", 0, 2),
        ("nemotron_nano_12b_v2", "fp8_block", 1, 2),
        ("nemotron_nano_12b_v2", "nemotron3_super", 0, 10),
        ("nemotron_nano_12b_v2", "bf16", 0, 0),
    ],
)
def test_bf16_blocks_follow_recipe_and_model(experiment: str, precision: str, first: int, last: int) -> None:
    config = compose([f"experiment={experiment}", f"precision={precision}"])
    assert config.precision.bf16_blocks.counts(len(config.model.pattern)) == (first, last)


def test_the_command_line_decides_over_the_experiment() -> None:
    config = compose(["experiment=nemotron_nano_12b_v2", "precision.bf16_blocks.last=4", "model=quickstart", "steps=7"])
    assert config.precision.bf16_blocks.counts(10) == (2, 4)
    assert (config.model.hidden_size, config.steps) == (128, 7)


def test_debug_files() -> None:
    assert compose(["debug=overfit"]).debug.overfit is True
    limit = compose(["debug=limit", "experiment=nano"])
    assert (limit.steps, limit.model.pattern) == (3, compose(["experiment=nano"]).model.pattern)
    assert compose(["debug=limit", "steps=5"]).steps == 5
    profile = compose(["debug=profile"])
    assert 0 < profile.debug.profile < profile.steps


def test_without_an_experiment_the_model_names_the_run() -> None:
    config = compose(["experiment=null", "model=nano"])
    assert config.name == "nano"
    assert compose(["name=mine"]).name == "mine"


@pytest.mark.parametrize("overrides", [["+experiment=nano"], ["experiment=nano"]])
def test_a_plus_before_a_group_is_harmless(overrides: list[str]) -> None:
    assert compose(overrides).name == "nano"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.pth=x", ["data.pth", "Did you mean data.path?"]),
        ("+data.pth=x", ["data.pth", "data.path"]),
        ("++data.pth=x", ["data.pth", "data.path"]),
        ("+stepss=10", ["stepss", "Did you mean steps?"]),
        ("precison=bf16", ["precison", "Did you mean precision?"]),
        ("stepss=10", ["stepss", "steps"]),
        ("~stepss", ["stepss", "steps"]),
        ("lr=1", ["optimizer.lr"]),
        ("four_bit_blocks.last=4", ["four_bit_blocks"]),
        ("precision.rules.0.format=x", ["precision.rules", "list"]),
        ("precision.rules=[{mach: a, format: bf16}]", ["precision.rules[0].mach", "precision.rules[0].match"]),
        ("precision=nvfp5", ["precision=nvfp5", "nvfp4", "fp8_block"]),
        ("precision=null", ["precision"]),
        ("optimizer={lr: 1}", ["optimizer.KEY=VALUE"]),
        ("expirement=nano", ["experiment"]),
        ("a/b=c", ["a/b", "no such group"]),
        ("experiment@x=nano", ["@"]),
        ("hydra.run.dir=x", ["run_dir"]),
        ("hydra/launcher=x", ["run_dir"]),
        ("steps", ["'steps'", "key=value"]),
        ("steps=1,2", ["--multirun"]),
        ("data.path=[a", ["data.path=[a", "Quote"]),
        ("steps=abc", ["steps", "'abc'", "whole number"]),
        ("steps=1.5", ["steps", "1.5"]),
        ("steps=0", ["steps", "1 or more", "0"]),
        ("steps=null", ["steps", "null"]),
        ("optimizer.lr=none", ["optimizer.lr", "'none'"]),
        ("optimizer.lr=nan", ["optimizer.lr", "nan"]),
        ("optimizer.lr=0", ["optimizer.lr", "above 0"]),
        ("optimizer.lr=-1e-3", ["optimizer.lr", "-0.001"]),
        ("optimizer.beta1=1", ["optimizer.beta1", "below 1"]),
        ("optimizer.fuse_wgrad=no", ["optimizer.fuse_wgrad", "'no'"]),
        ("logging.wandb=of", ["logging.wandb", "offline", "'of'"]),
        ("schedule.decay_style=cosin", ["schedule.decay_style", "Did you mean cosine?"]),
        ("data.validation_share=1", ["data.validation_share"]),
        ("checkpoint.keep=-1", ["checkpoint.keep", "0 or more", "-1"]),
        ("run_dir=", ["run_dir", "empty"]),
        ("name=a/b", ["name", "'a/b'"]),
        ("~optimizer.lr", ["optimizer.lr", "missing"]),
        ("~model", ["model", "missing"]),
        ("~model=3", ["model", "missing"]),
        ("precision.rules={role: fc1, format: bf16}", ["precision.rules: wanted a list of {key: value}", "role: fc1"]),
        (
            "precision.phases=bf16",
            ["precision.phases: wanted a list of {key: value}, got 'bf16'", "precision.phases=[...]"],
        ),
        ("precision.knobs.rotation=3", ["precision.knobs.rotation", "list"]),
        ("optimizer.lr=1e400", ["optimizer.lr"]),
        ("data.path=${x", ["data.path"]),
    ],
)
def test_refusals(override: str, words: list[str]) -> None:
    message = refused(override)
    for word in words:
        assert word in message


def test_an_interpolation_that_leads_nowhere_is_named() -> None:
    message = refused("data.path=${data.pth}")
    assert message.startswith("data.path: refers to ${data.pth}")
    assert "Did you mean data.path?" in message
    assert "rotation: refers to ${nowhere}" in refused("precision.rotation=${nowhere}")


def test_numbers_and_texts_are_kept_as_typed() -> None:
    config = compose(
        ["steps=1e3", "logging.name=2024_01", "logging.group=007", "optimizer.lr=1", "data.path=/a b/c'(1)"]
    )
    assert config.data.path == "/a b/c'(1)"
    assert (config.steps, type(config.steps)) == (1000, int)
    assert (config.logging.name, config.logging.group) == ("2024_01", "007")
    assert (config.optimizer.lr, type(config.optimizer.lr)) == (1.0, float)


def test_relative_paths_start_where_the_command_was_launched(tmp_path: Path) -> None:
    overrides = [
        "run_dir=r",
        "data.path=d/x.txt",
        "data.prepared=p",
        "data.tokenizer=t.json",
        "resume=old",
        "baseline=b",
    ]
    config = compose(overrides, base=tmp_path)
    found = (
        config.run_dir,
        config.data.path,
        config.data.prepared,
        config.data.tokenizer,
        config.resume,
        config.baseline,
    )
    assert found == tuple(str(tmp_path / name) for name in ("r", "d/x.txt", "p", "t.json", "old", "b"))
    absolute = compose(["run_dir=/a/../b", "data.path=~/x"], base=tmp_path)
    assert (absolute.run_dir, absolute.data.path) == ("/b", os.path.expanduser("~/x"))


def test_the_working_directory_is_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["run_dir=runs/a"])
    assert config.run_dir == str(tmp_path / "runs" / "a")
    assert list(tmp_path.iterdir()) == [], "composing must leave nothing behind"


def test_words_that_are_no_path() -> None:
    config = compose(["data.path=builtin", "data.tokenizer=byte", "resume=never"])
    assert (config.data.path, config.data.tokenizer, config.resume) == ("builtin", "byte", "never")


def _own_recipe(folder: Path, name: str, text: str | None = None) -> Path:
    target = folder / "precision" / f"{name}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    from nvfp4_train.overrides import CONFIGS

    target.write_text(text if text is not None else (CONFIGS / "precision" / "nvfp4.yaml").read_text())
    return target


def test_a_recipe_of_the_users_own(tmp_path: Path) -> None:
    file = _own_recipe(tmp_path, "mine")
    file.write_text(file.read_text().replace("name: nvfp4", "name: mine").replace("rotation: 16", "rotation: 32"))
    config = compose(["precision=mine"], [tmp_path])
    assert (config.precision.name, config.precision.rotation) == ("mine", 32)
    assert compose_precision("mine", ["precision.rotation=null"], [tmp_path]).rotation is None
    assert "mine" in find_groups([tmp_path]).options["precision"]
    assert "mine" in refused("precision=mein", config_dirs=(tmp_path,))


def test_an_own_file_that_would_be_hidden_is_refused(tmp_path: Path) -> None:
    file = _own_recipe(tmp_path, "nvfp4")
    message = refused("steps=3", config_dirs=(tmp_path,))
    assert str(file) in message
    assert "Rename" in message


def test_own_files_with_mistakes(tmp_path: Path) -> None:
    file = _own_recipe(tmp_path, "typo")
    file.write_text(file.read_text().replace("backend: auto", "bakend: auto"))
    assert "precision.bakend" in refused("precision=typo", config_dirs=(tmp_path,))
    _own_recipe(tmp_path, "broken", "name: [a\nsource: b")
    assert "broken.yaml" in refused("precision=broken", config_dirs=(tmp_path,))
    logging = tmp_path / "logging" / "yes.yaml"
    logging.parent.mkdir()
    logging.write_text("wandb: no\nproject: p\n")
    message = refused("logging=yes", config_dirs=(tmp_path,))
    assert "logging.wandb" in message
    assert "quote" in message
    assert "there is no such folder" in refused("steps=3", config_dirs=(tmp_path / "nowhere",))


def test_sweeps_expand_in_order() -> None:
    assert list(expand_sweeps(["seed=1,2", "steps=3", "precision=nvfp4,bf16"])) == [
        ["seed=1", "steps=3", "precision=nvfp4"],
        ["seed=1", "steps=3", "precision=bf16"],
        ["seed=2", "steps=3", "precision=nvfp4"],
        ["seed=2", "steps=3", "precision=bf16"],
    ]
    assert list(expand_sweeps(["seed=range(1,4)"])) == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert list(expand_sweeps(["precision.weight_tile=[1,16]"])) == [["precision.weight_tile=[1,16]"]]


def test_replaced_changes_nothing_else() -> None:
    config = compose()
    changed = replaced(config, {"steps": 3, "data.path": "/x", "precision.fprop.input.scaling": "row"})
    assert (changed.steps, changed.data.path, changed.precision.fprop.input.scaling) == (3, "/x", "row")
    assert (
        replaced(changed, {"steps": config.steps, "data.path": "builtin", "precision.fprop.input.scaling": "tensor"})
        == config
    )


def test_errors_are_config_errors() -> None:
    with pytest.raises(ConfigError):
        compose(["stepss=1"])
