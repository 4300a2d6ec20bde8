"""One case, one process, one JSON file: `python -m xmem.conformance.worker CASE RESULT`.

CASE is a `Case` as JSON text, RESULT the file to write. What frameworks print goes nowhere near
the result. Of a case with several ranks each is such a process and writes a file of its own; see
`xmem.conformance.gathering`.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import xmem
from xmem.conformance.measured import (
    MEASURED_STEPS,
    WARM_UP_STEPS,
    told_categories,
    told_losses,
)
from xmem.conformance.techniques import Target, technique
from xmem.distributed import watching
from xmem.errors import BackendUnavailableError, CapabilityError
from xmem.report.model import Case, Machine, Result, Status, TimelinePoint, write_json
from xmem.workloads import make_batch, make_weights, workload

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.meter import Measurement


class CaseRun:
    """A workload realised on a backend, with a technique in force."""

    def __init__(self, case: Case, backend: Backend) -> None:
        self._backend = backend
        self._workload = workload(case.workload, case.preset)
        self.model = backend.models.build(self._workload.model, make_weights(self._workload))
        self.blocks = backend.models.blocks(self.model)
        self.block_calls = 0
        for block in self.blocks:
            self._count_calls(block)
        self._step = 0
        self.batch = self._batch()
        self.applied = technique(case.technique).apply(
            backend, Target(self.model, self.blocks, self.batch, self._loss)
        )
        self.optimizer = backend.training.make_optimizer(
            self._workload.optimizer, self.model, learning_rate=self._workload.learning_rate
        )

    def _batch(self) -> tuple[Any, Any]:
        inputs, targets = make_batch(self._workload, self._step)
        return self._backend.models.tensor(inputs), self._backend.models.tensor(targets)

    def _loss(self, model: Any, batch: tuple[Any, Any]) -> Any:
        inputs, targets = batch
        return self._backend.models.loss(self._workload.loss, model(inputs), targets)

    def _count_calls(self, block: Any) -> None:
        if not self._backend.offers("checkpoint"):
            return

        def counting(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                self.block_calls += 1
                return forward(*args, **kwargs)

            return run

        self._backend.checkpoint.replace_forward(block, counting)

    def backward(self) -> Any:
        """Run forward and backward; returns the loss."""
        with self.applied.forward_context():
            loss = self._loss(self.model, self.batch)
        xmem.backward(loss, self.optimizer)
        return loss

    def finish(self) -> None:
        """Update the parameters and forget the gradients."""
        xmem.optimizer_step(self.optimizer)
        xmem.zero_grad(self.optimizer)

    def next_batch(self) -> None:
        """Take the data of the next step."""
        self._step += 1
        if self._workload.input_kind in ("text", "patterns"):
            self.batch = self._batch()

    def step(self) -> float:
        """Run one step and return its loss."""
        loss = self.backward()
        self.finish()
        return xmem.log_value(loss)

    def measured_step(self) -> tuple[Measurement, Any]:
        """Run one step under the meter."""
        self.block_calls = 0
        with xmem.measure(
            model=self.model, optimizer=self.optimizer, inputs=self.batch
        ) as measurement:
            loss = self.backward()
            self.finish()
        return measurement, loss


def run(case: Case, gradients_path: Path | None = None) -> Result:
    """Run a case in this process.

    Raises:
        Exception: whatever went wrong; `main` turns it into a status.
    """
    backend = xmem.use(case.backend, device=case.device)
    for capability in ("measure", "training", "models", *technique(case.technique).capabilities):
        if not backend.offers(capability):
            raise CapabilityError(f"backend {case.backend!r} does not offer {capability!r}")
    if case.limit_bytes is not None:
        backend.measure.set_limit(case.limit_bytes)
    if technique(case.technique).several_ranks:
        from xmem.conformance import gathering, sharded

        result = sharded.run(case, backend)
        return gathering.merged([result]) if case.world == 1 else result
    item = backend.models.item
    current = CaseRun(case, backend)
    losses = []
    loss = current.backward()
    if gradients_path is not None:
        gradients = backend.training.gradients(current.model, current.optimizer)
        np.savez(gradients_path, **gradients)
        del gradients
    current.finish()
    losses.append(item(loss))
    del loss
    # Warm up as the measured steps run: a lazy framework that is asked for a value at another
    # place fuses, and compiles, other kernels.
    for _ in range(WARM_UP_STEPS - 1):
        current.next_batch()
        _, loss = current.measured_step()
        losses.append(item(loss))
        del loss
    measurements = []
    for _ in range(MEASURED_STEPS):
        current.next_batch()
        measurement, loss = current.measured_step()
        measurements.append(measurement)
        losses.append(item(loss))
        del loss
    for _ in range(len(losses), case.steps or 0):
        current.next_batch()
        losses.append(current.step())
    return _result(case, backend, current, measurements, losses)


def _result(
    case: Case,
    backend: Backend,
    current: CaseRun,
    measurements: list[Measurement],
    losses: list[float],
) -> Result:
    highest = max(measurements, key=lambda m: m.peak_allocated_bytes)
    times = [m.seconds for m in measurements]
    return Result(
        case=case,
        status="ok",
        device=backend.device,
        losses=told_losses(losses),
        step_seconds=statistics.median(times),
        step_seconds_spread=max(times) - min(times),
        static_bytes=highest.static_bytes,
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peak_above_static_bytes=highest.peak_above_static_bytes,
        peaks_bytes=tuple(m.peak_allocated_bytes for m in measurements),
        peak_reserved_bytes=highest.peak_reserved_bytes,
        peak_process_bytes=measurements[-1].peak_process_bytes,
        gpu_process_bytes=measurements[-1].gpu_process_bytes,
        allocation_count=measurements[-1].allocation_count,
        by_category=told_categories(highest),
        timeline=tuple(
            TimelinePoint(
                name=p.name,
                seconds=p.seconds,
                allocated_bytes=p.allocated_bytes,
                peak_allocated_bytes=p.peak_allocated_bytes,
            )
            for p in measurements[-1].timeline
        ),
        applied_to=current.applied.applied_to,
        dtype=current.applied.dtype,
        block_forward_calls=current.block_calls if backend.offers("checkpoint") else None,
        block_count=len(current.blocks),
        source=highest.source,
        framework_version=backend.framework_version,
        distribution=backend.distribution,
        settings=backend.measure.settings(),
    )


def _out_of_memory() -> bool:
    """Say whether the allocator refused a request: by its own count, not by an error's text."""
    try:
        return bool(xmem.active().measure.counters().out_of_memory_count)
    except xmem.XmemError:
        return False


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE = re.compile(r"\[?reason\]?\s*:", re.IGNORECASE)


def reason_of(error: Exception) -> str:
    """Tell an exception by its type, its first and last line, and the lines that name a reason.

    A framework may close a page of facts with advice (Jittor: "export trace_py_var=3").
    """
    lines = [line.strip() for line in _COLOUR.sub("", str(error)).strip().splitlines()] or [""]
    last = len(lines) - 1
    # What a reason says may begin on the line below the word.
    causes = {k for n, line in enumerate(lines) if _CAUSE.match(line) for k in (n, n + 1)}
    shown = [lines[n] for n in sorted({0, *causes, last}) if n <= last]
    return f"{type(error).__name__}: " + " [...] ".join(line for line in shown if line)


def attempt(case: Case, gradients_path: Path | None = None) -> Result:
    """Run a case; whatever happens becomes a result."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", xmem.XmemWarning)
        try:
            result = run(case, gradients_path)
        except CapabilityError as error:
            result = Result(case=case, status="unsupported", reason=str(error))
        except BackendUnavailableError as error:
            result = Result(case=case, status="unavailable", reason=str(error))
        except Exception as error:  # noqa: BLE001  a worker's failure is a row of the report
            traceback.print_exc()
            status: Status = "out_of_memory" if _out_of_memory() else "error"
            lost = watching.explanation(error) if status == "error" else None
            result = Result(case=case, status=status, reason=reason_of(lost or error))
    messages = tuple(
        dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, xmem.XmemWarning))
    )
    return msgspec.structs.replace(
        result,
        warnings=messages,
        machine=Machine.here(),
        started=started,
        seconds=time.perf_counter() - begin,
    )


def main(arguments: list[str]) -> int:
    """Run the case given as JSON text, and write its result to the given file."""
    case = msgspec.json.decode(arguments[0], type=Case)
    path = Path(arguments[1])
    gradients_path = path.with_suffix(".npz") if case.save_gradients else None
    result = attempt(case, gradients_path)
    if case.world > 1:
        return _leave(result, path)
    write_json(result, path)
    return 0


def _leave(result: Result, path: Path) -> int:
    """Write a rank's own file; whole ranks leave together, a failed one ends the others."""
    from xmem import distributed
    from xmem.conformance.gathering import rank_of_this_process, rank_path
    from xmem.distributed import failing

    write_json(result, rank_path(path, rank_of_this_process()))
    watch = failing.current()
    if result.status == "ok":
        distributed.destroy()
    elif watch is not None:
        watch.roll.fail(result.reason)  # the others end at once, and name this rank
    return 0 if result.status in ("ok", "unsupported") else 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Frameworks may abort while they shut down; the result is on disk by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
