"""What a planned run hands out, and where gradients of it go: the tape around the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jittor as jt

from xmem.playing import Script
from xmem.records import HEAD, REST, TAIL
from xmem_jittor import native, notices
from xmem_jittor.graph import reached, read_by


def is_trained(var: Any) -> bool:
    """Say whether gradients are asked for."""
    return var.dtype.is_float() and not var.is_stop_grad()


def bytes_of(tensors: Sequence[Any]) -> int:
    """Return the bytes of distinct allocations; of those not made yet, of distinct tensors."""
    distinct = list({v.var_ptr: v for v in tensors}.values())
    there = [v for v in distinct if bytes_there([v])]
    known = {v.var_ptr for v in there}
    return bytes_there(there) + sum(v.nbytes for v in distinct if v.var_ptr not in known)


def bytes_there(tensors: Sequence[Any]) -> int:
    """Return the bytes of distinct allocations that have been made."""
    return int(native.allocator().xmem_jittor_bytes_of(*native.addresses(tensors)))


@dataclass(frozen=True)
class Stepping:
    """A step that is being run.

    Attributes:
        targets: the model's trained parameters; the step asks for their gradients and no others.
        newest: the newest node before the step.
    """

    targets: Sequence[Any]
    newest: int

    @cached_property
    def parameters(self) -> dict[int, int]:
        """The bytes of the parameters by address."""
        return {int(p.var_ptr): int(p.nbytes) for p in self.targets}

    def asks(self, var: Any) -> bool:
        """Say whether a gradient of a tensor is needed for one that is asked for.

        A batch asks for gradients by default, and nobody for its.
        """
        return any(reached([var], self.targets))


@dataclass(eq=False)
class _Called:
    """How many stages have been called: all that a guard holds of its run.

    A guard that held the run would never go where something is computed between two stages: the
    run holds what was computed, which holds the guard, and Jittor's references are not collected
    in circles.
    """

    stages: int
    called: int = 0


class Chain:
    """The sources of gradients of a run, and the tape between them and what is handed out.

    Args:
        script: what is played.
        stepping: the step that it is part of, where its gradients are counted.
    """

    def __init__(self, script: Script, stepping: Stepping | None) -> None:
        self.first = 0
        self._script = script
        self._stepping = stepping
        self._before: set[int] = set()
        self._sources: dict[int, Any] = {}
        self._new: list[Any] = []  # sources that no guard has yet
        self._token: Any = None
        self._called = _Called(len(script))
        self._parameter_bytes: list[dict[int, int]] = [{}]  # by stage
        self._tail_bytes = 0

    def begin(self, var: Any) -> None:
        """Note what stage 0 reads first, and which parameters it comes from."""
        self.first = var.var_ptr
        if self._stepping is not None:
            self._before = set(read_by([var], self._stepping.newest, [])[0])

    def wants(self, var: Any) -> bool:
        """Say whether gradients of a tensor are asked for, in a step those that it needs."""
        return is_trained(var) and (self._stepping is None or self._stepping.asks(var))

    def source(self, var: Any) -> int:
        """Note a tensor that gradients are asked for of; returns its address."""
        address = int(var.var_ptr)
        if address not in self._sources:
            self._sources[address] = jt.wrap_var_addr(address)
            self._new.append(self._sources[address])
        return address

    def parameter(self, var: Any) -> int | None:
        """Note what the stage being called reads; returns its address where gradients are asked."""
        if not self.wants(var):
            return None
        address = self.source(var)
        if self._stepping is None or address in self._stepping.parameters:
            self._parameter_bytes[-1][address] = var.nbytes
        return address

    def stage_ended(self) -> None:
        """Go on to the next stage."""
        self._called.called += 1
        self._parameter_bytes.append({})
        if self._called.called == self._called.stages and self._stepping is not None:
            known = self._before.union(*self._parameter_bytes)
            self._tail_bytes = sum(
                size for a, size in self._stepping.parameters.items() if a not in known
            )

    def guarded(self, value: Any, name: str) -> Any:
        """Return a tensor that has a value and refuses gradients.

        A guard's sources are those of its own stage and a token of the guard before.
        """
        sources, self._new = self._new, []
        if self._token is not None:
            sources.append(self._token)
        output, self._token = value.tape(), jt.zeros((1,)).tape()
        called = self._called

        def refuse(*_: Any) -> None:
            notices.refuse_other_readers(name, called.called, called.stages)

        jt.tape_together([v.tape() for v in sources], [output, self._token], refuse)
        return output

    def taped(self, value: Any, backward: Callable[..., Any]) -> Any:
        """Return a tensor that has a value, and whose gradient goes to `backward`."""
        output = value.tape()
        jt.tape_together([v.tape() for v in self._sources.values()], [output], backward)
        self._token, self._new = None, []
        return output

    def results(self, found: Mapping[int, Any]) -> list[Any]:
        """Return the gradients of the sources, zeros where there are none."""
        return [
            found[a] if a in found else jt.zeros(v.shape, v.dtype) for a, v in self._sources.items()
        ]

    def release(self) -> None:
        """Let go of all tensors."""
        self._sources, self._new, self._token = {}, [], None

    def gradient_bytes_before(self, number: int) -> int:
        """Return the bytes of gradients that have been made when an operation begins."""
        script = self._script
        if 0 <= number < script.loss or number in (HEAD, TAIL):
            return 0
        made: dict[int, int] = {}
        for sizes, at in zip(self._parameter_bytes, script.backward, strict=False):
            if number == REST or at < number:
                made.update(sizes)
        return self._tail_bytes + sum(made.values())
