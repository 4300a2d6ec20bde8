"""The two backends read side by side: the same files, classes and methods."""

import ast
from pathlib import Path

import pytest

BACKENDS = Path(__file__).parent.parent / "backends"
TWINS = (
    "__init__.py",
    "away.py",
    "checkpoint.py",
    "codec.py",
    "communication.py",
    "conversion.py",
    "data_parallel.py",
    "distributed.py",
    "environment.py",
    "measure.py",
    "models.py",
    "few_bits.py",
    "full_states.py",
    "late.py",
    "living.py",
    "offload.py",
    "optimizers.py",
    "owners.py",
    "pipelines.py",
    "plans.py",
    "playing.py",
    "plugin.py",
    "pool.py",
    "precision.py",
    "quantize.py",
    "ranks.py",
    "saved.py",
    "sharded_layers.py",
    "sharded_models.py",
    "sharded_optimizers.py",
    "states.py",
    "streamed_layers.py",
    "streamed_parameters.py",
    "streamed_states.py",
    "training.py",
    "weights.py",
    "weights_layers.py",
)
CAPABILITY = {
    "checkpoint.py": "Checkpoint",
    "distributed.py": "Distributed",
    "measure.py": "Measure",
    "models.py": "Models",
    "offload.py": "Offload",
    "plans.py": "Plans",
    "pool.py": "Pool",
    "playing.py": "PlanRun",
    "precision.py": "Precision",
    "quantize.py": "Quantize",
    "saved.py": "Saved",
    "training.py": "Training",
}


def tree(backend, file):
    return ast.parse((BACKENDS / backend / file).read_text())


def public(nodes):
    return {
        n.name
        for n in nodes
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")
    }


@pytest.mark.parametrize("file", TWINS)
def test_both_backends_have_the_file_and_its_docstring(file):
    for backend in ("xmem_torch", "xmem_jittor"):
        assert ast.get_docstring(tree(backend, file)), f"{backend}/{file}"


@pytest.mark.parametrize(("file", "name"), CAPABILITY.items())
def test_both_capabilities_have_the_same_public_methods(file, name):
    methods = []
    for backend in ("xmem_torch", "xmem_jittor"):
        [found] = [
            n for n in tree(backend, file).body if isinstance(n, ast.ClassDef) and n.name == name
        ]
        methods.append(public(found.body))
    assert methods[0] == methods[1]


def test_both_plugins_implement_the_same_hooks():
    hooks = [public(tree(backend, "plugin.py").body) for backend in ("xmem_torch", "xmem_jittor")]
    assert hooks[0] == hooks[1]


def test_nothing_in_xmem_imports_a_framework():
    for path in (BACKENDS.parent / "xmem").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            tops = {name.split(".")[0] for name in names}
            assert not tops & {"torch", "jittor"}, f"{path}:{node.lineno}"


def test_both_environments_are_opened_by_the_same_function():
    for backend in ("xmem_torch", "xmem_jittor"):
        assert "open_session" in public(tree(backend, "environment.py").body)
