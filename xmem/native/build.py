"""One C++ file -> one shared library, compiled once per source, compiler and framework version.

The library is written beside its final place and moved there in one step, under a lock, so that
processes which start together compile once and none loads a half-written file.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from xmem.errors import NativeBuildError

_OUTPUT_LINES = 20


@dataclass(frozen=True)
class Source:
    """What is compiled.

    Attributes:
        path: the C++ file.
        compiler: the compiler's name or path.
        arguments: compiler arguments, without source and output, before the source.
        link_arguments: those after the source (libraries).
        version: whatever else the binary depends on, e.g. the framework's version.
        headers: further files whose content the binary depends on.
    """

    path: Path
    compiler: str
    arguments: tuple[str, ...]
    link_arguments: tuple[str, ...] = ()
    version: str = ""
    headers: tuple[Path, ...] = ()


def cache_folder() -> Path:
    """Return the folder of compiled parts: $XMEM_CACHE_DIR, or the user's cache folder."""
    chosen = os.environ.get("XMEM_CACHE_DIR")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("xmem"))


@cache
def _compiler_version(compiler: str) -> str:
    try:
        ran = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeBuildError(
            f"the C++ compiler {compiler!r} does not run: {error}. Install g++ (Debian, Ubuntu:"
            " apt-get install g++) or name another one in the environment variable CXX.",
            command=f"{compiler} --version",
            output=str(error),
        ) from error
    return ran.stdout.splitlines()[0] if ran.stdout else "unknown"


def find_compiler() -> str | None:
    """Return the C++ compiler ($CXX, g++ or c++), or None if there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and shutil.which(name):
            return name
    return None


def _key(source: Source) -> str:
    digest = hashlib.sha256()
    for part in (
        source.path.read_text(encoding="utf-8"),
        *(h.read_text(encoding="utf-8") for h in source.headers),
        _compiler_version(source.compiler),
        *source.arguments,
        *source.link_arguments,
        source.version,
    ):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def compile_library(source: Source) -> Path:
    """Return the compiled library, compiling it if the cache has none.

    Raises:
        NativeBuildError: the compiler failed; has the command and its last lines of output.
    """
    from filelock import FileLock

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{source.path.stem}-{_key(source)}.so"
    if target.exists():
        return target
    with FileLock(f"{target}.lock"):
        if not target.exists():
            _compile(source, target)
    return target


def _compile(source: Source, target: Path) -> None:
    unfinished = target.with_suffix(f".{os.getpid()}.tmp")
    command: Sequence[str] = (
        source.compiler,
        *source.arguments,
        str(source.path),
        "-o",
        str(unfinished),
        *source.link_arguments,
    )
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if ran.returncode != 0:
        unfinished.unlink(missing_ok=True)
        output = "\n".join(ran.stdout.splitlines()[-_OUTPUT_LINES:])
        raise NativeBuildError(
            f"{source.path.name} did not compile (exit status {ran.returncode}).\n"
            f"command: {shlex.join(command)}\nlast lines of its output:\n{output}",
            command=shlex.join(command),
            output=output,
        )
    unfinished.replace(target)
