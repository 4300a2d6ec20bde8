"""What a planned run holds: stages as they were called, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jittor as jt

from xmem.playing import playing_again
from xmem_jittor import notices
from xmem_jittor.calls import Call
from xmem_jittor.emptying import Emptied
from xmem_jittor.packing import Kept as Packed


@dataclass(frozen=True, eq=False)
class Place:
    """Which value a tensor that was handed out is; an attribute of the tensor.

    Attributes:
        run: that has handed it out.
        value: the number of the value.
        tensor: the tensor's number, which changes when its handle gets another one.
        held: the value.
    """

    run: Any
    value: int
    tensor: int
    held: Any


@dataclass(eq=False)
class Input:
    """An input of a stage.

    Attributes:
        value: the number of the value that it is; None for other tensors.
        held: what it is, where the schedule does not hold it for this stage.
        source: the address of the tensor whose gradient it adds to.
        wanted: gradients are asked for.
    """

    value: int | None
    held: Any
    source: int
    wanted: bool


@dataclass(eq=False)
class Stage:
    """A stage, as it was called.

    Attributes:
        call: the call.
        inputs: its inputs.
        result: the template of what it returns; None before its first pass.
        reads: the addresses of what it reads beside them, None where no gradient is asked for.
    """

    call: Call
    inputs: list[Input]
    result: Any = None
    reads: list[int | None] = field(default_factory=list)

    def run(self, inputs: Sequence[Any], name: str, *, with_graph: bool) -> tuple[Any, list[Any]]:
        """Run it; returns its output, and what was read beside the inputs, with a graph.

        Args:
            inputs: for this pass alone.
            name: what errors call it.
            with_graph: build a graph.
        """
        with jt.flag_scope(no_grad=int(not with_graph), **self.call.flags):
            if self.result is None:
                self.result, outputs = self.call.first_pass(
                    inputs, own_views=True, with_graph=with_graph
                )
                if len(outputs) != 1 or not outputs[0].dtype.is_float():
                    notices.refuse_output(name, len(outputs))
                reads, self.call.seen = self.call.seen, []
            else:
                reads = self.call.views()
                with playing_again():
                    outputs = self.call.second_pass(inputs, reads)
        return outputs[0].stop_fuse(), reads


@dataclass(eq=False)
class Kept:
    """What a stage keeps: a graph of its own.

    Attributes:
        inputs: where the graph ends, for each input of the stage.
        reads: the same for what it reads beside them.
        output: where it begins.
        value: a view of the output, outside of the graph.
        compares: its backward may compare its inputs with its output, so it needs the very same.
        emptied: the inputs that have lost their memory.
        packed: what its backward reads beside them, where that is packed.
    """

    inputs: list[Any]
    reads: list[Any]
    output: Any
    value: Any
    compares: bool = False
    emptied: list[Emptied] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)


def added(held: dict[int, Any], key: int, gradient: Any) -> tuple[dict[int, Any], int]:
    """Add to what is held under a key; returns where it is."""
    before = held.get(key)
    held[key] = gradient if before is None else (before + gradient).stop_fuse()
    return held, key
