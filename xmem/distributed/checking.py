"""Can ranks be started here, do they find each other, and do they add up right?

`findings` is what `xmem doctor --distributed` prints. Run as a module this file is the program of
its ranks: it starts two per backend, which make a real all-reduce.
"""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from xmem.errors import XmemError

if TYPE_CHECKING:
    from xmem.distributed.supervising import Outcome
    from xmem.plugins import BackendInfo

RANKS = 2
_MARK = "xmem-checked "
_ELEMENTS = 262144
_TIMES = 10
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        verdict: "ok", "note" or "problem".
        text: what was found, and the remedy where it is not ok.
    """

    what: str
    verdict: Literal["ok", "note", "problem"]
    text: str


def findings(infos: list[BackendInfo]) -> Iterator[Finding]:
    """Check what ranks need, then two real ranks of each usable backend; one finding at a time."""
    yield _interfaces()
    yield _timeout()
    for info in infos:
        if info.usable:
            yield from _backend(info)


def _interfaces() -> Finding:
    names = [name for _, name in socket.if_nameindex()]
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding(
            "interfaces",
            "problem",
            f"nothing can listen on 127.0.0.1 ({error}); there is {', '.join(names) or 'none'}."
            " Ranks of one host meet there: bring the loopback interface up (ip link set lo up)",
        )
    return Finding("interfaces", "ok", f"127.0.0.1 works; there is {', '.join(names)}")


def _timeout() -> Finding:
    from xmem.distributed.world import DEFAULT_TIMEOUT_SECONDS, TIMEOUT_VARIABLE, given_timeout

    set_to = os.environ.get(TIMEOUT_VARIABLE)
    try:
        seconds = given_timeout(None)
    except XmemError as error:
        return Finding("timeout", "problem", f"{error}. Unset {TIMEOUT_VARIABLE}, or correct it")
    source = "the default" if set_to is None else f"from {TIMEOUT_VARIABLE}"
    how = "init(timeout=...) or `xmem launch --timeout` changes it"
    verdict: Literal["ok", "note"] = "ok" if seconds <= DEFAULT_TIMEOUT_SECONDS else "note"
    return Finding("timeout", verdict, f"{seconds:g} s for a rank that waits, {source}; {how}")


def _backend(info: BackendInfo) -> Iterator[Finding]:
    from xmem.distributed import launching

    launcher = info.framework.launcher if info.framework else ""
    if not launcher:
        text = "the backend names no launcher; it runs in one process"
        yield Finding(f"{info.name}: launcher", "note", text)
        return
    try:
        version = launching.launcher_version(launcher)
        yield Finding(f"{info.name}: launcher", "ok", version)
    except XmemError as error:
        yield Finding(f"{info.name}: launcher", "problem", str(error))
        return
    yield from _ranks(info.name, launcher)


def _ranks(name: str, launcher: str) -> Iterator[Finding]:
    from xmem.distributed.launching import Job, launch

    job = Job(
        backend=name,
        launcher=launcher,
        ranks=RANKS,
        script=("-m", "xmem.distributed.checking", name),
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    output, errors = io.BytesIO(), io.BytesIO()
    began = time.monotonic()
    try:
        outcome = launch(job, output=output, errors=errors)
    except XmemError as error:
        yield Finding(f"{name}: ranks", "problem", str(error))
        return
    seconds = time.monotonic() - began
    reports = _reports(output.getvalue())
    yield from _judged(name, outcome, reports, errors.getvalue().decode(errors="replace"), seconds)


def _reports(output: bytes) -> list[dict[str, Any]]:
    lines = output.decode(errors="replace").splitlines()
    found = [json.loads(line.split(_MARK, 1)[1]) for line in lines if _MARK in line]
    return sorted(found, key=lambda report: report["rank"])


def _judged(
    name: str, outcome: Outcome, reports: list[dict[str, Any]], said: str, seconds: float
) -> Iterator[Finding]:
    """Say what came of the ranks."""
    if outcome.status or len(reports) != RANKS:
        last = "\n".join(said.strip().splitlines()[-12:])
        yield Finding(
            f"{name}: ranks",
            "problem",
            f"{len(reports)} of {RANKS} ranks came to the end; rank {outcome.rank} failed first,"
            f" with {outcome.status}. Correct what it says and try again:\n{last}",
        )
        return
    first = reports[0]
    devices = ", ".join(f"rank {report['rank']} on {report['device']}" for report in reports)
    started = f"{RANKS} in {seconds:.1f} s, over {first['engine']}: {devices}"
    yield Finding(f"{name}: ranks", "ok", started)
    wrong = [report for report in reports if report["found"] != [first["expected"]] * 2]
    if wrong:
        values = ", ".join(f"{report['found']} on rank {report['rank']}" for report in wrong)
        yield Finding(
            f"{name}: all-reduce",
            "problem",
            f"the sum is {values}, and should be {first['expected']} everywhere. Do not train on"
            f" several ranks here; run `xmem conformance --backend {name}` and report what it says",
        )
        return
    slowest = max(report["seconds"] for report in reports)
    yield Finding(
        f"{name}: all-reduce",
        "ok",
        f"right; {_ELEMENTS * 4 // 1024} KiB in {slowest * 1e3:.1f} ms, the slower rank's median",
    )


def _check(name: str) -> None:
    """Be one of the ranks."""
    import numpy as np

    import xmem
    import xmem.distributed as xd

    backend = xmem.use(name)
    world = xd.init()
    seconds = []
    for _ in range(_TIMES):
        tensor = backend.models.tensor(np.full(_ELEMENTS, world.rank + 1.0, np.float32))
        began = time.perf_counter()
        total = xd.all_reduce(tensor)
        found = [backend.models.item(total.min()), backend.models.item(total.max())]
        seconds.append(time.perf_counter() - began)
    report = {
        "rank": world.rank,
        "engine": world.engine,
        "device": f"{backend.device}:{world.local_rank}" if backend.device != "cpu" else "cpu",
        "found": found,
        "expected": float(sum(range(1, world.size + 1))),
        "seconds": sorted(seconds)[_TIMES // 2],
    }
    sys.stdout.write(f"{_MARK}{json.dumps(report)}\n")
    xd.destroy()


if __name__ == "__main__":
    _check(sys.argv[1])
