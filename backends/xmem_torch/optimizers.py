"""AdamW, Adam, Lion, SGD and Adafactor with states in few bits on PyTorch (2.13).

With `state_bits=32` they are torch.optim's rules (Adafactor for vectors and matrices; of more axes
it makes one matrix). See `xmem.optim_rules` for the rules, `few_bits.py` for what they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from xmem import optim_rules as rules
from xmem.errors import UsageError, unknown
from xmem.receipts import Receipt
from xmem_torch import updates
from xmem_torch.few_bits import Optimizer, Place, contiguous

_EPSILON = 2.0**-23
_LEFT_TO_PYTORCH = {"foreach": None, "differentiable": False, "fused": None}


class AdamW(Optimizer):
    """Adam; a group's "decoupled_weight_decay" says how weights decay."""

    rule = "adam"
    moments: ClassVar[Mapping[str, rules.Moment]] = {"exp_avg": "first", "exp_avg_sq": "second"}
    plain_options: ClassVar[Mapping[str, Any]] = {
        "amsgrad": False,
        "capturable": False,
        **_LEFT_TO_PYTORCH,
    }
    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        maximize: bool = False,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "decoupled_weight_decay": self.decoupled,
            "state_bits": state_bits,
            "min_elements": min_elements,
        }
        super().__init__(params, defaults)

    def numbers(self, group: Mapping[str, Any], step: int) -> rules.Numbers:
        """Return what a group's step needs."""
        beta1, beta2 = group["betas"]
        return rules.adam_numbers(
            step,
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group.get("decoupled_weight_decay", self.decoupled),
        )


class Adam(AdamW):
    """Adam whose decay is a part of the gradient, as torch.optim.Adam has it."""

    decoupled = False


class Lion(Optimizer):
    """The sign of a mixture of gradient and momentum."""

    rule = "lion"
    moments: ClassVar[Mapping[str, rules.Moment]] = {"exp_avg": "first"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "state_bits": state_bits,
            "min_elements": min_elements,
        }
        super().__init__(params, defaults)

    def numbers(self, group: Mapping[str, Any], step: int) -> rules.Numbers:
        """Return what a group's step needs."""
        return rules.lion_numbers(
            lr=float(group["lr"]), betas=group["betas"], weight_decay=group["weight_decay"]
        )


class SGD(Optimizer):
    """Stochastic gradient descent with momentum; made by `quantize_optimizer`."""

    rule = "sgd"
    moments: ClassVar[Mapping[str, rules.Moment]] = {"momentum_buffer": "first"}
    plain_options: ClassVar[Mapping[str, Any]] = _LEFT_TO_PYTORCH

    def numbers(self, group: Mapping[str, Any], step: int) -> rules.Numbers:
        """Return what a group's step needs."""
        return rules.sgd_numbers(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
        )

    def flags(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> int:
        """Return the flags of a parameter's step."""
        return (
            super().flags(group, state)
            + rules.NESTEROV * bool(group["nesterov"])
            + rules.FIRST_STEP * (state.get("momentum_buffer") is None)
        )


class Adafactor(Optimizer):
    """Adam's second moment as a row and a column, and steps relative to the parameter's size."""

    moments: ClassVar[Mapping[str, rules.Moment]] = {"exp_avg": "first"}
    plain_options: ClassVar[Mapping[str, Any]] = {"foreach": None}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        beta1: float | None = None,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        state_bits: int = 8,
        min_elements: int = 4096,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "state_bits": state_bits,
            "min_elements": min_elements,
        }
        super().__init__(params, defaults)

    def update(self, found: Sequence[Place]) -> None:
        """Step parameters one after the other: each needs sums over all of it."""
        for group, p, index in found:
            state = self.state[p]
            row, column = self._factors(p, state)
            first = None if group["beta1"] is None else self.held(group, p, "exp_avg")
            step = state["step"] = state.get("step", 0) + 1
            parameter, gradient = contiguous(p)
            lr, (least, smallest) = float(group["lr"]), group["eps"]
            numbers = (
                group["beta1"] or 0.0,
                step ** group["beta2_decay"],
                _EPSILON if least is None else least,
                smallest,
                1 - lr * group["weight_decay"],
                min(lr, step**-0.5),
                group["d"],
            )
            updates.apply_factored(
                updates.Factored(
                    parameter,
                    gradient,
                    row,
                    column,
                    first,
                    group["state_bits"],
                    rules.seed_of(step, index),
                    numbers,
                    group["maximize"],
                )
            )
            if parameter is not p:
                p.copy_(parameter)

    def _factors(self, p: Any, state: dict[str, Any]) -> tuple[Any, Any]:
        """Return row and column, in the shapes that torch.optim.Adafactor has for matrices."""
        if p.dim() < 2:
            if "variance" not in state:
                state["variance"] = torch.zeros_like(p, dtype=torch.float32)
            return None, state["variance"]
        if "row_var" not in state:
            rows = p.shape[0]
            columns = p.numel() // max(rows, 1)
            state["row_var"] = torch.zeros(rows, 1, device=p.device)
            state["col_var"] = torch.zeros(1, columns, device=p.device)
        return state["row_var"], state["col_var"]


RULES = {"adamw": AdamW, "adafactor": Adafactor, "lion": Lion}


def make_optimizer(
    rule: str, parameters: Iterable[Any], options: Mapping[str, Any], *, state_bits: int
) -> Any:
    """The option "engine" may name another library; see `engines.py`."""
    if rule not in RULES:
        raise UsageError(unknown("update rule", rule, RULES))
    from xmem_torch import engines

    given = dict(options)
    parameters = list(parameters)
    if not parameters:
        raise UsageError("params is empty: give the parameters to train, or groups of them")
    engine = engines.choose(given.pop("engine", "auto"), rule, parameters, state_bits)
    if engine != "xmem":
        return engines.make(engine, rule, parameters, given, state_bits=state_bits)
    return RULES[rule](parameters, **given, state_bits=state_bits)


def quantize_optimizer(optimizer: Any, bits: int, *, min_elements: int) -> Any:
    """Change the optimizer's class and states in place; see `conversion.py`."""
    from xmem_torch.conversion import go_on
    from xmem_torch.streamed_states import brought_back

    with brought_back(optimizer):
        return go_on(optimizer, bits, min_elements=min_elements)


def optimizer_in_backward(model: Any, optimizer: Any) -> Receipt:
    """Step in hooks behind each gradient's accumulation; see `in_backward.py`."""
    from xmem_torch.in_backward import step_in_backward

    return step_in_backward(model, optimizer)
