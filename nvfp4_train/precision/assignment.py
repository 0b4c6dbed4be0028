"""Which linear runs in which precision, and who decided it. No torch here.

The order of decision, for each linear: the user's `rules`, then `bf16_blocks`, then the recipe's own `recipe_rules`,
then the recipe's operands; the output layer stays in BF16 unless a rule asks for more. Last comes what the formats
allow: a linear whose widths do not fit stays in BF16 and says so. Blocks are counted from 0 over the whole model, so
the answer is the same on every pipeline stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nvfp4_train.precision.config import Dgrad, Fprop, Operand, PrecisionConfig, PrecisionError, Rule, Wgrad
from nvfp4_train.precision.fit import LinearShape, misfit
from nvfp4_train.precision.recipes import Gemms, standard_gemms
from nvfp4_train.precision.rules import check_user_rules, first_match

BF16_GEMMS = standard_gemms("bf16")


@dataclass(frozen=True)
class LinearPrecision:
    """What was decided for one linear.

    Attributes:
        name, block, letter, role, in_features, out_features: of the unsharded model.
        fprop, dgrad, wgrad: operands of each GEMM; None is plain BF16.
        decided_by: the rule, setting or recipe that decided.
        reason: why the linear is in BF16; empty where it is quantized.
        format: one name for the three GEMMs, such as `nvfp4` or `nvfp4 fwd, bf16 bwd`.
    """

    name: str
    block: int | None
    letter: str | None
    role: str
    in_features: int
    out_features: int
    fprop: Fprop | None
    dgrad: Dgrad | None
    wgrad: Wgrad | None
    decided_by: str
    reason: str
    format: str

    @property
    def operands(self) -> dict[str, dict[str, Operand]]:
        """GEMM -> operand name -> operand, BF16 ones included."""
        fprop, dgrad, wgrad = (self.fprop or BF16_GEMMS[0], self.dgrad or BF16_GEMMS[1], self.wgrad or BF16_GEMMS[2])
        return {
            "fprop": {"input": fprop.input, "weight": fprop.weight},
            "dgrad": {"gradient": dgrad.gradient, "weight": dgrad.weight},
            "wgrad": {"gradient": wgrad.gradient, "input": wgrad.input},
        }

    @property
    def gemm_formats(self) -> dict[str, str]:
        """GEMM -> format: one name where both operands have the same, else `a x b`."""
        return {
            gemm: _joined([operand.format for operand in pair.values()], " x ") for gemm, pair in self.operands.items()
        }


class Decision(NamedTuple):
    """What was decided for a linear before its widths were looked at."""

    gemms: Gemms
    decided_by: str
    reason: str = ""


def assign(config: PrecisionConfig, shapes: Sequence[LinearShape], tensor: int = 1) -> tuple[LinearPrecision, ...]:
    """Decide the precision of every linear of a model.

    Args:
        config: the recipe with the user's overrides.
        shapes: every linear of the unsharded model, the output layer included.
        tensor: tensor-parallel ranks; formats must fit the width that a rank holds.

    Returns:
        One `LinearPrecision` a shape, in the same order.

    Raises:
        PrecisionError: a user's rule that decides nothing, more BF16 blocks than blocks, or a recipe that is not BF16
            and would quantize nothing.
    """
    check_user_rules(config.rules, shapes)
    ends = bf16_ends(config, shapes)
    decided = tuple(_apply(shape, _decide(config, shape, *ends), tensor) for shape in shapes)
    _check_something_quantized(config, decided)
    return decided


def num_blocks(shapes: Sequence[LinearShape]) -> int:
    """Blocks of the model: every block has a linear."""
    return 1 + max((shape.block for shape in shapes if shape.block is not None), default=-1)


def bf16_ends(config: PrecisionConfig, shapes: Sequence[LinearShape]) -> tuple[int, int, int]:
    """First blocks and last blocks that stay in BF16, and all blocks of the model. Raises PrecisionError."""
    blocks = num_blocks(shapes)
    first, last = config.bf16_blocks.counts(blocks)
    if first + last > blocks:
        written = f"first={config.bf16_blocks.first} and last={config.bf16_blocks.last}"
        raise PrecisionError(
            f"precision.bf16_blocks {written} keep {first} + {last} blocks in BF16, but the model has {blocks}. "
            f"Write counts that sum up to less than {blocks}, or precision=bf16 if nothing is to be quantized."
        )
    return first, last, blocks


def rule_name(kind: str, index: int, rule: Rule) -> str:
    """How a report names a rule: `precision.rules[0] (role fc1 -> mxfp8)`."""
    return f"precision.{kind}[{index}] ({rule})"


def recipe_gemms(config: PrecisionConfig) -> Gemms:
    """The recipe's own operands."""
    return Gemms(config.fprop, config.dgrad, config.wgrad)


def _decide(config: PrecisionConfig, shape: LinearShape, first: int, last: int, blocks: int) -> Decision:
    index = first_match(config.rules, shape)
    if index is not None:
        return _by_rule(config, "rules", index)
    if shape.block is not None and shape.block < first:
        return _by_ends(f"the first {first} of {blocks} blocks")
    if shape.block is not None and shape.block >= blocks - last:
        return _by_ends(f"the last {last} of {blocks} blocks")
    index = first_match(config.recipe_rules, shape)
    if index is not None:
        return _by_rule(config, "recipe_rules", index)
    if shape.role == "output":
        return Decision(BF16_GEMMS, "output layer", "the output layer stays in BF16 unless a rule says otherwise")
    recipe = f"recipe {config.name}"
    gemms = recipe_gemms(config)
    return Decision(gemms, recipe, f"{recipe} is BF16 throughout" if _format(gemms) == "bf16" else "")


def _by_ends(which: str) -> Decision:
    return Decision(BF16_GEMMS, "precision.bf16_blocks", f"{which} stay in BF16")


def _by_rule(config: PrecisionConfig, kind: str, index: int) -> Decision:
    rule = getattr(config, kind)[index]
    name = rule_name(kind, index, rule)
    gemms = recipe_gemms(config) if rule.format == "recipe" else standard_gemms(rule.format)
    return Decision(gemms, name, f"{name} says so" if _format(gemms) == "bf16" else "")


def _apply(shape: LinearShape, decision: Decision, tensor: int) -> LinearPrecision:
    problem = misfit(shape, decision.gemms, tensor)
    gemms, reason = (BF16_GEMMS, problem) if problem else (decision.gemms, decision.reason)
    fprop, dgrad, wgrad = gemms
    return LinearPrecision(
        name=shape.name,
        block=shape.block,
        letter=shape.letter,
        role=shape.role,
        in_features=shape.in_features,
        out_features=shape.out_features,
        fprop=None if _plain(fprop.input, fprop.weight) else fprop,
        dgrad=None if _plain(dgrad.gradient, dgrad.weight) else dgrad,
        wgrad=None if _plain(wgrad.gradient, wgrad.input) else wgrad,
        decided_by=decision.decided_by,
        reason=reason,
        format=_format(gemms),
    )


def _plain(*operands: Operand) -> bool:
    """Whether a GEMM is plain BF16: on decoded operands it is not, although it multiplies BF16 values."""
    return all(operand.format == "bf16" and operand.source == "original" for operand in operands)


def _format(gemms: Gemms) -> str:
    fprop, dgrad, wgrad = gemms
    forward = _joined([fprop.input.format, fprop.weight.format], " x ")
    input_gradient = _joined([dgrad.gradient.format, dgrad.weight.format], " x ")
    weight_gradient = _joined([wgrad.gradient.format, wgrad.input.format], " x ")
    backward = _joined([input_gradient, weight_gradient], " and ")
    return forward if forward == backward else f"{forward} fwd, {backward} bwd"


def _joined(names: list[str], separator: str) -> str:
    return separator.join(dict.fromkeys(names))


def _check_something_quantized(config: PrecisionConfig, decided: Sequence[LinearPrecision]) -> None:
    asked = {rule.format for rule in config.rules} - {"bf16", "recipe"}
    if (_format(recipe_gemms(config)) == "bf16" and not asked) or any(linear.format != "bf16" for linear in decided):
        return
    counts = Counter(linear.reason for linear in decided)
    reasons = "".join(f"\n  {count} x {reason}" for reason, count in counts.most_common(6))
    raise PrecisionError(
        f"Recipe {config.name} would quantize nothing: all {len(decided)} linears stay in BF16.{reasons}\n"
        "Choose widths that fit, keep fewer blocks in BF16, or write precision=bf16."
    )
