"""What docs/distributed.md shows runs on two ranks of both frameworks, and so does the example."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xmem.distributed
from xmem.cli import main

ROOT = Path(__file__).parent.parent
PAGES = ("distributed.md", "distributed.zh-CN.md")


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(name, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", text_of(name), re.DOTALL)


def without_comments(block):
    return re.sub(r"\s*#.*", "", block)


def launch(backend, *script, folder):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "xmem",
            "launch",
            "-n",
            "2",
            "--backend",
            backend,
            *map(str, script),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-6000:]
    return ran.stdout


@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_its_examples_run_on_two_ranks(backend, tmp_path):
    preamble = (ROOT / "tests" / "docs_distributed_preamble.py").read_text(encoding="utf-8")
    script = tmp_path / "examples.py"
    script.write_text("\n".join([preamble, *blocks("distributed.md")]), encoding="utf-8")
    output = launch(backend, script, backend, folder=tmp_path)
    assert (tmp_path / "state.pkl").exists()
    for rank in (0, 1):
        assert re.search(rf"^\[{rank}\] ranks called different things", output, re.MULTILINE)


def test_both_pages_show_the_same_code():
    for language, count in (("python", 10), ("bash", 2)):
        first, second = ([without_comments(b) for b in blocks(n, language)] for n in PAGES)
        assert len(first) == count
        assert first == second


@pytest.mark.parametrize("page", PAGES)
def test_what_it_names_exists(page):
    text = text_of(page)
    for call in set(re.findall(r"xmem\.distributed\.([a-z_]+)\(", text)):
        assert hasattr(xmem.distributed, call), call
    for name in set(re.findall(r"`([A-Z]\w+Error)`", text)):
        assert hasattr(xmem, name), name
    for verb in set(re.findall(r"(?:`|^)xmem ([a-z-]+)", text, re.MULTILINE)):
        assert verb in main.list_commands(None), verb


@pytest.mark.parametrize("backend", ["torch", "jittor"])
@pytest.mark.parametrize("technique", ["zero3", "pipeline"])
def test_the_example_runs_and_learns(backend, technique, tmp_path):
    script = ROOT / "examples" / "distributed.py"
    output = launch(backend, script, backend, technique, tmp_path / "state.pkl", folder=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]
    assert (
        len(re.findall(r"^\[[01]\] rank [01] of 2: peak \d+ bytes, sent \d+ bytes", output, re.M))
        == 2
    )
    assert (tmp_path / "state.pkl").exists() == (technique == "zero3")


def test_the_example_needs_no_launcher(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "distributed.py", "torch", "data_parallel"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "rank 0 of 1" in ran.stdout
