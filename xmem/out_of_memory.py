"""Out of memory: an error that says where the bytes were, after which training goes on.

try:
    with xmem.oom_guard(model=model, optimizer=optimizer):
        step()
except xmem.OutOfMemoryError as error:
    print(error.diagnosis)
    ...  # a smaller batch
"""

from __future__ import annotations

import os
import shutil
import traceback
import warnings
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmem import accumulating, scaling
from xmem.api import active
from xmem.containers import optimizers_in
from xmem.diagnosis_text import markdown, text
from xmem.errors import OffloadError, OutOfMemoryError, UsageError, XmemError, XmemWarning

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from xmem.backend import Backend
    from xmem.diagnosis import Diagnosis
    from xmem.pooling import Owners, Refusal


def oom_guard(
    path: str | os.PathLike[str] | None = None,
    *,
    model: Any = None,
    optimizer: Any = None,
    whole: bool = True,
) -> OomGuard:
    """Let an out-of-memory error leave the block as `xmem.OutOfMemoryError`, and nothing stay.

    The error is the framework's own type, too. Its `diagnosis` says what was asked for in which
    phase and module, who held the bytes, and what to try. When it leaves the block, the locals of
    all functions that were called in it are gone, what was pending is dropped, the cache is given
    back. If backward had begun, the optimizer's gradients are dropped, also what other
    micro-batches had added to them. Parameters are what they were, unless the diagnosis says
    `may_be_updated`; running statistics and random numbers have moved on.

    What the function that has the `with` block holds itself stays its own, so call the step in
    the block: `loss = model(x)` written there is alive until `loss` is another.

    Put it around a whole step. On Jittor what the block has asked for runs at its end, so that it
    fails inside it.

    Args:
        path: a folder for reports of errors; each gets a new folder in it, with
            diagnosis.json, report.md and a snapshot of the pool, to be attached to a report.
        model: names modules and parameters; a module, or a list of them.
        optimizer: names gradients and states; its gradients are dropped. One, or a list of them.
        whole: on Jittor, let updates wait until all gradients are there, as they do on PyTorch.
            They run as soon as they can otherwise, so that a step that fails late in backward has
            updated some parameters; and gradients that are dropped after the step never all exist,
            which is less memory. Optimizers of `xmem.optim` always do so.

    Raises:
        UsageError: `optimizer` is none.
    """
    optimizers_in(optimizer)  # refuses what is none
    return OomGuard(active(), None if path is None else Path(path), model, optimizer, whole=whole)


class OomGuard(AbstractContextManager["OomGuard"]):
    """See `oom_guard`.

    Attributes:
        diagnosis: of the error that the block ended with, or None.
        bundle: the folder that was written, or None.
    """

    def __init__(
        self, backend: Backend, path: Path | None, model: Any, optimizer: Any, *, whole: bool
    ) -> None:
        self._backend = backend
        self._path = path
        self._model = model
        self._optimizers = optimizers_in(optimizer)
        self._whole = whole
        self._stack: ExitStack | None = None
        self._owners: Owners | None = None
        self._refused: int | None = None
        self.diagnosis: Diagnosis | None = None
        self.bundle: Path | None = None

    def __enter__(self) -> OomGuard:
        if self._owners is not None:
            raise UsageError("this xmem.oom_guard is open already; make one for each block")
        stack = ExitStack()
        owners = stack.enter_context(self._backend.pool.watch(self._model, self._optimizers))
        with stack:  # closed again if what follows raises
            if self._whole:
                owners.make_whole()
            self._refused = self._backend.measure.counters().out_of_memory_count
            self._stack = stack.pop_all()
        self._owners = owners
        self.diagnosis = self.bundle = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        owners, stack = self._owners, self._stack
        assert owners is not None
        assert stack is not None
        self._owners = self._stack = None
        with stack:
            if error is None:
                try:
                    owners.finish()
                except Exception as late:  # noqa: BLE001  the framework's own; told apart below
                    error = late
            if error is None or not self._is_ours(error):
                owners.forget()
                if kind is None and error is not None:
                    raise error
                return
            raised, backward = self._explained(error, owners)
            cause = next((e for e in _chain(error) if isinstance(e, OffloadError)), None)
            del error, trace, owners
            # Warnings may be errors, and the error that is under way is worth more.
            with suppress(XmemWarning):
                self._backend.pool.recover()  # while it is watched: what was pending is put back
        del stack
        for optimizer in self._optimizers if backward else ():
            accumulating.mark_unscaled(optimizer, unscaled=False)
            scaling.forget(optimizer)
            self._backend.training.zero_grad(optimizer)
        try:
            raise raised from cause
        finally:
            # Set by the interpreter; the framework's error has been told in the diagnosis.
            raised.__context__ = None
            del raised, cause

    def _is_ours(self, error: BaseException) -> bool:
        if isinstance(error, OutOfMemoryError) and error.diagnosis is not None:
            return False  # a guard inside has dealt with it
        return self._backend.pool.is_out_of_memory(error)

    def _explained(self, error: BaseException, owners: Owners) -> tuple[OutOfMemoryError, bool]:
        """Diagnose, tell, and free what the error holds; also says if backward had begun."""
        from xmem.diagnosing import bare, diagnose

        pool, given = self._backend.pool, {"model": self._model, "optimizers": self._optimizers}
        try:
            refusal = self._refusal(error)
            diagnosis = diagnose(self._backend, owners, error, refusal=refusal, **given)
        except Exception as failed:  # noqa: BLE001  whatever it is, it must not hide the error
            _warn(f"the diagnosis failed by {type(failed).__name__}: {failed}. Please report it.")
            diagnosis = bare(self._backend, error)
            _clear(failed)
        self.diagnosis = diagnosis
        self._tell(diagnosis)
        _clear(error)
        backward = "backward" in owners.phases
        owners.forget()
        return pool.out_of_memory_type()(text(diagnosis), diagnosis=diagnosis), backward

    def _refusal(self, error: BaseException) -> Refusal | None:
        """Return the refused request, unless it is one from before the block, or not the pool's."""
        if isinstance(error, MemoryError):  # Python's or NumPy's own
            return None
        count = self._backend.measure.counters().out_of_memory_count
        if count is not None and count == self._refused:
            return None
        return self._backend.pool.refusal()

    def _tell(self, diagnosis: Diagnosis) -> None:
        """Write the bundle and tell the observers; whoever fails warns, the error comes anyway."""
        if self._path is not None:
            try:
                self.bundle = write_bundle(diagnosis, self._path)
            except Exception as failed:  # noqa: BLE001  a file system's, a name's, memory's
                reason = getattr(failed, "strerror", None) or f"{type(failed).__name__}: {failed}"
                _warn(
                    f"no report of the out-of-memory error could be written to {str(self._path)!r}:"
                    f" {reason}. Make room, or name another folder."
                )
                _clear(failed)
        from xmem.plugins import observers

        try:
            observers.hook.xmem_oom.call_historic(kwargs={"diagnosis": diagnosis})
        except Exception as failed:  # noqa: BLE001  an observer's bug must not hide the error
            _warn(f"an observer's xmem_oom raised {type(failed).__name__}: {failed}")


def _warn(message: str) -> None:
    with suppress(XmemWarning):  # as above
        warnings.warn(message, XmemWarning, stacklevel=5)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, each once."""
    pending, seen = [error], {id(error)}
    while pending:
        one = pending.pop()
        yield one
        for other in (one.__cause__, one.__context__, *getattr(one, "exceptions", ())):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                pending.append(other)


def _clear(error: BaseException) -> None:
    """Free the locals of all functions that an error has left."""
    for one in list(_chain(error)):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None


def write_bundle(diagnosis: Diagnosis, path: Path) -> Path:
    """Write a report into a new folder of a folder, all of it or nothing.

    Args:
        diagnosis: what is reported.
        path: the folder; made if need be. Nothing in it is overwritten.

    Returns:
        The new folder: oom-0001, oom-0002 and so on.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    unfinished = path / f".oom-{os.getpid()}.tmp"
    try:
        unfinished.mkdir(parents=True)
        (unfinished / "diagnosis.json").write_bytes(diagnosis.to_json())
        (unfinished / "report.md").write_text(markdown(diagnosis), encoding="utf-8")
        _snapshot(unfinished / "pool.json")
        return _numbered(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _snapshot(path: Path) -> None:
    """Write what the pool holds, where the backend can tell."""
    import xmem

    pool = getattr(xmem, "pool", None)
    if pool is None:
        return
    try:
        pool.snapshot(path)
    except XmemError:
        path.unlink(missing_ok=True)


def _numbered(unfinished: Path, path: Path) -> Path:
    """Move a folder to the first number that is free."""
    number = 1
    while True:
        target = path / f"oom-{number:04d}"
        if not target.exists():
            try:
                return unfinished.rename(target)
            except OSError:
                if not target.exists():
                    raise
        number += 1
