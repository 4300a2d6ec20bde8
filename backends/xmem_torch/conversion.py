"""Optimizers and their states, from torch.optim (PyTorch 2.13) to few bits and back.

`go_on` changes an optimizer's class and states in place, so that whatever holds the optimizer
(schedulers, scalers, hooks, masters) holds the new one. Two things of the old class live in the
instance: a fused optimizer's word that it unscales gradients itself, and the step that a scheduler
has wrapped, to see that there was one; both are brought in line.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xmem import optim_rules as rules
from xmem.errors import UsageError
from xmem_torch import states
from xmem_torch.few_bits import Optimizer, check_group, check_parameter
from xmem_torch.optimizers import SGD, Adam, AdamW

_KINDS: Mapping[type, type[Optimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}
_OWN = ("state_bits", "min_elements")


@dataclass(frozen=True)
class _Hidden:
    """A tensor that PyTorch's `load_state_dict` does not see, and so does not cast."""

    tensor: torch.Tensor


def go_on(optimizer: Any, bits: int, *, min_elements: int) -> Any:
    """Pack a running optimizer's states.

    Raises:
        UsageError: there is no rule for it, or an option or a parameter that no rule can take.
    """
    kind = _check(optimizer, min_elements)
    options = {"state_bits": bits, "min_elements": min_elements}
    index = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state.get(p):
                optimizer.state[p] = _packed(kind, optimizer.state[p], p, options, index)
            index += 1
        group.update(options)
    optimizer.defaults.update(options)
    optimizer.__class__ = kind
    optimizer.__dict__.pop("_step_supports_amp_scaling", None)
    optimizer._patch_step_function()
    if optimizer.__dict__.pop("step", None) is not None:
        wrap_for_scheduler(optimizer)
    return optimizer


def _check(optimizer: Any, min_elements: int) -> type[Optimizer]:
    if isinstance(optimizer, Optimizer):
        bits = sorted({group["state_bits"] for group in optimizer.param_groups})
        raise UsageError(
            f"the optimizer keeps its states in {', '.join(map(str, bits))} bits already; to change"
            " that, load its plain_state_dict() into a new one"
        )
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        raise UsageError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} has no update rule in few"
            " bits. There are: torch.optim.AdamW, torch.optim.Adam and torch.optim.SGD with"
            " momentum; xmem.optim makes Lion and Adafactor"
        )
    step = optimizer.__dict__.get("step")
    if step is not None and not getattr(step, "_wrapped_by_lr_sched", False):
        raise UsageError(
            "the optimizer's step has been replaced on the instance, which would step by the old"
            " rule: put its own back, or quantize it before it is wrapped"
        )
    for group in optimizer.param_groups:
        check_group({**group, "min_elements": min_elements}, optimizer)
        if kind is SGD and not group["momentum"]:
            raise UsageError("SGD without momentum has no states to keep in few bits")
        for p in group["params"]:
            check_parameter(p)
            for name in kind.moments:
                held = optimizer.state.get(p, {}).get(name)
                if held is not None and held.shape != p.shape:
                    raise UsageError(
                        f"the state {name!r} has shape {tuple(held.shape)}, and its parameter"
                        f" {tuple(p.shape)}: the optimizer is of other parameters"
                    )
    return kind


def wrap_for_scheduler(optimizer: Any) -> None:
    """Do as `LRScheduler` does: note on the optimizer that it has stepped."""
    step, held = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        stepped = held()
        assert stepped is not None
        stepped._opt_called = True
        return step(stepped, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noted


def _packed(
    kind: type[Optimizer], state: Mapping[str, Any], p: Any, group: Mapping[str, Any], index: int
) -> dict[str, Any]:
    """Return a parameter's plain state in few bits."""
    bits = states.bits_for(p, group["state_bits"], group["min_elements"])
    step = int(state.get("step", 1))  # SGD counts none
    found: dict[str, Any] = {"step": step}
    seed = rules.seed_of(step, index)
    for name, value in state.items():
        if name in kind.moments and value is not None:
            found[name] = states.pack(value.to(p.device), kind.moments[name], bits, seed)
        elif name not in ("step", *kind.moments):
            found[name] = value
    return found


def hide(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state_dict as this optimizer holds it, its tensors hidden from PyTorch.

    Raises:
        UsageError: it is in other bits, of other parameters, or of another kind of optimizer.
    """
    saved = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != [len(group["params"]) for group in saved]:
        return state_dict  # PyTorch's to refuse
    kind = type(optimizer)
    groups, held = [], {}
    index = 0
    for own, group in zip(optimizer.param_groups, saved, strict=True):
        plain = "state_bits" not in group
        if not plain and group["state_bits"] != own["state_bits"]:
            raise UsageError(
                f"the state is in {group['state_bits']} bits, and this {kind.__name__} keeps"
                f" {own['state_bits']}: make it with state_bits={group['state_bits']}, or load"
                " plain_state_dict() of the optimizer that was saved"
            )
        options = {**{k: v for k, v in own.items() if k != "params"}, **group}
        check_group(options, optimizer)
        groups.append(options)
        for number, p in zip(group["params"], own["params"], strict=True):
            state = state_dict["state"].get(number)
            if state:
                held[number] = _hidden(kind, state, p, options, index, plain=plain)
            index += 1
    others = {k: v for k, v in state_dict["state"].items() if not isinstance(k, int)}
    return {**state_dict, "param_groups": groups, "state": {**others, **held}}


def _hidden(
    kind: type[Optimizer],
    state: Mapping[str, Any],
    p: Any,
    options: Mapping[str, Any],
    index: int,
    *,
    plain: bool,
) -> dict[str, Any]:
    wanted = set(kind.moments) if kind.rule else set()  # Adafactor may have none
    missing = sorted(name for name in wanted if state.get(name) is None)
    if missing:
        raise UsageError(
            f"the state has no {missing[0]!r}, which {kind.__name__} keeps: it is of another kind"
            " of optimizer"
        )
    bits = states.bits_for(p, options["state_bits"], options["min_elements"])
    for name in kind.moments:
        if state.get(name) is not None:
            states.check(state[name], p, 32 if plain else bits, name, kind.__name__)
    if plain:
        state = _packed(kind, state, p, options, index)
    return {
        name: _Hidden(value.detach().to(p.device, copy=True))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.items()
    }


def show(optimizer: Any) -> None:
    """Put hidden tensors in their places."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, _Hidden):
                state[name] = value.tensor


def plain(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's state as torch.optim has it."""
    found = optimizer.state_dict()
    held = {}
    numbers = [n for group in found["param_groups"] for n in group["params"]]
    for (group, p, _), number in zip(optimizer.places(), numbers, strict=True):
        if number in found["state"]:
            held[number] = _unpacked(type(optimizer), found["state"][number], p, group)
    groups = [
        {
            **type(optimizer).plain_options,
            **{name: value for name, value in group.items() if name not in _OWN},
        }
        for group in found["param_groups"]
    ]
    return {**found, "state": {**found["state"], **held}, "param_groups": groups}


def _unpacked(
    kind: type[Optimizer], state: Mapping[str, Any], p: Any, group: Mapping[str, Any]
) -> dict[str, Any]:
    found = dict(state)
    if kind is SGD:
        del found["step"]
    elif "step" in found:
        found["step"] = torch.tensor(float(found["step"]))
    for name, moment in kind.moments.items():
        if name in found:
            bits = states.bits_of(found[name], group["state_bits"])
            found[name] = states.unpack(found[name], p.shape, moment, bits)
    return found
