"""What the READMEs say is what the code does."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import xmem
from xmem.cli import main

ROOT = Path(__file__).parent.parent
READMES = ("README.md", "README.zh-CN.md")


def blocks(name, language):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


@pytest.mark.parametrize("name", READMES)
def test_its_scripts_are_the_examples(name):
    examples = {(ROOT / "examples" / f).read_text() for f in ("train_torch.py", "train_jittor.py")}
    shown = blocks(name, "python")
    assert shown
    assert set(shown) <= examples
    if name == "README.md":
        assert set(shown) == examples


@pytest.mark.parametrize("name", READMES)
def test_its_table_is_the_recorded_runs(name):
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "readme_table.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("name", READMES)
def test_its_calls_and_commands_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for call in set(re.findall(r"xmem\.([a-z_]+)\(", text)):
        assert hasattr(xmem, call), call
    for verb in set(re.findall(r"`xmem ([a-z-]+)", text)):
        assert verb in main.list_commands(None), verb
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in set(re.findall(r"make ([a-z-]+)", text)):
        assert target in targets, target


def test_a_user_is_never_told_to_install_the_name_of_others():
    wrong = re.compile(r"pip install\s+(?:-\S+\s+)*['\"]?xmem(?!-train|_)\b")
    for path in [*ROOT.glob("*.md"), *(ROOT / "xmem").rglob("*.py")]:
        assert not wrong.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_the_example_runs(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / f"train_{backend}.py"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    peaks = re.findall(r"peak (\d+) bytes", ran.stdout)
    assert len(peaks) == 3
    losses = [float(v) for v in re.findall(r"loss ([\d.]+)", ran.stdout)]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("backend", ["torch", "jittor"])
def test_one_loop_runs_on_both(backend):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    script = ROOT / "examples" / "train_either.py"
    ran = subprocess.run(
        [sys.executable, script, backend],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(v) for v in re.findall(r"loss ([\d.]+)", ran.stdout)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
