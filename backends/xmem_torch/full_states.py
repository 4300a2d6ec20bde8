"""Sharded states as one process would have them, on PyTorch (2.13).

A full state is what `state_dict()` of the plain model and optimizer would be, so that
`torch.load` and `load_state_dict` read it without xmem. Tensors go one by one: rank 0 collects the
whole, others hold at most one parameter's whole beside their share. What a rank has whole anyway is
not copied, as in `state_dict()`; what is loaded is.

Not by `torch.distributed.checkpoint.state_dict`: it names an optimizer's states by parameters'
names and gathers all on every rank, and knows no states that one rank owns.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from xmem.distributed.agreeing import attempt
from xmem.distributed.world import current
from xmem.errors import UsageError
from xmem_torch import wholes
from xmem_torch.masters import parameters_of
from xmem_torch.sharded_optimizers import owners_of
from xmem_torch.streamed_parameters import are_away, brought_in
from xmem_torch.wholes import Cuts


def gather(model: Any, optimizer: Any) -> dict[str, Any] | None:
    """Return the whole on rank 0."""
    module = _plain(model)
    cuts = Cuts(module)
    attempt("full_state", lambda: _check_states(optimizer, cuts))
    first = current().rank == 0
    tensors: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        whole = wholes.gathered(value, cuts.of_name(name))
        if first:
            tensors[name] = whole
    state = None if optimizer is None else _gather_optimizer(optimizer, cuts)
    return {"model": tensors, "optimizer": state} if first else None


def scatter(model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Take up the whole."""
    module = _plain(model)
    cuts = Cuts(module)
    given = attempt("load_full_state", lambda: _checked(module, optimizer, cuts, state))
    if optimizer is not None:
        own = _scatter_optimizer(optimizer, cuts, given)
        attempt("load_full_state", lambda: optimizer.load_state_dict(own))
    extras = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, target in module.state_dict().items():
            value = given["model"][name] if given else None
            away = [p for p in [parameters.get(name)] if p is not None and are_away([p])]
            if isinstance(target, torch.Tensor):
                with brought_in(away):  # what state_dict gives of such is a copy
                    wholes.load(value, away[0] if away else target, cuts.of_name(name))
            else:
                extras[name] = wholes.told(value)
    if extras:
        module.load_state_dict(extras, strict=False)


def save_file(state: Mapping[str, Any], path: str) -> None:
    """Write a file by torch.save."""
    torch.save(dict(state), path)


def load_file(path: str) -> dict[str, Any]:
    """Read a file by torch.load, whose tensors come from it as they are needed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UsageError(
            f"{path!r} is no file of torch.save with tensors and plain values: {error}"
        ) from error
    return state if isinstance(state, dict) else {"": state}


def _plain(model: Any) -> Any:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _gather_optimizer(optimizer: Any, cuts: Cuts) -> dict[str, Any]:
    """Return the optimizer's state; only rank 0's is the whole."""
    found = optimizer.state_dict()
    parameters = list(parameters_of(optimizer))
    owners = owners_of(optimizer)
    if owners is not None:
        _collect(found["state"], owners)
        return dict(found)
    states: dict[int, Any] = {}
    for number, entry in found["state"].items():
        p = parameters[number]
        states[number] = {
            name: wholes.gathered(value, cuts.of_state(p, value)) for name, value in entry.items()
        }
    return {**found, "state": states}


def _collect(states: dict[int, Any], owners: list[int]) -> None:
    """Bring the states of parameters that others own to rank 0, one tensor at a time."""
    rank, ranks = current().rank, current().size
    told: list[Any] = [None] * ranks
    described = {number: wholes.described(entry) for number, entry in states.items()}
    dist.gather_object(described, told if rank == 0 else None, dst=0)
    for number, owner in enumerate(owners):
        if owner == 0:
            continue
        if rank == owner:
            for value in states.get(number, {}).values():
                wholes.send(value, 0)
        elif rank == 0 and number in told[owner]:
            states[number] = {
                name: wholes.receive(kind, owner) for name, kind in told[owner][number].items()
            }
    if rank == 0:
        order = sorted(states)
        states.update({number: states.pop(number) for number in order})


def _scatter_optimizer(optimizer: Any, cuts: Cuts, given: Any) -> dict[str, Any]:
    """Return what this rank's optimizer is to load."""
    rank = current().rank
    whole = given["optimizer"] if given else {}
    states = whole.get("state", {})
    rest = {name: value for name, value in whole.items() if name != "state"}
    kinds = {number: wholes.described(entry) for number, entry in states.items()}
    rest, kinds = wholes.told((rest, kinds) if given else None)
    owners = owners_of(optimizer)
    own: dict[int, dict[str, Any]] = {}
    for number, p in enumerate(parameters_of(optimizer)):
        for name, kind in kinds.get(number, {}).items():
            value = states[number][name] if given else None
            if owners is None or not kind.is_sent:
                part = wholes.dealt(value, kind, p, cuts)
            elif owners[number] == 0:
                part = None if value is None else value.clone()
            else:
                if given:
                    wholes.send(value, owners[number])
                part = wholes.receive(kind, 0) if rank == owners[number] else None
            if owners is None or owners[number] == rank:
                own.setdefault(number, {})[name] = part
    return {**rest, "state": own}


def _check_states(optimizer: Any, cuts: Cuts) -> None:
    """Refuse states of parts that cannot be put together."""
    if optimizer is None:
        return
    for p in parameters_of(optimizer):
        for name, value in optimizer.state.get(p, {}).items():
            cuts.check(p, name, value)


def _checked(module: Any, optimizer: Any, cuts: Cuts, state: Mapping[str, Any] | None) -> Any:
    """Refuse a state of another model or optimizer; only rank 0 has any to look at."""
    if state is None:
        return None
    own, given = module.state_dict(), state["model"]
    missing = [name for name in own if name not in given]
    foreign = [name for name in given if name not in own]
    if missing or foreign:
        raise UsageError(
            f"the state is of another model: it lacks {missing[:3]} ({len(missing)} in all) and has"
            f" {foreign[:3]} ({len(foreign)}) that {type(module).__name__} does not know"
        )
    for name, target in own.items():
        if not isinstance(target, torch.Tensor):
            continue
        shape = wholes.whole_shape(target, cuts.of_name(name))
        found = getattr(given[name], "shape", None)
        if found is None or tuple(found) != shape:
            raise UsageError(
                f"the state has {name!r} of shape {found and tuple(found)}, and the model's is"
                f" {shape}"
            )
    if optimizer is not None:
        _check_groups(optimizer, state["optimizer"])
    return state


def _check_groups(optimizer: Any, state: Any) -> None:
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise UsageError("the state's optimizer is none of PyTorch's: it has no param_groups")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in state["param_groups"]]
    if sizes != found:
        raise UsageError(
            f"the state's optimizer has groups of {found} parameters, and this one has {sizes}"
        )
