"""Dense peaks of the cards we know, for MFU and for the plan. No torch here."""

from __future__ import annotations

# TFLOP/s of dense BF16 products by a part of the device's name. H100 and H200: datasheets (SXM); GB200 and GB300:
# arXiv 2509.25149.
_BF16_PEAK = {"H100 80GB HBM3": 989.0, "H200": 989.0, "GB200": 2500.0, "GB300": 2500.0}


def bf16_peak(device: str) -> float | None:
    """Dense BF16 peak of a device in TFLOP/s, None for one that we have no figure for."""
    return next((peak for part, peak in _BF16_PEAK.items() if part in device), None)
