"""After an out-of-memory error in the middle of a lazy graph.

Jittor 1.3.11 leaves a failed execution half done: what ran is finished, the rest stays pending and
runs when anything asks for it, so the graph can be taken up again where it stopped, with right
values. But a step that is too large fails again, and its parameters have been rebound to results
that are not there. What they were is still an input of that graph, so it needs no copy to put it
back: the tensors of a model and its optimizer are followed by node ids, noted whenever gradients
are asked for, and the newest one that is there is found among a pending tensor's inputs.

What cannot be undone without copies: updates that had run by then. Jittor runs each parameter's
update as soon as its gradient is there, so an error late in backward finds some parameters updated,
and `put_back` says how many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jittor as jt

from xmem.containers import leaves
from xmem.following import replacing
from xmem.sizes import format_size
from xmem_jittor import gradients, native, ran_out, scaling
from xmem_jittor.masters import masters_of, round_again

# More notes without an execution in between have lost the first anyway.
_NOTES = 64
_followed: list[Followed] = []


@dataclass(frozen=True)
class PutBack:
    """What became of the tensors of a model and an optimizer.

    Attributes:
        restored: how many had a pending value, and are what they were before it.
        updated: of what the optimizer changes, how many had been updated by then, and stay so; 0
            where no update was under way.
        lost: how many are pending, and what they were is not known.
    """

    restored: int
    updated: int
    lost: int


@dataclass
class _Note:
    tensor: Any
    ids: list[int]
    is_updated: bool


@dataclass(eq=False)
class Followed:
    """The tensors of a model and an optimizer, and the nodes that they have been.

    Attributes:
        model: a module, or containers of such, or None.
        optimizer: one or several, or None.
    """

    model: Any
    optimizer: Any
    _notes: dict[int, _Note] = field(default_factory=dict)
    _counts: dict[int, dict[str, Any]] = field(default_factory=dict)

    def note(self) -> None:
        """Note which nodes the tensors are, and what the optimizers have counted."""
        before, self._notes = self._notes, {}
        updated = {id(tensor) for tensor in _updated_by(self.optimizer)}
        for tensor in held_by(self.model, self.optimizer):
            known = before.get(id(tensor))
            ids = known.ids if known is not None else []
            node = tensor.id
            if not is_pending(tensor):
                ids = [node]
            elif node not in ids:
                ids = [*ids, node][-_NOTES:]
            self._notes[id(tensor)] = _Note(tensor, ids, id(tensor) in updated)
        for optimizer in _optimizers(self.optimizer):
            # What was counted before the first of several backwards for one update.
            if not gradients.are_new(optimizer):
                self._counts[id(optimizer)] = counts_of(optimizer)

    def put_back(self) -> PutBack:
        """Let tensors whose update is pending be what they were; gradients are forgotten."""
        notes = self._notes.values()
        pending = [note for note in notes if is_pending(note.tensor)]
        done = [note for note in notes if not is_pending(note.tensor)]
        restored = _restore(pending)
        # No update reads a rounded parameter, so that what it was may be gone by now.
        restored += sum(round_again(one, is_pending) for one in _optimizers(self.optimizer))
        # Where no update was under way, what has changed is of an earlier step, which is through.
        was_updating = any(note.is_updated for note in pending)
        changed = [note for note in done if note.is_updated and note.tensor.id not in note.ids]
        updated = len(changed) if was_updating else 0
        for optimizer in _optimizers(self.optimizer):
            counts = self._counts.get(id(optimizer))
            # Gradients that a step has not used have been counted, even if they are dropped by now.
            is_unused = gradients.are_new(optimizer) or not changed
            if counts and not updated and (was_updating or is_unused):
                put_counts_back(optimizer, counts)
            gradients.forget(optimizer)
            scaling.forget(optimizer)
        self.note()
        return PutBack(restored, updated, len(pending) - restored)


def held_by(model: Any, optimizer: Any) -> list[Any]:
    """Return the tensors that a step changes: parameters, buffers, states, each once."""
    found = [p for module in leaves(model, jt.Module) for p in module.parameters()]
    for group in _groups(optimizer):
        found += leaves({n: value for n, value in group.items() if n != "grads"}, jt.Var)
    found += masters_of(optimizer)
    return list({id(tensor): tensor for tensor in found}.values())


def _optimizers(optimizer: Any) -> list[Any]:
    return leaves(optimizer, jt.optim.Optimizer)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for one in _optimizers(optimizer) for group in one.param_groups]


def _updated_by(optimizer: Any) -> list[Any]:
    """Return what an optimizer's step changes; a frozen parameter or a statistic is not of it."""
    found = []
    for group in _groups(optimizer):
        for name, value in group.items():
            held = leaves(value, jt.Var) if name != "grads" else []
            found += [v for v in held if name != "params" or not v.is_stop_grad()]
    return found + masters_of(optimizer)


def is_pending(tensor: Any) -> bool:
    """Say whether a tensor is not computed yet."""
    return bool(native.recovering().xmem_jittor_is_pending(tensor.var_ptr))


@contextmanager
def following(model: Any, optimizer: Any) -> Iterator[Followed]:
    """Note inside the block what `put_back` needs: at its start, and whenever gradients are asked.

    Nothing is held beside the Python objects, so no tensor lives longer than it would. Updates that
    are pending at the start are run: what they were made of is not known, so that they could be
    neither put back nor told from those of the block.

    Raises:
        JittorOutOfMemoryError: there is no memory for those; they stay pending, nothing is lost.
    """
    _run_pending(held_by(model, optimizer))
    followed = Followed(model, optimizer)
    followed.note()
    depth = 0

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def grad(loss: Any, targets: Any, retain_graph: bool = True) -> Any:
            nonlocal depth
            if depth == 0:
                followed.note()
            depth += 1
            try:
                return original(loss, targets, retain_graph)
            finally:
                depth -= 1

        return grad

    with replacing(jt, "grad", noting):
        _followed.append(followed)
        try:
            yield followed
        finally:
            _followed.remove(followed)


def _run_pending(tensors: list[Any]) -> None:
    """Compute those of the tensors that are not yet."""
    pending = [tensor for tensor in tensors if is_pending(tensor)]
    if not pending:
        return
    try:
        jt.sync(pending)
    except RuntimeError as error:
        if not ran_out.is_out_of_memory(error):
            raise
        raise ran_out.JittorOutOfMemoryError(_too_early(pending)) from None


def _too_early(tensors: list[Any]) -> str:
    found = ran_out.counters()
    limit = "none" if found[ran_out.LIMIT] < 0 else format_size(found[ran_out.LIMIT])
    return (
        f"memory ran out where the block begins, for {sum(map(is_pending, tensors))} parameters,"
        f" buffers or optimizer states whose values were asked for before it ("
        f"{format_size(found[0])} are allocated, the limit is {limit}). Nothing is lost: they wait"
        " for memory. Raise the limit (xmem.pool.configure(limit=...)) or let go of tensors, and"
        " enter the block again"
    )


def is_following() -> bool:
    """Say whether a block is open that follows something."""
    return bool(_followed)


def put_back_all() -> PutBack:
    """Put back all that is followed now."""
    found = [followed.put_back() for followed in _followed]
    return PutBack(
        sum(one.restored for one in found),
        sum(one.updated for one in found),
        sum(one.lost for one in found),
    )


def pending_tensors() -> int:
    """Return how many tensors that Python holds are not computed."""
    return int(native.recovering().xmem_jittor_pending())


def drop_fetches() -> int:
    """Forget callbacks of `jt.fetch` that wait for what failed; returns how many."""
    return int(native.recovering().xmem_jittor_drop_fetches())


def _restore(pending: list[_Note]) -> int:
    """Put the newest of a tensor's nodes that is there in its place; returns for how many."""
    addresses, count = native.addresses(note.tensor for note in pending)
    ids = sorted({node for note in pending for node in note.ids})
    known = (ctypes.c_longlong * len(ids))(*ids)
    found = (ctypes.c_longlong * len(ids))()
    native.recovering().xmem_jittor_values_before(addresses, count, known, len(ids), found)
    there = {node: address for node, address in zip(ids, found, strict=True) if address}
    # All are held before the first is put back, which lets go of a part of the graph.
    held = [
        (note.tensor, jt.wrap_var_addr(there[max(nodes)]))
        for note in pending
        if (nodes := [node for node in note.ids if node in there])
    ]
    for tensor, before in held:
        name = tensor.name()
        # Not `assign`, which would give the old node the flags of the new one.
        tensor.swap(before)
        tensor.name(name)
    return len(held)


def counts_of(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer counts: whole numbers of its own, and lists of them in groups."""
    counts = {name: value for name, value in vars(optimizer).items() if type(value) is int}
    groups = [
        {name: list(value) for name, value in group.items() if _are_counts(value)}
        for group in optimizer.param_groups
    ]
    return {"counts": counts, "groups": groups}


def put_counts_back(optimizer: Any, found: dict[str, Any]) -> None:
    """Let an optimizer have counted what `counts_of` found."""
    vars(optimizer).update(found["counts"])
    for group, held in zip(optimizer.param_groups, found["groups"], strict=False):
        for name, counts in held.items():
            group[name][:] = counts


def _are_counts(value: Any) -> bool:
    return type(value) is list and bool(value) and all(type(item) is int for item in value)
