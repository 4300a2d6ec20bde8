"""Blocks that treat saved tensors, one inside another: which policy is in force in a thread.

Of two blocks of one kind the innermost counts. One that packs and one that sends away count both,
whichever is outside: packed bytes travel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from xmem.saving import Candidate, Choice, Policy


class PackedAway:
    """Asks one policy how a tensor is packed, and another one where its bytes go.

    Args:
        packing: chooses bits.
        sending: chooses where to.
    """

    def __init__(self, packing: Policy, sending: Policy) -> None:
        self.packing = packing
        self.sending = sending
        self._stays = ""
        self._unpacked = ""

    def choose(self, candidate: Candidate) -> Choice:
        """See `xmem.saving.Policy`."""
        packing, sending = self.packing.choose(candidate), self.sending.choose(candidate)
        self._unpacked, self._stays = packing.reason, sending.reason
        return replace(packing, away=sending.away)

    def packed(
        self,
        candidate: Candidate,
        packed_bytes: int,
        *,
        exact: bool = False,
        away_bytes: int = 0,
    ) -> None:
        """See `xmem.saving.Policy`."""
        taken = packed_bytes + away_bytes
        if taken < candidate.nbytes:
            self.packing.packed(candidate, taken, exact=exact)
        else:
            self.packing.kept(candidate, self._unpacked or "nothing saved by packing")
        if away_bytes:
            self.sending.packed(candidate, packed_bytes, exact=exact, away_bytes=away_bytes)
        else:
            self.sending.kept(candidate, self._stays or "nothing to be sent")

    def kept(self, candidate: Candidate, reason: str) -> None:
        """See `xmem.saving.Policy`."""
        self.packing.kept(candidate, reason)
        self.sending.kept(candidate, reason)


class _Policies(threading.local):
    def __init__(self) -> None:
        self.entered: list[Policy] = []


_policies = _Policies()


@contextmanager
def in_force(policy: Policy) -> Iterator[Any]:
    """Let a policy count inside the block, together with one of the other kind around it.

    Yields what is to be handed to the backend.
    """
    around = _policies.entered[-1] if _policies.entered else None
    joined = _joined(policy, around)
    _policies.entered.append(joined)
    try:
        yield joined
    finally:
        # By identity, and wherever it is: blocks need not end in the order they were entered.
        entered = _policies.entered
        del entered[max(n for n, held in enumerate(entered) if held is joined)]


def _joined(policy: Policy, around: Policy | None) -> Policy:
    if around is None:
        return policy
    packing = around.packing if isinstance(around, PackedAway) else around
    sending = around.sending if isinstance(around, PackedAway) else around
    if sends(policy):
        return policy if sends(packing) else PackedAway(packing, policy)
    return PackedAway(policy, sending) if sends(sending) else policy


def sends(policy: Policy) -> bool:
    """Say whether a policy sends tensors away."""
    return bool(getattr(policy, "sends_away", False))
