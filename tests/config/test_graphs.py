"""Whether passes are recorded as CUDA graphs: what is chosen, what is said, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4_train.compose import compose, replaced
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.layout import check_run, choose_graphs
from nvfp4_train.precision.backends import Backend

HOPPER = (9, 0)
EMULATED = Backend("emulated", "")


@pytest.fixture(scope="module")
def base() -> RunConfig:
    return compose(["experiment=nano"])


def test_recorded_where_they_can_be(base: RunConfig) -> None:
    for backend in (EMULATED, Backend("native", "")):
        recorded, line = choose_graphs(base, backend, HOPPER)
        assert recorded
        assert "recorded in the second step of each phase" in line
    assert choose_graphs(replaced(base, {"parallel.cuda_graphs": "never"}), EMULATED, HOPPER) == (
        False,
        "CUDA graphs: none, as asked",
    )
    assert choose_graphs(replaced(base, {"parallel.cuda_graphs": "always"}), EMULATED, HOPPER)[0]


@pytest.mark.parametrize(
    ("changes", "backend", "capability", "reason"),
    [
        ({}, "emulated", None, "no CUDA device"),
        ({}, "transformer_engine", HOPPER, "Transformer Engine"),
        ({"parallel.tensor": 2}, "emulated", HOPPER, "parallel.tensor=2"),
        ({"parallel.pipeline": 2}, "emulated", HOPPER, "parallel.pipeline=2"),
        ({"parallel.context": 2}, "emulated", HOPPER, "parallel.context=2"),
        ({"parallel.overlap_grad_reduce": True}, "emulated", HOPPER, "parallel.overlap_grad_reduce=true"),
        ({"model.recompute": "full"}, "native", HOPPER, "model.recompute=full"),
    ],
)
def test_auto_says_why_not_and_always_is_refused(
    base: RunConfig, changes: dict[str, Any], backend: str, capability: tuple[int, int] | None, reason: str
) -> None:
    recorded, line = choose_graphs(replaced(base, changes), Backend(backend, ""), capability)
    assert not recorded
    assert line.startswith("CUDA graphs: none (")
    assert reason in line
    wanted = replaced(base, changes | {"parallel.cuda_graphs": "always"})
    with pytest.raises(ConfigError, match=r"cuda_graphs=always: .*Write parallel\.cuda_graphs=auto or never") as caught:
        choose_graphs(wanted, Backend(backend, ""), capability)
    assert reason in str(caught.value)


def test_another_word_is_refused(base: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.cuda_graphs=sometimes: write one of auto, always, never"):
        check_run(replaced(base, {"parallel.cuda_graphs": "sometimes"}))
