"""One result of what the ranks of a case have written, each for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from xmem.errors import SchemaError
from xmem.report.model import Case, Machine, Result, read_json

# What a rank says that has lost another: the other's own words are the reason.
_FOLLOWS = ("RankLostError", "CollectiveTimeoutError", "DistributedError")


def rank_of_this_process() -> int:
    """Return the rank that the launcher has given this process, before it joins the others."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):  # torchrun, mpirun
        if name in os.environ:
            return int(os.environ[name])
    return 0


def rank_path(path: Path, rank: int) -> Path:
    """Return where a rank's part of a result lies."""
    return path.with_suffix(f".rank{rank}")


def forget_parts(case: Case, path: Path) -> None:
    """Remove the ranks' files; those of a run that was killed would pass for the next one's."""
    for rank in range(case.world):
        rank_path(path, rank).unlink(missing_ok=True)


def gather(case: Case, path: Path, failure: Result) -> Result:
    """Put the parts together and remove their files.

    Args:
        case: what ran.
        path: where the whole result is to lie; the parts lie beside it.
        failure: what to return if ranks have written nothing.
    """
    parts = [_part(rank_path(path, rank)) for rank in range(case.world)]
    forget_parts(case, path)
    whole = [part for part in parts if part is not None]
    bad = [(rank, part) for rank, part in enumerate(parts) if part and part.status != "ok"]
    if bad:
        return _worst(bad, failure)
    if len(whole) < case.world:
        silent = [str(rank) for rank, part in enumerate(parts) if part is None]
        return msgspec.structs.replace(
            failure, reason=f"nothing came from ranks {', '.join(silent)}: {failure.reason}"
        )
    return merged(whole)


def _part(path: Path) -> Result | None:
    try:
        return read_json(path, Result)
    except (FileNotFoundError, SchemaError):  # it was killed before or while it wrote
        return None


def _worst(bad: Sequence[tuple[int, Result]], failure: Result) -> Result:
    """Return the first failure that is not the consequence of another."""
    own = [(rank, part) for rank, part in bad if not part.reason.startswith(_FOLLOWS)]
    if not own:  # a rank was killed and said nothing; the others say whom they lost
        rank, part = bad[0]
        status = "timeout" if failure.status == "timeout" else part.status
        reason = f"rank {rank}: {part.reason}; {failure.reason}"
        return msgspec.structs.replace(part, status=status, reason=reason)
    rank, part = own[0]
    if part.status in ("unsupported", "unavailable"):
        return part  # every rank says the same
    return msgspec.structs.replace(part, reason=f"rank {rank}: {part.reason}")


def merged(parts: Sequence[Result]) -> Result:
    """Return the result of all ranks: bytes of the highest, times of the slowest, mean losses."""
    ranks = tuple(rank for part in parts for rank in part.ranks)
    top = max(range(len(parts)), key=lambda number: ranks[number].peak_allocated_bytes or 0)
    highest = ranks[top]
    slowest = max(parts, key=lambda part: part.step_seconds or 0.0)
    return msgspec.structs.replace(
        parts[top],
        losses=tuple(_mean(losses) for losses in zip(*(p.losses for p in parts), strict=True)),
        step_seconds=slowest.step_seconds,
        step_seconds_spread=slowest.step_seconds_spread,
        static_bytes=highest.static_bytes,
        peak_allocated_bytes=highest.peak_allocated_bytes,
        peak_above_static_bytes=highest.peak_above_static_bytes,
        peaks_bytes=highest.peaks_bytes,
        peak_process_bytes=highest.peak_process_bytes,
        by_category=highest.by_category,
        warnings=tuple(dict.fromkeys(message for part in parts for message in part.warnings)),
        machine=Machine.here(),
        seconds=max(part.seconds or 0.0 for part in parts),
        ranks=ranks,
    )


def _mean(losses: Sequence[float | None]) -> float | None:
    """Return the mean, since shares of a batch weigh the same; what is equal stays as it is."""
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(losses):
        return None
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)
