"""Ranks compare what they are about to do before anything is sent.

Each gives the others a few bytes: the call, a hash of all that has to be equal, and the error that
its own check ended with, if any. Only where hashes differ are the calls themselves exchanged, to
say who called what and where the first difference is.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xmem.distributed.answers import read
from xmem.distributed.failing import communicating
from xmem.distributed.world import joined
from xmem.distributing import Kind
from xmem.errors import CollectiveMismatchError, DistributedError

_LONGEST_BYTES = 60_000
_SHOWN_TENSORS = 4
_SHOWN_RANKS = 4
_ERROR_CHARACTERS = 1000


@dataclass(frozen=True)
class Asked:
    """A call, as far as ranks must agree.

    Attributes:
        what: its name.
        settings: its arguments besides tensors, by name.
        kinds: its tensors.
    """

    what: str
    settings: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[Kind, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(kind.size_bytes for kind in self.kinds)

    @property
    def digest(self) -> str:
        """Return a short text that is equal where calls are."""
        tensors = ";".join([f"{kind.dtype}{kind.shape}" for kind in self.kinds])
        settings = ";".join(f"{name}={value}" for name, value in self.settings)
        return hashlib.sha256(f"{self.what}\n{settings}\n{tensors}".encode()).hexdigest()[:24]

    def parts(self) -> dict[str, Any]:
        """Return what is compared, as JSON holds it."""
        tensors = [[kind.dtype, list(kind.shape)] for kind in self.kinds]
        settings = [[name, str(value)] for name, value in self.settings]
        return {"what": self.what, "settings": settings, "tensors": tensors}


def agree(what: str, check: Callable[[], Asked]) -> Asked:
    """Check arguments on this rank, and see that every rank asks for the same.

    Args:
        what: the call's name.
        check: raises what is wrong here, or returns what is asked for.

    Raises:
        CollectiveMismatchError: ranks ask for different things; raised on every rank.
        DistributedError: the check failed on another rank; it says which, and why.
    """
    asked, error = None, None
    try:
        asked = check()
    except Exception as raised:  # noqa: BLE001  raised again when the others know of it
        error = raised
    answer = {
        "what": what,
        "is": "" if asked is None else asked.digest,
        "error": "" if error is None else f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS],
        "tells": 1,
    }
    answers = [{"is": "", **read(raw)} for raw in _exchange(what, json.dumps(answer).encode())]
    if error is not None:
        raise error
    assert asked is not None
    if len({(other["what"], other["is"]) for other in answers}) > 1:
        _refuse(answers, asked)
    return asked


def _refuse(answers: Sequence[dict[str, Any]], asked: Asked) -> None:
    failed = [rank for rank, other in enumerate(answers) if other["error"]]
    if failed:
        other = answers[failed[0]]
        raise DistributedError(
            f"{other['what']} failed on rank {failed[0]}: {other['error']}", ranks=failed
        )
    if all(other.get("tells") for other in answers):
        told = [_unpacked(raw) for raw in _exchange(answers[0]["what"], _packed(asked.parts()))]
    else:  # one of them is in a call of another kind, which compares nothing further
        told = [{"what": other["what"], "settings": [], "tensors": []} for other in answers]
    ranks = [rank for rank, other in enumerate(told) if other != told[0]]
    ranks = ranks or [rank for rank, other in enumerate(answers) if other != answers[0]]
    raise CollectiveMismatchError(mismatch(told), ranks=ranks)


def mismatch(told: Sequence[dict[str, Any]]) -> str:
    """Return who called what, ranks that called the same together, and the first difference."""
    groups: list[tuple[list[int], dict[str, Any]]] = []
    for rank, parts in enumerate(told):
        for ranks, known in groups:
            if known == parts:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], parts))
    named = [name for parts in told for name, _ in parts["settings"]]
    values = [dict(parts["settings"]) for parts in told if parts["what"] == told[0]["what"]]
    differing = [name for name in named if len({value.get(name) for value in values}) > 1]
    calls = "; ".join(
        f"{_ranks(ranks)}: {_call(parts, differing)}" for ranks, parts in groups[:_SHOWN_RANKS]
    )
    if len(groups) > _SHOWN_RANKS:
        calls += f"; and {len(groups) - _SHOWN_RANKS} others"
    first = ""
    if len(groups) > 1:
        first = f" First difference: {_difference(groups[0], groups[1])}."
    return (
        f"ranks called different things, and nothing was sent. {calls}.{first} All ranks make the"
        " same calls in one order, with tensors of the same types and shapes"
    )


def _difference(
    one: tuple[list[int], dict[str, Any]], two: tuple[list[int], dict[str, Any]]
) -> str:
    (ranks, a), (others, b) = one, two
    between = f"of {_ranks(ranks)} and {_ranks(others)}"
    if a["what"] != b["what"]:
        return f"the calls {between}, {a['what']} and {b['what']}"
    for (name, value), (_, other) in zip(a["settings"], b["settings"], strict=False):
        if value != other:
            return f"{name} {between}, {value} and {other}"
    for number, (tensor, other) in enumerate(zip(a["tensors"], b["tensors"], strict=False)):
        if tensor != other:
            return f"tensor {number} {between}, {_tensor(tensor)} and {_tensor(other)}"
    if len(a["tensors"]) != len(b["tensors"]):
        return f"the number of tensors {between}, {len(a['tensors'])} and {len(b['tensors'])}"
    return "in a tensor further on"


def _call(parts: dict[str, Any], differing: Sequence[str]) -> str:
    """Return a call in one line, with those of its settings that not all ranks share."""
    tensors = parts["tensors"]
    if not tensors:
        return str(parts["what"])
    shown = [_tensor(tensor) for tensor in tensors[:_SHOWN_TENSORS]]
    if len(tensors) > _SHOWN_TENSORS:
        shown.append(f"{len(tensors) - _SHOWN_TENSORS} more")
    shown += [f"{name}={value}" for name, value in parts["settings"] if name in differing]
    return f"{parts['what']}({', '.join(shown)})"


def _tensor(tensor: Sequence[Any]) -> str:
    dtype, shape = tensor
    return f"{dtype} {tuple(shape)}"


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _exchange(what: str, payload: bytes) -> list[bytes]:
    distributed = joined()
    with communicating(what):
        return distributed.exchange(payload)


def _packed(parts: dict[str, Any]) -> bytes:
    """Return a call in few bytes, without its last tensors if there is no other way."""
    while len(raw := zlib.compress(json.dumps(parts).encode())) > _LONGEST_BYTES:
        parts = {**parts, "tensors": parts["tensors"][: len(parts["tensors"]) // 2]}
    return raw


def _unpacked(raw: bytes) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(zlib.decompress(raw))
    return parts
