"""Stands for torchrun: starts a command several times, with RANK set, and leaves files behind.

Run as a script it is the launcher; `main` is `xmem launch` with this in the place of torchrun.
"""

import os
import subprocess
import sys
import tempfile
import time


def main():
    """Run `xmem launch`, with this launcher and whatever backend the command line names."""
    from xmem.cli import launch as verb
    from xmem.cli import main as command
    from xmem.distributed import launching

    launching.command_for = lambda launcher, ranks, script: [
        sys.executable,
        __file__,
        str(ranks),
        sys.executable,
        *script,
    ]
    verb._backend = lambda name: (name or "fake", "torchrun")
    command(["launch", *sys.argv[1:]], prog_name="xmem")


def start(ranks, command):
    """Start the ranks; returns the largest exit status."""
    tempfile.mkdtemp(prefix="left-behind-")
    if "FAKE_LAUNCHER_FAILS" in os.environ:
        print("no slots are free")
        return 213
    pause = float(os.environ.get("FAKE_LAUNCHER_PAUSES", "0"))
    started = []
    for rank in range(ranks):
        time.sleep(pause * rank)
        started.append(subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}))
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2:]))
