"""Who made what lies in memory: modules, parameters, states, phases (Jittor 1.3.11).

Relies on what modules execute (`xmem.following`), on `jt.grad` being the door to backward, and on
optimizers calling `pre_step` and `post_step`. Each notes the newest node of the graph
(`xmem.trail`); an allocation carries the node of the tensor that it was made for, so that it does
not matter when the graph runs, nor in which order.

Since nothing runs before something asks for it, a step could fail behind the block that guards it,
and late in backward, when some parameters have been updated already. `make_whole` keeps that off
where all gradients exist at once anyway: they are computed before updates are asked for.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jittor as jt

from xmem.containers import leaves
from xmem.following import following, replacing
from xmem.layouts import modules_of
from xmem.trail import Trail, TrailOwners
from xmem_jittor import gradients, keeping, masters, native, recovery
from xmem_jittor.checkpoint import Checkpoint, OwnExecute

if TYPE_CHECKING:
    from xmem.pooling import Refusal


class Owners(TrailOwners):
    """Names owners by node numbers, and keeps steps whole; see `xmem.pooling.Owners`.

    Attributes:
        whole: updates wait for all gradients.
        interleaved: an optimizer that drops each gradient after its use has been stepped.
    """

    def __init__(self, trail: Trail, model: Any, optimizer: Any) -> None:
        names = functools.partial(parameter_names, model, optimizer)
        super().__init__(trail, names, functools.partial(_paths, model))
        self.whole = self.interleaved = False

    def make_whole(self) -> None:
        """Let updates wait, but for those that would hold more memory then."""
        self.whole = True

    def finish(self) -> None:
        """Run all that Python holds a handle of; waits for no device."""
        jt.sync_all(False)

    def may_be_updated(self, refusal: Refusal | None) -> bool:
        """An update that runs as soon as its gradient is there may run in backward."""
        return self.interleaved or super().may_be_updated(refusal)


@contextmanager
def watch(model: Any, optimizer: Any) -> Iterator[Owners]:
    """Follow modules, backward and optimizer steps inside the block."""
    newest: Callable[[], int] = native.graph().xmem_jittor_total_node
    trail = Trail(newest())
    owners = Owners(trail, model, optimizer)
    made: Any = {"trail": trail, "newest": newest}
    before = functools.partial(_before_update, owners=owners, **made)
    with (
        replacing(jt, "grad", functools.partial(_differentiating, **made)),
        replacing(jt.optim.Optimizer, "pre_step", before),
        replacing(jt.optim.Optimizer, "post_step", functools.partial(_after_update, **made)),
        following(_each_once(model), "execute", OwnExecute, trail, newest, lambda: _look(trail)),
    ):
        yield owners


def _each_once(model: Any) -> list[Any]:
    """Return the modules of a model; quicker than with their paths."""
    found: dict[int, Any] = {}
    pending = leaves(model, jt.Module)
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            held = module.layers if isinstance(module, jt.nn.Sequential) else vars(module)
            pending += [child for child in held.values() if isinstance(child, jt.Module)]
    return list(found.values())


def _look(trail: Trail) -> None:
    block = keeping.packs()
    packs = block is not None and not block.everywhere
    trail.look(*(["compress_activations"] if packs else []))


def _differentiating(
    original: Callable[..., Any], trail: Trail, newest: Callable[[], int]
) -> Callable[..., Any]:
    """Note where the outermost backward begins and ends: regions call it inside."""

    def grad(loss: Any, targets: Any, retain_graph: bool = True) -> Any:
        if not trail.depth:
            trail.begin(newest(), "backward")
        trail.depth += 1
        try:
            found = original(loss, targets, retain_graph)
        except BaseException:
            trail.raised(newest())
            raise
        finally:
            trail.depth -= 1
        if not trail.depth:
            trail.begin(newest(), "outside")
        return found

    return grad


def _before_update(
    original: Callable[..., Any], trail: Trail, newest: Callable[[], int], owners: Owners
) -> Callable[..., Any]:
    def pre_step(self: Any, loss: Any, retain_graph: bool = False) -> Any:
        result = original(self, loss, retain_graph)
        if not owners.whole or not _keeps_gradients(self):
            owners.interleaved = True
        elif gradients.are_new(self):
            jt.sync([g for group in self.param_groups for g in group["grads"]])
        trail.begin(newest(), "optimizer")
        return result

    return pre_step


def _after_update(
    original: Callable[..., Any], trail: Trail, newest: Callable[[], int]
) -> Callable[..., Any]:
    def post_step(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        trail.begin(newest(), "outside")
        return result

    return post_step


def _keeps_gradients(optimizer: Any) -> bool:
    """Say whether all gradients exist at once anyway: those in few bits drop each after its use."""
    return not hasattr(optimizer, "plain_state_dict")


def _paths(model: Any) -> dict[int, str]:
    return {id(module): path for path, module in _modules(model)}


def _modules(model: Any) -> list[tuple[str, Any]]:
    """Return all modules of a model, or of several, with their paths."""
    roots = leaves(model, jt.Module)
    found = []
    for index, root in enumerate(roots):
        prefix = f"{index}." if len(roots) > 1 else ""
        for path, module in [("", root), *modules_of(Checkpoint(), root)]:
            found.append((f"{prefix}{path}".rstrip("."), module))
    return found


def parameter_names(model: Any, optimizer: Any) -> dict[int, str]:
    """Name what lies at an address: parameters, buffers, gradients, masters, states."""
    found: list[tuple[Any, str]] = []
    named: dict[int, str] = {}
    for path, module in _modules(model):
        for name, held in vars(module).items():
            if isinstance(held, jt.Var):
                found.append((held, f"{path}.{name}".lstrip(".")))
                named.setdefault(id(held), found[-1][1])
    groups = [
        pair
        for one in leaves(optimizer, jt.optim.Optimizer)
        for pair in zip(one.param_groups, masters.parameters_of(one), strict=True)
    ]
    number = 0
    for group, parameters in groups:
        for index, parameter in enumerate(parameters):
            name = named.get(id(parameter), f"parameter {number} of the optimizer")
            number += 1
            found.append((parameter, name))
            if group["params"][index] is not parameter:
                found.append((group["params"][index], f"float32 master of {name}"))
            found += _held_for(group, index, name)
    return _by_address(found)


def _held_for(group: Mapping[str, Any], index: int, name: str) -> Iterator[tuple[Any, str]]:
    """Yield what a group holds beside a parameter, under whatever names."""
    for kind, held in group.items():
        if kind != "params" and isinstance(held, list) and index < len(held):
            what = "gradient" if kind == "grads" else "optimizer state"
            for tensor in leaves(held[index], jt.Var):
                yield tensor, f"{what} of {name}"


def _by_address(found: list[tuple[Any, str]]) -> dict[int, str]:
    """Return names by address; of what is pending, by the address of what it was before."""
    pending = [tensor for tensor, _ in found if recovery.is_pending(tensor)]
    before = _before(pending) if pending else {}
    pointers = [before.get(id(tensor), tensor.var_ptr) for tensor, _ in found]
    count = len(found)
    given, memory = (ctypes.c_longlong * max(count, 1))(*pointers), _numbers(count)
    native.recovering().xmem_jittor_memory_of(given, count, memory)
    names: dict[int, str] = {}
    for address, (_, name) in zip(memory[:count], found, strict=True):
        if address:
            names.setdefault(address, name)
    return names


def _before(pending: list[Any]) -> dict[int, int]:
    """Return the addresses of the Vars that tensors were before their updates were asked for."""
    notes = [
        note
        for followed in recovery._followed
        for tensor in pending
        if (note := followed._notes.get(id(tensor))) is not None
    ]
    ids = sorted({node for note in notes for node in note.ids})
    known, found = (ctypes.c_longlong * max(len(ids), 1))(*ids), _numbers(len(ids))
    pointers, count = native.addresses(note.tensor for note in notes)
    native.recovering().xmem_jittor_values_before(pointers, count, known, len(ids), found)
    there = {node: address for node, address in zip(ids, found, strict=False) if address}
    return {
        id(note.tensor): there[max(nodes)]
        for note in notes
        if (nodes := [node for node in note.ids if node in there])
    }


def _numbers(count: int) -> Any:
    return (ctypes.c_longlong * max(count, 1))()
