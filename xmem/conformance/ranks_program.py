"""What the cases of several ranks run: `python -m xmem.conformance.ranks_program ARGUMENTS`.

ARGUMENTS: the backend, the device, a folder and a part, "reference" or "load" (one process) or
"several". Every rank writes `PART-WORLD-RANK.json` into the folder: what it found, by name. One
program checks many things, since each start costs seconds; `test_distributed` asserts.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xmem
import xmem.distributed as xd
from xmem.backend import Backend
from xmem.distributing import World

TIMEOUT_SECONDS = 60.0


@dataclass
class Findings:
    """What a rank found.

    Attributes:
        backend: the backend in use.
        here: this rank's place.
        folder: where files go.
        facts: what was found, by name.
        gaps: what the backend declares missing, by the name of what was to be found.
        failed: the name of what failed, and how; nothing is found after it.
    """

    backend: Backend
    here: World
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    gaps: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] | None = None

    def find(self, name: str, look: Callable[[], Any], *needs: str) -> None:
        """Note what `look` returns, unless the backend declares missing what it needs."""
        declared = self.backend.distributed.gaps
        missing = [declared[need] for need in needs if need in declared]
        if missing:
            self.gaps[name] = missing[0]
            return
        with self._telling(name):
            self.facts[name] = look()

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.failed = {"what": name, "error": traceback.format_exc()}
            raise

    def write(self, part: str) -> None:
        """Write it all into a file of this rank's own."""
        content = {"facts": self.facts, "gaps": self.gaps, "failed": self.failed}
        path = findings_path(self.folder, part, self.here.size, self.here.rank)
        path.write_text(json.dumps({**content, "engine": self.here.engine}), encoding="utf-8")


def findings_path(folder: Path, part: str, world: int, rank: int) -> Path:
    """Return where a rank's findings lie."""
    return folder / f"{part}-{world}-{rank}.json"


def main(arguments: list[str]) -> int:
    """Run a part; returns the exit status."""
    from xmem.conformance import ranks_collectives, ranks_training

    name, device, folder, part = arguments
    backend = xmem.use(name, device=device)
    findings = Findings(backend, xd.init(timeout=TIMEOUT_SECONDS), Path(folder))
    try:
        if part == "reference":
            ranks_training.reference(findings)
        elif part == "load":
            ranks_training.load(findings)
        else:
            ranks_collectives.run(findings)
            ranks_training.run(findings)
    finally:
        findings.write(part)
    xd.destroy()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Frameworks may abort while they shut down; all that was found is on disk by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
