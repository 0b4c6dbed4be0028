"""Precision: formats, quantizers, recipes and the three GEMMs. `quantize` is imported on first use, so that reading a configuration needs no torch."""

from typing import TYPE_CHECKING, Any

from nvfp4_train.precision.config import QuantSpec

if TYPE_CHECKING:
    from nvfp4_train.precision.quantize import Quantized, quantize

__all__ = ["QuantSpec", "Quantized", "quantize"]


def __getattr__(name: str) -> Any:
    if name in ("quantize", "Quantized"):
        from nvfp4_train.precision import quantize as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
