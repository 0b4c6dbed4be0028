"""The plan: published parameter counts, FLOPs by part, and memory that equals what training really keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.shapes import linear_shapes
from nvfp4_train import plan as plan_module
from nvfp4_train.compose import compose, replaced
from nvfp4_train.config import RunConfig
from nvfp4_train.memory import Machine, activation_bytes, by_recompute, memory
from nvfp4_train.plan import plan
from nvfp4_train.precision.assignment import assign

CPU = Machine(cuda=False, kernels="torch")


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return compose(["precision=bf16", "data.micro_batch=2"])


@pytest.mark.parametrize(
    ("experiment", "total"),
    [("nemotron_nano_12b_v2", 12_310_001_152), ("nemotron_h_8b", 8_100_852_736)],
)
def test_published_parameter_counts(experiment: str, total: int) -> None:
    planned = plan(compose([f"experiment={experiment}"]))
    parameters = planned["parameters"]
    assert parameters["total"] == total
    blocks = sum(found["count"] * found["each"] for found in parameters["blocks"].values())
    rest = parameters["embedding"] + parameters["output_layer"] + parameters["final_norm"]
    assert blocks + rest == total


def test_the_12b_in_numbers() -> None:
    planned = plan(compose(["experiment=nemotron_nano_12b_v2"]))
    assert planned["tokens_per_step"] == 736 * 8192
    assert planned["tokens"] == pytest.approx(1e13, rel=1e-6)
    flops = planned["flops_per_token"]
    assert flops["forward"] == sum(flops["forward_by_part"].values())
    assert flops["training"] == 3 * flops["forward"]
    for found in planned["time"]:
        seconds = flops["training"] * planned["tokens"] / (found["bf16_peak_tflops"] * 1e12 * found["mfu"])
        assert found["gpu_hours"] == pytest.approx(seconds / 3600)
    assert [linear["format"] for linear in planned["precision"]["linears"][:5]] == ["bf16"] * 4 + ["nvfp4"]
    parts = planned["memory_per_rank"]["parts"]
    assert parts["weights"] + parts["gradients"] + parts["moments"] == 16 * 12_310_001_152


def test_memory_adds_up(base: RunConfig) -> None:
    planned = plan(replaced(base, {"model.kernels": "torch"}))["memory_per_rank"]
    parts = planned["parts"]
    held = sum(parts[name] for name in ("weights", "gradients", "moments", "weight_cache"))
    assert planned["total"] == held + max(parts["activations"] + parts["working"], parts["optimizer_step"])
    modes = planned["activations_by_recompute"]
    assert modes["none"] == parts["activations"]
    assert modes["full"] < modes["selective"] < modes["none"]


def test_one_weight_copy_serves_both_passes_where_tiles_are_square() -> None:
    def cache(*overrides: str) -> tuple[int, int]:
        config = compose([*overrides, "precision.bf16_blocks.first=0", "precision.bf16_blocks.last=0"])
        assignments = assign(config.precision, linear_shapes(config.model))
        weights = sum(linear.in_features * linear.out_features for linear in assignments)
        head = config.model.hidden_size * 384
        return memory(config.model, assignments, 1).weight_cache - 2 * head, weights - head

    for overrides, size in (
        (["precision=nvfp4"], 2),
        (["precision=nvfp4", "precision.weight_tile=[1,16]"], 4),
        (["precision=mxfp8"], 4),
        (["precision=fp8_block"], 4),
        (["precision=bf16"], 2),
    ):
        found, weights = cache(*overrides)
        assert found == size * weights, overrides


def kept_for_backward(config: RunConfig) -> float:
    """Bytes a token of every tensor that autograd keeps in one forward pass, parameters aside, each memory once."""
    import torch

    from models.hybrid import LinearClasses, build_model, named_linears
    from models.megatron_cpu import install_cpu_rng, megatron_device
    from nvfp4_train.precision.linear import QuantizedColumnParallelLinear, QuantizedRowParallelLinear, attach
    from nvfp4_train.precision.phases import Passes
    from nvfp4_train.precision.runtime import PrecisionRuntime

    install_cpu_rng()
    linears = LinearClasses(QuantizedColumnParallelLinear, QuantizedRowParallelLinear)
    model = build_model(config.model, linears, sequence_length=config.data.sequence_length, seed=1)
    runtime = PrecisionRuntime(1)
    attach(named_linears(model), assign(config.precision, linear_shapes(config.model)), runtime)
    runtime.begin_step(0, Passes())
    runtime.begin_microbatch(0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(config.data.micro_batch, config.data.sequence_length, dtype=torch.int64)
    with megatron_device(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, labels=tokens)
    assert loss.shape == tokens.shape
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own) / tokens.numel()


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("pattern", ["-", "*", "M", "M-M*-"])
def test_activations_are_what_training_keeps(base: RunConfig, pattern: str, recompute: str) -> None:
    config = replaced(base, {"model.pattern": pattern, "model.recompute": recompute})
    assignments = assign(config.precision, linear_shapes(config.model))
    found = activation_bytes(config.model, assignments, CPU)
    if recompute == "full":  # the block that is run again comes in the backward pass
        alone = replaced(config, {"model.recompute": "none"}).model
        one = {letter: activation_bytes(replaced(alone, {"pattern": letter}), [], CPU) for letter in set(pattern)}
        ends = activation_bytes(replaced(alone, {"pattern": ""}), [], CPU)
        found -= max(one.values()) - ends
    assert found == pytest.approx(kept_for_backward(config), rel=0.01)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("precision", ["nvfp4", "fp8_block", "fp8_current", "quartet2"])
def test_activations_of_recipes(precision: str) -> None:
    config = compose([f"precision={precision}", "data.micro_batch=1", "model.pattern=M-M*-"])
    assignments = assign(config.precision, linear_shapes(config.model))
    found = activation_bytes(config.model, assignments, CPU)
    assert found == pytest.approx(kept_for_backward(config), rel=0.01)


def test_by_recompute_scales_with_tokens(base: RunConfig) -> None:
    assignments = assign(base.precision, linear_shapes(base.model))
    one, two = (by_recompute(base.model, assignments, tokens) for tokens in (1000, 2000))
    assert all(two[mode] == pytest.approx(2 * one[mode], rel=1e-4) for mode in one)


def test_json_is_alone_on_stdout_and_needs_no_torch() -> None:
    code = (
        "import sys\nfrom nvfp4_train.plan import main\ncode = main(['--json', 'steps=7', 'precision=fp8_block'])\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules], file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    assert (planned["steps"], planned["precision"]["recipe"]) == (7, "fp8_block")
    assert done.stderr.strip() == "[]"


def test_the_text_names_what_people_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_module.main(["experiment=1b"]) == 0
    out = capsys.readouterr().out
    for word in (
        "1,067,745,920",
        "14 x Mamba-2",
        "GiB a rank",
        "GPU hours",
        "40% of the dense BF16 peak",
        "precision nvfp4",
    ):
        assert word in out


def test_a_backend_that_no_card_has_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    start = "train refuses precision.backend=native on any card: Transformer Engine cannot express mxfp4 "
    assert plan_module.main(["precision=mxfp4", "precision.backend=native"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"warning: {start}")
    for overrides in (["precision=mxfp4"], ["precision=nvfp4", "precision.backend=native"]):
        assert plan_module.main(["--json", *overrides]) == 0
        assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_what_cannot_be_trained_cannot_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_module.main(["--json", "model.pattern=M-E"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "'E'" in err


def test_recipes_are_listed_with_their_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text("name: mine\ndescription: my own\nsource: nowhere yet\n")
    assert plan_module.main(["--recipes", "--config-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("nvfp4 ") and "arXiv 2509.25149" in line for line in lines)
    assert lines[-1].split() == ["mine", "my", "own", "[nowhere", "yet]"]
    assert plan_module.main(["--recipes", "--json"]) == 0
    assert "fp8_block" in {recipe["name"] for recipe in json.loads(capsys.readouterr().out)}
