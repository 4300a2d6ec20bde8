"""The C++ parts: compiled by Jittor's own compiler and flags, loaded beside Jittor's core.

They name symbols of `jittor_core`, which is loaded with global visibility, and are not linked
against it; so a new version of Jittor, or other flags, needs a new build.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from xmem_jittor.native.loading import Numbers, address_of, addresses, load
from xmem_jittor.native.ranks import message, mpi

__all__ = [
    "address_of",
    "addresses",
    "allocator",
    "away",
    "donating",
    "emptying",
    "graph",
    "living",
    "message",
    "mpi",
    "recovering",
    "saving",
    "streaming",
]
_VOID = (
    "reset_peak",
    "set_limit",
    "tag",
    "tag_unclaimed",
    "peak_by_category",
    "mark_backward",
    "expect",
    "forget_expectations",
    "enter",
    "forget_entries",
    "set_pool",
    "know_holders",
    "release_orphans",
    "late_calls",
    "late_allow",
    "late_stats",
    "late_missed",
    "late_note",
    "late_back",
)


_ALLOCATOR_HEADERS = (
    "beneath", "blocks", "control", "history", "installed", "late", "log", "orphans", "pool",
    "records",
)  # fmt: skip


@lru_cache(maxsize=1)
def allocator() -> ctypes.PyDLL:
    """Return the library of `allocator.cc`, its functions declared."""
    library = load("allocator", _ALLOCATOR_HEADERS)
    number, many = ctypes.c_longlong, Numbers
    _declare_control(library)
    library.xmem_jittor_install.argtypes = [number, ctypes.c_int]
    library.xmem_jittor_counters.argtypes = [many]
    library.xmem_jittor_reset_peak.argtypes = []
    library.xmem_jittor_set_limit.argtypes = [number]
    library.xmem_jittor_tag.argtypes = [many, ctypes.c_int, ctypes.c_int, many]
    library.xmem_jittor_tag_unclaimed.argtypes = [ctypes.c_int]
    library.xmem_jittor_peak_by_category.argtypes = [many, ctypes.c_int]
    library.xmem_jittor_mark_backward.argtypes = []
    library.xmem_jittor_expect.argtypes = [many, ctypes.c_int, ctypes.c_int]
    library.xmem_jittor_forget_expectations.argtypes = []
    library.xmem_jittor_reachable_bytes.restype = number
    library.xmem_jittor_note.argtypes = [number]
    library.xmem_jittor_note.restype = None
    library.xmem_jittor_noted.argtypes = [ctypes.POINTER(ctypes.c_double)]
    library.xmem_jittor_noted.restype = number
    library.xmem_jittor_enter.argtypes = [number]
    seconds = ctypes.POINTER(ctypes.c_double)
    library.xmem_jittor_entries.argtypes = [ctypes.c_int, ctypes.c_int, many, seconds]
    library.xmem_jittor_forget_entries.argtypes = []
    library.xmem_jittor_bytes_of.argtypes = [many, ctypes.c_int]
    library.xmem_jittor_bytes_of.restype = number
    for name in _VOID:
        getattr(library, f"xmem_jittor_{name}").restype = None
    return library


def _declare_control(library: ctypes.PyDLL) -> None:
    number, many, integer = ctypes.c_longlong, Numbers, ctypes.c_int
    real = ctypes.c_double
    library.xmem_jittor_pool_stats.argtypes = [many]
    library.xmem_jittor_segments.argtypes = [integer, many]
    library.xmem_jittor_history.argtypes = [integer, many]
    library.xmem_jittor_refusal.argtypes = [many, many, integer, integer, many]
    library.xmem_jittor_trim.restype = number
    library.xmem_jittor_preallocate.argtypes = [number]
    library.xmem_jittor_preallocate.restype = number
    library.xmem_jittor_set_pool.argtypes = [real, real, number, integer]
    library.xmem_jittor_know_holders.argtypes = [number]
    library.xmem_jittor_pool_settings.argtypes = [ctypes.POINTER(real)]
    library.xmem_jittor_late_calls.argtypes = [number, number, number]
    library.xmem_jittor_late_depot.argtypes = [number, integer]
    library.xmem_jittor_late_allow.argtypes = [integer]
    library.xmem_jittor_late_stats.argtypes = [many]
    library.xmem_jittor_late_missed.argtypes = [many]
    library.xmem_jittor_late_users.argtypes = [integer]


@lru_cache(maxsize=1)
def recovering() -> ctypes.PyDLL:
    """Return the library of `recovering.cc`, its functions declared."""
    library = load("recovering")
    number, many = ctypes.c_longlong, Numbers
    library.xmem_jittor_is_pending.argtypes = [number]
    library.xmem_jittor_values_before.argtypes = [many, ctypes.c_int, many, ctypes.c_int, many]
    library.xmem_jittor_values_before.restype = None
    library.xmem_jittor_memory_of.argtypes = [many, ctypes.c_int, many]
    library.xmem_jittor_memory_of.restype = None
    return library


@lru_cache(maxsize=1)
def living() -> ctypes.PyDLL:
    """Return the library of `living.cc`, its functions declared."""
    library = load("living")
    number, many, integer = ctypes.c_longlong, Numbers, ctypes.c_int
    library.xmem_jittor_held_objects.argtypes = [ctypes.c_void_p, many, integer]
    library.xmem_jittor_behind.argtypes = [number, many, integer, ctypes.POINTER(integer)]
    return library


@lru_cache(maxsize=1)
def graph() -> ctypes.PyDLL:
    """Return the library of `graph.cc`, its functions declared."""
    library = load("graph")
    number, many = ctypes.c_longlong, Numbers
    library.xmem_jittor_total_node.restype = number
    integers = ctypes.POINTER(ctypes.c_int)
    library.xmem_jittor_read_by.argtypes = [
        many, ctypes.c_int, number, many, ctypes.c_int, many, ctypes.c_int, integers,
    ]  # fmt: skip
    library.xmem_jittor_reached_by_gradient.argtypes = [
        many, ctypes.c_int, many, ctypes.c_int, integers,
    ]  # fmt: skip
    library.xmem_jittor_reached_by_gradient.restype = None
    library.xmem_jittor_handles.argtypes = [
        many, ctypes.c_int, ctypes.c_void_p, integers, many, ctypes.c_int,
    ]  # fmt: skip
    library.xmem_jittor_tape_of.argtypes = [number]
    library.xmem_jittor_tape_of.restype = number
    library.xmem_jittor_maker_of.argtypes = [number]
    library.xmem_jittor_maker_of.restype = number
    library.xmem_jittor_let_go.argtypes = [number, number]
    library.xmem_jittor_let_go.restype = None
    library.xmem_jittor_may_depend.argtypes = [number, number]
    library.xmem_jittor_draws.argtypes = [many, ctypes.c_int, number]
    library.xmem_jittor_compares.argtypes = [many, ctypes.c_int, number]
    library.xmem_jittor_refuse.argtypes = [
        number, many, ctypes.c_int, many, ctypes.c_int, ctypes.py_object,
    ]  # fmt: skip
    library.xmem_jittor_refuse.restype = None
    library.xmem_jittor_seedings.argtypes = []
    library.xmem_jittor_seedings.restype = number
    return library


@lru_cache(maxsize=1)
def emptying() -> ctypes.PyDLL:
    """Return the library of `emptying.cc`, its functions declared."""
    library = load("emptying")
    for function in (library.xmem_jittor_empty, library.xmem_jittor_refill):
        function.restype = None
    return library


@lru_cache(maxsize=1)
def donating() -> ctypes.PyDLL:
    """Return the library of `donating.cc`, its functions declared."""
    library = load("donating")
    library.xmem_jittor_donate.restype = None
    library.xmem_jittor_donated.argtypes = [Numbers]
    library.xmem_jittor_donated.restype = None
    return library


@lru_cache(maxsize=1)
def saving() -> ctypes.PyDLL:
    """Return the library of `saving.cc`, its functions declared."""
    library = load("saving")
    number, many, integer = ctypes.c_longlong, Numbers, ctypes.c_int
    library.xmem_jittor_held.argtypes = [number, number, ctypes.c_void_p, many, integer]
    library.xmem_jittor_cut.argtypes = [
        many, integer, many, integer, many, integer, many, integer, number, number, many,
        ctypes.POINTER(integer), integer,
    ]  # fmt: skip
    library.xmem_jittor_recipe.argtypes = [
        number, many, integer, many, integer, number, many, integer,
        ctypes.POINTER(integer), ctypes.POINTER(integer),
    ]  # fmt: skip
    library.xmem_jittor_recipe.restype = number
    library.xmem_jittor_follow.argtypes = [number, many, many]
    library.xmem_jittor_follow.restype = number
    library.xmem_jittor_forget_recipe.argtypes = [number]
    library.xmem_jittor_forget_recipe.restype = None
    library.xmem_jittor_origin.argtypes = [number]
    library.xmem_jittor_origin.restype = number
    library.xmem_jittor_is_there.argtypes = [number]
    library.xmem_jittor_reader.argtypes = [number, number, number]
    library.xmem_jittor_reader.restype = number
    library.xmem_jittor_views_before.argtypes = [number, many, integer, many, integer]
    return library


@lru_cache(maxsize=1)
def streaming() -> ctypes.PyDLL:
    """Return the library of `streaming.cc`, its functions declared."""
    library = load("streaming", ["letting_go"])
    number, many, integer = ctypes.c_longlong, Numbers, ctypes.c_int
    library.xmem_jittor_send.argtypes = [number, ctypes.c_void_p, number]
    for name in ("bring_back", "where"):
        getattr(library, f"xmem_jittor_{name}").argtypes = [number]
    library.xmem_jittor_move.argtypes = [
        number, many, integer, many, integer, integer, integer,
    ]  # fmt: skip
    library.xmem_jittor_move.restype = number
    library.xmem_jittor_move_taken.restype = None
    for name in ("streamed", "move_failure"):
        getattr(library, f"xmem_jittor_{name}").argtypes = [many]
        getattr(library, f"xmem_jittor_{name}").restype = None
    return library


@lru_cache(maxsize=1)
def away() -> ctypes.PyDLL:
    """Return the library of `away.cc`, its functions declared."""
    library = load("away", ["letting_go"])
    number, many, pointer = ctypes.c_longlong, Numbers, ctypes.c_void_p
    library.xmem_jittor_away_store.argtypes = [number, pointer, number, number, many]
    library.xmem_jittor_away_store.restype = pointer
    library.xmem_jittor_away_load.argtypes = [pointer, number]
    library.xmem_jittor_away_load.restype = number
    library.xmem_jittor_away_let_go.argtypes = [pointer]
    library.xmem_jittor_away_failure.argtypes = [many]
    library.xmem_jittor_away_pieces.argtypes = []
    library.xmem_jittor_away_pieces.restype = number
    for name in ("taken", "let_go", "failure"):
        getattr(library, f"xmem_jittor_away_{name}").restype = None
    return library
