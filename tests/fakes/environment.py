"""Install the crashy backend for this process and for the workers it starts."""

import json
import sys
from pathlib import Path

import pytest
from distributions import make_distribution

SOURCE = Path(__file__).with_name("xmem_crashy.py")


class Crashy:
    """How the crashy backend is told what to do."""

    def __init__(self, monkeypatch, pids_path):
        self._monkeypatch = monkeypatch
        self._pids_path = pids_path

    def plan(self, modes):
        """Break cases, by "workload/technique", in a way that `xmem_crashy` knows."""
        self._monkeypatch.setenv("XMEM_CRASHY", json.dumps(modes))

    def lose_framework(self):
        """Let its framework be missing."""
        self._monkeypatch.setenv("XMEM_CRASHY_MISSING", "1")

    def hanging_pids(self):
        """Return the process ids that hang, once they do."""
        if not self._pids_path.exists():
            return []
        return [int(pid) for pid in self._pids_path.read_text(encoding="utf-8").split()]


@pytest.fixture
def crashy(monkeypatch, tmp_path):
    """Give a backend named "crashy", in this process and in those that it starts."""
    site = make_distribution(
        tmp_path / "site",
        "xmem-crashy",
        entry_points={"crashy": "xmem_crashy"},
        modules={"xmem_crashy.py": SOURCE.read_text(encoding="utf-8")},
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    pids_path = tmp_path / "pids"
    monkeypatch.setenv("XMEM_CRASHY_PIDS", str(pids_path))
    monkeypatch.delenv("XMEM_CRASHY", raising=False)
    monkeypatch.delenv("XMEM_CRASHY_MISSING", raising=False)
    yield Crashy(monkeypatch, pids_path)
    # The module is imported in this process, too; the next test has another folder.
    sys.modules.pop("xmem_crashy", None)
