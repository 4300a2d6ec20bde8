"""What a step streams together: groups of states by their bytes, and parts of large ones.

Two blocks are on the device at once, the one that is stepped and the one that is read ahead or
written behind, so each has half of what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Loaded = TypeVar("Loaded")

MULTIPLE = 4096
"""Elements that parts of a tensor begin at multiples of.

So vectors of any width, codec blocks and the halves of threads lie in a part as in the whole.
"""


def grouped(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return the numbers of neighbours that go together.

    Args:
        sizes: in bytes.
        limit: what a group takes at most; what is larger is a group of its own.
    """
    found: list[list[int]] = []
    filled = limit
    for index, size in enumerate(sizes):
        if not found or filled + size > limit:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found


def parts(count: int, nbytes: int, limit: int) -> tuple[int, ...]:
    """Return where the parts of a tensor begin, and at last its end.

    Args:
        count: its elements.
        nbytes: what is to be on the device for all of them.
        limit: for a part, in bytes; a part has `MULTIPLE` elements at least.
    """
    if nbytes <= limit or count == 0:
        return (0, count)
    fits = limit * count // nbytes // MULTIPLE * MULTIPLE
    return (*range(0, count, max(fits, MULTIPLE)), count)


def stream(
    jobs: Sequence[Job],
    *,
    read: Callable[[Job], Loaded],
    step: Callable[[Job, Loaded], None],
    write: Callable[[Job], None],
) -> None:
    """Step jobs one after the other, the next one read ahead and the last one written behind.

    One thread reads and writes in order: what is read ahead begins only when what was stepped
    before has been written. All has been written at the end, also after an exception.

    Args:
        jobs: what is stepped.
        read: brings what a job needs; runs in the thread.
        step: uses it; runs here.
        write: puts what a job has changed away, also when its step failed; runs in the thread.
    """
    if len(jobs) < 2:  # no thread for a parameter that steps in backward
        for job in jobs:
            loaded = read(job)
            try:
                step(job, loaded)
            finally:
                del loaded
                write(job)
        return
    with ThreadPoolExecutor(1, "xmem-states") as worker:
        written: list[Future[None]] = []
        ahead = worker.submit(read, jobs[0])
        for index, job in enumerate(jobs):
            loaded = ahead.result()
            if index + 1 < len(jobs):
                ahead = worker.submit(read, jobs[index + 1])
            else:
                del ahead  # it holds what it has read
            try:
                step(job, loaded)
            finally:
                del loaded
                written.append(worker.submit(write, job))
    for future in written:
        future.result()
