"""Make installed distributions out of thin air: a folder with a .dist-info and modules."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


def make_distribution(folder, name, entry_points=None, modules=None, version="1.0"):
    """Lay a distribution into a folder that goes on sys.path; returns the folder."""
    folder = Path(folder)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = ["[xmem]", *(f"{k} = {v}" for k, v in (entry_points or {}).items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    record = []
    for path, text in (modules or {}).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        record.append(f"{path},,")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    return folder


def install_project(project, folder):
    """Make a project of this repository look installed, from its pyproject.toml."""
    described = tomllib.loads((Path(project) / "pyproject.toml").read_text())["project"]
    return make_distribution(
        folder,
        described["name"],
        entry_points=described["entry-points"]["xmem"],
        version=described["version"],
    )
