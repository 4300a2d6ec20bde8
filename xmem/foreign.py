"""Another package named `xmem` in the environment: found, named, and what to do about it.

On the public index the name `xmem` belongs to others. Installed beside this package, one hides or
overwrites the other, and what follows looks like a bug in either. Only the file system is asked:
nothing is imported.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xmem.errors import XmemWarning

OUR_DISTRIBUTION = "xmem-train"
_NAME = "xmem"
_METADATA = re.compile(r"(?P<name>[^-]+)(?:-(?P<version>[^-]+))?.*\.(?:dist-info|egg-info)")
# Only a copy of this package has all of these beside each other.
_OUR_FILES = ("foreign.py", "hookspecs.py", "protocols.py")


@dataclass(frozen=True)
class Foreign:
    """A package that is called `xmem` and is not this one.

    Attributes:
        distribution: its name and version, or None if no distribution claims the files.
        location: the folder on `sys.path` that holds it.
    """

    distribution: str | None
    location: Path

    @property
    def message(self) -> str:
        """What is wrong and what to do."""
        what = self.distribution or "a package without a distribution"
        text = (
            f"another package named {_NAME!r} is in this environment: {what}, in {self.location}."
            f" It is not part of {OUR_DISTRIBUTION}, and one of the two hides the other."
        )
        if self.distribution is None:
            return f"{text} Rename it, or take that folder off PYTHONPATH."
        name = self.distribution.split()[0]
        return (
            f"{text} Remove it with: python -m pip uninstall {name}; then put back what it"
            f" overwrote: python -m pip install --force-reinstall --no-deps {OUR_DISTRIBUTION}"
        )


def find(path: Iterable[str] | None = None) -> list[Foreign]:
    """Return the foreign packages on a search path, `sys.path` by default."""
    found: list[Foreign] = []
    for entry in dict.fromkeys(sys.path if path is None else path):
        folder = Path(entry or ".")
        try:
            claims = list(_claims(folder))
            present = _has_foreign_module(folder)
        except OSError:  # unreadable, or no folder: a zip file, a stale entry
            continue
        foreign = [c for c in claims if c.split()[0] != OUR_DISTRIBUTION]
        if foreign:
            found.extend(Foreign(claim, folder) for claim in foreign)
        elif present and not claims:
            found.append(Foreign(None, folder))
    return found


@cache
def warn_once() -> None:
    """Warn of each foreign package, once in a process."""
    for found in find():
        warnings.warn(found.message, XmemWarning, stacklevel=3)


def _has_foreign_module(folder: Path) -> bool:
    """Say whether an import of `xmem` from this folder would get something that is not ours."""
    if (folder / f"{_NAME}.py").is_file():
        return True
    package = folder / _NAME
    if not (package / "__init__.py").is_file():
        return False
    return not all((package / name).is_file() for name in _OUR_FILES)


def _claims(folder: Path) -> Iterator[str]:
    """Yield the distributions in a folder that provide a top-level `xmem`."""
    for metadata in sorted(folder.iterdir()):
        match = _METADATA.fullmatch(metadata.name)
        if match is None or not metadata.is_dir():
            continue
        name = match["name"].replace("_", "-").lower()
        if name == _NAME or _provides(metadata):
            yield f"{name} {match['version']}" if match["version"] else name


def _provides(metadata: Path) -> bool:
    record = metadata / "RECORD"
    if record.is_file():
        listed = record.read_bytes()
        return listed.startswith(b"xmem/") or b"\nxmem/" in listed or b"\nxmem.py," in listed
    top_level = metadata / "top_level.txt"
    return top_level.is_file() and _NAME.encode() in top_level.read_bytes().split()
