"""The settings of our c10 allocator: names, checks, defaults, and which strategy has which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xmem.offload import adaptive
from xmem.pooling import Setting
from xmem_torch import parsing

STRATEGIES = ("passthrough", "size_class", "bfc")

_MIB = 2**20
DEFAULTS: dict[str, Any] = {
    "strategy": "passthrough",
    "segment_size": 2 * _MIB,
    "reserve_ratio": 1.15,
    "min_cached": None,
    "cache_limit": None,
    "huge_pages": False,
    "divisions": 8,
    "slack": 0.25,
}
# Below it a fault is cheap, and glibc keeps the memory itself.
MIN_CACHED = {"passthrough": 0, "size_class": _MIB, "bfc": 64 * 1024}

SETTINGS: Mapping[str, Setting] = {
    s.name: s
    for s in (
        Setting(
            "strategy",
            parsing.one_of("strategy", STRATEGIES),
            "passthrough (PyTorch's own behaviour, counted), size_class or bfc",
        ),
        Setting(
            "segment_size",
            parsing.size("segment_size", 64 * 1024, 2**40),
            "bfc: the least that is asked of the system at once",
        ),
        Setting(
            "reserve_ratio",
            parsing.factor("reserve_ratio", 1, 1000, may_be_none=True),
            "bfc: before more than this times the most that was live is reserved, free segments"
            " go back; None: any",
        ),
        Setting(
            "min_cached",
            parsing.size("min_cached", 0, 2**40, may_be_none=True),
            "smaller requests pass through; None: 64 KiB with bfc, 1 MiB with size_class",
        ),
        Setting(
            "cache_limit",
            parsing.size("cache_limit", 0, may_be_none=True),
            "how much may be kept free before whole segments go back; None: any amount",
        ),
        Setting(
            "huge_pages",
            parsing.flag("huge_pages"),
            "ask for huge pages (madvise) where 2 MiB and more are needed",
        ),
        Setting(
            "divisions",
            parsing.whole("divisions", 1, 1024),
            "size_class: how many classes between a power of two and the next",
        ),
        Setting(
            "slack",
            parsing.fraction("slack", open_ends=False),
            "size_class: how much larger than its class a kept block may be for a request",
        ),
        *adaptive.SETTINGS.values(),
    )
}

ONLY_FOR = {
    "segment_size": ("bfc",),
    "reserve_ratio": ("bfc",),
    "min_cached": ("size_class", "bfc"),
    "cache_limit": ("size_class", "bfc"),
    "divisions": ("size_class",),
    "slack": ("size_class",),
}
