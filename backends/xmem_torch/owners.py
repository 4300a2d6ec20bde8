"""Who made what lies in memory: modules, parameters, states, phases (PyTorch 2.13).

Relies on the forwards of modules (`xmem.following`), on torch.autograd.backward and
torch.autograd.grad being the doors to backward, and on the optimizers' global step hooks. Each
notes the serial of the latest allocation (`xmem.trail`); blocks carry the serial of their birth. On
CUDA blocks have no births, and only the phase and the module of the latest note are known.

Limit: a forward that changes would make torch.compile compile a model anew in each block, so of a
model that it works on there are phases and no modules.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xmem.containers import leaves
from xmem.following import following, replacing
from xmem.native.build import find_compiler
from xmem.trail import Trail, TrailOwners
from xmem_torch import native
from xmem_torch.local_parts import local_part
from xmem_torch.masters import master_of
from xmem_torch.passes import top_hooks

# Models that torch.compile was at work in the block of.
_compiled: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def watch(model: Any, optimizer: Any) -> Iterator[TrailOwners]:
    """Follow modules, backward and optimizer steps inside the block."""
    serial = _serial()
    trail = Trail(serial())
    owners = TrailOwners(
        trail,
        functools.partial(parameter_names, model, optimizer),
        functools.partial(_paths, model),
    )
    around = functools.partial(_differentiating, trail=trail, serial=serial)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: trail.begin(serial(), "optimizer")),
        register_optimizer_step_post_hook(lambda *_: trail.begin(serial(), "outside")),
    ]
    modules, graphs = _eager_modules(model), _compiled_graphs()
    try:
        with (
            replacing(torch.autograd, "backward", around),
            replacing(torch.autograd, "grad", around),
            following(
                modules,
                "forward",
                _forward_of,
                trail,
                serial,
                lambda: _look(trail),
                passes=torch.compiler.is_compiling,
            ),
        ):
            yield owners
    finally:
        if modules and _compiled_graphs() != graphs:
            _compiled.update(leaves(model, torch.nn.Module))
        for handle in handles:
            handle.remove()


def _forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward
    return forward


def _look(trail: Trail) -> None:
    trail.look(*(["compress_activations"] if _packs() else []))


def _eager_modules(model: Any) -> Iterable[torch.nn.Module]:
    """Return a model's modules, without scripts; none where it is compiled."""
    found: dict[int, torch.nn.Module] = {}
    pending = leaves(model, torch.nn.Module)
    if any(root in _compiled for root in pending):
        return ()
    while pending:
        module = pending.pop()
        if id(module) in found or isinstance(module, torch.jit.ScriptModule):
            continue
        if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
            return ()
        found[id(module)] = module
        pending += [child for child in module._modules.values() if child is not None]
    return found.values()


def _differentiating(
    original: Callable[..., Any], trail: Trail, serial: Callable[[], int]
) -> Callable[..., Any]:
    """Note where the outermost backward begins and ends: recomputation may call it inside."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not trail.depth:
            trail.begin(serial(), "backward")
        trail.depth += 1
        try:
            found = original(*args, **kwargs)
        except BaseException:
            trail.raised(serial())
            raise
        finally:
            trail.depth -= 1
        if not trail.depth:
            trail.begin(serial(), "outside")
        return found

    return run


def _serial() -> Callable[[], int]:
    """Return what reads the serial of the latest allocation; 0 where nothing counts them."""
    if not native.load.cache_info().currsize:
        return int
    return _counted()


@functools.cache
def _counted() -> Callable[[], int]:
    compiler = find_compiler()
    if compiler is None:
        return int
    serial: Callable[[], int] = native.load(compiler).xmem_torch_serial
    return serial


def _compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["stats"]["unique_graphs"])


def _packs() -> bool:
    """Say whether `xmem.compress_activations` is in force."""
    hooks = top_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "xmem_torch.saved"


def _paths(model: Any) -> dict[int, str]:
    return {id(module): path for path, module in _modules(model)}


def _modules(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """Return all modules of a model, or of several, with their paths."""
    roots = leaves(model, torch.nn.Module)
    several = len(roots) > 1
    found = []
    for index, root in enumerate(roots):
        for path, module in root.named_modules():
            found.append((f"{index}.{path}".rstrip(".") if several else path, module))
    return found


def parameter_names(model: Any, optimizer: Any) -> dict[int, str]:
    """Name what lies at an address: parameters, buffers, gradients, masters, states."""
    names: dict[int, str] = {}
    named: dict[Any, str] = {}

    def add(tensor: Any, name: str) -> None:
        tensor = local_part(tensor)
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return
        if not torch.nn.parameter.is_lazy(tensor) and tensor.untyped_storage().nbytes():
            names.setdefault(tensor.untyped_storage().data_ptr(), name)

    for path, module in _modules(model):
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    add(tensor, f"{path}.{name}".lstrip("."))
                    if held is module._parameters:
                        named.setdefault(tensor, f"{path}.{name}".lstrip("."))
    optimizers = leaves(optimizer, torch.optim.Optimizer)
    groups = [group for one in optimizers for group in one.param_groups]
    masters = {id(master_of(parameter)): name for parameter, name in named.items()}
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        name = masters.get(id(parameter), f"parameter {number} of the optimizer")
        add(parameter, name if parameter in named else f"float32 master of {name}")
        named.setdefault(parameter, name)
    for parameter, name in list(named.items()):
        for held in (parameter, master_of(parameter)):
            add(held.grad, f"gradient of {name}")
    for parameter, state in (item for one in optimizers for item in one.state.items()):
        for tensor in leaves(state, torch.Tensor):
            add(tensor, f"optimizer state of {named.get(parameter, 'a parameter')}")
    names.pop(0, None)  # empty
    return names
