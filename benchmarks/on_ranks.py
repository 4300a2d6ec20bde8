"""Run techniques of several ranks, and get what each rank measured."""

import gc
import json
import sys
import tempfile
from pathlib import Path

from xmem.conformance.launched import run_program

STEPS = 3


def start(script, framework, world, *arguments, limit_seconds=600):
    """Run `script --rank FRAMEWORK FOLDER ARGUMENTS` on ranks; returns what each has written."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [str(script), "--rank", framework, folder, *map(str, arguments)]
        code = run_program(framework, world, command, log, limit_seconds=limit_seconds)
        files = [Path(folder) / f"{rank}.json" for rank in range(world)]
        if not all(file.exists() for file in files):
            sys.exit(f"{framework} on {world} ranks ended with {code}:\n{log.read_text()[-4000:]}")
        return [json.loads(file.read_text()) for file in files]


def measured(backend, workload, technique, here):
    """Train a few steps and return bytes of the last, on this rank."""
    from xmem.conformance import sharded
    from xmem.workloads import make_weights

    sharded.check(backend, workload, technique, here.size)
    setting = sharded.Setting(backend, workload, make_weights(workload), here.size, here.rank)
    current = sharded.RankRun(setting, technique)
    for _ in range(STEPS):
        measurement, loss, traffic = current.measured_step()
        value = current.value(loss)
        del loss
    found = {
        "static_bytes": measurement.static_bytes,
        "peak_bytes": measurement.peak_allocated_bytes,
        "by_category": measurement.by_category,
        "seconds": measurement.seconds,
        "loss": value,
        "sent_bytes": traffic.sent_bytes,
        "calls": traffic.calls,
        "buffer_bytes": traffic.buffer_bytes,
    }
    del current, setting
    gc.collect()
    return found


def leave(folder, here, found):
    """Write what this rank found; all ranks leave together."""
    import os

    import xmem.distributed as xd

    (Path(folder) / f"{here.rank}.json").write_text(json.dumps(found))
    xd.destroy()
    sys.stdout.flush()
    os._exit(0)  # frameworks may abort while they shut down
