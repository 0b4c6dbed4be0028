"""What runs between the linears besides the mixers' cores: norms, squared ReLU and the loss. In plain torch, or as one
kernel each on a CUDA device, where walking over memory several times costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor
from torch.distributed import ProcessGroup

from models.config import ModelConfig, ModelError
from models.kernels import TOLERANCE, largest_error
from models.norm import ACTIVATION_DTYPE, BlockNormFunction, NormFunction, block_norm, rms_norm

LossFunction = Callable[[Tensor, Tensor, ProcessGroup], Tensor]
_ROWS = 64  # of the comparison's inputs


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2. Megatron's own goes through torch.compile at its first call."""
    return F.relu(x).square()


def cross_entropy(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """Nats, FP32 [...], of logits [..., vocabulary / ranks] split over the ranks of a group, for labels [...]."""
    return vocab_parallel_cross_entropy(logits, labels, tp_group=group)


@dataclass(frozen=True)
class Pointwise:
    """The functions in use, and the line that says so.

    Attributes:
        norm: as `norm.rms_norm`.
        block_norm: as `norm.block_norm`.
        squared_relu: as the one here, of BF16.
        cross_entropy: as the one here.
    """

    norm: NormFunction
    block_norm: BlockNormFunction
    squared_relu: Callable[[Tensor], Tensor]
    cross_entropy: LossFunction
    description: str

    @property
    def fused(self) -> bool:
        """Whether any of them is a kernel, to be compared with plain torch before it is trusted."""
        return self != in_torch(self.description)


def in_torch(description: str) -> Pointwise:
    """All of them in plain torch."""
    return Pointwise(rms_norm, block_norm, squared_relu, cross_entropy, description)


def choose_pointwise(config: ModelConfig, device: torch.device) -> Pointwise:
    """Kernels on a CUDA device unless `config.kernels` says torch."""
    if config.kernels == "torch" or device.type != "cuda":
        return in_torch("norms, squared ReLU and loss: PyTorch")
    from models import fused, fused_norm

    said = "norms, squared ReLU and loss: Triton"
    return Pointwise(fused_norm.rms_norm, fused_norm.block_norm, fused.squared_relu, fused.cross_entropy, said)


def compare_pointwise(config: ModelConfig, chosen: Pointwise, device: torch.device) -> float:
    """Run each function and its plain form once, forward and backward, on small random inputs of the model's sizes.

    Returns:
        The largest relative error (2-norm) over results and gradients.

    Raises:
        ModelError: an error beyond what BF16 explains, or not a number.
    """
    plain, hidden = in_torch(""), config.hidden_size
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, hidden, generator=generator).to(device, ACTIVATION_DTYPE)
    turned = x.view(_ROWS // 2, 2, hidden).transpose(0, 1)  # as the scan leaves its result
    weight = torch.randn(hidden, generator=generator).to(device)
    labels = torch.randint(0, hidden * group.size(), (_ROWS,), generator=generator).to(device)

    def norms(functions: Pointwise) -> Callable[..., Tensor]:
        return lambda x, weight: functions.norm(x, weight, config.norm_eps, hidden // 2)

    def block_norms(functions: Pointwise) -> Callable[..., Tensor]:
        return lambda x, weight: torch.cat(functions.block_norm(x, weight, config.norm_eps))

    def losses(functions: Pointwise) -> Callable[..., Tensor]:
        return lambda x: functions.cross_entropy(x, labels, group)

    checks = {
        "norm": (norms(chosen), norms(plain), (turned, weight)),
        "norm of a block": (block_norms(chosen), block_norms(plain), (x, weight)),
        "squared ReLU": (chosen.squared_relu, plain.squared_relu, (x,)),
        "loss": (losses(chosen), losses(plain), (x,)),
    }
    found: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, (function, reference, inputs) in checks.items():
        found |= _with_gradients(name, function, inputs)
        expected |= _with_gradients(name, reference, inputs)
    worst, error = largest_error(found, expected)
    if not error <= TOLERANCE:
        kind = worst.partition("/")[0]
        raise ModelError(
            f"{chosen.description}: the {kind} or its gradient differs from PyTorch's by {error:.3g} (limit "
            f"{TOLERANCE}), so training with these kernels would go wrong. Write model.kernels=torch"
        )
    return error


def _with_gradients(name: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """FP32 result (`name`/0) and gradients, the result weighted by numbers that repeat at every call."""
    leaves = [leaf.clone().requires_grad_() for leaf in inputs]
    result = function(*leaves)
    weights = torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape).to(result.dtype)
    gradients = torch.autograd.grad(result, leaves, weights)
    return {f"{name}/{number}": each.float() for number, each in enumerate((result.detach(), *gradients))}
