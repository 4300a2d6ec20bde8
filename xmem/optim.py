"""Optimizers whose states take few bits: `xmem.optim.AdamW`, `Lion`, `Adafactor`, on any backend.

Each function returns an optimizer of the active framework's own kind, so groups, schedules,
clipping, scalers and `state_dict` work as they do there. `xmem.optim_rules` has the rules and their
sources. States take 2.03 bytes a parameter at 8 bits, 1.03 at 4 (AdamW; half as much for Lion), 8
at 32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from xmem.api import active
from xmem.errors import UsageError
from xmem.receipts import Receipt


def AdamW(  # noqa: N802
    params: Iterable[Any],
    lr: float = 1e-3,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    maximize: bool = False,
    state_bits: int = 8,
    min_elements: int = 4096,
    engine: str = "auto",
) -> Any:
    """Return AdamW.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: the step.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient.
        maximize: climb instead of descending.
        state_bits: 32, 8 or 4, of each moment.
        min_elements: smaller parameters keep float32 states.
        engine: "auto", "xmem", or on PyTorch "bitsandbytes" or "torchao", which have their own
            rounding and layout; "auto" is xmem, and bitsandbytes on CUDA where it is installed.

    Raises:
        UsageError: an option that is out of its range, with the range.
    """
    options = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return _make("adamw", params, options, state_bits, min_elements, engine)


def Lion(  # noqa: N802
    params: Iterable[Any],
    lr: float = 1e-4,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
    state_bits: int = 8,
    min_elements: int = 4096,
    engine: str = "auto",
) -> Any:
    """Return Lion: the sign of a mixture of gradient and momentum; see `AdamW`.

    Raises:
        UsageError: an option that is out of its range, with the range.
    """
    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
    return _make("lion", params, options, state_bits, min_elements, engine)


def Adafactor(  # noqa: N802
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
) -> Any:
    """Return Adafactor, which keeps the second moment as a row and a column for each matrix.

    A tensor of more axes is seen as the matrix of its first axis and all others, which needs less
    than PyTorch's factors of the last two.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: the largest relative step; after t steps it is at most 1 / sqrt(t).
        beta1: the decay of a first moment; None keeps none. Only this state takes `state_bits`:
            the factors are small and stay float32.
        beta2_decay: the second moment's decay is 1 - t^beta2_decay.
        eps: the least second moment (its root; None: float32's epsilon), and the least size of a
            parameter that steps are relative to.
        d: the largest root mean square of an update.
        weight_decay: decoupled from the gradient.
        maximize: climb instead of descending.
        state_bits: 32, 8 or 4, of the first moment.
        min_elements: smaller parameters keep a float32 first moment.

    Raises:
        UsageError: an option that is out of its range, with the range.
    """
    options = {
        "lr": lr,
        "beta1": beta1,
        "beta2_decay": beta2_decay,
        "eps": eps,
        "d": d,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return _make("adafactor", params, options, state_bits, min_elements, "auto")


def quantize_optimizer(optimizer: Any, bits: int = 8, *, min_elements: int = 4096) -> Any:
    """Turn a running optimizer's states into few bits; training goes on where it is.

    The optimizer is changed in place and returned: moments are packed; groups, options and counts
    of steps stay, so schedulers, scalers and hooks that hold the optimizer need no rebuilding.

    Args:
        optimizer: the framework's own AdamW, Adam, or SGD with momentum.
        bits: 8 or 4.
        min_elements: states of smaller parameters stay float32.

    Returns:
        The optimizer. Its `plain_state_dict()` is what the framework's own optimizer loads, and its
        `load_state_dict` takes such a state too.

    Raises:
        UsageError: there is no update rule for this optimizer; names those there are.
    """
    if bits not in (8, 4) or not isinstance(bits, int):
        raise UsageError(f"bits is {bits!r}; optimizer states are packed in 8 or 4 bits.")
    _check_elements(min_elements)
    return active().quantize.quantize_optimizer(optimizer, bits, min_elements=min_elements)


def optimizer_in_backward(model: Any, optimizer: Any) -> Receipt:
    """Step each parameter as soon as its gradient is there, and drop the gradient.

    So gradients never all exist at once; parameters come out the same, bit for bit. Afterwards a
    training step is `xmem.backward` alone: no `optimizer_step`, no `zero_grad`. Each backward is
    a step, so gradients of several cannot be added up, clipped, or scaled: those functions refuse.

    Args:
        model: a native module.
        optimizer: the framework's own, or one of `xmem.optim`; schedulers of it go on working.

    Returns:
        A receipt; `receipt.undo()` ends it.

    Raises:
        CapabilityError: the framework cannot.
        CompositionError: the optimizer or the model is in a combination that cannot work.
    """
    from xmem import in_backward
    from xmem.receipts import issue

    if in_backward.steps_in_backward(optimizer):
        raise UsageError("this optimizer steps in backward already; undo its receipt first")
    receipt = active().quantize.optimizer_in_backward(model, optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return issue(in_backward.note(receipt, optimizer, parameters))


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that are out of their range.

    Args:
        options: those of one of the functions above, of a group or of all; others pass.

    Raises:
        UsageError: names the option, its value and its range.
    """
    for name, value in options.items():
        if name in ("lr", "weight_decay"):
            _check(name, value, "a number from 0", valid=_finite(value) and value >= 0)
        elif name == "betas":
            pair = isinstance(value, (tuple, list)) and len(value) == 2
            valid = pair and all(_finite(b) and 0 <= b < 1 for b in value)
            _check(name, value, "two numbers from 0, below 1", valid=valid)
        elif name == "beta1" and value is not None:
            valid = _finite(value) and 0 <= value < 1
            _check(name, value, "None, or from 0 and below 1", valid=valid)
        elif name == "eps":
            _check_eps(value, options)
        elif name == "d":
            _check(name, value, "from 1", valid=_finite(value) and value >= 1)
        elif name == "beta2_decay":
            _check(name, value, "0 or below", valid=_finite(value) and value <= 0)
        elif name == "state_bits":
            from xmem.optim_rules import check_state_bits  # NumPy is slow to import

            check_state_bits(value)
        elif name == "min_elements":
            _check_elements(value)


def _make(
    rule: str,
    params: Iterable[Any],
    options: dict[str, Any],
    state_bits: int,
    min_elements: int,
    engine: str,
) -> Any:
    options["min_elements"] = min_elements
    check_options({**options, "state_bits": state_bits})
    if engine != "auto":
        options["engine"] = engine
    return active().quantize.make_optimizer(rule, params, options, state_bits=state_bits)


def _check(name: str, value: Any, what: str, *, valid: bool) -> None:
    if not valid:
        raise UsageError(f"{name}={value!r}: give {what}")


def _check_eps(value: Any, options: Mapping[str, Any]) -> None:
    """Refuse an eps that is not the one number of Adam, or the two of Adafactor."""
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    parts = [0.0 if value[0] is None else value[0], value[1]] if pair else [value]
    one, two = "betas" in options, "beta2_decay" in options
    fits = (pair or not two) and not (pair and one)
    what = "two numbers from 0, or None and one" if two else "a number from 0"
    _check("eps", value, what, valid=fits and all(_finite(p) and p >= 0 for p in parts))


def _check_elements(value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    _check("min_elements", value, "a number of elements, from 0", valid=whole)


def _finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except TypeError:
        return False
