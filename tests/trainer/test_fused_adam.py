"""AdamW's kernel without a GPU: Triton's interpreter runs it in a process of its own."""

from __future__ import annotations

from tests.interpreter import checked_in_interpreter


def test_the_kernel_equals_torchs_adamw() -> None:
    assert checked_in_interpreter("tests.trainer.fused_adam_checks") == "equal\n"


def test_a_launched_update_of_a_skipped_step_changes_nothing() -> None:
    assert checked_in_interpreter("tests.trainer.launched_update_checks").endswith("\nequal\n")
