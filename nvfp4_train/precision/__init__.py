"""Precision: formats, quantizers, recipes and the three GEMMs.

Quantizers are imported on first use, so that reading a configuration needs no torch.
"""

from typing import TYPE_CHECKING, Any

from nvfp4_train.precision.config import QuantSpec

if TYPE_CHECKING:
    from nvfp4_train.precision.quantizer import Quantized, Values, quantize, quantize_values

__all__ = ["QuantSpec", "Quantized", "Values", "quantize", "quantize_values"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from nvfp4_train.precision import quantizer

        return getattr(quantizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
