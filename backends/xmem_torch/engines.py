"""Other libraries' optimizers with states in few bits (bitsandbytes 0.50, torchao 0.18), by name.

On a CPU xmem's own are faster than both and their steps allocate nothing
(`benchmarks/optimizers.py`). On CUDA bitsandbytes has kernels where xmem uses PyTorch's operations,
so "auto" takes it there if it is installed; that has not been run here. Their states have layouts
of their own: what `xmem.optim` says of `state_dict` and of equal states on all backends holds for
xmem's own only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from xmem.errors import CapabilityError, UsageError, unknown

# The engine's module, and by rule and bits the class in it.
_CLASSES: Mapping[str, tuple[str, Mapping[tuple[str, int], str]]] = {
    "bitsandbytes": (
        "bitsandbytes.optim",
        {("adamw", 8): "AdamW8bit", ("lion", 8): "Lion8bit"},
    ),
    "torchao": ("torchao.optim", {("adamw", 8): "AdamW8bit", ("adamw", 4): "AdamW4bit"}),
}
_ENGINES = ("auto", "xmem", *_CLASSES)


def choose(engine: str, rule: str, parameters: Sequence[Any], state_bits: int) -> str:
    """Return the engine for a new optimizer.

    Raises:
        UsageError: there is no such engine.
    """
    if engine not in _ENGINES:
        raise UsageError(unknown("engine", engine, _ENGINES))
    if engine != "auto":
        return engine
    offered = (rule, state_bits) in _CLASSES["bitsandbytes"][1]
    if offered and _on_cuda(parameters) and find_spec("bitsandbytes") is not None:
        return "bitsandbytes"
    return "xmem"


def make(
    engine: str,
    rule: str,
    parameters: Iterable[Any],
    options: Mapping[str, Any],
    *,
    state_bits: int,
) -> Any:
    """Return another library's optimizer.

    Raises:
        CapabilityError: the library is not installed.
        UsageError: it has no such rule, or not with these options.
    """
    module, classes = _CLASSES[engine]
    name = classes.get((rule, state_bits))
    if name is None:
        offered = ", ".join(f"{r} in {bits} bits" for r, bits in classes)
        raise UsageError(
            f"{engine} has no {rule} in {state_bits} bits; it has: {offered}. Use engine='xmem'"
        )
    given = dict(options)
    if given.pop("maximize", False):
        raise UsageError(f"{engine} cannot maximize; negate the loss, or use engine='xmem'")
    smallest = given.pop("min_elements", 4096)
    if engine == "bitsandbytes":
        given["min_8bit_size"] = smallest
    elif smallest != 4096:
        raise UsageError(
            f"min_elements={smallest}: torchao's is always 4096. Use that, or engine='xmem'"
        )
    try:
        library = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != engine:
            raise
        raise CapabilityError(
            f"engine {engine!r} is not installed: pip install {engine}. Or use engine='xmem'"
        ) from error
    return getattr(library, name)(parameters, **given)


def _on_cuda(parameters: Sequence[Any]) -> bool:
    for entry in parameters:
        held = entry["params"] if isinstance(entry, Mapping) else entry
        for p in held if isinstance(held, (list, tuple)) else [held]:
            tensor = p[1] if isinstance(p, tuple) else p  # named parameters
            if getattr(getattr(tensor, "device", None), "type", "") == "cuda":
                return True
    return False
