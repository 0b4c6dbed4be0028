"""What several values must agree on: one error with all sizes and the nearest legal values, before anything heavy."""

from __future__ import annotations

import pytest

from models.config import ModelError
from nvfp4_train import layout
from nvfp4_train.compose import compose, replaced
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.layout import check_layout, check_run, choose_backend, tokens_per_step
from nvfp4_train.precision.backends import TransformerEngine
from nvfp4_train.precision.config import PrecisionError


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return compose()


def refused(config: RunConfig, world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        check_layout(config, world_size)
    return str(error.value)


def test_a_world_that_the_split_does_not_divide(base: RunConfig) -> None:
    message = refused(replaced(base, {"parallel.tensor": 4}), 6)
    for word in (
        "world size 6",
        "tensor=4",
        "pipeline=1",
        "context=1",
        "global_batch=16",
        "4 or 8 processes",
        "3 or 6",
    ):
        assert word in message


def test_a_global_batch_that_does_not_divide(base: RunConfig) -> None:
    sizes = {"data.global_batch": 10, "data.micro_batch": 4}
    message = refused(replaced(base, sizes), 2)
    for word in ("global_batch=10", "micro_batch=4", "data parallel 2", "4 * 2 = 8", "8 or 16", "micro_batch=1 or 5"):
        assert word in message
    assert "8 or 12" in refused(replaced(base, sizes), 1)
    assert "8 or 16" in refused(replaced(base, {**sizes, "data.global_batch": 12}), 2), "12 is 3 * 4"
    assert "data parallel 3" in refused(replaced(base, {"parallel.tensor": 2, **sizes}), 6)


@pytest.mark.parametrize(
    ("world", "tensor", "batch", "micro"), [(1, 1, 16, 8), (2, 1, 16, 8), (8, 4, 8, 4), (4, 4, 3, 3)]
)
def test_layouts_that_fit(base: RunConfig, world: int, tensor: int, batch: int, micro: int) -> None:
    sizes = {"parallel.tensor": tensor, "data.global_batch": batch, "data.micro_batch": micro}
    check_layout(replaced(base, sizes), world)


def test_expert_parallelism_is_refused_by_name(base: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.expert=2: not there yet.*Write parallel\.expert=1"):
        check_run(replaced(base, {"parallel.expert": 2}), 2)


def test_interleaving_needs_pipeline_ranks_and_micro_batches_for_each(base: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"virtual_pipeline=2 with parallel\.pipeline=1.*pipeline=2 or more"):
        check_run(replaced(base, {"parallel.virtual_pipeline": 2}))
    interleaved = {"parallel.pipeline": 2, "parallel.virtual_pipeline": 5}
    check_layout(replaced(base, interleaved), 2)
    message = refused(replaced(base, {**interleaved, "data.global_batch": 24}), 2)
    for word in ("global_batch=24", "micro_batch=8", "3 micro-batches", "pipeline=2", "16 or 32"):
        assert word in message


@pytest.mark.parametrize("also", [{}, {"parallel.distributed_optimizer": True}, {"parallel.overlap_grad_reduce": True}])
def test_gathering_weights_in_passing_needs_a_distributed_optimizer(base: RunConfig, also: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"overlap_param_gather=true.*parallel=replicas"):
        check_run(replaced(base, {"parallel.overlap_param_gather": True, **also}), 2)
    check_run(compose(["parallel=replicas"]), 2)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"parallel.tensor": 3, "parallel.sequence": True}, ("parallel.tensor=3",)),
        (
            {"parallel.context": 2, "data.sequence_length": 1001},
            ("data.sequence_length=1001", "4 pieces", "1000 or 1004"),
        ),
        ({"parallel.tensor": 4}, ("mamba_num_groups = 2", "parallel.tensor=4")),
        ({"parallel.pipeline": 3}, ("10 blocks", "3 stages", "9 or 12")),
        ({"model.pattern": "M-|M*-|M-M*-", "parallel.pipeline": 2}, ("3 stages", "2 '|'", "parallel.pipeline=3")),
        ({"model.pattern": "M-E-"}, ("'E'", "mixture-of-experts", "not supported yet")),
    ],
)
def test_splits_that_a_model_does_not_allow(base: RunConfig, sizes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(ModelError) as error:
        check_run(replaced(base, {"data.global_batch": 12, "data.micro_batch": 1, **sizes}), 12)
    for word in words:
        assert word in str(error.value)


def test_a_run_that_can_be_trained(base: RunConfig) -> None:
    check_run(base)
    assert tokens_per_step(base) == base.data.global_batch * base.data.sequence_length


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_a_recipe_that_cannot_run_natively_names_both_capabilities(
    base: RunConfig, capability: tuple[int, int] | None
) -> None:
    with pytest.raises(PrecisionError) as error:
        choose_backend(replaced(base, {"precision.backend": "native"}), capability)
    message = str(error.value)
    here = "no CUDA device" if capability is None else f"{capability[0]}.{capability[1]}"
    for word in ("nvfp4", "compute capability 10.0", here, "precision.backend=emulated"):
        assert word in message


def test_what_is_not_installed_is_no_silent_emulation(base: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_find_transformer_engine", lambda: TransformerEngine(None, None))
    with pytest.raises(PrecisionError, match="Transformer Engine is not installed"):
        choose_backend(replaced(base, {"precision.backend": "native"}), (10, 0))
    assert choose_backend(replaced(base, {"precision.backend": "emulated"}), (10, 0)) == ("emulated", "as asked")
    name, why = choose_backend(replaced(base, {"precision.backend": "auto"}), (10, 0))
    assert name == "emulated"
    assert "not installed" in why
    monkeypatch.setattr(layout, "_find_transformer_engine", lambda: TransformerEngine("2.20.2", None))
    assert choose_backend(base, (10, 0)) == ("transformer_engine", "native through Transformer Engine 2.20.2")


def test_health_where_transformer_engine_multiplies_is_refused(
    base: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_find_transformer_engine", lambda: TransformerEngine("2.20.2", None))
    sampled = replaced(base, {"logging.health_every": 50})
    with pytest.raises(PrecisionError, match=r"health_every=50: .* Write logging\.health_every=0, or"):
        choose_backend(sampled, (10, 0))
    assert choose_backend(replaced(sampled, {"precision.backend": "emulated"}), (10, 0)).name == "emulated"
