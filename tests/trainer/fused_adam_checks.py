"""AdamW's kernel against torch's AdamW, on a GPU or (as a program) in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so it needs a process of its own:
TRITON_INTERPRET=1 python -m tests.trainer.fused_adam_checks
"""

from __future__ import annotations

from typing import Any

import torch

from nvfp4_train import fused_adam

SHAPES = ((130,), (8, 10), (2,), (66,), (4200,))


def check_updates(device: str) -> None:
    """Four updates by gradients times a factor: tensors at any address, more than one share, two groups. Before each,
    one whose factor is NaN changes no bit.
    """
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    theirs = [parameter.clone() for parameter in mine]
    count, common = sum(parameter.numel() for parameter in mine), {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}

    def groups(parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
        return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]

    fused, plain = fused_adam.FusedAdamW(groups(mine), **common), torch.optim.AdamW(groups(theirs), **common)
    for parameter in mine:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        fused.state[parameter].update(step=torch.tensor(0.0), **moments)
    factor, nan = (torch.tensor(value, dtype=torch.float64, device=device) for value in (0.37, float("nan")))
    for step in range(4):
        buffer = torch.randn(count + 2, generator=generator).to(device)  # elsewhere each time
        pieces = buffer[2:].split([parameter.numel() for parameter in mine])
        for own, other, piece in zip(mine, theirs, pieces, strict=True):
            own.grad = piece.view(own.shape)
            other.grad = own.grad * 0.37
        mine[3].grad = None if step == 2 else mine[3].grad
        theirs[3].grad = None if step == 2 else theirs[3].grad
        held = [*mine, *(moment for state in fused.state.values() for moment in state.values())]
        before = [tensor.clone() for tensor in held]
        fused.factor = nan
        fused.step()
        assert fused.state[mine[0]]["step"] == step + 1  # launched before anyone knew
        fused.uncount()
        assert all(map(torch.equal, held, before))
        fused.factor = factor
        fused.step()
        plain.step()
        if step == 2:  # one that had no gradient counts along: all share one count
            plain.state[theirs[3]]["step"] += 1
            fused.state[mine[3]]["step"] += 1
    for own, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(fused.state[own][name], plain.state[other][name], rtol=1e-5, atol=1e-7)
        assert fused.state[own]["step"] == 4


if __name__ == "__main__":
    fused_adam._ELEMENTS = 256
    check_updates("cpu")
    print("equal")
