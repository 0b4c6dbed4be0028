"""Dense peaks of the cards we know, for MFU and for the plan. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

# TFLOP/s of dense products by a part of the device's name and by what the tensor cores multiply. H100 and H200:
# datasheets (SXM); GB200 and GB300: arXiv 2509.25149. MXFP8 has FP8's rate.
_PEAKS = {
    "H100 80GB HBM3": {"bf16": 989.0, "fp8": 1979.0},
    "H200": {"bf16": 989.0, "fp8": 1979.0},
    "GB200": {"bf16": 2500.0, "fp8": 5000.0, "nvfp4": 10000.0},
    "GB300": {"bf16": 2500.0, "fp8": 5000.0, "nvfp4": 15000.0},
}


def tensor_cores(formats: str) -> str:
    """`bf16`, `fp8` or `nvfp4`: what multiplies operands of a format, of the slower one where they are `a x b`."""
    kinds = {"fp8" if "fp8" in name else name for name in formats.split(" x ")}
    return next(kind for kind in ("bf16", "fp8", "nvfp4") if kind in kinds)


def bf16_peak(device: str) -> float | None:
    """Dense BF16 peak of a device in TFLOP/s, None for one that we have no figure for."""
    peaks = _of(device)
    return None if peaks is None else peaks["bf16"]


def weighted_peak(device: str, operations: Mapping[str, float]) -> float | None:
    """TFLOP/s of work that keeps all tensor cores busy and runs in several formats one after another.

    Args:
        device: name of the card.
        operations: by what multiplies (`tensor_cores`); only their proportions count.
    """
    peaks = _of(device)
    if peaks is None:
        return None
    return sum(operations.values()) / sum(count / peaks[kind] for kind, count in operations.items())


def _of(device: str) -> dict[str, float] | None:
    return next((peaks for part, peaks in _PEAKS.items() if part in device), None)
