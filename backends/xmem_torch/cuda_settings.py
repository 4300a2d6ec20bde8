"""The keys of PYTORCH_ALLOC_CONF (PyTorch 2.13), checked here.

PyTorch checks some of them itself, takes -1 for a huge number, and a build without CUDA takes any
key. Bounds: c10's AllocatorConfig.h and what its parser answers; CUDA's own keys:
CUDAAllocatorConfig.cpp. Sizes are in MB there (2**20 bytes), and so are they here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from xmem.errors import UsageError, unknown
from xmem.pooling import Setting
from xmem_torch import parsing

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where PyTorch reads settings from when it starts; the first that is set wins, empty or not."""
BACKENDS = ("native", "cudaMallocAsync")

_LARGE_SEGMENT_MB = 20
_MOST_MB = 2**31 - 1
_MOST_THREADS = 128
_MOST_INTERVAL_MB = 2**16
_MOST_STEPS = 2**30


def _power_of_two(value: Any, most: int) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and 0 < value <= most and value & (value - 1) == 0


def _divisions(value: Any) -> Any:
    """Take a power of two, or one for each interval: {256: 1, 512: 2, ">": 4}."""
    name = "roundup_power2_divisions"
    if not isinstance(value, Mapping):
        if not _power_of_two(value, _MOST_STEPS):
            raise UsageError(
                f"{name} is a power of two up to {_MOST_STEPS}, or a mapping of sizes in MB to"
                f" powers of two, e.g. {{256: 1, 512: 2, '>': 4}}, not {value!r}"
            )
        return value
    if not value:
        raise UsageError(f"{name} is empty: name at least one interval, e.g. {{'>': 4}}")
    for interval, number in value.items():
        if interval != ">" and not _power_of_two(interval, _MOST_INTERVAL_MB):
            raise UsageError(
                f"an interval of {name} is '>' or a power of two from 1 to {_MOST_INTERVAL_MB}"
                f" (MB), not {interval!r}"
            )
        if number != 0 and not _power_of_two(number, _MOST_STEPS):
            raise UsageError(
                f"{name} of {interval!r} is 0 or a power of two up to {_MOST_STEPS}, not {number!r}"
            )
    sizes = [i for i in value if i != ">"]
    # PyTorch fills from the last interval it has read, whatever comes after.
    ordered = {size: value[size] for size in sorted(sizes)}
    return {**ordered, **({">": value[">"]} if ">" in value else {})}


def _threads(value: Any) -> int:
    if not _power_of_two(value, _MOST_THREADS):
        raise UsageError(
            f"pinned_num_register_threads is a power of two up to {_MOST_THREADS}, not {value!r}"
        )
    return int(value)


def _mb(name: str, least: int, meaning: str, applies: Any = "any time") -> Setting:
    return Setting(name, parsing.whole(name, least, _MOST_MB), f"{meaning}, in MB", applies)


def _flag(name: str, meaning: str, applies: Any = "any time") -> Setting:
    return Setting(name, parsing.flag(name), meaning, applies)


SETTINGS = {
    s.name: s
    for s in (
        Setting(
            "backend",
            parsing.one_of("backend", BACKENDS),
            "native, or CUDA's own pool (cudaMallocAsync)",
            "before start",
        ),
        _flag("expandable_segments", "segments that grow: less fragmentation"),
        _mb("large_segment_size_mb", 11, "the segment that large requests are cut from"),
        _mb("max_split_size_mb", _LARGE_SEGMENT_MB, "larger blocks are never split"),
        _mb("max_non_split_rounding_mb", _LARGE_SEGMENT_MB, "how much a block may be too large"),
        Setting(
            "garbage_collection_threshold",
            parsing.fraction("garbage_collection_threshold", open_ends=True),
            "the share of the limit above which unused blocks are given back",
        ),
        Setting(
            "roundup_power2_divisions",
            _divisions,
            "round requests up to so many steps between powers of two",
        ),
        Setting(
            "per_process_memory_fraction",
            parsing.fraction("per_process_memory_fraction", open_ends=False),
            "the limit at the start, as a share of the device; later: configure(limit=)",
            "before use",
        ),
        _flag("throw_on_cudamalloc_oom", "refuse what cannot fit before the driver is asked"),
        _flag("release_lock_on_cudamalloc", "let other threads in while the driver allocates"),
        _flag(
            "graph_capture_record_stream_reuse", "reuse across streams while a graph is captured"
        ),
        _flag("pinned_use_cuda_host_register", "pin host memory by cudaHostRegister", "before use"),
        Setting(
            "pinned_num_register_threads",
            _threads,
            "threads that pin host memory",
            "before use",
        ),
        _flag("pinned_use_background_threads", "free host memory in the background", "before use"),
        _flag("pinned_free_catch_all", "let host memory be freed that is not known", "before use"),
        _mb("pinned_reserve_segment_size_mb", 1, "host memory pinned at once", "before use"),
        _mb("pinned_max_round_threshold_mb", 0, "larger host requests are not rounded up"),
        _mb("pinned_max_cached_size_mb", 0, "larger host blocks are not kept"),
    )
}
# By CUDAAllocatorConfig.cpp and the documentation of `backend`.
_NATIVE_ONLY = (
    "expandable_segments",
    "large_segment_size_mb",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "roundup_power2_divisions",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)


def check(values: Mapping[str, Any]) -> None:
    """Refuse values that contradict each other.

    Raises:
        UsageError: with both values.
    """
    segment = values.get("large_segment_size_mb", _LARGE_SEGMENT_MB)
    for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        if name in values and values[name] < segment:
            raise UsageError(
                f"{name}={values[name]} is less than large_segment_size_mb={segment}; PyTorch"
                " needs it to be at least that"
            )
    rounded = values.get("pinned_max_round_threshold_mb")
    kept = values.get("pinned_max_cached_size_mb")
    if rounded is not None and kept is not None and rounded > kept:
        raise UsageError(
            f"pinned_max_round_threshold_mb={rounded} is more than pinned_max_cached_size_mb="
            f"{kept}, and what is not kept is never rounded up"
        )
    ignored = [name for name in _NATIVE_ONLY if name in values]
    if values.get("backend") == "cudaMallocAsync" and ignored:
        raise UsageError(f"backend='cudaMallocAsync' ignores {', '.join(ignored)}")


def write(values: Mapping[str, Any]) -> str:
    """Write settings as PyTorch reads them."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return "[" + ",".join(f"{k}:{v}" for k, v in value.items()) + "]"
        return str(value)

    return ",".join(f"{name}:{text(value)}" for name, value in values.items())


def read(text: str) -> dict[str, Any]:
    """Read settings as PyTorch writes them, and check each.

    Raises:
        UsageError: a key that PyTorch does not know, or a value that it would refuse.
    """
    found = {}
    text = re.sub(r"\s", "", text)
    for part in filter(None, re.split(r",(?![^\[]*\])", text)):  # PyTorch skips commas at the ends
        name, _, value = part.partition(":")
        # On ROCm both spellings are read.
        name = name.replace("_hipmalloc", "_cudamalloc").replace("_hip_host", "_cuda_host")
        if name not in SETTINGS:
            raise UsageError(unknown("allocator setting", name, SETTINGS))
        found[name] = SETTINGS[name].parse(_value(value))
    return found


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if text.startswith("[") and text.endswith("]"):
        pairs = [pair.partition(":") for pair in text[1:-1].split(",") if pair]
        return {_value(k): _value(v) for k, _, v in pairs}
    if "_" in text:  # Python reads 6_4 as 64, PyTorch as 6
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
