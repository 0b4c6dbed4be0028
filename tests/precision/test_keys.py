"""Keys of random bits in device memory: those of `element_key`, in any order, and the same bits from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_train.precision.config import QuantSpec
from nvfp4_train.precision.keys import DeviceKeys
from nvfp4_train.precision.quantizer import quantize_values
from nvfp4_train.precision.rotation import signs_of
from nvfp4_train.precision.rounding import element_key, random_bytes, signed

from .linears import RECIPE, precision, run, standalone, tensors
from .recipe_files import NAMES

CPU = torch.device("cpu")
OPERANDS = [("a", "dgrad.gradient"), ("a", "wgrad.gradient"), ("b", "wgrad.signs"), ("output_layer", "dgrad.gradient")]
# The second has its top bit set.
KEYS = [0x123456789ABCDEF0, 0xFEDCBA9876543210, 0, 2**64 - 1]


def bits(key: torch.Tensor) -> int:
    return int(key) % 2**64


def test_every_operand_has_the_key_of_its_hash_whatever_the_order() -> None:
    for operands in (OPERANDS, OPERANDS[::-1]):
        keys = DeviceKeys(operands, CPU)
        for step, microbatch in ((0, 0), (7, 3)):  # refilled in place
            views = [keys[operand] for operand in operands]
            keys.fill(5, step, microbatch)
            assert [bits(view) for view in views] == [element_key(5, step, microbatch, *o) for o in operands]


def test_an_unknown_operand_is_no_key() -> None:
    with pytest.raises(KeyError):
        DeviceKeys(OPERANDS, CPU)["a", "fprop.input"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_memory_gives_the_bytes_and_signs_of_the_number(key: int) -> None:
    there = torch.tensor(signed(key))
    for shape in ((4, 64), (3, 20)):
        assert torch.equal(random_bytes(there, *shape), random_bytes(key, *shape))
    spec = QuantSpec("nvfp4", rotation=128, signs="fresh")
    assert torch.equal(signs_of(spec, there), signs_of(spec, key))


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "quartet2", "bf16_fwd_nvfp4_bwd"])
def test_a_linear_asks_for_no_other_key_than_it_names(name: str) -> None:
    """With its keys in memory a linear gives the bits that it gives with numbers."""
    x, w, dy = tensors()
    results = []
    for in_memory in (False, True):
        gemms = standalone(precision(name))
        if in_memory:
            gemms.runtime.read_keys_from(CPU, gemms.random_operands())
            gemms.runtime.begin_microbatch(3)
            gemms.runtime.begin_microbatch(0)  # another began in between
        assert (gemms.runtime.call().keys is not None) == in_memory
        results.append(run(gemms, x, w, dy))
    for number, memory in zip(*results, strict=True):
        assert torch.equal(number, memory)


def test_quantized_values_of_a_key_in_memory() -> None:
    x, _, _ = tensors()
    spec = QuantSpec("nvfp4", rounding="stochastic", rotation=128, signs="fresh")
    expected = quantize_values(x, spec, key=KEYS[1], axis=0)
    found = quantize_values(x, spec, key=torch.tensor(signed(KEYS[1])), axis=0)
    assert torch.equal(found.values, expected.values)


class _NumbersAskedFor(TorchDispatchMode):
    """Operations for which a host waits for a device, or a device for a copy of the host's memory."""

    ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh", "equal.default")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = "aten.index" in str(func) and any(
            index is not None and index.dtype == torch.bool for index in args[1] if isinstance(args[1], (list, tuple))
        )
        if by_mask or any(name in str(func) for name in self.ASKING):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_of_a_pass_asks_a_device_for_a_number(name: str) -> None:
    """Neither a GPU that is to stay busy nor one whose launches are recorded could answer."""
    x, w, dy = tensors()
    gemms = standalone(precision(name))
    gemms.runtime.read_keys_from(CPU, gemms.random_operands())
    run(gemms, x, w, dy)  # fills caches
    gemms.runtime.end_step()
    gemms.runtime.begin_step(2, RECIPE)
    gemms.runtime.begin_microbatch(0)
    with _NumbersAskedFor() as numbers:
        run(gemms, x, w, dy)
    assert numbers.seen == ["aten._local_scalar_dense.default"]  # of `runtime.call`: a number in the host's memory
