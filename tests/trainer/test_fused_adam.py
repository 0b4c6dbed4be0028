"""AdamW's kernel without a GPU: Triton's interpreter runs it in a process of its own."""

from __future__ import annotations

from tests.interpreter import checked_in_interpreter


def test_the_kernel_equals_torchs_adamw() -> None:
    assert checked_in_interpreter("tests.trainer.fused_adam_checks") == "equal\n"
