"""Sharded states as one process would have them, on Jittor (1.3.11).

A full state has the model's `state_dict()` and the optimizer's, laid out as those of a plain model
and of `jt.optim`, so that `jt.load` and `load_state_dict` read it without xmem. Tensors go one by
one: rank 0 collects the whole, others hold at most one parameter's whole beside their share. Where
an optimizer holds float32 masters, the model's numbers are those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleError
from typing import Any

import jittor as jt
import numpy as np

from xmem.containers import fill, take_apart
from xmem.distributed.agreeing import attempt
from xmem.errors import CompositionError, UsageError
from xmem_jittor import few_bits, gradients, masters, ranks, shares, states, wholes
from xmem_jittor.sharded_optimizers import of as sharded_states
from xmem_jittor.sharded_optimizers import state_names

# Names for which jt.save writes PyTorch's format: it needs PyTorch, and has no place for all types.
_NOT_OURS = (".pt", ".pth", ".bin")
_FLAT = "uint8"  # of states in few bits, which know nothing of axes


def gather(model: Any, optimizer: Any) -> dict[str, Any] | None:
    """Return the whole on rank 0."""
    attempt("full_state", lambda: _check_parts(model, optimizer))
    float32 = {id(p): m for p, m in masters.pairs_of(optimizer)}
    found = {}
    for name, parameter in model.named_parameters():
        held = float32.get(id(parameter), parameter)
        found[name] = _gathered(held, shares.of(parameter))
    state = None if optimizer is None else _gather_optimizer(optimizer)
    return {"model": found, "optimizer": state} if ranks.rank() == 0 else None


def scatter(model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Take up the whole."""
    attempt("load_full_state", lambda: _check(model, optimizer, state))
    if optimizer is not None:
        loaded = _scatter_optimizer(optimizer, state)
        attempt("load_full_state", lambda: _load(optimizer, loaded))
    float32 = {id(p) for p, _ in masters.pairs_of(optimizer)}
    for name, parameter in model.named_parameters():
        value = state["model"][name] if state else None
        share = shares.of(parameter)
        dtype = "float32" if id(parameter) in float32 else str(parameter.dtype)
        part = _scattered(value, share or _as_it_is(parameter), dtype)
        if part is not None:
            gradients.put(parameter, part)
            parameter.sync()


def save_file(state: Mapping[str, Any], path: str) -> None:
    """Write a file by jt.save, with NumPy arrays for tensors."""
    if path.endswith(_NOT_OURS):
        raise UsageError(
            f"jt.save and jt.load of Jittor 1.3.11 take a name in {Path(path).suffix!r} for one of"
            " PyTorch's format, which has no place for all types of a state. Give another name,"
            " e.g. 'state.pkl'"
        )
    held: list[Any] = []
    template = take_apart(dict(state), jt.Var, held)
    jt.save(fill(template, [v.numpy() for v in held]), path)


def load_file(path: str) -> dict[str, Any]:
    """Read a file by jt.load."""
    try:
        state = jt.load(path)
    except (RuntimeError, ValueError, EOFError, LookupError, AssertionError, PickleError) as error:
        raise UsageError(f"{path!r} is no file that jt.save wrote: {error}") from error
    return state if isinstance(state, dict) else {"": state}


def _as_it_is(parameter: Any) -> shares.Share:
    return shares.Share("equal", tuple(parameter.shape), str(parameter.dtype))


def _gathered(value: Any, share: shares.Share | None) -> Any:
    """Return on rank 0 the whole of what belongs to a parameter; None elsewhere."""
    if share is not None and share.kind == "owned":
        found = wholes.move(value, share.shape, share.dtype, share.owner or 0, 0)
    elif share is not None and share.kind == "part":
        found = wholes.together(value, share.axis)
    else:
        found = value
    return states.snapshot(found) if ranks.rank() == 0 else None


def _scattered(value: Any, share: shares.Share, dtype: str) -> Any:
    """Return this rank's part of rank 0's value of a parameter; None if it has none."""
    if ranks.rank() == 0:
        value = wholes.as_tensor(value, dtype)
    if share.kind == "owned":
        return wholes.move(value, share.shape, dtype, 0, share.owner or 0)
    found = wholes.spread(value, share.shape, dtype)
    return wholes.part_of(found, share) if share.kind == "part" else found


@dataclass(frozen=True)
class _Entry:
    """What a group of an optimizer holds for one parameter.

    Attributes:
        group: number of the group.
        name: of the list.
        index: of the parameter.
        local: where it is in this rank's list; None if another rank has it.
        share: how the parameter is shared; owned by the rank that has its states.
    """

    group: int
    name: str
    index: int
    local: int | None
    share: shares.Share


def _entries(optimizer: Any) -> Iterator[_Entry]:
    sharded = sharded_states(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        held = masters.parameters_of(optimizer)[number]
        for name in state_names(optimizer, group):
            place = 0
            for index, p in enumerate(held):
                share = shares.of(p) or _as_it_is(p)
                local: int | None = index
                if sharded is not None:
                    owner = sharded.owners[number][index]
                    share = shares.Share("owned", share.shape, share.dtype, owner)
                    local = place if owner == ranks.rank() else None
                    place += owner == ranks.rank()
                yield _Entry(number, name, index, local, share)


def _gather_optimizer(optimizer: Any) -> dict[str, Any]:
    found = {k: states.snapshot(v) for k, v in optimizer.defaults.items() if k != "param_groups"}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        names = state_names(optimizer, group)
        plain = {k: v for k, v in group.items() if k not in ("params", "grads", *names)}
        empty = {name: [None] * len(group["params"]) for name in names}
        groups.append({**states.snapshot(plain), **empty})
    kinds = [wholes.tell(_described(optimizer), rank) for rank in range(ranks.size())]
    for number, entry in enumerate(_entries(optimizer)):
        owner = entry.share.owner if entry.share.kind == "owned" else 0
        described = kinds[owner or 0][number]
        held = optimizer.param_groups[entry.group][entry.name]
        value = None if entry.local is None else held[entry.local]
        if described is None:
            continue
        if not isinstance(described, tuple):
            groups[entry.group][entry.name][entry.index] = described
            continue
        whole = _gathered(value, _shaped(entry.share, described))
        groups[entry.group][entry.name][entry.index] = whole
    return {"defaults": {**found, "param_groups": groups}}


def _shaped(share: shares.Share, described: tuple[tuple[int, ...], str]) -> shares.Share:
    """Return how a state is shared, which may have another shape than its parameter."""
    shape, dtype = described
    if share.kind == "part" and len(shape) == len(share.shape):
        return share
    kind = "equal" if share.kind == "part" else share.kind
    return shares.Share(kind, shape, dtype, share.owner)


def _described(optimizer: Any) -> list[Any]:
    """Return shape and type, or the plain value, of what this rank holds for each entry."""
    found: list[Any] = []
    for entry in _entries(optimizer):
        held = optimizer.param_groups[entry.group][entry.name]
        value = None if entry.local is None else held[entry.local]
        found.append(_kind([value], 0))
    return found


def _scatter_optimizer(optimizer: Any, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what this rank's optimizer is to load."""
    entries = list(_entries(optimizer))
    held = state["optimizer"]["defaults"] if state else {}
    groups = held.get("param_groups", ())
    told, kinds = None, None
    if state:
        names = [state_names(optimizer, group) for group in optimizer.param_groups]
        plain = [
            {k: v for k, v in group.items() if k not in ("params", "grads", *names[number])}
            for number, group in enumerate(groups)
        ]
        told = {k: v for k, v in held.items() if k != "param_groups"}, plain
        kinds = [_kind(groups[e.group].get(e.name), e.index) for e in entries]
    (defaults, plain), kinds = wholes.tell((told, kinds))
    for number, group in enumerate(plain):
        own = optimizer.param_groups[number]
        group.update({name: list(own[name]) for name in state_names(optimizer, own)})
    for entry, kind in zip(entries, kinds, strict=True):
        value = groups[entry.group][entry.name][entry.index] if state and kind else None
        found = kind
        if isinstance(kind, tuple):
            found = _scattered(value, _shaped(entry.share, kind), kind[1])
        is_here = entry.share.kind != "owned" or entry.share.owner == ranks.rank()
        if is_here and entry.local is not None:
            plain[entry.group][entry.name][entry.local] = found
    return {"defaults": {**defaults, "param_groups": plain}}


def _kind(values: Any, index: int) -> Any:
    value = None if values is None else values[index]
    if isinstance(value, (jt.Var, np.ndarray)):
        return tuple(value.shape), str(value.dtype)
    return value


def _load(optimizer: Any, state: dict[str, Any]) -> None:
    sharded = sharded_states(optimizer)
    if sharded is not None and isinstance(optimizer, few_bits.Optimizer):
        with sharded.restricted():
            optimizer.load_state_dict(state)
    else:
        optimizer.load_state_dict(state)


def _check_parts(model: Any, optimizer: Any) -> None:
    """Refuse what cannot be put together."""
    for name, parameter in model.named_parameters():
        share = shares.of(parameter)
        if share is not None and share.kind == "part" and share.axis is None:
            raise CompositionError(
                f"{name!r} belongs to a stage of a pipeline: each rank has other parameters. Save"
                " each rank's own, by jt.save"
            )
    if optimizer is None:
        return
    for entry in _entries(optimizer):
        value = optimizer.param_groups[entry.group][entry.name]
        if entry.share.kind != "part" or entry.local is None:
            continue
        if isinstance(value[entry.local], jt.Var) and str(value[entry.local].dtype) == _FLAT:
            raise CompositionError(
                "states in few bits of a part of a layer cannot be put together. Train with"
                " state_bits=32 where they are to be saved, or save each rank's own"
            )


def _check(model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Refuse a state of another model or optimizer, before anything has changed."""
    _check_parts(model, optimizer)
    if state is None:
        return
    own = dict(model.named_parameters())
    given = state["model"]
    strange = sorted(own.keys() ^ given.keys())
    if strange:
        where = "has no" if strange[0] in own else "has an unknown"
        raise UsageError(f"the state {where} {strange[0]!r}: it is of another model")
    for name, parameter in own.items():
        share = shares.of(parameter) or _as_it_is(parameter)
        if tuple(given[name].shape) != share.shape:
            raise UsageError(
                f"{name!r} is {tuple(given[name].shape)} in the state and {share.shape} in the"
                " model"
            )
    if optimizer is not None:
        _check_optimizer(optimizer, state["optimizer"])


def _check_optimizer(optimizer: Any, state: Any) -> None:
    groups = state.get("defaults", {}).get("param_groups") if isinstance(state, Mapping) else None
    if groups is None or len(groups) != len(optimizer.param_groups):
        raise UsageError(
            f"the state is of {len(groups or ())} groups of parameters, and the"
            f" {type(optimizer).__name__} has {len(optimizer.param_groups)}"
        )
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        for name in state_names(optimizer, own):
            if name not in group and name != "steps":
                raise UsageError(
                    f"the state has no {name!r}, which {type(optimizer).__name__} keeps: it is of"
                    " another kind of optimizer"
                )
            if len(group.get(name, own["params"])) != len(own["params"]):
                raise UsageError(
                    f"the state is of {len(group[name])} parameters, and the group has"
                    f" {len(own['params'])}"
                )
