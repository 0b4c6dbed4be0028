"""GEMMs whose scales are read from device memory, through cuBLASLt: BF16 with one scale, FP8 with a scale an operand.

The emulated GEMM multiplies its FP32 accumulator by the operands' tensor scales and rounds once. The scales come out of
kernels, so the host does not know them without waiting for the GPU; cuBLASLt takes alpha and beta from device memory
instead, and PyTorch has no way to ask for that. It also adds weight gradients to an FP32 buffer (beta = 1) in the same
kernel, which PyTorch's scaled GEMMs do not offer either.

The first algorithm of cuBLASLt's own heuristic is taken: choosing by time would give other sums in another run.
Algorithms that add parts of a sum in the output's type are ruled out: they would round more than once.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

_HOST_POINTERS, _DEVICE_POINTERS = 0, 1
# cublasLtMatmulDescAttributes_t
_POINTER_MODE, _TRANSPOSE_A, _TRANSPOSE_B = 2, 3, 4
_SCALE_A, _SCALE_B, _SCALE_MODE_A, _SCALE_MODE_B = 17, 18, 31, 32
_ONE_SCALE, _BLOCKS_1X128, _BLOCKS_128X128 = 0, 4, 5  # cublasLtMatmulMatrixScale_t
# cublasLtMatmulPreferenceAttributes_t; the alignments are those of A, B, C and D
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_REDUCE_IN_FP32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
_COMPUTE_FP32 = 68  # CUBLAS_COMPUTE_32F
# cudaDataType_t
_TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
_BEST_ALIGNMENT = 256  # bytes; cuBLASLt asks for no more

_HOST_NUMBERS = {value: ctypes.c_float(value) for value in (0.0, 1.0)}


class Matrix(NamedTuple):
    """A row-major matrix, as far as the choice of a kernel depends on it.

    Attributes:
        rows, columns: sizes.
        stride: elements from row to row.
        alignment: of its address, in bytes.
        dtype: of its elements.
        scaling: cuBLASLt's mode of an FP8 operand's scales; None for others, which have none.
    """

    rows: int
    columns: int
    stride: int
    alignment: int
    dtype: torch.dtype
    scaling: int | None = None


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL:
    """The cuBLASLt that PyTorch itself has loaded, so that there is one version in the process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libcublasLt.so" in line})
    assert paths, "PyTorch has not loaded libcublasLt; run a matrix product on the GPU first"
    return ctypes.CDLL(paths[0])


@cache
def _function(name: str) -> Any:
    return getattr(_library(), name)


def _call(name: str, *arguments: object) -> None:
    status = _function(name)(*arguments)
    assert status == 0, f"{name} failed with cuBLAS status {status}"


@cache
def _matmul() -> Any:
    """cublasLtMatmul, which is called thousands of times a step: with its types told, plain ints do for addresses."""
    function = _function("cublasLtMatmul")
    pointer = ctypes.c_void_p
    function.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
    return function


@cache
def _handle(device: int) -> ctypes.c_void_p:
    torch.cuda.current_blas_handle()  # loads the library
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


@cache
def _workspace(device: int, stream: int) -> torch.Tensor:
    """One for each stream: two GEMMs that run at once must not share it."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device))


@cache
def _constant(value: float, device: int) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=torch.device("cuda", device))


def _set(setter: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(setter, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


def _layout(matrix: Matrix) -> ctypes.c_void_p:
    """Of the matrix as cuBLAS sees it: column-major, so transposed."""
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout),
        _TYPES[matrix.dtype],
        ctypes.c_uint64(matrix.columns),
        ctypes.c_uint64(matrix.rows),
        ctypes.c_int64(matrix.stride),
    )
    return layout


class _Plan:
    """Descriptors and algorithm for one shape; cuBLAS is column-major, so it is asked for D^T = op(b)^T op(a)^T."""

    def __init__(self, device: int, a: Matrix, b: Matrix, d: Matrix, transposes: tuple[bool, bool]) -> None:
        self.device, self.operation = device, ctypes.c_void_p()
        self.handle, self.matmul = _handle(device), _matmul()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), _COMPUTE_FP32, _TYPES[torch.float32])
        where = _DEVICE_POINTERS if a.scaling is None else _HOST_POINTERS
        self._describe(_POINTER_MODE, ctypes.c_int32(where))
        self._describe(_TRANSPOSE_A, ctypes.c_int32(transposes[1]))
        self._describe(_TRANSPOSE_B, ctypes.c_int32(transposes[0]))
        if a.scaling is not None and b.scaling is not None:
            self._describe(_SCALE_MODE_A, ctypes.c_int32(b.scaling))
            self._describe(_SCALE_MODE_B, ctypes.c_int32(a.scaling))
            stand_in = _constant(1.0, device)
            self.scales = 0, 0
            self.point_to_scales(stand_in, stand_in)
        self.a, self.b, self.d = map(_layout, (a, b, d))
        self.algorithm = self._choose((b.alignment, a.alignment, d.alignment, d.alignment))

    def _describe(self, attribute: int, value: Any) -> None:
        _set("cublasLtMatmulDescSetAttribute", self.operation, attribute, value)

    def point_to_scales(self, scale_a: torch.Tensor, scale_b: torch.Tensor) -> None:
        """Where the next run reads the scales of FP8 operands."""
        scales = scale_b.data_ptr(), scale_a.data_ptr()
        for i, (attribute, scale) in enumerate(zip((_SCALE_A, _SCALE_B), scales, strict=True)):
            if scale != self.scales[i]:
                self._describe(attribute, ctypes.c_void_p(scale))
        self.scales = scales

    def _choose(self, alignments: tuple[int, int, int, int]) -> _Heuristic:
        preference, found, result = ctypes.c_void_p(), ctypes.c_int(), _Heuristic()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        setter = "cublasLtMatmulPreferenceSetAttribute"
        _set(setter, preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES))
        _set(setter, preference, _REDUCTION_SCHEMES, ctypes.c_uint32(_REDUCE_IN_FP32))
        for attribute, alignment in zip(_ALIGNMENTS, alignments, strict=True):
            _set(setter, preference, attribute, ctypes.c_uint32(alignment))
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(self.device),
            self.operation,
            self.b,
            self.a,
            self.d,
            self.d,
            preference,
            1,
            ctypes.byref(result),
            ctypes.byref(found),
        )
        assert found.value == 1, "cuBLASLt knows no algorithm for this shape"
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return result

    def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, alpha: int, beta: int) -> None:
        """out = alpha op(a) op(b) + beta out; alpha and beta are addresses of FP32 numbers."""
        # What torch.cuda.current_stream(...).cuda_stream says, in a tenth of its time.
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        status = self.matmul(
            self.handle,
            self.operation,
            alpha,
            b.data_ptr(),
            self.b,
            a.data_ptr(),
            self.a,
            beta,
            out.data_ptr(),
            self.d,
            out.data_ptr(),
            self.d,
            ctypes.byref(self.algorithm),
            _workspace(self.device, stream).data_ptr(),
            _WORKSPACE_BYTES,
            stream,
        )
        assert status == 0, f"cublasLtMatmul failed with cuBLAS status {status}"


@lru_cache(maxsize=4096)
def _plan(device: int, a: Matrix, b: Matrix, d: Matrix, transposes: tuple[bool, bool]) -> _Plan:
    return _Plan(device, a, b, d, transposes)


def _matrix(x: torch.Tensor, scaling: int | None = None) -> Matrix:
    assert x.dim() == 2, x.shape
    assert x.stride(1) == 1, "row-major matrices only"
    address = x.data_ptr()
    return Matrix(x.shape[0], x.shape[1], x.stride(0), min(address & -address, _BEST_ALIGNMENT), x.dtype, scaling)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """scale * op(a) op(b), accumulated in FP32 and rounded once to the output's dtype.

    Args:
        a, b: row-major BF16 matrices on one GPU.
        scale: FP32, 0-d, in device memory; None for 1.
        out: BF16 or FP32 matrix to write; None makes a BF16 one.
        accumulate: add to `out` instead of overwriting it.
    """
    device = a.device.index
    rows, columns = a.shape[1] if transpose_a else a.shape[0], b.shape[0] if transpose_b else b.shape[1]
    if out is None:
        assert not accumulate
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device=a.device)
    assert out.shape == (rows, columns)
    assert scale is None or (scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == a.device)
    plan = _plan(device, _matrix(a), _matrix(b), _matrix(out), (transpose_a, transpose_b))
    alpha = _constant(1.0, device) if scale is None else scale
    plan.run(a, b, out, alpha.data_ptr(), _constant(1.0 if accumulate else 0.0, device).data_ptr())
    return out


def fp8_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    out: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """a b^T of FP8 operands times their scales, on the FP8 tensor cores, rounded once to the output's dtype.

    The tensor cores' own partial sums, which keep fewer bits than FP32, are added up in FP32 (no fast accumulation).

    Args:
        a, b: codes [M, K] and [N, K], contiguous float8 on one GPU, one of them E4M3; K a multiple of 16.
        scale_a, scale_b: decode scales in the layouts of `fp8_launch`, both 0-d or neither.
        out: BF16 or FP32 [M, N] to write.
        accumulate: add to `out` instead of overwriting it.
    """
    assert a.shape[1] == b.shape[1], (a.shape, b.shape)
    assert out.shape == (a.shape[0], b.shape[0]), (out.shape, a.shape, b.shape)
    operands = [_matrix(x, _scaling(x, scale)) for x, scale in ((a, scale_a), (b, scale_b))]
    plan = _plan(a.device.index, operands[0], operands[1], _matrix(out), (False, True))
    plan.point_to_scales(scale_a, scale_b)
    alpha, beta = (ctypes.addressof(_HOST_NUMBERS[value]) for value in (1.0, float(accumulate)))
    plan.run(a, b, out, alpha, beta)
    return out


def _scaling(x: torch.Tensor, scale: torch.Tensor) -> int:
    """cuBLASLt's mode for the scales of an operand [rows, K]."""
    assert scale.dtype == torch.float32, scale.dtype
    if scale.dim() == 0:
        return _ONE_SCALE
    rows, contraction = x.shape
    if scale.shape == (-(-contraction // 128), rows):
        return _BLOCKS_1X128
    assert scale.shape == (-(-rows // 128), -(-contraction // 512) * 4), (scale.shape, x.shape)
    return _BLOCKS_128X128
