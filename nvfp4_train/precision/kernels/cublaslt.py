"""BF16 GEMM whose scale is read from device memory, through cuBLASLt.

The emulated GEMM multiplies its FP32 accumulator by the operands' tensor scales and rounds once. The scales come out of
kernels, so the host does not know them without waiting for the GPU; cuBLASLt takes alpha and beta from device memory
instead, and PyTorch has no way to ask for that. It also adds weight gradients to an FP32 buffer (beta = 1) in the same
kernel.

The first algorithm of cuBLASLt's own heuristic is taken: choosing by time would give other sums in another run.
Algorithms that add parts of a sum in the output's type are ruled out: they would round more than once.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch

_HOST_POINTERS, _DEVICE_POINTERS = 0, 1
_POINTER_MODE, _TRANSPOSE_A, _TRANSPOSE_B = 2, 3, 4  # cublasLtMatmulDescAttributes_t
# cublasLtMatmulPreferenceAttributes_t; the alignments are those of A, B, C and D
_MAX_WORKSPACE, _REDUCTION_SCHEMES, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_REDUCE_IN_FP32 = 2  # CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
_COMPUTE_FP32 = 68  # CUBLAS_COMPUTE_32F
_TYPES = {torch.float32: 0, torch.bfloat16: 14}  # cudaDataType_t
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
_BEST_ALIGNMENT = 256  # bytes; cuBLASLt asks for no more

Matrix = tuple[int, int, int, int]  # rows, columns, elements from row to row, alignment in bytes


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
    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libcublasLt.so" in line})
    assert paths, "PyTorch has not loaded libcublasLt; run a matrix product on the GPU first"
    return ctypes.CDLL(paths[0])


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    assert status == 0, f"{name} failed with cuBLAS status {status}"


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


def _layout(rows: int, columns: int, stride: int, dtype: torch.dtype) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout),
        _TYPES[dtype],
        ctypes.c_uint64(rows),
        ctypes.c_uint64(columns),
        ctypes.c_int64(stride),
    )
    return layout


class _Plan:
    """Descriptors and algorithm for one shape; cuBLAS is column-major, so it is asked for D^T = op(b)^T op(a)^T."""

    def __init__(
        self,
        device: int,
        a: Matrix,
        b: Matrix,
        d: Matrix,
        transposes: tuple[bool, bool],
        out_dtype: torch.dtype,
    ) -> None:
        self.device, self.operation = device, ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self.operation), _COMPUTE_FP32, _TYPES[torch.float32])
        setter = "cublasLtMatmulDescSetAttribute"
        _set(setter, self.operation, _POINTER_MODE, ctypes.c_int32(_DEVICE_POINTERS))
        _set(setter, self.operation, _TRANSPOSE_A, ctypes.c_int32(transposes[1]))
        _set(setter, self.operation, _TRANSPOSE_B, ctypes.c_int32(transposes[0]))
        self.a = _layout(a[1], a[0], a[2], torch.bfloat16)
        self.b = _layout(b[1], b[0], b[2], torch.bfloat16)
        self.d = _layout(d[1], d[0], d[2], out_dtype)
        self.algorithm = self._choose((b[3], a[3], d[3], d[3]))

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

    def run(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        pointer = ctypes.c_void_p
        _call(
            "cublasLtMatmul",
            _handle(self.device),
            self.operation,
            pointer(alpha.data_ptr()),
            pointer(b.data_ptr()),
            self.b,
            pointer(a.data_ptr()),
            self.a,
            pointer(beta.data_ptr()),
            pointer(out.data_ptr()),
            self.d,
            pointer(out.data_ptr()),
            self.d,
            ctypes.byref(self.algorithm),
            pointer(_workspace(self.device, stream).data_ptr()),
            ctypes.c_size_t(_WORKSPACE_BYTES),
            pointer(stream),
        )


@lru_cache(maxsize=4096)
def _plan(
    device: int,
    a: Matrix,
    b: Matrix,
    d: Matrix,
    transposes: tuple[bool, bool],
    out_dtype: torch.dtype,
) -> _Plan:
    return _Plan(device, a, b, d, transposes, out_dtype)


def _matrix(x: torch.Tensor) -> Matrix:
    assert x.dim() == 2, x.shape
    assert x.stride(1) == 1, "row-major matrices only"
    address = x.data_ptr()
    return x.shape[0], x.shape[1], x.stride(0), min(address & -address, _BEST_ALIGNMENT)


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
    plan = _plan(device, _matrix(a), _matrix(b), _matrix(out), (transpose_a, transpose_b), out.dtype)
    alpha = _constant(1.0, device) if scale is None else scale
    plan.run(a, b, out, alpha, _constant(1.0 if accumulate else 0.0, device))
    return out
