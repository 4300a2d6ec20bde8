"""The neutral functions: find the active backend, delegate, nothing more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xmem.errors import NoActiveBackendError

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.meter import Measurement
    from xmem.plugins import BackendInfo
    from xmem.receipts import Receipt

# A process global, not a ContextVar: autograd runs backward in threads of its own.
_active: Backend | None = None
_loaded: dict[tuple[str, str], Backend] = {}
_lock = threading.RLock()


def use(name: str, *, device: str = "auto") -> Backend:
    """Choose the framework; later calls of the neutral functions go to it.

    Args:
        name: "torch", "jittor" or what another distribution offers; `xmem.backends()` lists them.
        device: "auto" (a GPU if the framework can use one), "cpu" or "cuda".

    Returns:
        The frozen Backend: `.name .device .capabilities .framework_version`.

    Raises:
        BackendNotFoundError: nothing installed offers this name.
        BackendUnavailableError: the framework or the device is missing.
        BackendLoadError: the backend's own code is broken.
    """
    global _active
    from xmem import plugins

    with _lock:
        backend = _loaded.get((name, device))
        if backend is None:
            backend = plugins.load(name, device)
        elif _active is not None and _active is not backend and _active.name == name:
            plugins.reopen(backend)  # the framework itself was switched to another device
        _loaded.pop((name, device), None)
        _loaded[name, device] = backend  # the latest comes last
        _active = backend
        return backend


def active() -> Backend:
    """Return the backend in use.

    Raises:
        NoActiveBackendError: `xmem.use()` has not been called.
    """
    if _active is None:
        raise NoActiveBackendError(
            'no backend is active. Call xmem.use("torch") or xmem.use("jittor") first;'
            " xmem.backends() lists what is installed."
        )
    return _active


def loaded(name: str) -> Backend:
    """Return a backend that this process has used, active or not.

    Raises:
        NoActiveBackendError: `xmem.use()` has not been called with this name.
    """
    if _active is not None and _active.name == name:
        return _active
    for backend in reversed(_loaded.values()):
        if backend.name == name:
            return backend
    raise NoActiveBackendError(
        f"backend {name!r} is not in use in this process. Call xmem.use({name!r}) first."
    )


def backends() -> list[BackendInfo]:
    """List the installed backends, usable or why not; imports no framework."""
    from xmem import plugins

    return plugins.backend_infos()


def observe(plugin: object, *, name: str | None = None) -> Callable[[], None]:
    """Register an observer of receipts, results and out-of-memory diagnoses.

    Args:
        plugin: an object with some of the hooks of `xmem.hookspecs.ObserverSpec`, each marked
            with `xmem.hookspecs.hookimpl`. It is told what has already happened, too.
        name: a name to see it by; optional.

    Returns:
        A function that ends the observation.
    """
    from xmem import plugins

    return plugins.observe(plugin, name=name)


def measure(*, model: Any = None, optimizer: Any = None, inputs: Any = None) -> Measurement:
    """Measure a block of training exactly; use as `with xmem.measure(model=model) as m:`.

    Args:
        model: the module (or modules) whose parameters and buffers are told apart.
        optimizer: the optimizer whose state is told apart.
        inputs: the batch: tensors, or containers of tensors.

    Returns:
        A Measurement; its bytes are there after the block.
    """
    from xmem.meter import Measurement

    return Measurement(active(), model, optimizer, inputs)


def checkpoint(
    function: Callable[..., Any], /, *args: Any, preserve_rng: bool = True, **kwargs: Any
) -> Any:
    """Call a function, keep only its inputs, and call it again in backward.

    Args:
        function: a module or any callable.
        args: its inputs.
        preserve_rng: the second call draws the same random numbers as the first.
        kwargs: its keyword inputs.
    """
    return active().checkpoint.checkpoint(function, *args, preserve_rng=preserve_rng, **kwargs)


def apply_checkpointing(
    model: Any,
    layout: str = "every",
    *,
    blocks: Sequence[Any] | None = None,
    preserve_rng: bool = True,
) -> Receipt:
    """Checkpoint the blocks of a model.

    Args:
        model: a native module.
        layout: "every": each block is a region of its own.
        blocks: the modules to checkpoint, where they should not be found by themselves.
        preserve_rng: recomputation draws the same random numbers.

    Returns:
        A receipt; `receipt.undo()` restores the model. Applied to nothing warns.
    """
    from xmem.checkpointing import apply_checkpointing as apply

    return apply(active(), model, layout, blocks=blocks, preserve_rng=preserve_rng)


def autocast(
    dtype: str = "auto", *, keep_fp32: Sequence[str] = (), enabled: bool = True
) -> AbstractContextManager[Any]:
    """Compute in half precision inside a `with` block; parameters and gradients stay float32.

    Args:
        dtype: "auto" (what this framework and device do best), "bfloat16" or "float16".
        keep_fp32: names of operations to leave in float32.
        enabled: False makes a region of plain precision.

    Raises:
        CapabilityError: the active backend does not offer this type, with the reason.
    """
    return active().precision.autocast(dtype, keep_fp32=keep_fp32, enabled=enabled)


def backward(loss: Any, optimizer: Any) -> None:
    """Compute the gradients of a scalar loss for the optimizer's parameters."""
    active().training.backward(loss, optimizer)


def optimizer_step(optimizer: Any) -> None:
    """Update the parameters from the gradients that `backward` left."""
    active().training.optimizer_step(optimizer)


def zero_grad(optimizer: Any) -> None:
    """Forget the gradients and give their memory back."""
    active().training.zero_grad(optimizer)
