"""Run a command; if a signal kills it, say so and run it once more: `python tools/outlive.py CMD`.

Jittor 1.3.11, which compiles kernels on threads, has once aborted in a first run on a fresh
machine, and not again in many. What kills a command every time still fails, and every death is on
the output.
"""

from __future__ import annotations

import signal
import subprocess
import sys

KILLED_BY_HAND = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run the command; returns its exit status, 128 + the signal's number if a signal killed it."""
    for last in (False, True):
        status = subprocess.run(command, check=False).returncode
        number = -status if status < 0 else status - 128 if status > 128 else 0
        if not number:
            return status
        name = signal.Signals(number).name
        again = not last and number not in KILLED_BY_HAND
        print(
            f"\n{name} KILLED {' '.join(command)}" + (": it is run once more" if again else ""),
            file=sys.stderr,
            flush=True,
        )
        if not again:
            break
    return 128 + number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
