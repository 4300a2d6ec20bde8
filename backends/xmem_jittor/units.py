"""A call of a module whose insides are packed until backward.

The call's graph is built on views of its inputs and stays, without the memory of what is packed
(`packing.py`). The call is taped as one operation. What Python holds of the call's tensors gets
views of them, taped like its results, so whoever reads one later finds its value and passes its
gradient on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jittor as jt

from xmem.containers import leaves
from xmem_jittor import native, notices
from xmem_jittor.calls import flags_in_force
from xmem_jittor.emptying import empty_views
from xmem_jittor.entries import Entries
from xmem_jittor.graph import (
    handles_of,
    let_go,
    maker_of,
    newest_node,
    reached,
    read_by,
    tape_of,
)
from xmem_jittor.keeping import Block, Origin, Packed, Running, origin_of
from xmem_jittor.late import Stays
from xmem_jittor.ordering import after, anchor
from xmem_jittor.packing import EXACT, GIVEN, REMAKE, Cut, cut, handles_between, pack
from xmem_jittor.remaking import Recipe, Remade, recipe_of
from xmem_jittor.softmax import keeping_outputs
from xmem_jittor.trial import noting_kept
from xmem_jittor.unpacking import Unit


def is_trained(var: Any) -> bool:
    """Say whether gradients are asked for."""
    return var.dtype.is_float() and not var.is_stop_grad()


def run(
    block: Block, path: str, module: Any, call: Callable[[], Any], args: Any, kwargs: Any
) -> Any:
    """Make a call and pack what it leaves for backward.

    Args:
        block: says what is packed.
        path: of the module.
        module: what is called.
        call: calls it with `args` and `kwargs`.
        args: the arguments; handles in them hold views during the call.
        kwargs: those by name.
    """
    notices.warn_if_eager()
    given = list({id(v): v for v in leaves((args, kwargs), jt.Var)}.values())
    with jt.flag_scope(lazy_execution=1):
        first = newest_node()
        entries = Entries([v for v in given if is_trained(v)])
        noted: list[Running] = []
        block.noted = noted
        try:
            with noting_kept() as own, keeping_outputs(), entries.in_place():
                result = call()
        finally:
            block.noted = None
        piece = _Piece(block, path, module, first, newest_node(), entries, noted)
        returned = leaves(result, jt.Var)
        piece.hand_out([*entries.changed, *returned], own)
    return result


class _Piece:
    """The nodes that a call has made."""

    def __init__(
        self,
        block: Block,
        path: str,
        module: Any,
        first: int,
        newest: int,
        entries: Entries,
        noted: Sequence[Running],
    ) -> None:
        self.block = block
        self.path = path
        self.module = module
        self.first = first
        self.newest = newest
        self.entries = entries
        self.noted = noted

    def hand_out(self, returned: Sequence[Any], own: Sequence[Any]) -> None:
        """Tape what Python holds of the call, and pack what backward reads."""
        views = list(self.entries.views.values())
        handles, others = self._held(returned, [*own, *views])
        if not handles:
            return
        reads = self._trained_reads(handles, views)
        pairs = list(zip([*self.entries.originals.values(), *reads], [*views, *reads], strict=True))
        flowing = reached(handles, [target for _, target in pairs])
        pairs = [pair for pair, flows in zip(pairs, flowing, strict=True) if flows]
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        outputs = {
            v.var_ptr: jt.wrap_var_addr(v.var_ptr) for v in handles if any(reached([v], targets))
        }
        if not outputs:
            return
        # A detached tensor looks as if it asked for gradients.
        others += [v for v in handles if v.var_ptr not in outputs]
        for output in outputs.values():
            output.stop_fuse()
        name = self.path or type(self.module).__name__
        unit = Unit(name, list(outputs.values()), targets, flags_in_force())
        found = cut(
            unit.outputs,
            targets,
            entries=views,
            given=[*others, *self.entries.leaves],
            first=self.first,
        )
        taped = [output.detach() for output in unit.outputs]
        self._pack(unit, found, taped, others)
        self._tape(unit, sources, dict(zip(outputs, taped, strict=True)), handles)

    def _held(self, returned: Sequence[Any], ignored: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return handles of the call's tensors that may be differentiated, and all others."""
        handles: list[Any] = []
        others: list[Any] = []
        for handle in handles_between(self.first, self.newest, ignored):
            (handles if is_trained(handle) else others).append(handle)
        entered = {v.var_ptr for v in self.entries.views.values()}
        kept = [v for v in handles if v.var_ptr not in entered]
        order = {id(v): index for index, v in enumerate(returned)}
        kept.sort(key=lambda v: order.get(id(v), len(order)))
        return kept, others

    def _trained_reads(self, outputs: Sequence[Any], views: Sequence[Any]) -> list[Any]:
        """Return what the call read beside its inputs and asks for gradients."""
        addresses, _ = read_by(outputs, self.first, views)
        found = [handles[0] for handles in handles_of(addresses)]
        return [v for v in found if is_trained(v)]

    def _pack(self, unit: Unit, found: Cut, ends: Sequence[Any], others: Sequence[Any]) -> None:
        unit.kept, inputs, sources = pack(found, self._keep, ends=ends, waits=[*ends, *others])
        for output in unit.outputs:
            recipe = self._recipe(output, inputs)
            if recipe is not None:
                unit.remade.append(Remade.of(recipe, sources))
                self.block.remake(origin_of(output), unit.remade[-1])
        self._empty_outputs(unit, found, ends, others)

    def _empty_outputs(
        self, unit: Unit, found: Cut, ends: Sequence[Any], others: Sequence[Any]
    ) -> None:
        """Let outputs that backward does not read lose their memory; what is handed out keeps it.

        They go by themselves where backward is built before anything runs, but not where somebody
        waits for the loss first.
        """
        read = {var.var_ptr for var, _ in found}
        remade = [kept.packed for kept in unit.kept if isinstance(kept.packed, Remade)]
        leaves = {origin_of(v) for r in (*remade, *unit.remade) for v in r.recipe.leaves}
        done = anchor()
        for wait in (*ends, *others):
            done = after(done, wait)
        for output in unit.outputs:
            whole = origin_of(output) == output.id  # and no view of what others read
            if output.var_ptr not in read and whole and output.id not in leaves:
                unit.emptied.append(empty_views(output, ends, done))

    def _recipe(self, target: Any, inputs: Sequence[Any]) -> Recipe | None:
        if any(target.var_ptr == v.var_ptr for v in inputs):
            return None
        return recipe_of(target, inputs, list(self.entries.views.values()), self.first)

    def _keep(
        self, var: Any, kind: int, inputs: Sequence[Any], sources: list[Any]
    ) -> Packed | Remade | Stays | None:
        """Return what a tensor comes back from; None where it is kept as it is."""
        origin = self.entries.origins.get(var.var_ptr) or origin_of(var)
        layer, module = self._reader(var)
        if var.var_ptr not in self.entries.origins:
            var.stop_fuse()
        if kind == GIVEN:
            self.block.left(var, origin, layer, module, "held elsewhere")
            return None
        if kind == REMAKE:
            recipe = self._recipe(var, inputs)
            remade = None if recipe is None else Remade.of(recipe, sources)
            if remade is not None:
                self.block.remake(origin, remade)
        return self.block.keep(var, origin, layer, module, compared=kind == EXACT)

    def _reader(self, var: Any) -> tuple[str, Any]:
        """Return the innermost module that reads a tensor, with its path."""
        node = native.saving().xmem_jittor_reader(var.var_ptr, self.first, self.newest)
        inner = [entry for entry in self.noted if entry.made(node)]
        if not inner:
            return self.path, self.module
        last = max(inner, key=lambda entry: entry.first)
        return last.path, last.module

    def _tape(
        self, unit: Unit, sources: Sequence[Any], own: dict[int, Any], handles: Sequence[Any]
    ) -> None:
        """Let gradients of the outputs come to the unit, and the handles hold what is taped."""
        taped = {address: view.tape() for address, view in own.items()}
        callback = functools.partial(Unit.backward, unit)
        jt.tape_together([v.tape() for v in sources], list(taped.values()), callback)
        unit.places = [tape_of(v) for v in taped.values()]
        alive = weakref.ref(callback)
        operation = maker_of(unit.places[0])
        for source in sources:
            place = self.entries.places.get(source.var_ptr)
            if place is not None:
                dropped = weakref.finalize(place, let_go, operation, source.var_ptr, alive)
                dropped.atexit = False
        origins = {address: origin_of(v) for address, v in taped.items()}
        for handle in handles:
            address = handle.var_ptr
            if address in taped:
                handle.swap(jt.wrap_var_addr(taped[address].var_ptr))
                handle._xmem_origin = Origin(origins[address], handle.id)
