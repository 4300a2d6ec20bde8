"""Adaptive placement: what leaves the device is decided while a step runs, when memory runs out.

Xuan Peng et al., "Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020;
Chien-Chin Huang et al., "SwapAdvisor", ASPLOS 2020. They decide by what they have measured of
earlier steps. Here nothing is predicted: what forward leaves for backward stays until a request
would pass the limit, and then what backward needs last leaves first, which is the best choice for
a working set that is read in reverse order (Belady).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from xmem.errors import UsageError, unknown
from xmem.offload.depot import Depot, To
from xmem.pooling import Setting
from xmem.saving import Away, Candidate, Choice

if TYPE_CHECKING:
    from xmem.errors import OffloadError

MIN_BYTES = 64 << 10
"""Smaller tensors are never moved."""
MARGIN = 64
"""One part in so many of the limit leaves beyond what is missing, so that not every request that
follows has to move something."""


def _to(value: Any) -> To:
    if value not in get_args(To):
        raise UsageError(unknown("offload_to", value, get_args(To)))
    return value  # type: ignore[no-any-return]


def _directory(value: Any) -> str | None:
    if value is None or isinstance(value, (str, Path)):
        return None if value is None else str(value)
    raise UsageError(f"offload_directory={value!r}: it is a path, or None")


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "offload_to",
            _to,
            'on_oom="offload": where tensors go: "disk" (a scratch file), or "host" (memory outside'
            " of the pool, which on a CPU the process still holds)",
        ),
        Setting(
            "offload_directory",
            _directory,
            "of the scratch file; None: $XMEM_OFFLOAD_DIR, or the system's for temporary files",
        ),
    )
}
"""Of every pool that has `on_oom="offload"`."""
_DEFAULTS: Mapping[str, Any] = {"offload_to": "disk", "offload_directory": None}


class Adaptive:
    """Where tensors go when memory runs out, and what has gone; a policy of `xmem.saving`.

    Attributes:
        away: where tensors go, while it is on; else None.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = dict(_DEFAULTS)
        self.away: Away | None = None
        self._earlier_bytes = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in force."""
        return dict(self._values)

    def prepare(self, values: Mapping[str, Any], *, on: bool) -> dict[str, Any]:
        """Return what `begin` or `end` is to be given; nothing has changed yet.

        Args:
            values: parsed values of `SETTINGS`; others are ignored.
            on: whether tensors are to be moved from now on.

        Raises:
            UsageError: a directory for "host".
            OffloadError: the directory is missing or cannot be written to.
        """
        given = {name: values[name] for name in SETTINGS if name in values}
        merged = self._values | given
        if given.get("offload_to") == "host" and "offload_directory" not in given:
            merged["offload_directory"] = None
        to, directory = merged["offload_to"], merged["offload_directory"]
        for name, value in given.items():
            # Settings can be put back as they were.
            if not on and value not in (self._values[name], _DEFAULTS[name]):
                raise UsageError(f"{name}={value!r} has no effect without on_oom='offload'")
        if to == "host" and directory is not None:
            raise UsageError(
                f"offload_directory={directory!r} is for offload_to='disk'; it is 'host'"
            )
        away = self.away if on else None
        if on and (away is None or merged != self._values or not away.depot.is_usable):
            away = Away(Depot(to, directory=directory), when_needed=True)
        return {"values": merged, "away": away}

    def put_in_force(self, *, values: dict[str, Any], away: Away | None) -> None:
        """Take what `prepare` returned. What went to an earlier depot comes back from there."""
        if self.away is not None and self.away is not away:
            self._earlier_bytes += self.away.depot.stats.written_bytes
        self._values, self.away = values, away

    @property
    def moved_bytes(self) -> int:
        """What has left the device since `xmem.use`."""
        now = 0 if self.away is None else self.away.depot.stats.written_bytes
        return self._earlier_bytes + now

    @property
    def failure(self) -> OffloadError | None:
        """Why nothing can be moved any more, if so."""
        return None if self.away is None else self.away.depot.failure

    def note(self) -> str:
        """Return what an error says of what has been moved, for its end."""
        text = f' on_oom="offload" has moved {self.moved_bytes} bytes'
        reason = self.failure
        return f"{text}; nothing more can be moved{'.' if reason is None else f': {reason}'}"

    def choose(self, candidate: Candidate) -> Choice:
        """See `xmem.saving.Policy`."""
        if self.away is None or candidate.nbytes < MIN_BYTES:
            return Choice(None, reason="below 64.0 KiB")
        return Choice(None, away=self.away)

    def packed(self, candidate: Candidate, packed_bytes: int, **_: Any) -> None:
        """See `xmem.saving.Policy`; what is noted has not moved yet."""

    def kept(self, candidate: Candidate, reason: str) -> None:
        """See `xmem.saving.Policy`."""


def wanted_bytes(requested: int, allocated: int, limit: int | None) -> tuple[int, int]:
    """Return what must be free for a request to fit, and how much better is, in bytes."""
    if limit is None:
        return requested, requested + requested // MARGIN
    missing = max(requested + allocated - limit, 0)
    return missing, missing + limit // MARGIN
