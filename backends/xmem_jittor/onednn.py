"""Give Jittor its oneDNN from the PyPI wheels, where Jittor would download it.

Jittor 1.3.11 takes matmul and convolution on a CPU from oneDNN 2.2, which it downloads into its
cache at the first import. The wheels `onednn-cpu-gomp` and `onednn-devel-cpu-gomp` 2021.2.0 hold
the same release, so an import without a network works too. Measured on two cores, Jittor without
oneDNN: matmul 1.25 instead of 46.8 GFLOP/s, convolution forward and backward 2.15 instead of
0.0245 s.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import socket
import tempfile
import warnings
from importlib import metadata
from pathlib import Path

from xmem.errors import XmemWarning

LIBRARY_WHEEL = "onednn-cpu-gomp"
HEADER_WHEEL = "onednn-devel-cpu-gomp"
DOWNLOAD_HOST = "cg.cs.tsinghua.edu.cn"
FOLDER = "dnnl_lnx_2.2.0_cpu_gomp"


def jittor_home() -> Path:
    """Return the folder that Jittor puts `.cache/jittor` in, as `jittor_utils.home` finds it."""
    config = Path.home() / ".cache" / "jittor" / "config.json"
    default = str(Path.home())
    if config.is_file():
        default = json.loads(config.read_text(encoding="utf-8")).get("JITTOR_HOME", default)
    return Path(os.environ.get("JITTOR_HOME", default)).resolve()


def prepare() -> None:
    """See to it that Jittor finds oneDNN, or goes without it and the user knows.

    Whoever has set `use_mkl` or the paths of an own oneDNN has decided already.
    """
    if any(name in os.environ for name in ("use_mkl", "mkl_include_path", "mkl_lib_path")):
        return
    parent = jittor_home() / ".cache" / "jittor" / "mkl"
    target = parent / FOLDER
    if is_ready(target):
        return
    files = wheel_files()
    if files is not None:
        from filelock import FileLock

        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / ".xmem.lock"):
            if not is_ready(target):
                lay_out(target, *files)
        return
    if download_host_answers():
        return
    os.environ["use_mkl"] = "0"
    warnings.warn(
        f"oneDNN is neither installed nor can it be downloaded ({DOWNLOAD_HOST} does not answer),"
        " so Jittor's matmul and convolution run 40 to 90 times slower on this CPU. Install it"
        f" with: pip install {LIBRARY_WHEEL}==2021.2.0 {HEADER_WHEEL}==2021.2.0",
        XmemWarning,
        stacklevel=2,
    )


def is_ready(target: Path) -> bool:
    """Say whether a folder holds what `jittor.compile_extern.setup_mkl` looks for."""
    return (target / "lib" / "libmkldnn.so").is_file() and (target / "include").is_dir()


def wheel_files() -> tuple[dict[str, Path], list[Path]] | None:
    """Return oneDNN's headers (by path below `include/`) and libraries, or None without wheels."""
    headers: dict[str, Path] = {}
    for file in _files(HEADER_WHEEL):
        parts = file.parts
        if "include" in parts and file.suffix in (".h", ".hpp"):
            below = parts[len(parts) - parts[::-1].index("include") :]
            headers["/".join(below)] = file
    libraries = [file for file in _files(LIBRARY_WHEEL) if ".so" in file.name]
    complete = "dnnl.hpp" in headers and any(f.name == "libmkldnn.so" for f in libraries)
    return (headers, libraries) if complete else None


def _files(distribution: str) -> list[Path]:
    try:
        listed = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    located = [Path(str(file.locate())) for file in listed]
    return [file for file in located if file.is_file()]


def lay_out(target: Path, headers: dict[str, Path], libraries: list[Path]) -> None:
    """Copy oneDNN to where Jittor looks for it, in one step that cannot be seen half done.

    The folder is built beside its place under a name that does not begin with "dnnl", since
    Jittor takes the first such folder it sees. Libraries of equal content become links, as they
    were before they went into a wheel.
    """
    unfinished = Path(tempfile.mkdtemp(prefix=".xmem-", dir=target.parent))
    try:
        (unfinished / "lib").mkdir()
        (unfinished / "examples").mkdir()  # Jittor tests for nothing in it, but enters it
        for below, source in headers.items():
            copy = unfinished / "include" / below
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        _copy_libraries(unfinished / "lib", libraries)
        if target.exists():  # an interrupted download
            shutil.rmtree(target)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_libraries(folder: Path, libraries: list[Path]) -> None:
    copied: list[Path] = []
    for source in sorted(libraries, key=lambda file: len(file.name), reverse=True):
        copy = folder / source.name
        same = next((c for c in copied if filecmp.cmp(c, source, shallow=False)), None)
        if same is not None:
            copy.symlink_to(same.name)
        else:
            shutil.copyfile(source, copy)
            copied.append(copy)


def download_host_answers(timeout_seconds: float = 3.0) -> bool:
    """Say whether the host that Jittor downloads oneDNN from can be reached."""
    try:
        with socket.create_connection((DOWNLOAD_HOST, 443), timeout=timeout_seconds):
            return True
    except OSError:
        return False
