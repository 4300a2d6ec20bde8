"""Run a benchmark's part in a process of its own."""

import json
import os
import subprocess
import sys


def run_part(script, *arguments):
    """Return what `script --run ARGUMENTS` prints last, as JSON; its errors end the benchmark."""
    ran = subprocess.run(
        [sys.executable, script, "--run", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])
