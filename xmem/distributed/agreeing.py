"""What one rank does for all fails on all of them, also if it fails on one only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from xmem.distributed.answers import read
from xmem.distributed.failing import communicating
from xmem.distributed.world import joined
from xmem.errors import CollectiveMismatchError, DistributedError

_Result = TypeVar("_Result")
_ERROR_CHARACTERS = 1000


def attempt(what: str, action: Callable[[], _Result]) -> _Result:
    """Do something on this rank that may fail, and wait until all ranks have.

    Args:
        what: what is done, as all ranks call it.
        action: what this rank does for it, perhaps nothing; it needs no other rank.

    Raises:
        DistributedError: it failed on another rank; it says on which, and why.
        CollectiveMismatchError: another rank does something else.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = action()
    except Exception as raised:  # noqa: BLE001  raised again when the others know of it
        error = raised
    said = "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]
    with communicating(what):
        raw = joined().exchange(json.dumps({"what": what, "error": said}).encode())
    if error is not None:
        raise error
    for rank, answer in enumerate(map(read, raw)):
        if answer["error"]:
            raise DistributedError(
                f"{answer['what']} failed on rank {rank}: {answer['error']}", ranks=[rank]
            )
        if answer["what"] != what:
            raise CollectiveMismatchError(
                f"this rank calls {what}, and rank {rank} {answer['what']}: all ranks make the same"
                " calls in one order",
                ranks=[rank],
            )
    return result  # type: ignore[no-any-return]
