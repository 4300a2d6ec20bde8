"""Compile C++ parts once and keep them in a cache folder."""

from xmem.native.build import Source, cache_folder, compile_library

__all__ = ["Source", "cache_folder", "compile_library"]
