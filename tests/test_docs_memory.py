"""What docs/memory.md shows runs on both frameworks, and its tables are the code's settings."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("memory.md", "memory.zh-CN.md")


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(name):
    return re.findall(r"```python\n(.*?)```", text_of(name), re.DOTALL)


def without_comments(block):
    return re.sub(r"\s*#.*", "", block)


@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_its_examples_run(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    preamble = (ROOT / "tests" / "docs_preamble.py").read_text(encoding="utf-8")
    script = tmp_path / "examples.py"
    script.write_text("\n".join([preamble, *blocks("memory.md")]), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, script, backend],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "XmemWarning" not in ran.stderr
    assert (tmp_path / "run.jsonl").exists()
    assert (tmp_path / "pool.pickle").exists()


def test_both_pages_show_the_same_code():
    first, second = ([without_comments(b) for b in blocks(name)] for name in PAGES)
    assert len(first) == 8
    assert first == second


@pytest.mark.parametrize(
    ("backend", "expression"),
    [
        ("torch", "xmem_torch.cpu_settings.SETTINGS"),
        ("torch", "xmem_torch.cuda_settings.SETTINGS"),
        ("jittor", "xmem_jittor.pool_settings.available('cpu')"),
    ],
)
def test_every_setting_is_in_its_table(backend, expression):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    module = expression.rpartition(".")[0]
    code = f"import xmem; xmem.use({backend!r}, device='cpu'); import {module}\n"
    code += f"print('NAMES', *{expression})"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    names = next(line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("NAMES"))
    assert names
    for page in PAGES:
        assert not [name for name in names if f"`{name}`" not in text_of(page)]
