"""What a call keeps for backward, and how long it takes: exact bytes, of Jittor 1.3.11.

Forward and backward are built lazily and run in one execution, since an execution in between would
fuse other operations. An operation that waits for the outputs notes what is allocated then, and
what backward starts from waits for that operation.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jittor as jt

from xmem.containers import fill, take_apart
from xmem.randomness import Streams, stream_kinds
from xmem.records import Cost
from xmem_jittor import native, replay
from xmem_jittor.graph import handles_of, newest_node, reached, read_by, swapped
from xmem_jittor.ordering import noting
from xmem_jittor.reach import Reach
from xmem_jittor.regions import Feed

_BEFORE, _AFTER = 0, 1
_INPUTS_OF_AN_OPERATION = 8


def measured(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Cost:
    """Return what a call keeps beyond its inputs and outputs; no trace is left."""
    given: list[Any] = []
    template = take_apart((tuple(args), dict(kwargs)), jt.Var, given)
    reach = Reach.of(function)
    streams = Streams(reach.streams, stream_kinds())

    def call(inputs: Sequence[Any], handles: Sequence[Any], views: Sequence[Any]) -> list[Any]:
        known = {id(handle) for handle in handles}
        buffers = [b for b in reach.buffers if id(b) not in known]
        thrown_away = [b.detach().stop_grad() for b in buffers]
        with replay.aside(), swapped(handles, views), swapped(buffers, thrown_away):
            filled, named = fill(template, inputs)
            outputs: list[Any] = []
            take_apart(function(*filled, **named), jt.Var, outputs)
            return [jt.wrap_var_addr(v.var_ptr) if id(v) in known else v for v in outputs]

    try:
        with jt.flag_scope(no_grad=0, lazy_execution=1):
            jt.sync(given, True, False)
            handles = _read(call, given, streams)
            for _ in range(2):  # the first pass compiles
                cost = _pass(call, given, handles, streams)
    finally:
        streams.rewind()
    return cost


_Call = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]]


def _read(call: _Call, given: Sequence[Any], streams: Streams) -> list[Any]:
    """Return the handles of what the call reads beside its inputs."""
    inputs = [_private(v) for v in given]
    newest = newest_node()
    found, _ = read_by(call(inputs, [], []), newest, inputs)
    streams.rewind()
    return [handle for held in handles_of(found) for handle in held]


def _private(var: Any) -> Any:
    """Return a view with a gradient of its own, where the tensor asks for one."""
    if var.dtype.is_float() and not var.is_stop_grad():
        return var.detach().start_grad()
    return var.detach().stop_grad()


def _pass(call: _Call, given: Sequence[Any], handles: Sequence[Any], streams: Streams) -> Cost:
    """Run forward and backward once."""
    gc.collect()
    jt.sync_all(True)
    library = native.allocator()
    start = jt.zeros((1,), dtype="int32").sync()
    before = _allocated()
    begun = _noting(start, _BEFORE)
    inputs = [_private(v) for v in given]
    views = [_private(h) for h in handles]
    outputs = call(inputs, handles, [jt.wrap_var_addr(v.var_ptr) for v in views])
    streams.rewind()
    if not outputs:
        return Cost(0, 0.0)
    ended = _after_all(outputs)
    targets = [v for v in (*inputs, *views) if not v.is_stop_grad()]
    ends = [v for v in outputs if v.dtype.is_float() and not v.is_stop_grad()]
    wanted = [t for t, flows in zip(targets, reached(ends, targets), strict=True) if flows]
    found = []
    if wanted:
        feed = Feed([_gradient(v, ended) for v in ends])
        found = jt.grad(feed(*ends), wanted, retain_graph=False)
    del targets, wanted, views
    own = [v.detach() for v in inputs]
    del inputs
    jt.sync([begun, ended, *found], True, False)
    seconds = ctypes.c_double()
    noted = int(library.xmem_jittor_noted(ctypes.byref(seconds)))
    outside = _bytes_of([*given, *handles, *own])
    handed_out = _bytes_of([*given, *handles, *own, *outputs]) - outside
    saved = noted - before - handed_out if found else 0
    return Cost(max(saved, 0), max(seconds.value, 0.0))


def _allocated() -> int:
    values = (ctypes.c_longlong * 6)()
    native.allocator().xmem_jittor_counters(values)
    return int(values[0])


def _bytes_of(tensors: Sequence[Any]) -> int:
    return int(native.allocator().xmem_jittor_bytes_of(*native.addresses(tensors)))


def _noting(var: Any, which: int, *others: Any) -> Any:
    return noting(var, native.address_of(native.allocator().xmem_jittor_note), which, *others)


def _after_all(outputs: Sequence[Any]) -> Any:
    """Return a tensor that is there when all outputs are, and have been noted."""
    last, *others = [v.detach() for v in outputs]
    while len(others) > _INPUTS_OF_AN_OPERATION:
        taken, others = others[:_INPUTS_OF_AN_OPERATION], others[_INPUTS_OF_AN_OPERATION:]
        [last] = jt.code(
            inputs=[last, *taken], outputs=[last], cpu_src="(void)0;", cuda_src="(void)0;"
        )
    return _noting(last, _AFTER, *others)


def _gradient(output: Any, ended: Any) -> Any:
    """Return some gradient that is made when forward has been noted."""
    source = "for (int i = 0; i < out0->num; i++) out0_p[i] = (out0_type)(1e-3f);"
    return jt.code(
        output.shape,
        output.dtype,
        [ended],
        cpu_src=source,
        cuda_src="cudaMemsetAsync(out0_p, 0, out0->size, 0);",
    ).stop_fuse()
