"""Install the crashy backend for this process and for the workers it starts."""

import json
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def add_distribution(folder, name, version="0.1", *, entry_points="", record=None):
    """Write the metadata of a distribution, as an installer would."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
    if entry_points:
        (metadata / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    if record is not None:
        (metadata / "RECORD").write_text(record, encoding="utf-8")
    return metadata


class Crashy:
    """How the crashy backend is told what to do."""

    def __init__(self, monkeypatch, pids_path):
        self._monkeypatch = monkeypatch
        self._pids_path = pids_path

    def plan(self, **modes):
        """Break cases: `plan(**{"mlp/checkpoint": "SIGKILL"})`."""
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
    site = tmp_path / "site"
    add_distribution(site, "xmem-crashy", entry_points="[xmem]\ncrashy = xmem_crashy\n")
    paths = [str(site), str(HERE)]
    for path in reversed(paths):
        monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    pids_path = tmp_path / "pids"
    monkeypatch.setenv("XMEM_CRASHY_PIDS", str(pids_path))
    monkeypatch.delenv("XMEM_CRASHY", raising=False)
    return Crashy(monkeypatch, pids_path)
