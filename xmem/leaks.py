"""Watch a training loop for memory that is never given back: `with xmem.watch_leaks() as watch`.

Once per step the watch reads figures that the framework has anyway: allocated bytes, how many
tensors are alive, on a lazy framework how many variables and operations. Nothing is waited for, run
or read, so a lazy program stays as lazy as it was. `xmem.slopes` says when one of them grows and
goes on; only then tensors and their holders are looked at (some 0.1 s, a few times).

The watch is there for the training: if it fails itself, it says so once, stops, and training goes
on. Only what was asked for ends a step: `on_leak="raise"`, or an error of what `on_leak` calls.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from xmem import leak_marks
from xmem.api import active
from xmem.errors import LeakError, MeasurementError, UsageError, XmemWarning
from xmem.leak_figures import BYTES, Figures
from xmem.leak_lines import LineFinder, stack_level
from xmem.leak_notes import pool_notes
from xmem.leak_records import Leak, LeakKind, Note, NoteKind
from xmem.leak_search import Case
from xmem.slopes import WINDOWS, Trend

if TYPE_CHECKING:
    from types import TracebackType

    from xmem.backend import Backend
    from xmem.leak_marks import Mark
    from xmem.pooling import PoolStats

__all__ = ["Leak", "LeakKind", "LeakWatch", "Note", "NoteKind", "watch_leaks"]

OnLeak = Literal["warn", "raise"] | Callable[[Leak], Any]

_BETWEEN = 4
"""So many samples after the first mark the second is taken."""
_PAUSE = 8
"""After so many samples without suspicion the marks are forgotten."""
_TRACED = 8
"""Lines are looked for of so many suspects at most."""
_LONGEST_WAIT = 64


def watch_leaks(
    *,
    every: int = 1,
    model: Any = None,
    optimizer: Any = None,
    warm_up: int = 4,
    on_leak: OnLeak = "warn",
    find_lines: bool = True,
) -> LeakWatch:
    """Watch the steps inside a `with` block for leaks.

        with xmem.watch_leaks() as watch:
            for batch in batches:
                train_step(batch)
                watch.step()

    Without `watch.step()`, a step ends where the optimizer's does (with several, the first one's).
    A leak is sure after 14 samples on a straight line; irregular ones take longer.

    Args:
        every: sample each so manieth step; the others cost nothing.
        model: helps to name gradients.
        optimizer: whose steps count, where `watch.step()` is not called; helps to name gradients.
        warm_up: so many steps may grow: optimizer states, kernels, caches.
        on_leak: "warn" (an XmemWarning), "raise" (a LeakError), or what is called with each Leak.
        find_lines: run one step under `sys.settrace` to find the line that keeps a leak.

    Returns:
        A block; `watch.findings` has the leaks so far, `watch.notes` what grows and is no leak.

    Raises:
        UsageError: a value that makes no sense.
        CapabilityError: the active backend cannot tell what is alive.
    """
    for name, value, least in (("every", every, 1), ("warm_up", warm_up, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{name}={value!r}: a number of steps, at least {least}")
    if on_leak not in ("warn", "raise") and not callable(on_leak):
        raise UsageError(f"on_leak={on_leak!r}: 'warn', 'raise' or something to call with a Leak")
    backend = active()
    backend.measure.counters()
    backend.pool.live_counts()
    return LeakWatch(backend, every, model, optimizer, warm_up, on_leak, find_lines)


class LeakWatch:
    """What `watch_leaks` returns.

    Attributes:
        findings: the leaks that are sure.
        notes: what grows and is no leak; complete when the block has ended.
        steps: how many steps have ended.
    """

    def __init__(
        self,
        backend: Backend,
        every: int,
        model: Any,
        optimizer: Any,
        warm_up: int,
        on_leak: OnLeak,
        find_lines: bool,
    ) -> None:
        self.findings: list[Leak] = []
        self.notes: list[Note] = []
        self.steps = 0
        self._backend = backend
        self._every = every
        self._model = model
        self._optimizer = optimizer
        self._warm_up = warm_up
        self._on_leak = on_leak
        self._find_lines = find_lines
        self._end: Callable[[], None] | None = None
        self._by_hand = False
        self._stepping: int | None = None if optimizer is None else id(optimizer)
        self._first_stats: PoolStats | None = None
        self._patience = 0
        self._has_failed = False
        self._begin()

    def _begin(self) -> None:
        """Begin anew: no figure has a past."""
        self._figures = Figures(self._backend.pool)
        self._marks: list[Mark] = []
        self._quiet = 0
        self._case: Case | None = None
        self._lines: LineFinder | None = None

    def __enter__(self) -> LeakWatch:
        if self._end is not None:
            raise MeasurementError("this watch is open already; make a new one with watch_leaks()")
        self._end = self._backend.pool.on_step(self._on_optimizer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._end is not None:
            self._end()
            self._end = None
        try:
            leaks = self._guarded(lambda: self._last_look(ended_well=kind is None))
            if kind is None and self.steps == 0:
                self._warn_of_no_step()
            self._report(leaks)
        finally:
            self._begin()
            self._model = self._optimizer = None

    def _last_look(self, *, ended_well: bool) -> list[Leak]:
        lines = self._stop_tracing()
        if not ended_well:
            return []
        if self._first_stats is not None:
            for note in pool_notes(self._first_stats, self._backend.pool.stats()):
                self._note(note.kind, note.text)
        return [] if self._case is None else self._settle(self._case, lines)

    def _warn_of_no_step(self) -> None:
        warnings.warn(
            "watch_leaks saw no training step: no optimizer"
            + (" that it knows" if self._stepping is None else " that was given as optimizer=")
            + " stepped. Call watch.step() at the end of each step",
            XmemWarning,
            stacklevel=stack_level(),
        )

    def step(self) -> None:
        """Say that a training step has ended; then optimizers' steps no longer count as that."""
        if not self._by_hand:
            self._by_hand = True
            self._begin()
            self.steps = 0
        self._advance()

    def _on_optimizer(self, optimizer: Any) -> None:
        if self._by_hand:
            return
        if self._stepping is None:
            self._stepping = id(optimizer)
        if id(optimizer) == self._stepping:
            self._advance()

    def _advance(self) -> None:
        if self._end is None:
            raise MeasurementError("watch.step() outside of its `with` block watches nothing")
        self.steps += 1
        self._report(self._guarded(self._look))

    def _guarded(self, look: Callable[[], list[Leak]]) -> list[Leak]:
        """Look, if nothing has failed so far; what fails is told once and does not come through."""
        if self._has_failed:
            return []
        try:
            return look()
        except Exception as error:  # noqa: BLE001  whatever it is, training is worth more
            self._has_failed = True
            text = f"it failed with {type(error).__name__}: {error}. Training goes on, unwatched"
        self._begin()
        self._note("stopped", text)
        warnings.warn(f"watch_leaks stopped: {text}", XmemWarning, stacklevel=stack_level())
        return []

    def _look(self) -> list[Leak]:
        """Look at the step that has ended; returns the leaks that are sure."""
        lines = self._stop_tracing()
        if self._case is not None:
            self._case.let_go()
            if lines or self.steps >= self._case.due:
                return self._settle(self._case, lines)
        if self.steps == max(1, self._warm_up):
            # Looking at gradients makes Python objects of them, which stay; and what is garbage
            # already would fall later. Neither is a figure's growth.
            self._backend.pool.live_tensors()
            gc.collect()
        if self.steps > self._warm_up and self.steps % self._every == 0 and self._case is None:
            self._sample()
        if self._case is not None and self._find_lines and self._lines is None:
            self._trace(self._case)
        return []

    def _sample(self) -> None:
        pool = self._backend.pool
        self._figures.sample(self.steps)
        if self._first_stats is None:
            self._first_stats = pool.stats()
        if not self._figures.is_rising():
            self._quiet += 1
            if self._quiet > _PAUSE:
                self._marks.clear()
            return
        self._quiet = 0
        trends = self._figures.trends()
        window = min((trend.window for trend in trends.values()), default=1)
        begin = max((t.since_step for t in trends.values() if t.window == window), default=0)
        if self._marks and self._marks[0].step < begin:
            self._marks.clear()  # what came between them has been given back since
        wait = _BETWEEN * window * self._every
        if not self._marks or (len(self._marks) == 1 and self.steps - self._marks[0].step >= wait):
            self._marks.append(leak_marks.mark(pool, self.steps))
            return
        self._patience = max(0, self._patience - 1)
        has_lain = len(self._marks) == 2 and self.steps - self._marks[1].step >= wait // 2
        if trends and has_lain and self._patience == 0:
            self._suspect(trends, window)

    def _suspect(self, trends: dict[str, Trend], window: int) -> None:
        """Look at what was kept; what is found has to show itself once more."""
        figure = min(trends, key=lambda name: (trends[name].window, name != BYTES))
        by_bytes = trends.get(BYTES)
        wait = max(1, min(2 * window - 2, _LONGEST_WAIT)) * self._every
        case = Case(self._backend, self._marks, self.steps, due=self.steps + wait)
        case.figure, case.trend = figure, trends[figure]
        case.bytes_per_step = 0.0 if by_bytes is None else by_bytes.per_step
        case.find(self._model, self._optimizer)
        case.value = self._figures.read(figure)  # garbage is gone by now
        for owner in case.bounded:
            self._note(
                "bounded container", f"{owner.text} fills up; it takes {owner.bound} at most"
            )
        if case.suspects:
            self._case = case
            return
        if not case.bounded:
            growth = f"{figure} grows by {trends[figure].per_step:.3g} per step"
            self._note("counts", f"{growth}, and allocated bytes do not")
        self._rest()

    def _trace(self, case: Case) -> None:
        self._lines = LineFinder(
            [suspect.owner for suspect in case.suspects[:_TRACED]],
            leak_marks.fingerprint(self._backend.pool),
        )
        if not self._lines.start():
            self._note("lines", "another tool traces this thread, so lines are not known")

    def _stop_tracing(self) -> dict[int, str]:
        return {} if self._lines is None else self._lines.stop()

    def _settle(self, case: Case, lines: dict[int, str]) -> list[Leak]:
        """Return what has shown itself once more."""
        now = self._figures.read(case.figure)
        confirmed = case.confirmed(now, self.steps)
        made_at = {id(case.suspects[number]): line for number, line in lines.items()}
        known = {(leak.kind, leak.owner) for leak in self.findings}
        leaks = [
            case.leak(each, self.steps, made_at.get(id(each)), alone=len(confirmed) == 1)
            for each in confirmed
        ]
        self._rest()
        return [leak for leak in leaks if (leak.kind, leak.owner) not in known]

    def _rest(self) -> None:
        """Look again later, and ever later where there is nothing new."""
        self._begin()
        self._patience = 2 * self._patience + WINDOWS

    def _report(self, leaks: list[Leak]) -> None:
        self.findings.extend(leaks)
        for leak in leaks:
            if self._on_leak == "raise":
                raise LeakError(str(leak), leak=leak)
            if self._on_leak == "warn":
                warnings.warn(str(leak), XmemWarning, stacklevel=stack_level())
            elif callable(self._on_leak):
                self._on_leak(leak)

    def _note(self, kind: NoteKind, text: str) -> None:
        note = Note(kind, text)
        if note not in self.notes:
            self.notes.append(note)
