"""One step of an optimizer whose states are away: what goes together, and in which parts.

Parameters of a block step by the framework's own `step`, on a shallow copy of the optimizer that
has only them; xmem's own by their `update`. One whose states are larger than a block steps in parts
where its rule treats each element alone (`ELEMENTWISE`): tensors that are parts of its memory, of
its gradient's and of its states' take its place. Others that are larger are used where they are
stored, through a mapping, on a CPU.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from xmem.errors import OffloadError
from xmem.offload import blocks
from xmem.offload.depot import Depot
from xmem_torch import few_bits
from xmem_torch.states_away import Away, flattened
from xmem_torch.states_blocks import Blocks, Job, Place, goes, places_of
from xmem_torch.streamed_parameters import brought_in
from xmem_torch.streamed_pieces import raise_behind


class Streaming:
    """Where the states of an optimizer are, and its step.

    Attributes:
        kind: the optimizer's class without offload.
        depot: where states go.
        block_bytes: of states on the device at once.
        blocks: what steps together.
    """

    def __init__(self, kind: type, depot: Depot, block_bytes: int) -> None:
        self.kind = kind
        self.depot = depot
        self.block_bytes = block_bytes
        self.blocks = Blocks(kind, max(block_bytes // 2, 1))
        self._failure: OffloadError | None = None
        self._untold: OffloadError | None = None
        self._before: dict[str, Any] = {}
        self._made: dict[str, Away] = {}
        self._mapped: list[torch.Tensor] = []

    def step(self, optimizer: Any, places: Sequence[Place]) -> None:
        """Step parameters, block by block; `raise_failure` says what could not be stored.

        That is on the device then, and the next steps go on without storing.

        Raises:
            OffloadError: some states do not come back.
        """
        with ExitStack() as here:  # the parameter that is stepped in parts stays in meanwhile
            blocks.stream(
                self.blocks.jobs(optimizer, places),
                read=lambda job: self._read(optimizer, job),
                step=lambda job, loaded: self._step(optimizer, job, loaded, here),
                write=self._write,
            )
        if torch._C._current_graph_task_id() != -1:  # one of many steps, which nobody waits for
            self.raise_failure()

    def raise_failure(self) -> None:
        """Say once that something could not be stored; behind a backward that runs.

        Raises:
            OffloadError: see `step`.
        """
        error, self._untold = self._untold, None
        if error is not None:
            raise_behind(error)

    def _read(self, optimizer: Any, job: Job) -> list[dict[str, Any]]:
        """Return the states of a job's parameters, those that stay left out."""
        found = []
        for _, p, _ in job.places:
            # Listed at once: the step of the part before may be adding to it.
            held = [
                kv for kv in list(optimizer.state.get(p, {}).items()) if isinstance(kv[1], Away)
            ]
            if job.bounds is None:
                found.append({name: self._load(away, job) for name, away in held})
                continue
            parts = {name: (away, away.part_at(job.bounds[0])) for name, away in held}
            found.append(
                {name: part.load(away) for name, (away, part) in parts.items() if part.is_there}
            )
        return found

    def _load(self, away: Away, job: Job) -> torch.Tensor:
        if job.nbytes > self.blocks.limit and away.device.type == "cpu" and len(away.parts) == 1:
            mapped = away.parts[0].mapped(away)
            if mapped is not None:
                job.mapped.append(mapped)
                return away.shaped(mapped)
        return away.load()

    def _step(self, optimizer: Any, job: Job, loaded: list[dict[str, Any]], here: Any) -> None:
        parameters = [p for _, p, _ in job.places]
        if job.bounds is not None:
            if job.first:
                here.enter_context(brought_in(parameters, self._note))
                self._before = dict(optimizer.state.get(parameters[0], {}))
            try:
                self._step_part(optimizer, job, loaded[0])
            except BaseException:
                if not self._before:  # no state is there of some parts only
                    optimizer.state.pop(parameters[0], None)
                raise
            if job.last:
                here.close()
            return
        aways = [dict(optimizer.state.get(p, {})) for p in parameters]
        self._mapped = job.mapped
        with brought_in(parameters, self._note):
            for p, values in zip(parameters, loaded, strict=True):
                if values:
                    optimizer.state[p].update(values)
            try:
                self._plainly(optimizer, job.places, optimizer.state)
            finally:
                for place, before in zip(job.places, aways, strict=True):
                    self._collect(optimizer, place, before, job)

    def made(self, p: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a new state of zeros, in the depot where it is larger than a block.

        Args:
            p: the only parameter of the job that is stepped.
            name: of the state.
            like: what it looks like; a tensor without memory.
        """
        if like.nbytes > self.blocks.limit and p.device.type == "cpu" and self._failure is None:
            away = Away(like, self.depot, (0, like.numel()))
            away.device = p.device
            try:
                found = away.parts[0].zeros(away)
            except OffloadError as error:
                self._failure = error
                self._note(error)
            else:
                self._made[name] = away
                self._mapped.append(found)
                return away.shaped(found)
        return torch.zeros_like(like, device=p.device)

    def _plainly(self, optimizer: Any, places: Sequence[Place], state: Any) -> None:
        """Step by the optimizer's own rule, with states that are there."""
        if issubclass(self.kind, few_bits.Optimizer):
            self.kind.update(optimizer, places)
            return
        alone: Any = object.__new__(self.kind)
        alone.__dict__.update(optimizer.__dict__)
        alone.__dict__.pop("step", None)
        groups = {id(group): {**group, "params": []} for group, _, _ in places}
        for group, p, _ in places:
            groups[id(group)]["params"].append(p)
        alone.param_groups, alone.state = list(groups.values()), state
        inspect.unwrap(self.kind.step, stop=is_own)(alone)  # type: ignore[attr-defined]

    def _step_part(self, optimizer: Any, job: Job, loaded: dict[str, Any]) -> None:
        """Step some elements of a parameter; what counts its steps moves with the last of them."""
        group, p, index = job.places[0]
        assert job.bounds is not None
        start, stop = job.bounds
        part = flattened(p)[start:stop]
        part.grad = flattened(p.grad)[start:stop]
        small = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._before.items()
            if name not in loaded
        }
        state: Any = defaultdict(dict)
        if small or loaded:
            state[part] = {name: loaded.get(name, small.get(name)) for name in self._before}
        try:
            self._plainly(optimizer, [(group, part, index)], state)
        finally:
            self._collect_part(optimizer, job, state[part])

    def _collect_part(self, optimizer: Any, job: Job, state: Mapping[str, Any]) -> None:
        _, p, _ = job.places[0]
        assert job.bounds is not None
        for name, value in state.items():
            if not goes(value):
                if job.last:
                    optimizer.state[p][name] = value
                continue
            away = optimizer.state[p].get(name)
            if not isinstance(away, Away):
                bounds = self.blocks.bounds(optimizer, job.places[0])
                like = p if value.dtype == p.dtype else p.to(value.dtype)
                away = optimizer.state[p][name] = Away(like, self.depot, bounds)
            held = away.part_at(job.bounds[0])
            held.held = value
            job.changed.append(held)

    def _collect(self, optimizer: Any, place: Place, before: Mapping[str, Any], job: Job) -> None:
        """Let what stands for states take their places again, and hold the states."""
        state = optimizer.state.get(place[1])
        if not state:
            return
        bounds = self.blocks.bounds(optimizer, place)
        for name, value in list(state.items()):
            if not goes(value):
                continue
            away = before.get(name) or self._made.pop(name, None)
            if not isinstance(away, Away) or not away.is_for(value):
                fits = value.numel() == bounds[-1]
                away = Away(value, self.depot, bounds if fits else (0, value.numel()))
            state[name] = away
            if any(value.data_ptr() == mapped.data_ptr() for mapped in job.mapped):
                continue  # it is where it is stored
            away.hold(value)
            job.changed += away.parts
        job.mapped.clear()

    def put_away(self, optimizer: Any) -> None:
        """Let all states go; those that cannot be stored are held.

        Raises:
            OffloadError: the first reason why one could not.
        """
        for place in places_of(optimizer):
            job = Job([place])
            self._collect(optimizer, place, {}, job)
            self._write(job)
        self.raise_failure()

    def _write(self, job: Job) -> None:
        if self._failure is not None:
            return
        for part in job.changed:
            try:
                part.store()
            except OffloadError as error:
                self._failure = error
                self._note(error)
                return

    def _note(self, error: OffloadError) -> None:
        self._untold = self._untold or error


def is_own(function: Any) -> bool:
    """Say whether a step is without PyTorch's profiling and hooks around it."""
    return not getattr(function, "hooked", False)
