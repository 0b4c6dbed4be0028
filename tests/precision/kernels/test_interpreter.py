"""The kernels without a GPU: Triton's interpreter runs them in a process of its own."""

from __future__ import annotations

import pytest

from tests.interpreter import checked_in_interpreter


@pytest.mark.slow
@pytest.mark.parametrize("checks", ["checks", "group_checks", "fp8_checks", "native_checks"])
def test_kernels_have_the_bits_of_the_reference(checks: str) -> None:
    assert "0 differences" in checked_in_interpreter(f"tests.precision.kernels.{checks}", seconds=600)
