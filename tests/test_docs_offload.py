"""What docs/offload.md shows runs on both frameworks, and the example does."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("offload.md", "offload.zh-CN.md")
LOSS = """
def loss_of(net, x):
    return ((net(x) - x) ** 2).mean()
"""


def blocks(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def without_comments(block):
    return re.sub(r"\s*#.*", "", block)


def run(script, *arguments, cwd):
    ran = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "2", "XMEM_OFFLOAD_DIR": str(cwd)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_its_examples_run(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    preamble = (ROOT / "tests" / "docs_preamble.py").read_text(encoding="utf-8")
    script = tmp_path / "examples.py"
    script.write_text("\n".join([preamble, LOSS, *blocks("offload.md")]), encoding="utf-8")
    ran = run(script, backend, cwd=tmp_path)
    assert "XmemWarning" not in ran.stderr, ran.stderr
    assert list(tmp_path.iterdir()) == [script]
    assert "offload_activations" in ran.stdout


def test_both_pages_show_the_same_code():
    first, second = ([without_comments(b) for b in blocks(name)] for name in PAGES)
    assert len(first) == 3
    assert first == second


@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_the_example_runs_and_needs_less(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    ran = run(ROOT / "examples" / "offload.py", backend, cwd=tmp_path)
    plain, away = map(int, re.findall(r"peak above static (\d+) bytes", ran.stdout))
    print(f"plain {plain} bytes, offloaded {away}")
    assert away < 0.6 * plain
    losses = re.findall(r"loss ([\d.]+)", ran.stdout)
    assert losses[0] == losses[1]
