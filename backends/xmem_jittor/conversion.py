"""Optimizers and their states, from `jt.optim` (Jittor 1.3.11) to few bits and back.

Jittor's optimizers hold their states beside the parameters in each group, in float32, under names
of their own, and count one `n_step` for all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jittor as jt

from xmem import optim_rules as rules
from xmem.errors import UsageError
from xmem_jittor import states
from xmem_jittor.few_bits import Optimizer, check_device
from xmem_jittor.optimizers import SGD, AdamW
from xmem_jittor.training import Adam

_OWN = ("state_bits", "min_elements", "param_groups")
"""What an optimizer has been made with and no state changes."""


def load(optimizer: Any, held: Mapping[str, Any], *, consume: bool = False) -> None:
    """Give an optimizer the states and the options of another.

    Args:
        optimizer: one of ours.
        held: the "defaults" of a state.
        consume: drop each state there once it has been taken over.

    Raises:
        UsageError: they are of other parameters, or of another kind of optimizer.
    """
    groups = list(held.get("param_groups", ()))
    before = held.get("state_bits", 32)
    _check(type(optimizer), optimizer.param_groups, groups, before)
    index = 0
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        count = len(own["params"])
        own["steps"] = list(group.get("steps", [held.get("n_step", 0)] * count))
        for name, moment in optimizer.moments.items():
            source = group.get(name, [None] * count)
            for i, p in enumerate(own["params"]):
                own[name][i] = states.convert(
                    source[i],
                    p,
                    moment,
                    before=before,
                    after=states.bits_for(p, optimizer.state_bits, optimizer.min_elements),
                    seed=rules.seed_of(own["steps"][i], index + i),
                )
                if consume:
                    source[i] = None
        for name in optimizer.factors:
            own[name] = states.snapshot(group[name])
        kept = ("params", "grads", "steps", *optimizer.moments, *optimizer.factors)
        own.update({k: states.snapshot(v) for k, v in group.items() if k not in kept})
        index += count
    for name, value in held.items():
        if name in vars(optimizer) and name not in _OWN:
            setattr(optimizer, name, states.snapshot(value))


def _check(
    kind: type[Optimizer], own_groups: Sequence[Any], groups: Sequence[Any], packed: int
) -> None:
    """Refuse states of other parameters or another rule, before anything is changed."""
    if len(groups) != len(own_groups):
        raise UsageError(
            f"the state is of {len(groups)} groups of parameters, and this {kind.__name__} has"
            f" {len(own_groups)}. Give it as many, in the same order"
        )
    for own, group in zip(own_groups, groups, strict=True):
        for name in (*kind.moments, *kind.factors):
            if name not in group:
                raise UsageError(
                    f"the state has no {name!r}, which {kind.__name__} keeps: it is of another"
                    " kind of optimizer"
                )
            if len(group[name]) != len(own["params"]):
                raise UsageError(
                    f"the state is of {len(group[name])} parameters, and the group has"
                    f" {len(own['params'])}. Give the state of an optimizer of the same parameters"
                )
            for state, p in zip(group[name], own["params"], strict=True):
                if state is not None and name in kind.moments:
                    states.check(state, p, packed)


def plain(optimizer: Any) -> dict[str, Any]:
    """Return what the optimizer of `jt.optim` with the same rule loads.

    Raises:
        UsageError: Jittor has no such optimizer.
    """
    if not isinstance(optimizer, (AdamW, SGD)):
        raise UsageError(
            f"jt.optim has no {type(optimizer).__name__}: its state cannot be laid out for it. Use"
            " state_dict()"
        )
    groups = []
    for own in optimizer.param_groups:
        left_out = ("params", "grads", "steps", *optimizer.moments)
        group = {k: v for k, v in own.items() if k not in left_out}
        for name, moment in optimizer.moments.items():
            group[name] = [
                jt.zeros(p.shape, "float32").stop_grad()
                if state is None
                else states.convert(state, p, moment, before=optimizer.state_bits, after=32, seed=0)
                for p, state in zip(own["params"], own[name], strict=True)
            ]
        groups.append(group)
    own_names = ("maximize", "decoupled", "eps_first", "dampen_first", "nesterov", *_OWN)
    options = {k: v for k, v in optimizer.defaults.items() if k not in own_names}
    steps = max((step for own in optimizer.param_groups for step in own["steps"]), default=0)
    return {**states.snapshot(options), "n_step": steps, "param_groups": groups}


def go_on(optimizer: Any, bits: int, *, min_elements: int) -> Any:
    """Turn an optimizer into one of ours, in place, so that whoever holds it goes on with it.

    See `xmem.quantizing.Quantize.quantize_optimizer`.
    """
    rules.check_state_bits(bits)
    check_device()
    made = _made(optimizer)
    held = _described(optimizer, made)
    before = held.get("state_bits", 32)
    _check(made.kind, optimizer.param_groups, held["param_groups"], before)
    optimizer.__class__ = made.kind
    for name, value in made.options.items():
        vars(optimizer).setdefault(name, value)
    optimizer.state_bits, optimizer.min_elements = bits, min_elements
    vars(optimizer).pop("updates", None)
    for group in optimizer.param_groups:
        group.pop("v", None)
        optimizer._add_states(group)
    load(optimizer, held, consume=True)
    return optimizer


@dataclass(frozen=True)
class _Made:
    """What an optimizer becomes.

    Attributes:
        kind: the class.
        options: those that it lacks.
    """

    kind: type[Optimizer]
    options: Mapping[str, Any]


_ADAM = {"maximize": False, "decoupled": True, "eps_first": False}
_DESCENT = {"maximize": False, "dampen_first": True, "nesterov": False}
_NONE = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
_MADE: dict[type, _Made] = {
    jt.optim.AdamW: _Made(AdamW, _ADAM),
    jt.optim.Adam: _Made(AdamW, {**_ADAM, "decoupled": False, "eps_first": True}),
    jt.optim.SGD: _Made(SGD, _DESCENT),
    jt.optim.Optimizer: _Made(SGD, {**_DESCENT, **_NONE}),
    Adam: _Made(AdamW, {**_ADAM, "weight_decay": 0.0}),
}


def _made(optimizer: Any) -> _Made:
    kind = type(optimizer)
    if isinstance(optimizer, Optimizer):
        return _Made(kind, {})
    if kind not in _MADE:
        known = ", ".join(f"{k.__module__}.{k.__qualname__}" for k in _MADE)
        raise UsageError(
            f"quantize_optimizer has no update rule for {kind.__module__}.{kind.__qualname__}; it"
            f" has those of {known} and of xmem.optim"
        )
    return _MADE[kind]


def _described(optimizer: Any, made: _Made) -> dict[str, Any]:
    """Return an optimizer's "defaults" as `load` takes them, with the states themselves."""
    groups = [dict(group) for group in optimizer.param_groups]
    count = getattr(optimizer, "updates", optimizer.n_step)
    for group in groups:
        if type(optimizer) is Adam:
            group["values"] = group.pop("v")
        if made.kind is SGD and not group.get("momentum", getattr(optimizer, "momentum", 0)):
            group["values"] = [None] * len(group["params"])
        group.setdefault("steps", [count] * len(group["params"]))
    return {**optimizer.defaults, "param_groups": groups}
