"""What Triton found once is launched again where everything that it compiled for is the same, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_train.precision.kernels import launcher


class Kernel:
    """Stands in for a kernel of `triton.jit`: takes down what it is looked at for, and what is launched without."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.looks: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def look(*arguments: Any, **options: Any) -> Any:
            self.looks.append((grid, arguments, options))
            return self.Compiled(self) if self.compiles else None

        return look

    class Compiled:
        def __init__(self, kernel: Kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments, stream: self.kernel.launches.append((grid, arguments, stream))


@pytest.fixture
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_found", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


@pytest.mark.usefixtures("_empty")
def test_a_launch_like_one_before_goes_by_addresses() -> None:
    kernel, x, y = Kernel(), torch.zeros(32), torch.ones(32)
    launcher.launch(kernel, (2, 3), (x,), (32, True), num_warps=4)
    launcher.launch(kernel, (5, 1), (y,), (32, True), num_warps=4)
    assert kernel.looks == [((2, 3), (x, 32, True), {"num_warps": 4})]
    assert kernel.launches == [((5, 1, 1), (y.data_ptr(), 32, True), 7)]


@pytest.mark.usefixtures("_empty")
def test_another_kernel_dtype_number_or_alignment_is_looked_at() -> None:
    kernel, other = Kernel(), Kernel()
    x = torch.zeros(64)
    for each, tensor, number in (
        (kernel, x, 32),
        (kernel, x, 33),
        (kernel, x.bfloat16(), 32),
        (kernel, x[1:], 32),
        (other, x, 32),
    ):
        launcher.launch(each, (1, 1), (tensor,), (number,))
        launcher.launch(each, (1, 1), (tensor,), (number,))
    assert (len(kernel.looks), len(kernel.launches)) == (4, 4)
    assert (len(other.looks), len(other.launches)) == (1, 1)


@pytest.mark.usefixtures("_empty")
def test_what_is_interpreted_is_looked_at_every_time() -> None:
    kernel = Kernel(compiles=False)
    for _ in range(2):
        launcher.launch(kernel, (1, 1), (torch.zeros(4),), ())
    assert len(kernel.looks) == 2
