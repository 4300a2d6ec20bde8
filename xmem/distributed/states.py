"""Save and load what is sharded, as one process would have it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xmem.distributed.agreeing import attempt
from xmem.distributed.failing import communicating
from xmem.distributed.signatures import Asked, agree
from xmem.distributed.training import check_module
from xmem.distributed.world import current, joined
from xmem.errors import UsageError


def full_state(model: Any, optimizer: Any = None) -> dict[str, Any] | None:
    """Gather a model's and an optimizer's state as one process would have it.

    Returns:
        On rank 0 {"model": state, "optimizer": state}, in the framework's own form; else None.
    """
    current()
    agree("full_state", lambda: _check("full_state", model, optimizer))
    return _gathered(model, optimizer)


def load_full_state(model: Any, optimizer: Any, state: Mapping[str, Any] | None) -> None:
    """Take up what `full_state` gave, on any number of ranks; only rank 0's state is read.

    Args:
        model: a module, sharded or not.
        optimizer: the optimizer of its parameters, or None.
        state: what `full_state` or a file has; an "optimizer" in it may stay unread.

    Raises:
        UsageError: it is of another model or optimizer. Nothing has changed then.
    """
    rank = current().rank

    def check() -> Asked:
        if rank == 0:
            _check_state(state, optimizer)
        return _check("load_full_state", model, optimizer)

    agree("load_full_state", check)
    with communicating("load_full_state"):
        joined().load_full_state(model, optimizer, state if rank == 0 else None)


def save(path: str | Path, model: Any, optimizer: Any = None) -> None:
    """Write an unsharded file that one process, or any number of ranks, can load.

    Rank 0 writes it, in the framework's own format, beside the path first: whoever reads the path
    finds the old file or the new one. All ranks return when it is there.

    Raises:
        DistributedError: rank 0 could not write; on rank 0 it is the system's own error.
    """
    rank = current().rank

    def check() -> Asked:
        target = Path(path)
        if rank == 0 and not target.parent.is_dir():
            raise UsageError(f"{str(target)!r}: there is no folder {str(target.parent)!r}")
        if rank == 0 and target.is_dir():
            raise UsageError(f"{str(target)!r} is a folder; give the path of a file")
        return _check("save", model, optimizer)

    agree("save", check)
    state = _gathered(model, optimizer)
    attempt("save", lambda: _write(state, Path(path)) if state is not None else None)


def load(path: str | Path, model: Any, optimizer: Any = None) -> None:
    """Read a file that `save` wrote, whatever number of ranks wrote it.

    Rank 0 reads it and hands out to each rank what it keeps.

    Raises:
        UsageError: it is no such file, or of another model or optimizer. Nothing has changed then.
        DistributedError: so on rank 0, raised on the others.
    """
    rank = current().rank
    state = attempt("load", lambda: _read(Path(path)) if rank == 0 else None)
    load_full_state(model, optimizer, state)


def _gathered(model: Any, optimizer: Any) -> dict[str, Any] | None:
    with communicating("full_state"):
        return joined().full_state(model, optimizer)


def _check(what: str, model: Any, optimizer: Any) -> Asked:
    """Refuse what has no state; return what has to be alike on the ranks."""
    check_module(model)
    if optimizer is not None and not getattr(optimizer, "param_groups", None):
        raise UsageError(f"{type(optimizer).__name__} is no optimizer of a model's parameters")
    kinds = (("model", type(model).__name__), ("optimizer", type(optimizer).__name__))
    return Asked(what, kinds)


def _check_state(state: Mapping[str, Any] | None, optimizer: Any) -> None:
    if not isinstance(state, Mapping) or not isinstance(state.get("model"), Mapping):
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise UsageError(
            "rank 0 has no full state to load: that is {'model': ..., 'optimizer': ...}, as"
            f" full_state gives it, and this is {found}"
        )
    if optimizer is not None and state.get("optimizer") is None:
        raise UsageError(
            "the state has no optimizer's: it was saved without. Load with optimizer=None"
        )


def _write(state: Mapping[str, Any], path: Path) -> None:
    # The end of the name may say in which format a framework writes.
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=f".part.{path.name}")
    os.close(number)
    try:
        joined().save_file(state, name)
        with Path(name).open("rb+") as written:
            os.fsync(written.fileno())  # before the name is: else a crash might leave it empty
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp leaves it to its owner alone
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{str(path)!r} is no file: give one that xmem.distributed.save wrote")
    state = joined().load_file(str(path))
    if not isinstance(state, Mapping) or "model" not in state:
        raise UsageError(f"{str(path)!r} is no file that xmem.distributed.save wrote")
    return dict(state)
