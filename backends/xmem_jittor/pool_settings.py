"""The settings of Jittor's SFRL pool: what they mean, and how they are put in force.

The pool cuts requests of up to 1 MiB from segments of 1 MiB, larger ones from blocks of
`large_block_size` (5 MiB in Jittor 1.3.11, compiled in on a CPU, the flag
`sfrl_large_block_size_device` on a GPU) or of their own size, and never shrinks by itself: its
`free_ratio` is 1. A new value holds for segments that are obtained from then on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jittor as jt

from xmem.errors import CapabilityError, UsageError
from xmem.offload import adaptive
from xmem.pooling import Setting
from xmem.sizes import format_size, parse_size
from xmem_jittor import flags, native

_LARGE_BLOCK = 5 * 2**20
# From here on Jittor 1.3.11 no longer takes workspaces from its temporary allocator.
_LARGEST_BLOCK = 2**40
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def available(device: str) -> dict[str, Setting]:
    """Return the settings on a device."""
    found = [
        Setting(
            "large_block_size",
            _large_block_size,
            "what requests of 1 MiB to this size are cut from; fewer segments, more unused. Holds"
            " for segments that are obtained from then on",
        ),
        Setting(
            "free_ratio",
            _ratio,
            "when more than this share of the pool is unused, a request for a new segment first"
            " gives back whole segments; 1: never",
        ),
        Setting(
            "min_free_size",
            parse_size,
            "what free_ratio leaves unused in the pool at least",
        ),
        Setting(
            "save_mem",
            _flag("save_mem"),
            "Jittor's own swapping to disk; only before its core is compiled (JT_SAVE_MEM)",
            applies="before start",
        ),
    ]
    if device == "cpu":
        found.append(
            Setting(
                "huge_pages",
                _flag("huge_pages"),
                "ask the system for pages of 2 MiB. Holds for segments of 2 MiB and more that are"
                " obtained from then on",
            )
        )
    found += [
        Setting(
            name, _allowed(name), f"a flag of Jittor; only {value} gives right, counted results"
        )
        for name, value in flags.WORKING.items()
        if flags.has(name)
    ]
    if device == "cpu":
        found += adaptive.SETTINGS.values()
    return {setting.name: setting for setting in found}


def elsewhere(device: str) -> dict[str, str]:
    """Return settings that Jittor has on the other device only."""
    names = ("huge_pages", *adaptive.SETTINGS)
    return {} if device == "cpu" else dict.fromkeys(names, "the CPU")


def in_force(device: str) -> dict[str, Any]:
    """Return all settings as they are."""
    values = (ctypes.c_double * 4)()
    native.allocator().xmem_jittor_pool_settings(values)
    ratio, least, block, huge = values
    found: dict[str, Any] = {
        "large_block_size": int(block) if device == "cpu" else _device_block(),
        "free_ratio": round(ratio, 6),
        "min_free_size": int(least),
        "save_mem": _saves_memory(),
    }
    if device == "cpu":
        found["huge_pages"] = bool(huge)
    return found | {name: getattr(jt.flags, name) for name in flags.WORKING if flags.has(name)}


def check(values: Mapping[str, Any]) -> None:
    """Refuse what cannot be put in force now, before anything is changed.

    Raises:
        UsageError: a value that comes too late.
        CapabilityError: the system has no huge pages for us.
    """
    if "save_mem" in values and values["save_mem"] != _saves_memory():
        raise UsageError(
            f"save_mem={values['save_mem']} comes too late: Jittor compiles its swapping in or out."
            f" Start again with JT_SAVE_MEM={int(values['save_mem'])} in the environment, and with"
            " a cache_name of its own, since it compiles its core for it"
        )
    if values.get("huge_pages") and not _has_huge_pages():
        raise CapabilityError(
            "huge_pages=True: this system gives none on request"
            f" ({_HUGE_PAGES} is missing or says never). Set it to madvise, or leave this out"
        )


def put_in_force(values: Mapping[str, Any], device: str) -> None:
    """Set checked values."""
    block = values.get("large_block_size")
    if block is not None and device != "cpu":
        jt.flags.sfrl_large_block_size_device = block
        block = None
    native.allocator().xmem_jittor_set_pool(
        values.get("free_ratio", -1.0),
        float(values.get("min_free_size", -1)),
        -1 if block is None else block,
        int(values.get("huge_pages", -1)),
    )


def _large_block_size(value: Any) -> int:
    size = parse_size(value)
    if not _LARGE_BLOCK <= size < _LARGEST_BLOCK:
        raise UsageError(
            f"large_block_size={value!r} is {format_size(size)}; it is at least 5 MiB, Jittor's own"
            " value, and less than 1 TiB"
        )
    return size


def _ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"free_ratio={value!r}: it is a share of the pool, from 0 to 1 (never)")
    return float(value)


def _flag(name: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r}: it is True or False")
        return value

    return parse


def _allowed(name: str) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, int) and int(value) == flags.WORKING[name]:
            return int(value)
        if isinstance(value, int) and (why := flags.reason(name, int(value))):
            raise UsageError(
                f"{name}={int(value)} chooses {why}. Leave it at {flags.WORKING[name]}"
            )
        raise UsageError(f"{name}={value!r}: xmem works with {name}={flags.WORKING[name]} only")

    return parse


def _device_block() -> int:
    return int(jt.flags.sfrl_large_block_size_device)


def _saves_memory() -> bool:
    return os.environ.get("JT_SAVE_MEM", "0") == "1"


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False
