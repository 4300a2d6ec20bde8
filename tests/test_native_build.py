"""C++ parts: compiled once, whole or not at all, and a failure says why."""

import ctypes
import multiprocessing
import os
import shutil
import stat

import pytest

from xmem.errors import NativeBuildError
from xmem.native import Source, cache_folder, compile_library

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XMEM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(tmp_path, text='extern "C" int answer() { return 42; }', **more):
    path = tmp_path / "part.cpp"
    path.write_text(text)
    return Source(path=path, compiler="g++", arguments=("-shared", "-fPIC", "-O1"), **more)


@needs_compiler
def test_a_library_is_compiled_once(tmp_path):
    first = compile_library(source(tmp_path))
    stamp = first.stat().st_mtime_ns
    assert compile_library(source(tmp_path)) == first
    assert first.stat().st_mtime_ns == stamp
    assert ctypes.CDLL(str(first)).answer() == 42
    assert first.parent == cache_folder()


@needs_compiler
@pytest.mark.parametrize("change", ["text", "arguments", "version", "header"])
def test_whatever_the_binary_depends_on_is_in_its_name(tmp_path, change):
    before = compile_library(source(tmp_path))
    if change == "text":
        after = source(tmp_path, 'extern "C" int answer() { return 43; }')
    elif change == "version":
        after = source(tmp_path, version="2")
    elif change == "header":
        header = tmp_path / "part.h"
        header.write_text("// nothing")
        after = source(tmp_path, headers=(header,))
    else:
        plain = source(tmp_path)
        after = Source(path=plain.path, compiler="g++", arguments=(*plain.arguments, "-O2"))
    assert compile_library(after) != before


@needs_compiler
def test_a_failing_compiler_shows_its_command_and_its_last_words(tmp_path, own_cache):
    with pytest.raises(NativeBuildError) as caught:
        compile_library(source(tmp_path, "int answer( { return no_such_name; }"))
    error = caught.value
    assert error.command.startswith("g++ -shared -fPIC -O1")
    assert "part.cpp" in error.command
    assert "error:" in error.output
    assert error.command in str(error)
    assert not list(own_cache.glob("*.so"))
    assert not list(own_cache.glob("*.tmp"))


def test_a_missing_compiler_says_how_to_get_one(tmp_path):
    missing = Source(
        path=source(tmp_path).path, compiler="no-such-compiler", arguments=("-shared",)
    )
    with pytest.raises(NativeBuildError, match="apt-get install g"):
        compile_library(missing)


def _compile(path, cache):
    os.environ["XMEM_CACHE_DIR"] = cache
    return str(compile_library(Source(path=path, compiler=str(path.parent / "slow"), arguments=())))


@needs_compiler
def test_processes_that_start_together_compile_once(tmp_path, own_cache):
    path = source(tmp_path).path
    log = tmp_path / "log"
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo run >> {log}\nsleep 0.3\n'
        'exec g++ -shared -fPIC "$@"\n'
    )
    slow.chmod(slow.stat().st_mode | stat.S_IXUSR)
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(_compile, [(path, str(own_cache))] * 3)
    assert len(set(found)) == 1
    assert log.read_text().count("run") == 1
