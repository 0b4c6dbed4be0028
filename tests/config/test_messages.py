"""A wrong value is refused by the key as it is typed, with the value as it is typed."""

from __future__ import annotations

import pytest

from data.config import DataError
from models.config import ModelError
from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError
from nvfp4_train.layout import check_run
from nvfp4_train.precision.config import PrecisionError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["schedule.warmup=2B"], "schedule.warmup: '2B' is no duration"),
        (["schedule.decay=-1"], "schedule.decay: -1 is no duration"),
        (
            [
                "data.path=null",
                "data.sources=[{name: a, path: x, weight: 1}]",
                "data.phases=[{start: 7%, weights: [1]}]",
            ],
            "data.phases[0].start: '7%' is no duration",
        ),
        (["data.path=null"], "neither data.path nor data.sources is given"),
        (["data.sources=[{name: a, path: x, weight: 1}]"], "data.path=builtin and data.sources are both given"),
        (["model.num_attention_heads=7"], "model.num_attention_heads=7 is not a multiple of model.num_query_groups=4"),
        (["model.mamba_num_heads=7"], "model.mamba_num_heads=7 is not a multiple of model.mamba_num_groups=2"),
        (["precision.four_over_six=true"], "precision.four_over_six=true makes no sense"),
        (["precision.rotation='16'"], 'precision.rotation="16" (text) makes no sense'),
        (["seed=9223372036854775808"], "seed: wanted 9223372036854775807 or less"),
        (["steps=1e20"], "steps=100000000000000000000: steps * data.global_batch * data.sequence_length = 4.1e+23"),
        (["parallel.tensor=2"], "Start 2 processes (python -m launch.run --processes N; plan: --world N)"),
    ],
)
def test_by_key_and_value(overrides: list[str], said: str) -> None:
    with pytest.raises((ConfigError, DataError, ModelError, PrecisionError)) as error:
        check_run(compose(overrides), 1)
    assert said in str(error.value)


def test_the_largest_seed_is_one() -> None:
    assert compose(["seed=9223372036854775807"]).seed == 2**63 - 1
