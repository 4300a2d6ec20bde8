"""The tree of errors: one page that says everything that can go wrong.

A message says what happened, with which value, and what to do; numbers are attributes too.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from xmem.diagnosis import Diagnosis
    from xmem.leak_records import Leak


class XmemError(Exception):
    """Every error that xmem raises on purpose."""


class UsageError(XmemError, ValueError):
    """A value that xmem does not know, with the valid ones and the nearest match."""


class BackendError(XmemError):
    """Something is wrong with a backend, before any technique runs."""


class BackendNotFoundError(BackendError, LookupError):
    """No installed distribution offers a backend of this name."""


class BackendLoadError(BackendError):
    """A backend is installed, and its own code fails to load: a bug in it."""


class BackendUnavailableError(BackendError, ImportError):
    """A backend is installed, and its framework (or the device asked for) is not."""


class NoActiveBackendError(BackendError, RuntimeError):
    """A call that needs a backend came before `xmem.use()`."""


class CapabilityError(BackendError, NotImplementedError):
    """The active backend does not offer this, for a stated reason."""


class PlanError(XmemError):
    """A checkpoint plan cannot be made or carried out."""


class InfeasibleBudgetError(PlanError, ValueError):
    """No plan, or no batch, fits the budget.

    Attributes:
        budget_bytes: what was asked for, in bytes.
        minimum_bytes: the least budget that something fits, in bytes; None where it is not known.
    """

    def __init__(self, message: str, *, budget_bytes: int, minimum_bytes: int | None) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


class InvalidScheduleError(PlanError):
    """A schedule reads what it has dropped, or leaves work undone."""


class RecomputeMismatchError(PlanError):
    """A recomputation did not do what the first pass did.

    Attributes:
        module: what was recomputed, as far as it has a name.
        cause: the likely cause, a key of `xmem.mismatch.CAUSES`.
    """

    def __init__(self, message: str, *, module: str = "", cause: str = "unknown") -> None:
        super().__init__(message)
        self.module = module
        self.cause = cause


class CompositionError(XmemError):
    """Two techniques that cannot work together were asked for."""


class MeasurementError(XmemError):
    """Bytes cannot be counted the way that was asked for."""


class OutOfMemoryError(XmemError):
    """Training ran out of memory; `diagnosis` says where the bytes were.

    Inside `xmem.oom_guard` it is an instance of the framework's own out-of-memory error too.
    """

    def __init__(self, message: str, *, diagnosis: Diagnosis | None = None) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


class LeakError(XmemError):
    """`xmem.watch_leaks(on_leak="raise")` is sure of a leak.

    Attributes:
        leak: the `xmem.leaks.Leak`.
    """

    def __init__(self, message: str, *, leak: Leak) -> None:
        super().__init__(message)
        self.leak = leak


class DistributedError(XmemError, RuntimeError):
    """Communication between ranks failed, or cannot be had.

    Attributes:
        ranks: the ranks that it is about, in order; empty where they are not known.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankLostError(DistributedError):
    """Other ranks have died, failed or left while this one needs them."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """Other ranks have not come to a call within the timeout."""


class CollectiveMismatchError(DistributedError, ValueError):
    """The ranks called different things, or with tensors that do not fit."""


class ReportError(XmemError):
    """A report cannot be read or written."""


class SchemaError(ReportError):
    """A result or report file has another shape, or another version, than this xmem reads."""


class OffloadError(XmemError, OSError):
    """What was to leave the device cannot be stored, or does not come back.

    Attributes:
        errno: the system's number of the error, or None.
        directory: of the scratch file, or None.
    """

    def __init__(self, errno: int | None, message: str, *, directory: Path | None = None) -> None:
        super().__init__(message)
        self.errno = errno
        self.directory = directory


class NativeBuildError(XmemError):
    """A C++ part did not compile.

    Attributes:
        command: the compiler call, ready to be pasted into a shell.
        output: the last lines that the compiler printed.
    """

    def __init__(self, message: str, *, command: str, output: str) -> None:
        super().__init__(message)
        self.command = command
        self.output = output


class XmemWarning(UserWarning):
    """Something was applied to nothing, fell back to a slower way, or came too late."""


_LISTED = 16


def unknown(kind: str, value: object, valid: Iterable[str]) -> str:
    """Return the message for a value that is not one of the valid names.

    Args:
        kind: what the value names, e.g. "backend".
        value: what was given.
        valid: the names that exist.

    Returns:
        A sentence that names the value, the nearest match and all valid names.
    """
    names: Sequence[str] = sorted(valid)
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = names if len(names) <= _LISTED else get_close_matches(str(value), names, _LISTED, 0)
    listed = ", ".join(shown) if names else "none is installed"
    if len(shown) < len(names):
        listed += f" and {len(names) - len(shown)} more"
    return f"unknown {kind} {value!r}.{hint} Valid: {listed}."
