"""Cost of emulated NVFP4 on a GPU, as tables of ratios.

Run: python -m tests.benchmarks.gpu_linear [--quick] [--quantizers]

Quantizers: the bytes that they must move, over their time, over the rate of a device copy. Linears: forward and
backward of one linear with weight gradients added to an FP32 buffer, NVFP4 emulated over BF16, both through the same
code and in the same run; weights quantized once a step (as in training with several micro-batches), and in every step.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from functools import partial

import torch
import triton
from triton.testing import do_bench

from nvfp4_train.precision import QuantSpec
from nvfp4_train.precision.delayed import AmaxHistories
from nvfp4_train.precision.kernels import launch
from nvfp4_train.precision.phases import Passes
from nvfp4_train.precision.runtime import PrecisionRuntime
from nvfp4_train.precision.three_gemms import ThreeGemms
from tests.benchmarks.card import need_card
from tests.precision.linears import precision

# tokens, in-features, out-features
LINEARS = ((8192, 5120, 20480), (8192, 20480, 5120), (8192, 5120, 22656), (8192, 2048, 8192))
OPERANDS = ((8192, 2048), (8192, 5120), (8192, 20480))
Specs = tuple[QuantSpec | None, QuantSpec | None]
NEAREST, ROTATED = QuantSpec("nvfp4"), QuantSpec("nvfp4", rotation=16)
STOCHASTIC = QuantSpec("nvfp4", rounding="stochastic")
ROTATED_STOCHASTIC = QuantSpec("nvfp4", rounding="stochastic", rotation=16)
MSE, MAE = QuantSpec("nvfp4", four_over_six="mse"), QuantSpec("nvfp4", four_over_six="mae")
MX4, MX4_ROTATED = QuantSpec("mxfp4"), QuantSpec("mxfp4", rotation=32)
MX4_STOCHASTIC = QuantSpec("mxfp4", rounding="stochastic")
MX4_ROTATED_STOCHASTIC = QuantSpec("mxfp4", rounding="stochastic", rotation=32)
MX8, FP8 = QuantSpec("mxfp8"), QuantSpec("fp8_block")
# Along features and along tokens; bytes an element that must move, reads for an amax among them.
QUANTIZERS: tuple[tuple[str, Specs, int], ...] = (
    ("nvfp4 nearest, one layout", (NEAREST, None), 6),
    ("nvfp4 nearest, both layouts", (NEAREST, ROTATED), 8),
    ("nvfp4 stochastic, both layouts", (STOCHASTIC, ROTATED_STOCHASTIC), 8),
    ("four over six (mse), one layout", (MSE, None), 6),
    ("four over six (mae), one layout", (MAE, None), 6),
    ("four over six and nvfp4, both", (MSE, ROTATED), 8),
    ("mxfp4 nearest, both layouts", (MX4, MX4_ROTATED), 6),
    ("mxfp4 stochastic, both layouts", (MX4_STOCHASTIC, MX4_ROTATED_STOCHASTIC), 6),
    ("mxfp8, one layout", (MX8, None), 4),
    ("mxfp8, both layouts", (MX8, MX8), 6),
    ("fp8_block, both layouts (FP32 values)", (FP8, FP8), 10),
)
# One operand, contracted over `axis`, with a read of x for the amax.
EDEN = QuantSpec("nvfp4", rotation=128, signs="fresh", correction="eden")
OPERANDS_ALONE = (
    ("Quartet II, along features", EDEN, 1, False),
    ("Quartet II, along tokens", EDEN, 0, False),
    ("Quartet II, along tokens, decoded", EDEN, 0, True),
    ("nvfp4 rotated by 128, along tokens", QuantSpec("nvfp4", rotation=128), 0, False),
    ("nvfp4 by rows, four over six (mse)", QuantSpec("nvfp4", scaling="row", four_over_six="mse"), 1, False),
)
# One copy for both contractions: of activations in BF16, and of weights in FP32.
TENSORS = (("fp8_current", QuantSpec("fp8_current"), 6), ("fp8_delayed", QuantSpec("fp8_delayed"), 6))
WEIGHTS = (
    ("nvfp4 16x16", QuantSpec("nvfp4", (16, 16)), 10),
    ("four over six (mse) 16x16", QuantSpec("nvfp4", (16, 16), four_over_six="mse"), 10),
    ("mxfp4 32x32", QuantSpec("mxfp4", (32, 32)), 6),
    ("fp8_block 128x128 (FP32 values)", QuantSpec("fp8_block", (128, 128)), 8),
    ("fp8_current", QuantSpec("fp8_current"), 10),
)


def milliseconds(run: Callable[[], object], repeat: int) -> float:
    """Median time on the GPU."""
    return float(do_bench(run, warmup=repeat // 4, rep=repeat, return_mode="median"))


def graphed(run: Callable[[], object]) -> Callable[[], object]:
    """The launches of `run` as one, a CUDA graph: a small kernel's time without its launch's on the CPU."""
    run()  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def copy_rate() -> float:
    """Bytes a millisecond, read and written, of a copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source), 100)


def quantizers(rate: float) -> None:
    """One row an operand: microseconds, and the share of the copy rate that they mean."""
    print(f"\n{'quantizer':<52} {'us':>7} {'bytes at copy rate':>19}")
    keys = torch.tensor([1 << 40, 2 << 40], device="cuda").unbind()
    for rows, columns in OPERANDS:
        x = torch.randn(rows, columns, device="cuda").bfloat16()
        for name, specs, size in QUANTIZERS:
            run = partial(launch.quantize_rows_and_columns, x, *specs, *keys)
            _row(f"{name}, {rows} x {columns}", run, size * x.numel(), rate)
        for name, spec, axis, decoded in OPERANDS_ALONE:
            decode = keys[0].float() if decoded else None
            run = partial(launch.quantize_operand, x, spec, axis, keys[0], sign_key=keys[1], decode=decode)
            _row(f"{name}, {rows} x {columns}", run, 6 * x.numel(), rate)
        for name, spec, size in TENSORS:
            run = partial(launch.quantize_operand, x, spec, 1, 0)
            _row(f"{name}, {rows} x {columns}", run, size * x.numel(), rate)
    w = torch.randn(20480, 5120, device="cuda")
    for name, spec, size in WEIGHTS:
        run = partial(launch.quantize_operand, w, spec, 1, 0)
        _row(f"{name} weight, FP32, 20480 x 5120", run, size * w.numel(), rate)


def _row(name: str, run: Callable[[], object], size: int, rate: float) -> None:
    ms = milliseconds(graphed(run), 40)
    print(f"{name:<52} {1e3 * ms:>7.0f} {size / rate / ms:>19.0%}", flush=True)


def linear_step(
    name: str, tokens: int, inputs: int, outputs: int, requantize: bool, native: bool = False
) -> Callable[[], None]:
    """Forward and backward of one linear in a recipe; `requantize` quantizes its weight anew each time."""
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    w = torch.randn(outputs, inputs, device="cuda") * 0.02
    dy = torch.randn(tokens, outputs, device="cuda").bfloat16()
    gradient = torch.zeros_like(w)
    runtime = PrecisionRuntime(seed=1, native=native)
    gemms = ThreeGemms(precision(name, sizes=(inputs, outputs)), runtime)
    runtime.histories = AmaxHistories(gemms.delayed_tensors(), 4, torch.device("cuda"))
    runtime.expect([gemms.name])
    runtime.begin_step(1, Passes())
    runtime.begin_microbatch(0)
    runtime.observing = False

    def step() -> None:
        if requantize:
            runtime.weights_changed()
        call = runtime.call()
        _, kept = gemms.forward(x, w, None, call)
        along_out, along_tokens = gemms.gradients(dy, call, True, True)
        assert along_out is not None
        assert along_tokens is not None
        gemms.input_gradient(along_out, w, call)
        gemms.weight_gradient(along_tokens, kept, call, gradient)

    return step


def linears(repeat: int) -> None:
    """One row a linear: BF16 in ms, and NVFP4 over it."""
    print(f"\n{'linear: tokens, in, out':<26} {'bf16 ms':>8} {'nvfp4 / bf16':>13} {'with the weight':>16}")
    for shape in LINEARS:
        ms = [
            milliseconds(linear_step(name, *shape, requantize), repeat)
            for name, requantize in (("bf16", False), ("nvfp4", False), ("bf16", True), ("nvfp4", True))
        ]
        print(f"{shape!s:<26} {ms[0]:>8.2f} {ms[1] / ms[0]:>13.3f} {ms[3] / ms[2]:>16.3f}", flush=True)


def fp8_linears(repeat: int) -> None:
    """One row a linear: FP8 on FP8 tensor cores over BF16, and the same with the weight quantized in each pass."""
    names = ("fp8_block", "fp8_current", "fp8_delayed")
    print(f"\n{'linear: tokens, in, out':<26} " + " ".join(f"{name:>20}" for name in names))
    for shape in LINEARS:
        cells = []
        for name in names:
            ms = [
                milliseconds(linear_step(recipe, *shape, requantize, native=recipe != "bf16"), repeat)
                for requantize in (False, True)
                for recipe in ("bf16", name)
            ]
            cells.append(f"{ms[1] / ms[0]:>12.3f} {ms[3] / ms[2]:>7.3f}")
        print(f"{shape!s:<26} " + " ".join(cells), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions")
    parser.add_argument("--quantizers", action="store_true", help="the quantizers alone")
    arguments = parser.parse_args()
    need_card()
    quick = arguments.quick
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, ", end="")
    print(f"Python {platform.python_version()}; a copy moves {rate / 1e6:.0f} GB/s")
    quantizers(rate)
    if arguments.quantizers:
        return
    linears(100 if quick else 400)
    fp8_linears(60 if quick else 200)


if __name__ == "__main__":
    main()
