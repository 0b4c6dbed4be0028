"""Delayed scaling: which amax scales which step, and what a resumed run finds."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.three_gemms import ThreeGemms

from .linears import RECIPE, precision, run, standalone, tensors


def _step(gemms: ThreeGemms, step: int, sizes: list[float], passes: Passes = RECIPE) -> list[tuple[Tensor, ...]]:
    """One step of micro-batches whose inputs are `sizes` times the same tensor."""
    x, w, dy = tensors()
    gemms.runtime.begin_step(step, passes)
    results = []
    for microbatch, size in enumerate(sizes):
        gemms.runtime.begin_microbatch(microbatch)
        results.append(run(gemms, (x.float() * size).bfloat16(), w, dy))
    gemms.runtime.end_step()
    return results


def test_one_entry_a_step_is_the_largest_of_its_micro_batches() -> None:
    gemms = standalone(precision("fp8_delayed"))
    x, w, dy = tensors()
    _step(gemms, 1, [100.0, 1.0, 1.0, 1.0])
    _step(gemms, 2, [1.0, 3.0, 1.0, 1.0])
    state = gemms.runtime.state_dict()
    assert set(state) == {"layer.input", "layer.weight", "layer.gradient"}
    largest = [float((x.float() * size).bfloat16().abs().max()) for size in (3.0, 100.0)]
    assert state["layer.input"].tolist() == [*largest, 0.0, 0.0]
    assert state["layer.weight"].tolist()[:3] == [float(w.abs().max())] * 2 + [0.0]
    assert state["layer.gradient"].tolist()[:3] == [float(dy.float().abs().max())] * 2 + [0.0]


def test_scale_is_one_before_the_first_entry_and_then_the_history_s() -> None:
    gemms = standalone(precision("fp8_delayed"))
    x, w, dy = tensors()
    first, again = _step(gemms, 1, [1.0, 1.0])
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    y = (x.float().to(e4m3).float() @ w.to(e4m3).float().t()).bfloat16()
    dw = dy.float().to(e5m2).float().t() @ x.float().to(e4m3).float()
    assert torch.equal(first[0], y)
    assert torch.equal(first[2], dw)
    assert torch.equal(again[0], y)  # this step's own amaxes are for the next one

    (second,) = _step(gemms, 2, [1.0])
    enc_x, enc_w = (torch.tensor(448.0) / t.float().abs().max() for t in (x, w))
    product = (x.float() * enc_x).to(e4m3).float() @ (w * enc_w).to(e4m3).float().t()
    assert torch.equal(second[0], (product * (1 / enc_x) * (1 / enc_w)).bfloat16())


def test_what_a_kernel_enters_is_the_step_s_as_what_is_recorded() -> None:
    """A graph that is replayed enters amaxes where no call is seen."""
    histories = AmaxHistories(["a.input", "b.input"], 3, torch.device("cpu"))
    histories.record("b.input", torch.tensor(4.0))
    histories.end_step()
    histories.entry("b.input").fill_(0.0)
    histories.end_step()
    histories.entry("b.input").fill_(torch.nan)
    histories.end_step()
    assert histories.state_dict()["b.input"].tolist() == [0.0, 0.0, 4.0]
    assert histories.state_dict()["a.input"].tolist() == [0.0, 0.0, 0.0]
    assert float(histories.amax("b.input")) == 4.0


def test_history_forgets_what_is_older_than_its_length() -> None:
    histories = AmaxHistories(["a.input"], 2, torch.device("cpu"))
    seen = []
    for amax in (8.0, 1.0, 2.0, 0.5):
        histories.record("a.input", torch.tensor(amax))
        histories.end_step()
        seen.append(float(histories.amax("a.input")))
    assert seen == [8.0, 8.0, 2.0, 2.0]


def test_steps_in_bf16_and_evaluations_leave_no_entry() -> None:
    gemms = standalone(precision("fp8_delayed"))
    _step(gemms, 1, [1.0])
    before = gemms.runtime.state_dict()
    _step(gemms, 2, [50.0], Passes("bf16", "bf16"))
    x, w, _ = tensors()
    gemms.runtime.begin_step(3, RECIPE)
    with gemms.runtime.evaluating():
        gemms.forward(x * 50, w, None, gemms.runtime.call())
    gemms.runtime.end_step()
    assert all(torch.equal(value, before[name]) for name, value in gemms.runtime.state_dict().items())


def test_what_is_not_finite_leaves_no_mark() -> None:
    histories = AmaxHistories(["a.input", "b.input"], 3, torch.device("cpu"))
    for amax in (2.0, float("nan"), float("inf")):
        histories.record("a.input", torch.tensor(amax))
        histories.record("b.input", torch.tensor(1.0))
        histories.end_step()
    assert histories.state_dict()["a.input"].tolist() == [0.0, 0.0, 2.0]
    assert histories.state_dict()["b.input"].tolist() == [1.0, 1.0, 1.0]


def test_a_skipped_step_leaves_no_entry() -> None:
    gemms = standalone(precision("fp8_delayed"))
    gemms.runtime.end_step()
    _step(gemms, 1, [1.0])
    before = gemms.runtime.state_dict()
    x, w, dy = tensors()
    gemms.runtime.begin_step(2, RECIPE)
    gemms.runtime.begin_microbatch(0)
    run(gemms, x * 50, w, dy)
    gemms.runtime.end_step(skipped=True)
    assert all(torch.equal(value, before[name]) for name, value in gemms.runtime.state_dict().items())


def test_resumed_run_goes_on_bitwise() -> None:
    gemms = standalone(precision("fp8_delayed"))
    for step, size in enumerate((1.0, 30.0, 2.0), start=1):
        _step(gemms, step, [size, 1.0])
    state = gemms.runtime.state_dict()
    straight = _step(gemms, 4, [1.0, 5.0])

    resumed = standalone(precision("fp8_delayed"))
    assert resumed.runtime.load_state_dict(state) == []
    for one, other in zip(straight, _step(resumed, 4, [1.0, 5.0]), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    after, expected = resumed.runtime.state_dict(), gemms.runtime.state_dict()
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_another_recipe_or_length_on_resume() -> None:
    histories = AmaxHistories(["a.input", "b.input"], 2, torch.device("cpu"))
    missing = histories.load_state_dict({"a.input": torch.tensor([1.0, 2.0, 9.0]), "c.input": torch.ones(3)})
    assert missing == ["b.input"]
    assert histories.state_dict()["a.input"].tolist() == [1.0, 2.0]
    assert float(histories.amax("a.input")) == 2.0
    longer = AmaxHistories(["a.input"], 4, torch.device("cpu"))
    longer.load_state_dict(histories.state_dict())
    assert longer.state_dict()["a.input"].tolist() == [1.0, 2.0, 0.0, 0.0]
    assert standalone(precision("nvfp4")).runtime.state_dict() == {}


def test_ranks_agree_on_the_largest() -> None:
    histories = AmaxHistories(["a.input", "b.input"], 2, torch.device("cpu"))

    def reduce(maxima: Tensor) -> None:
        torch.maximum(maxima, torch.tensor([5.0, 0.1]), out=maxima)

    histories.record("a.input", torch.tensor(1.0))
    histories.record("b.input", torch.tensor(float("nan")))
    histories.end_step(reduce)
    assert histories.state_dict()["a.input"].tolist()[0] == 5.0
    assert histories.state_dict()["b.input"].tolist()[0] == torch.tensor(0.1).item()
