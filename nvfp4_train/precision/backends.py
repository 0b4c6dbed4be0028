"""Which hardware multiplies which format by itself. No torch here: the caller says what the machine has.

Emulation runs anywhere; see `gemm.py` for what it computes.
"""

from __future__ import annotations

from nvfp4_train.precision.config import PrecisionConfig

# Least CUDA compute capability whose tensor cores multiply the format: Ada and Hopper for FP8 with one scale a tensor,
# Hopper for FP8 blocks (torch's scaled GEMM), Blackwell for the microscaled formats and NVFP4.
NATIVE_SINCE = {
    "bf16": (8, 0),
    "fp8_current": (8, 9),
    "fp8_delayed": (8, 9),
    "fp8_block": (9, 0),
    "mxfp8": (10, 0),
    "mxfp4": (10, 0),
    "nvfp4": (10, 0),
}

NO_NATIVE_KERNELS = "native kernels are not there yet. Write precision.backend=emulated: the same numbers, slower."


def formats_in_use(config: PrecisionConfig) -> set[str]:
    """Formats that the recipe's operands and all rules name."""
    operands = (
        *(config.fprop.input, config.fprop.weight),
        *(config.dgrad.gradient, config.dgrad.weight),
        *(config.wgrad.gradient, config.wgrad.input),
    )
    named = {operand.format for operand in operands}
    return named | {rule.format for rule in (*config.rules, *config.recipe_rules)} - {"recipe"}


def backend_support(config: PrecisionConfig, capability: tuple[int, int] | None) -> str | None:
    """Why this machine cannot run the recipe natively; None when it can.

    Args:
        config: the recipe; its `backend` is not looked at.
        capability: the GPU's CUDA compute capability, or None without a GPU.

    Returns:
        A message that names both compute capabilities and the alternatives.
    """
    used = formats_in_use(config)
    needed = max(NATIVE_SINCE[name] for name in used)
    if capability is not None and capability >= needed:
        return None
    beyond = sorted(name for name in used if capability is None or NATIVE_SINCE[name] > capability)
    here = "this machine has no CUDA device" if capability is None else f"this machine has {_dotted(capability)}"
    fitting = [name for name, since in NATIVE_SINCE.items() if capability is not None and since <= capability]
    others = f", or a recipe that runs natively here ({', '.join(fitting)})" if fitting else ""
    return (
        f"Recipe {config.name} cannot run natively: {' and '.join(beyond)} needs compute capability {_dotted(needed)}, "
        f"and {here}. Write precision.backend=emulated (the same numbers, slower){others}."
    )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
