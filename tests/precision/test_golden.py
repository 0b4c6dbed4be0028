"""Bits equal to Transformer Engine's reference quantizer: codes, block scales, amax, rotated operands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nvfp4_train.precision import Quantized, QuantSpec, quantize, quantize_values
from nvfp4_train.precision.rotation import rotate

FOLDER = Path(__file__).parents[1] / "golden"
FILES = sorted(path.stem for path in FOLDER.glob("*.npz"))
PLAIN = [name for name in FILES if not name.startswith(("fos_", "gemm_"))]
FOUR_OVER_SIX = [name for name in FILES if name.startswith("fos_")]

Arrays = dict[str, NDArray[np.generic]]


def load(name: str) -> tuple[Arrays, torch.Tensor]:
    arrays = dict(np.load(FOLDER / f"{name}.npz"))
    return arrays, tensor(arrays["x"])


def tensor(array: NDArray[np.generic]) -> torch.Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


def assert_equals(found: Quantized, arrays: Arrays, mode: str, side: str = "") -> None:
    assert found.scales is not None
    scales = found.scales.view(torch.uint8)
    if found.spec.tile == (16, 16):
        scales = scales.repeat_interleave(16, 0)
    np.testing.assert_array_equal(found.codes.numpy(), arrays[f"{mode}.codes{side}"])
    np.testing.assert_array_equal(scales.numpy(), arrays[f"{mode}.scales{side}"])
    np.testing.assert_array_equal(found.amax.reshape(-1).numpy(), arrays[f"{mode}.amax{side}"])


def test_every_file_is_here() -> None:
    assert len(FILES) == 38
    assert len(PLAIN) == 31
    assert len(FOUR_OVER_SIX) == 6


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(("mode", "tile"), [("r1x16", (1, 16)), ("t16x16", (16, 16))])
def test_blocks_by_rows_and_by_columns(name: str, mode: str, tile: tuple[int, int]) -> None:
    arrays, x = load(name)
    spec = QuantSpec("nvfp4", tile=tile)
    assert_equals(quantize(x, spec), arrays, mode)
    assert_equals(quantize(x.t(), spec), arrays, mode, "_t")


@pytest.mark.parametrize("name", [name for name in PLAIN if not name.startswith(("bf16max_all", "pad_"))])
@pytest.mark.parametrize("mode", ["r1x16_rht", "r1x16_rht_nosign"])
def test_codes_of_the_rotated_transpose(name: str, mode: str) -> None:
    arrays, x = load(name)
    assert_equals(quantize(x, QuantSpec("nvfp4")), arrays, mode)
    assert_equals(quantize(tensor(arrays[f"{mode}.x_t_rht"]), QuantSpec("nvfp4")), arrays, mode, "_t")


@pytest.mark.parametrize("name", [name for name in PLAIN if not name.startswith(("bf16max_all", "pad_"))])
def test_rotated_operand(name: str) -> None:
    arrays, x = load(name)
    spec = QuantSpec("nvfp4", rotation=16)
    found, golden = rotate(x, spec, axis=0).t(), tensor(arrays["r1x16_rht.x_t_rht"])
    assert found.dtype == golden.dtype
    if x.dtype == torch.bfloat16:
        assert torch.equal(found, golden)
        assert_equals(quantize(x.t(), spec), arrays, "r1x16_rht", "_t")
    else:
        # Sixteen products are rounded to subnormals in the reference's order of the sum, at most half a unit each.
        tolerance = 1e-6 * golden.abs().max() + 8 * 2.0**-149
        assert (found - golden).abs().max() <= tolerance


@pytest.mark.parametrize("name", FOUR_OVER_SIX)
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
@pytest.mark.parametrize("measure", ["mae", "mse"])
def test_four_over_six(name: str, tile: tuple[int, int], measure: str) -> None:
    arrays, x = load(name)
    mode = f"{'r1x16' if tile[0] == 1 else 't16x16'}_46_{measure}"
    assert_equals(quantize(x, QuantSpec("nvfp4", tile=tile, four_over_six=measure)), arrays, mode)


@pytest.mark.parametrize("name", FOUR_OVER_SIX)
def test_row_scaled(name: str) -> None:
    arrays, x = load(name)
    assert_equals(quantize(x, QuantSpec("nvfp4", scaling="row")), arrays, "r1x16_rowscaled")


def test_operands_of_the_gemm_file() -> None:
    arrays = dict(np.load(FOLDER / "gemm_m64_k96_n128_bf16.npz"))
    rows, square, rotated = QuantSpec("nvfp4"), QuantSpec("nvfp4", tile=(16, 16)), QuantSpec("nvfp4", rotation=16)
    for name, spec, spec_t in (("x", rows, rotated), ("w", square, square), ("dy", rows, rotated)):
        value = tensor(arrays[name])
        assert_equals(quantize(value, spec), arrays, name)
        assert_equals(quantize(value.t(), spec_t), arrays, name, "_t")


@pytest.mark.parametrize(
    "name", ["normal_128x96_bf16", "ties_64x64_f32", "smallblocks_64x64_f32", "alltiny_32x256_f32"]
)
def test_decoded_value_is_element_times_scale_times_s_dec(name: str) -> None:
    arrays, x = load(name)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    codes = arrays["r1x16.codes"]
    elements = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(x.shape)
    scales = torch.from_numpy(arrays["r1x16.scales"]).view(torch.float8_e4m3fn).float().numpy()
    with np.errstate(over="ignore"):
        s_enc = np.minimum(np.float32(2688) / arrays["r1x16.amax"][0], np.finfo(np.float32).max)
    expected = torch.from_numpy(elements * scales.repeat(16, 1) * (np.float32(1) / s_enc))
    assert torch.equal(quantize(x, QuantSpec("nvfp4")).dequantize(torch.float32), expected)
    values = quantize_values(x, QuantSpec("nvfp4"))
    assert torch.equal(values.values, torch.from_numpy(elements * scales.repeat(16, 1)))
