"""What holds for every format: one result in every memory layout, codes and values that agree, padding, edge inputs."""

from __future__ import annotations

import math

import pytest
import torch

from nvfp4_train.precision import Quantized, QuantSpec, Values, quantize, quantize_values
from nvfp4_train.precision.config import PrecisionError
from nvfp4_train.precision.rotation import rotate
from tests.precision.oracles import bf16_exact

SPECS = {
    "nvfp4": QuantSpec("nvfp4"),
    "nvfp4-square": QuantSpec("nvfp4", tile=(16, 16)),
    "nvfp4-stochastic": QuantSpec("nvfp4", rounding="stochastic"),
    "nvfp4-square-stochastic": QuantSpec("nvfp4", tile=(16, 16), rounding="stochastic"),
    "nvfp4-rotated": QuantSpec("nvfp4", rotation=16),
    "nvfp4-rotated-stochastic": QuantSpec("nvfp4", rotation=16, rounding="stochastic"),
    "nvfp4-rotated-fresh": QuantSpec("nvfp4", rotation=64, signs="fresh"),
    "nvfp4-row": QuantSpec("nvfp4", scaling="row"),
    "nvfp4-row-mse": QuantSpec("nvfp4", scaling="row", four_over_six="mse"),
    "nvfp4-mae": QuantSpec("nvfp4", four_over_six="mae"),
    "nvfp4-square-mse": QuantSpec("nvfp4", tile=(16, 16), four_over_six="mse"),
    "nvfp4-eden": QuantSpec("nvfp4", rotation=128, signs="fresh", correction="eden"),
    "mxfp4": QuantSpec("mxfp4"),
    "mxfp4-square": QuantSpec("mxfp4", tile=(32, 32)),
    "mxfp4-rotated-stochastic": QuantSpec("mxfp4", rotation=32, rounding="stochastic"),
    "mxfp8": QuantSpec("mxfp8"),
    "mxfp8-square": QuantSpec("mxfp8", tile=(32, 32)),
    "mxfp8-ocp": QuantSpec("mxfp8", scale_rounding="ocp"),
    "fp8_block": QuantSpec("fp8_block"),
    "fp8_block-square": QuantSpec("fp8_block", tile=(128, 128)),
    "fp8_block-power": QuantSpec("fp8_block", power_of_two=True),
    "fp8_current": QuantSpec("fp8_current"),
    "fp8_current-e5m2": QuantSpec("fp8_current", element="e5m2"),
    "fp8_delayed": QuantSpec("fp8_delayed"),
    "bf16": QuantSpec("bf16"),
}
every_spec = pytest.mark.parametrize("spec", list(SPECS.values()), ids=list(SPECS))
KEY = 0x0123_4567_89AB_CDEF


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    scale = torch.exp2(torch.randint(-6, 7, (rows, columns), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


def scaled(values: Values, axis: int) -> torch.Tensor:
    """The operand that Values stand for, its rows along dimension 0."""
    operand = (values.values if axis == 1 else values.values.t()).float()
    if values.scale is None:
        decoded = operand
    else:
        decoded = operand * (values.scale if values.scale.dim() == 0 else values.scale[:, None])
    own = values.dequantize() if axis == 1 else values.dequantize().t()
    assert torch.equal(own.nan_to_num(), decoded.nan_to_num())
    return decoded


def assert_same(found: Quantized, expected: Quantized) -> None:
    assert same_bits(found.codes, expected.codes)
    assert torch.equal(found.amax, expected.amax)
    assert same_bits(found.scales, expected.scales)


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@every_spec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 256), (256, 128), (40, 200), (7, 33), (1, 16)])
def test_values_are_decoded_codes_in_every_layout(spec: QuantSpec, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = matrix(*shape, dtype)
    before = x.clone()
    stored = quantize(x, spec, seed=KEY)
    decoded = stored.dequantize(torch.float32)
    wide = torch.stack([x, -x], dim=2).view(x.shape[0], -1)[:, ::2]
    for strided in (x, x.t().contiguous().t(), wide):
        assert_same(quantize(strided, spec, seed=KEY), stored)
        for axis, source in ((1, strided), (0, strided.t())):
            values = quantize_values(source, spec, key=KEY, axis=axis)
            assert torch.equal(scaled(values, axis), decoded)
            assert values.values.dtype == torch.float32
            assert same_bits(values.block_scale, stored.scales)
            assert torch.equal(values.amax, stored.amax)
    assert torch.equal(x, before)


@every_spec
def test_values_are_exact_in_bfloat16(spec: QuantSpec) -> None:
    values = quantize_values(matrix(256, 128, torch.bfloat16), spec, key=KEY)
    assert bf16_exact(values.values) or (spec.format == "fp8_block" and not spec.power_of_two)


@pytest.mark.parametrize("name", [name for name in SPECS if "square" in name and "stochastic" not in name])
@pytest.mark.parametrize("shape", [(128, 256), (40, 200)])
def test_a_square_tile_is_the_same_by_rows_and_by_columns(name: str, shape: tuple[int, int]) -> None:
    spec, x = SPECS[name], matrix(*shape)
    by_rows, by_columns = quantize_values(x, spec, axis=1), quantize_values(x, spec, axis=0)
    assert torch.equal(by_rows.values, by_columns.values)
    assert torch.equal(quantize(x, spec).dequantize().t(), quantize(x.t(), spec).dequantize())


@every_spec
def test_chunks_do_not_change_the_bits(spec: QuantSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(512, 256, torch.bfloat16)
    whole = [quantize_values(x, spec, key=KEY, axis=axis) for axis in (0, 1)]
    monkeypatch.setattr("nvfp4_train.precision.blocks._CHUNK_CPU", 4096)
    for axis in (0, 1):
        parts = quantize_values(x, spec, key=KEY, axis=axis)
        assert torch.equal(parts.values, whole[axis].values)


@pytest.mark.parametrize(
    ("name", "codes", "scales"),
    [
        ("nvfp4", (40, 100), (40, 13)),
        ("nvfp4-square", (40, 100), (3, 13)),
        ("nvfp4-rotated", (40, 104), (40, 13)),
        ("mxfp4", (40, 100), (40, 7)),
        ("mxfp8-square", (40, 200), (2, 7)),
        ("fp8_block", (40, 200), (40, 2)),
        ("fp8_block-square", (40, 200), (1, 2)),
        ("fp8_current", (40, 200), None),
        ("bf16", (40, 200), None),
    ],
)
def test_ragged_shapes(name: str, codes: tuple[int, int], scales: tuple[int, int] | None) -> None:
    spec, x = SPECS[name], matrix(40, 200)
    found = quantize(x, spec)
    assert found.codes.shape == codes
    assert (found.scales is None) if scales is None else (found.scales is not None and found.scales.shape == scales)
    padded = torch.nn.functional.pad(x, (0, 56, 0, 88))
    assert torch.equal(found.dequantize(), quantize(padded, spec).dequantize()[:40, : found.columns])


def test_an_odd_width_leaves_the_last_high_nibble_zero() -> None:
    x = matrix(4, 17).abs() + 1
    codes = quantize(x, QuantSpec("nvfp4")).codes
    assert codes.shape == (4, 9)
    assert (codes[:, -1] >> 4).eq(0).all()
    assert quantize(x, QuantSpec("nvfp4")).dequantize().shape == (4, 17)


def test_the_even_element_is_in_the_low_nibble_and_eight_bit_codes_are_float8() -> None:
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, -0.5, 3.0, -6.0])
    assert quantize(x, QuantSpec("nvfp4")).codes[0, :2].tolist() == [0x97, 0xF5]
    assert quantize(x, QuantSpec("mxfp8")).codes.dtype == torch.float8_e4m3fn
    assert quantize(x, QuantSpec("fp8_current", element="e5m2")).codes.dtype == torch.float8_e5m2


# ---- edge inputs


@every_spec
@pytest.mark.parametrize("axis", [0, 1])
def test_zeros_stay_zeros(spec: QuantSpec, axis: int) -> None:
    x = torch.zeros(128, 128)
    values = quantize_values(x, spec, key=KEY, axis=axis)
    assert scaled(values, axis).eq(0).all()
    assert values.scale is None or values.scale.isfinite().all()
    if spec.rotation is None:
        x[64:, :64] = matrix(64, 64)
        decoded = quantize_values(x, spec, key=KEY, axis=axis).dequantize()
        assert decoded.isfinite().all()
        assert decoded[:64].eq(0).all()
        assert decoded[64:, 64:].eq(0).all()


@every_spec
@pytest.mark.parametrize("size", [1e-36, 1e-44, 1e38])
@pytest.mark.parametrize("axis", [0, 1])
def test_tiny_and_huge_values_make_no_nan(spec: QuantSpec, size: float, axis: int) -> None:
    x = torch.zeros(128, 128)
    x[3, 5] = x[64, 70] = -size
    x[40] = size / 100
    found = quantize(x if axis == 1 else x.t(), spec, seed=KEY)
    assert found.dequantize().isfinite().all()
    values = quantize_values(x, spec, key=KEY, axis=axis)
    assert values.values.isfinite().all()
    assert torch.equal(scaled(values, axis), found.dequantize())


@every_spec
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_non_finite_value_stays_visible(spec: QuantSpec, bad: float, axis: int) -> None:
    x = matrix(128, 128)
    x[17, 33] = bad
    given = torch.tensor(4.0) if spec.format in ("fp8_delayed", "fp8_current") else None
    for amax in (None, given):
        values = quantize_values(x, spec, key=KEY, axis=axis, amax=amax)
        where = (17, 33) if axis == 1 else (33, 17)
        assert not scaled(values, axis)[where].isfinite()
    assert not quantize(x, spec, seed=KEY).dequantize()[17, 33].isfinite()


def test_only_a_matrix_of_float32_or_bfloat16_is_quantized() -> None:
    for bad in (torch.zeros(16), torch.zeros(2, 16, 16), torch.zeros(16, 16, dtype=torch.float16)):
        with pytest.raises(PrecisionError, match="float32 or bfloat16 tensor"):
            quantize(bad, QuantSpec("nvfp4"))
        with pytest.raises(PrecisionError, match="float32 or bfloat16 tensor"):
            quantize_values(bad, QuantSpec("nvfp4"))


@every_spec
@pytest.mark.parametrize("shape", [(4, 0), (0, 16), (0, 128), (0, 0)])
def test_an_empty_matrix_has_an_empty_result(spec: QuantSpec, shape: tuple[int, int]) -> None:
    rows, columns = shape
    x = torch.randn(rows, columns)
    wide = -(-columns // (spec.rotation or 1)) * (spec.rotation or 1)
    found = quantize(x, spec, seed=KEY)
    assert found.codes.shape == (rows, wide // 2 if spec.format in ("nvfp4", "mxfp4") else wide)
    if spec.tile is None:
        assert found.scales is None
    else:
        assert found.scales is not None
        assert found.scales.shape == (-(-rows // spec.tile[0]), -(-wide // spec.tile[1]))
    assert found.dequantize().shape == (rows, wide)
    amax = torch.zeros(rows) if spec.scaling == "row" else torch.tensor(0.0)
    assert torch.equal(found.amax, amax)
    for operand, axis in ((x, 1), (x.t().contiguous(), 0), (x.t(), 0)):
        values = quantize_values(operand, spec, key=KEY, axis=axis)
        assert values.values.shape == ((rows, wide) if axis == 1 else (wide, rows))
        assert values.dequantize().shape == values.values.shape
        assert torch.equal(values.amax, amax)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.rotation])
def test_a_rotated_matrix_keeps_the_columns_it_was_filled_up_with(name: str) -> None:
    spec, x = SPECS[name], matrix(40, 100)
    assert spec.rotation is not None
    wide = -(-100 // spec.rotation) * spec.rotation
    found = quantize(x, spec, seed=KEY)
    assert (found.columns, tuple(found.codes.shape)) == (wide, (40, wide // 2))
    decoded, rotated = found.dequantize(), rotate(x, spec, KEY)
    assert decoded.shape == rotated.shape == (40, wide)
    assert (decoded - rotated).norm() < 0.2 * rotated.norm()
    assert decoded[:, 100:].abs().max() > 0
    # Rotating back takes all of them: the matrix is its own inverse but for the signs.
    size = spec.rotation
    transform = rotate(torch.eye(size), spec, KEY)
    assert torch.allclose(transform @ transform.t(), torch.eye(size), atol=1e-6)
    back = (decoded.view(40, -1, size) @ transform.t()).view(40, wide)
    assert (back[:, :100] - x).norm() < 0.2 * x.norm()
    cut = (torch.nn.functional.pad(decoded[:, :100], (0, wide - 100)).view(40, -1, size) @ transform.t()).view(40, wide)
    assert (cut - back)[:, :100].norm() > 0.05 * x.norm()


@pytest.mark.parametrize("name", ["nvfp4-rotated", "nvfp4-rotated-fresh", "mxfp4-rotated-stochastic", "nvfp4-eden"])
def test_what_is_quantized_can_be_computed_again(name: str) -> None:
    spec, x = SPECS[name], matrix(256, 128, torch.bfloat16)
    for axis in (0, 1):
        values = quantize_values(x, spec, key=1, axis=axis, sign_key=2)
        assert torch.equal(values.amax, rotate(x, spec, 2, axis).abs().amax().float())


def test_the_sign_key_alone_decides_the_signs() -> None:
    spec, x = SPECS["nvfp4-rotated-fresh"], matrix(64, 128)
    values = [quantize_values(x, spec, key=key, sign_key=sign_key).values for key, sign_key in ((1, 5), (2, 5), (1, 6))]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
