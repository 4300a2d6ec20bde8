"""Run a program on several ranks, and get what each of them reports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from xmem.distributed.keeping import die_with_parent

ROOT = Path(__file__).parent.parent
_PREAMBLE = """
import json, os, sys
sys.path[:0] = [{tests!r}]
import numpy as np
import xmem
import xmem.distributed as xd
xmem.use({backend!r}, device="cpu")
here = xd.init(timeout={timeout})

def report(**values):
    final = os.path.join({folder!r}, f"{{here.rank}}.json")
    with open(final + ".part", "w") as file:
        json.dump(values, file)
    os.replace(final + ".part", final)  # whoever looks sees all of it

"""


def start(
    backend,
    program,
    folder,
    *,
    ranks=2,
    timeout=60.0,
    environment=None,
    preamble=True,
    arguments=(),
    options=(),
):
    """Start it by `xmem launch`, in a session of its own; returns the process of the launcher.

    What it prints goes to `process.output_file`, each line behind "[rank] ".
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    script = folder / "program.py"
    head = _PREAMBLE.format(
        tests=str(Path(__file__).parent), backend=backend, timeout=timeout, folder=str(folder)
    )
    script.write_text((head if preamble else "") + textwrap.dedent(program))
    command = ["launch", "-n", str(ranks), "--backend", backend, *options, str(script), *arguments]
    # A file and not a pipe: nobody has to read for the ranks to go on.
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "xmem", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # a test run may be ended, too
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            cwd=ROOT,
        )
    process.output_file = folder / "output.txt"
    return process


def run(backend, program, folder, *, ranks=2, timeout=60.0, limit=300.0, environment=None):
    """Run a program; returns what each rank reported. The program sees `here`, `xd`, `report`."""
    folder = Path(folder)
    process = start(backend, program, folder, ranks=ranks, timeout=timeout, environment=environment)
    status = finish(process, limit=limit)
    output = process.output_file.read_text(errors="replace")
    assert status == 0, f"the launcher ended with {status}:\n{output[-6000:]}"
    reports = [folder / f"{rank}.json" for rank in range(ranks)]
    missing = [path.stem for path in reports if not path.exists()]
    assert not missing, f"rank {', '.join(missing)} reported nothing:\n{output[-6000:]}"
    return [json.loads(path.read_text()) for path in reports]


def finish(process, *, limit=300.0):
    """Wait for the end, and leave nothing running; returns the exit status, None after `limit`."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process):
    """Leave nothing running and nothing lying about."""
    if process.poll() is None:
        process.terminate()  # it ends its ranks, and cleans up
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
    for pid in [process.pid, *session_of(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


def session_of(leader):
    """Return the processes of a session, and all that they started."""
    found, parents = {leader}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
            if int(fields[3]) == leader:
                found.add(int(folder.name))
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found}
        grown = not children <= found
        found |= children
    return sorted(found - {leader})


def wait_for(condition, what, *, limit=60.0):
    """Wait until a condition holds, and return what it gave."""
    ends = time.monotonic() + limit
    while not (value := condition()):
        assert time.monotonic() < ends, f"not within {limit} s: {what}"
        time.sleep(0.02)
    return value
