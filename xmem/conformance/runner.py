"""Run cases in processes of their own; a crash, a hang and an interrupt lose one case at most."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from xmem.children import deaths_survived, end
from xmem.conformance.gathering import forget_parts, gather
from xmem.conformance.launched import command_of, end_launched, environment_of, start
from xmem.conformance.techniques import technique
from xmem.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    CapabilityError,
    DistributedError,
    SchemaError,
    unknown,
)
from xmem.report.model import Case, Machine, Result, read_json, write_json
from xmem.workloads import workload

TIMEOUT_SECONDS = 1800.0
_LOG_LINES = 8
_POLL_SECONDS = 1.0
_STATUS = re.compile(r"(?:\[\d+\] )?(xmem: .*)")
"""What a backend says while it works; `xmem launch` puts the rank in front."""


def matrix(
    backends: Sequence[str],
    workloads: Sequence[str],
    techniques: Sequence[str],
    *,
    preset: str = "quick",
    device: str = "auto",
    threads: int = 2,
    limit_bytes: int | None = None,
    save_gradients: bool = False,
    steps: int | None = None,
    world: int = 1,
) -> list[Case]:
    """Return the cases, in an order that compares like with like as they come in.

    Techniques of several ranks run on `world` of them, all others in one process.

    Raises:
        UsageError: a workload, technique or preset does not exist.
        BackendNotFoundError: a backend is not installed.
    """
    from xmem.plugins import backend_infos

    installed = [info.name for info in backend_infos()]
    for name in backends:
        if name not in installed:
            raise BackendNotFoundError(unknown("backend", name, installed))
    for name in techniques:
        technique(name)
    for name in workloads:
        workload(name, preset)
    return [
        Case(
            workload=w,
            technique=t,
            backend=b,
            preset=preset,
            device=device,
            threads=threads,
            limit_bytes=limit_bytes,
            save_gradients=save_gradients,
            steps=steps,
            world=world if technique(t).several_ranks else 1,
        )
        for w in workloads
        for t in techniques
        for b in backends
    ]


def result_path(case: Case, folder: Path) -> Path:
    """Return where a case's result lies."""
    return folder / f"{case.name}.json"


def finished(case: Case, folder: Path) -> Result | None:
    """Return the result of a case that has already run to its end with these very settings.

    Timeouts, crashes and unavailable frameworks are tried again; so is what ran on another
    machine or with another version of the backend. Reports warn of mixed framework versions.
    """
    path = result_path(case, folder)
    try:
        result = read_json(path, Result)
    except (FileNotFoundError, SchemaError):
        return None
    settled = result.status in ("ok", "unsupported", "out_of_memory")
    if not settled or result.case != case or result.machine != Machine.here():
        return None
    if result.status == "ok" and result.distribution not in _distributions(case.backend):
        return None
    if case.save_gradients and result.status == "ok" and not path.with_suffix(".npz").exists():
        return None
    return result


def _distributions(backend: str) -> list[str]:
    from xmem.plugins import backend_infos

    return [info.distribution for info in backend_infos() if info.name == backend]


def run_case(
    case: Case,
    folder: Path,
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    on_status: Callable[[str], None] | None = None,
) -> Result:
    """Run one case in a fresh process and return its result, which is also on disk.

    Args:
        case: what to run.
        folder: where its files go.
        timeout_seconds: after this the process is ended.
        on_status: is given what a backend says while it works, line by line: what it prints
            that begins with "xmem: "; what several ranks say one after the other, once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = result_path(case, folder)
    path.unlink(missing_ok=True)
    forget_parts(case, path)
    log_path = path.with_suffix(".log")
    begin = time.perf_counter()
    try:
        command, environment = _command(case, path), _environment(case)
    except (CapabilityError, BackendUnavailableError, DistributedError) as error:
        unsupported = isinstance(error, CapabilityError)
        result = Result(
            case=case,
            status="unsupported" if unsupported else "unavailable",
            reason=str(error),
            machine=Machine.here(),
        )
        write_json(result, path)
        return result
    with deaths_survived():
        process = start(command, log_path, environment)
        try:
            code = _wait(process, timeout_seconds, log_path, on_status)
        finally:
            end(process) if case.world == 1 else end_launched(process)
    return _outcome(case, path, code, timeout_seconds, begin)


def _outcome(
    case: Case, path: Path, code: int | None, timeout_seconds: float, begin: float
) -> Result:
    """Return what the processes have written, or what to say of those that have not."""
    reason = None
    if path.exists():
        try:
            return read_json(path, Result)
        except SchemaError as error:  # a backend handed on what no result can hold
            reason = str(error)
    result = Result(
        case=case,
        status="timeout" if code is None else "error",
        reason=reason or _reason(code, timeout_seconds, path.with_suffix(".log")),
        machine=Machine.here(),
        seconds=time.perf_counter() - begin,
    )
    if case.world > 1:
        result = gather(case, path, result)
    write_json(result, path)
    return result


def _command(case: Case, path: Path) -> list[str]:
    worker = ["-m", "xmem.conformance.worker", msgspec.json.encode(case).decode(), str(path)]
    if case.world == 1:
        return [sys.executable, *worker]
    return command_of(case.backend, case.world, worker)


def _wait(
    process: subprocess.Popen[bytes],
    timeout_seconds: float,
    log_path: Path,
    on_status: Callable[[str], None] | None,
) -> int | None:
    """Return the exit code, or None when time is up; pass status lines on meanwhile."""
    deadline = time.monotonic() + timeout_seconds
    unfinished = said = ""
    with log_path.open("rb") as log:
        while True:
            left = deadline - time.monotonic()
            try:
                code = process.wait(max(0.0, min(left, _POLL_SECONDS)))
            except subprocess.TimeoutExpired:
                code = None
            if on_status is not None:
                *lines, unfinished = (unfinished + log.read().decode("utf-8", "replace")).split(
                    "\n"
                )
                for status in filter(None, map(_STATUS.match, lines)):
                    if status[1] != said:  # every rank says it
                        on_status(status[1])
                    said = status[1]
            if code is not None or left <= 0:
                return code


def _environment(case: Case) -> dict[str, str]:
    if case.world > 1:
        return environment_of(case.threads)
    threads = str(case.threads)
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _reason(code: int | None, timeout_seconds: float, log_path: Path) -> str:
    if code is None:
        return f"no result after {timeout_seconds:g} s; the process was ended"
    if code < 0:
        ended = f"killed by {signal.Signals(-code).name}"
    else:
        ended = f"exit status {code} without a result"
    lines = log_path.read_text(encoding="utf-8", errors="replace").split("\n")
    tail = [line.strip() for line in lines if line.strip()][-_LOG_LINES:]
    return f"{ended}; last output: {' | '.join(tail)}" if tail else f"{ended}; no output"


def _again(
    failed: Result,
    folder: Path,
    timeout_seconds: float,
    on_status: Callable[[str], None] | None,
) -> Result:
    """Run a case that failed once more; the first log stays beside the second."""
    case = failed.case
    log = result_path(case, folder).with_suffix(".log")
    log.replace(log.with_suffix(".failed.log"))
    result = run_case(case, folder, timeout_seconds=timeout_seconds, on_status=on_status)
    told = f"it was run again; before, it ended as {failed.status}: {failed.reason}"
    result = msgspec.structs.replace(result, warnings=(*result.warnings, told))
    write_json(result, result_path(case, folder))
    return result


def run_cases(
    cases: Iterable[Case],
    folder: Path,
    *,
    resume: bool = False,
    timeout_seconds: float = TIMEOUT_SECONDS,
    retries: int = 0,
    on_status: Callable[[str], None] | None = None,
) -> Iterator[Result]:
    """Run cases one after the other and yield each result as it comes.

    Args:
        cases: what to run.
        folder: where each case's file goes.
        resume: take results that are already there.
        timeout_seconds: for each case.
        retries: how often a case that ended as an error is run again; it says so in its warnings,
            and how it failed.
        on_status: see `run_case`.
    """
    from xmem.plugins import observers

    for case in cases:
        result = finished(case, folder) if resume else None
        if result is None:
            result = run_case(case, folder, timeout_seconds=timeout_seconds, on_status=on_status)
            for _ in range(retries):
                if result.status != "error":
                    break
                result = _again(result, folder, timeout_seconds, on_status)
        observers.hook.xmem_result.call_historic(kwargs={"result": result})
        yield result
