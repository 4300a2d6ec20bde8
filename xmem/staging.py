"""Which parts of a model are the stages of a chain.

On PyTorch the model's forward is traced where it can be. Elsewhere stages are modules that are
called one after another, each with what the one before has returned: among all such runs of calls,
anywhere in the model, the one is taken that leaves the least outside and in its heaviest stage, by
the bytes that modules return.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError, XmemWarning, unknown
from xmem.layouts import Named, modules_of

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.playing import TracedStages


_numbers = itertools.count()
_MUCH_OUTSIDE = 0.5
"""Of what modules return; more outside of the stages that were found is worth a warning."""


def forget_number(tensor: Any) -> None:
    """Take the number off a tensor that is somebody's."""
    if hasattr(tensor, "_xmem_number"):
        del tensor._xmem_number


@dataclass(frozen=True)
class Stages:
    """The stages of a model.

    Attributes:
        names: paths of modules, or what tracing calls them.
        modules: a module for each stage, with its path; none if they were traced.
        traced: what tracing found; stages of it beyond `names` run by themselves, once.
    """

    names: tuple[str, ...]
    modules: tuple[Named, ...] = ()
    traced: TracedStages | None = None

    def without_last(self) -> Stages:
        """Return all but the last, which then belongs to what follows."""
        return Stages(self.names[:-1], self.modules[:-1], self.traced)

    def places(self) -> list[tuple[Any, tuple[int, ...]]]:
        """Return each module once, with the numbers of the stages that it is."""
        found: dict[int, tuple[Any, list[int]]] = {}
        for number, (_, module) in enumerate(self.modules):
            found.setdefault(id(module), (module, []))[1].append(number)
        return [(module, tuple(numbers)) for module, numbers in found.values()]


def named_stages(backend: Backend, model: Any, names: Sequence[str], *, traced: bool) -> Stages:
    """Find stages again by their names.

    Raises:
        UsageError: the model has no such stages.
    """
    if not names:
        raise UsageError("the plan names no stages, so it is of no model; make it by xmem.plan")
    for name in names:
        inner = [other for other in names if other.startswith(f"{name}.")]
        if inner and not traced:
            raise UsageError(f"stage {inner[0]!r} lies inside stage {name!r}; name one of the two")
    if traced:
        found = backend.plans.traced(model)
        if found is None or found.names[: len(names)] != tuple(names):
            has = "cannot be traced" if found is None else f"has {len(found.names)} others"
            raise UsageError(
                f"the plan is of a traced forward with {len(names)} stages, and"
                f" {type(model).__name__} {has}; plan this model anew"
            )
        return Stages(tuple(names), traced=found)
    paths = dict(modules_of(backend.checkpoint, model))
    for name in names:
        if name not in paths:
            raise UsageError(unknown("stage", name, paths) + " The plan is of another model.")
    return Stages(tuple(names), tuple((name, paths[name]) for name in names))


def find_stages(backend: Backend, model: Any, step: Callable[[], Any], how: str) -> Stages:
    """Find the stages of a model.

    Args:
        backend: whose module it is.
        model: the model.
        step: runs a step.
        how: "traced", "modules", or "auto": traced where that works, else modules.

    Raises:
        UsageError: the model has no two stages that follow each other, or cannot be traced.
    """
    if how not in ("auto", "traced", "modules"):
        raise UsageError(unknown("way to find stages", how, ("auto", "traced", "modules")))
    found = None if how == "modules" else backend.plans.traced(model)
    if how == "traced" and found is None:
        raise UsageError(
            f"the forward of {type(model).__name__} cannot be traced; use stages='modules'"
        )
    if found is not None and len(found.names) > 1:
        return Stages(found.names, traced=found)
    run = _best_run(backend, model, step)
    if len(run) < 2:
        kind = type(model).__name__
        raise UsageError(
            f"no two modules of {kind} are called one after another, each with what"
            " the one before returns; put its blocks in a Sequential or a list, or name them:"
            " stages=[...]"
        )
    return Stages(tuple(path for path, _ in run), tuple(run))


@dataclass(eq=False)
class _Called:
    """A call of a module.

    Attributes:
        path: where the module is.
        module: the module.
        inputs: the numbers of the tensors that it is given; a tensor keeps its number.
        outputs: those of what it returns.
        inside: the calls that it makes.
        size_bytes: of what the modules in it return that call no others; a measure of how much it
            keeps.
    """

    path: str
    module: Any
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    inside: list[_Called] = field(default_factory=list)
    size_bytes: int = 0

    def follows(self, before: _Called) -> bool:
        """Say whether it reads what another call has returned, all of it."""
        return bool(before.outputs) and set(before.outputs) <= set(self.inputs)


def _best_run(backend: Backend, model: Any, step: Callable[[], Any]) -> list[Named]:
    root = _Called("", model)
    with _recorded(backend, model, root):
        step()
    root.size_bytes = sum(call.size_bytes for call in root.inside)
    best: list[_Called] = []
    least = root.size_bytes + 1
    for run in _runs(root):
        if _inside_each_other(backend, run):
            continue
        inside = sum(call.size_bytes for call in run)
        worst = max(root.size_bytes - inside, *(call.size_bytes for call in run))
        if worst < least:
            best, least = run, worst
    outside = root.size_bytes - sum(call.size_bytes for call in best)
    if best and outside > root.size_bytes * _MUCH_OUTSIDE:
        warnings.warn(
            f"the stages that were found, {best[0].path!r} to {best[-1].path!r}, make"
            f" {1 - outside / root.size_bytes:.0%} of what the modules of"
            f" {type(root.module).__name__} return; the rest is kept whatever the plan. Where a"
            " module changes its input in place, or something is computed between two modules, a"
            " run of stages ends: put such modules into one, or name the stages.",
            XmemWarning,
            stacklevel=6,
        )
    return [(call.path, call.module) for call in best]


def _inside_each_other(backend: Backend, run: Sequence[_Called]) -> bool:
    """Say whether one of the modules lies inside another one."""
    modules = {id(call.module): call.module for call in run}
    inside = (m for module in modules.values() for _, m in modules_of(backend.checkpoint, module))
    return any(id(module) in modules for module in inside)


def _runs(call: _Called) -> Iterator[list[_Called]]:
    """Yield the runs of two or more calls inside a call, each as long as can be."""
    run: list[_Called] = []
    for inner in _opened(call):
        if run and not (inner.follows(run[-1]) and _may_follow(inner)):
            yield from [run] if len(run) > 1 else []
            run = []
        if run or _may_follow(inner):
            run.append(inner)
    yield from [run] if len(run) > 1 else []
    for inner in call.inside:
        yield from _runs(inner)


def _may_follow(call: _Called) -> bool:
    """Say whether a call can be a stage: it must leave its input as it is."""
    return bool(call.outputs) and not getattr(call.module, "inplace", False)


def _opened(call: _Called) -> Iterator[_Called]:
    """Yield the calls inside a call; those that only hand on from one to the next are opened."""
    for inner in call.inside:
        if _hands_on(inner) and any(c.inside for c in inner.inside):
            yield from _opened(inner)
        else:
            yield inner


def _hands_on(call: _Called) -> bool:
    inside = call.inside
    if len(inside) < 2 or not call.inputs:
        return False
    starts = call.inputs[0] in inside[0].inputs
    ends = inside[-1].outputs == call.outputs
    return starts and ends and all(b.follows(a) for a, b in itertools.pairwise(inside))


@contextmanager
def _recorded(backend: Backend, model: Any, root: _Called) -> Iterator[None]:
    """Note the calls of all modules inside the block."""
    stack = [root]
    undos: list[Callable[[], None]] = []
    plans = backend.plans

    def numbers(tensors: Sequence[Any]) -> list[int]:
        # On the tensors, which are not held so.
        for tensor in tensors:
            if not hasattr(tensor, "_xmem_number"):
                tensor._xmem_number = next(_numbers)
        return [tensor._xmem_number for tensor in tensors]

    def wrapper(path: str, module: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Mapping[str, Any]) -> Any:
                call = _Called(path, module, numbers(plans.tensors((args, kwargs))))
                stack[-1].inside.append(call)
                stack.append(call)
                try:
                    output = forward(*args, **kwargs)
                finally:
                    stack.pop()
                returned = plans.tensors(output)
                call.outputs = numbers(returned)
                within = sum(c.size_bytes for c in call.inside)
                call.size_bytes = within or plans.bytes_of(returned)
                return output

            return run

        return wrap

    seen: set[int] = set()
    try:
        for path, module in modules_of(backend.checkpoint, model):
            if id(module) not in seen:
                seen.add(id(module))
                undos.append(backend.checkpoint.replace_forward(module, wrapper(path, module)))
        yield
    finally:
        while undos:
            undos.pop()()
