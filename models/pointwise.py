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
from models.kernels import INSTALL, TOLERANCE, import_or_reason, largest_error
from models.norm import ACTIVATION_DTYPE, NormFunction, rms_norm

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
        squared_relu: as the one here, of BF16.
        cross_entropy: as the one here.
    """

    norm: NormFunction
    squared_relu: Callable[[Tensor], Tensor]
    cross_entropy: LossFunction
    description: str

    @property
    def fused(self) -> bool:
        """Whether any of them is a kernel, to be compared with plain torch before it is trusted."""
        return self != in_torch(self.description)


def in_torch(description: str) -> Pointwise:
    """All of them in plain torch."""
    return Pointwise(rms_norm, squared_relu, cross_entropy, description)


def choose_pointwise(config: ModelConfig, device: torch.device) -> Pointwise:
    """Kernels on a CUDA device unless `config.kernels` says torch; the norms' come with mamba-ssm."""
    if config.kernels == "torch" or device.type != "cuda":
        return in_torch("norms, squared ReLU and loss: PyTorch")
    from models import fused

    gated, reason = import_or_reason("mamba_ssm.ops.triton.layernorm_gated", "mamba-ssm")
    if gated is None:
        said = f"squared ReLU and loss: Triton; norms: PyTorch (slow path; {reason})"
        return Pointwise(rms_norm, fused.squared_relu, fused.cross_entropy, said)

    def norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
        assert x.dtype == ACTIVATION_DTYPE, f"the kernel's result has its input's type, {x.dtype}"
        result: Tensor = gated.rmsnorm_fn(x, weight, None, eps=eps, group_size=group_size)
        return result

    return Pointwise(norm, fused.squared_relu, fused.cross_entropy, f"squared ReLU and loss: Triton; norms: {reason}")


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
    x = torch.randn(_ROWS, hidden, generator=generator).to(device)
    weight = torch.randn(hidden, generator=generator).to(device)
    labels = torch.randint(0, hidden * group.size(), (_ROWS,), generator=generator).to(device)

    def norms(functions: Pointwise) -> Callable[..., Tensor]:
        return lambda x, weight: functions.norm(x, weight, config.norm_eps, hidden // 2)

    def losses(functions: Pointwise) -> Callable[..., Tensor]:
        return lambda x: functions.cross_entropy(x, labels, group)

    checks = {
        "norm": (norms(chosen), norms(plain), (x.to(ACTIVATION_DTYPE), weight)),
        "squared ReLU": (chosen.squared_relu, plain.squared_relu, (x.to(ACTIVATION_DTYPE),)),
        "loss": (losses(chosen), losses(plain), (x.to(ACTIVATION_DTYPE),)),
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
            f"{TOLERANCE}), so training with these kernels would go wrong. Reinstall them ({INSTALL}) or write "
            "model.kernels=torch"
        )
    return error


def _with_gradients(name: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """FP32 result (`name`/0) and gradients, the result weighted by numbers that repeat at every call."""
    leaves = [leaf.clone().requires_grad_() for leaf in inputs]
    result = function(*leaves)
    weights = torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape).to(result.dtype)
    gradients = torch.autograd.grad(result, leaves, weights)
    return {f"{name}/{number}": each.float() for number, each in enumerate((result.detach(), *gradients))}
