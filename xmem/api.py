"""The neutral functions: find the active backend, delegate, nothing more.

Those of the training loop are in `xmem.loop`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from xmem.errors import NoActiveBackendError, UsageError
from xmem.records import Recompute

if TYPE_CHECKING:
    from pathlib import Path

    from xmem.backend import Backend
    from xmem.layouts import KeyLayers
    from xmem.meter import Measurement
    from xmem.offload.depot import To
    from xmem.planner.plan import Plan
    from xmem.plugins import BackendInfo
    from xmem.profiling import Profile
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
    function: Callable[..., Any],
    /,
    *args: Any,
    preserve_rng: bool = True,
    check_values: bool = False,
    **kwargs: Any,
) -> Any:
    """Call a function, keep only its inputs, and call it again in backward.

    Without gradients this is a plain call. The second call sees the parameters, random numbers,
    precision and training flags of the first, and running statistics are updated once. What is
    written through raw memory (`.data`) between forward and backward cannot be seen.

    Args:
        function: a module or any callable; it may read parameters and tensors around it.
        args: its inputs: tensors, containers of tensors and plain values.
        preserve_rng: the second call draws the same random numbers as the first.
        check_values: compare samples of the values of both calls; a debugging aid.
        kwargs: its keyword inputs.

    Raises:
        RecomputeMismatchError: in backward, if the second call does not do what the first did.
        CompositionError: the function cannot be recomputed, with the reason.
    """
    how = Recompute("", preserve_rng, check_values)
    return active().checkpoint.checkpoint(function, args, kwargs, how)


def apply_checkpointing(
    model: Any,
    layout: str | int | KeyLayers | Plan | Sequence[Any] = "every",
    *,
    blocks: Sequence[Any] | None = None,
    inputs: Sequence[Any] | None = None,
    preserve_rng: bool = True,
    check_values: bool = False,
) -> Receipt:
    """Checkpoint segments of a model: keep what enters them, compute their inside again.

    The blocks of a segment may be called by a Sequential or in the model's own loop. If anything
    but the next block reads the output of a block inside a segment, the segment is cut short there,
    with a warning; the result is the same.

    Args:
        model: a native module.
        layout: "every": each block; "sqrt": about sqrt(n) segments of n blocks; a number of
            segments; `xmem.KeyLayers(...)`: layers whose inside is large and cheap to compute; a
            plan (`xmem.plan`); or a list of segments, each a module, its path, or a list of these.
        blocks: the modules to make segments of, where they should not be found by themselves.
        inputs: the model's inputs, for a KeyLayers that has to measure.
        preserve_rng: recomputation draws the same random numbers.
        check_values: compare samples of the values of both passes; a debugging aid.

    Returns:
        A receipt; `receipt.undo()` restores the model. Applied to nothing warns.

    Raises:
        UsageError: an unknown layout, module or number of segments.
        CompositionError: a block is checkpointed already, listed twice, or cannot be recomputed.
    """
    from xmem.checkpointing import apply_checkpointing as apply

    return apply(
        active(),
        model,
        layout,
        blocks=blocks,
        inputs=inputs,
        preserve_rng=preserve_rng,
        check_values=check_values,
    )


def profile(
    model: Any,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    stages: str | Sequence[str] = "auto",
    compress: Sequence[int] = (),
    offload: To | None = None,
    directory: str | Path | None = None,
    repeats: int = 3,
    name: str = "",
) -> Profile:
    """Measure a model as a chain of stages: exact bytes, seconds.

    Runs a few steps in which every stage is recomputed, so no more memory is needed than the inputs
    of all stages and the inside of one. The model, its statistics, its gradients and random numbers
    are left as they were.

    Args:
        model: a native module, in training mode.
        batch: inputs and targets, whatever `loss_fn` takes.
        loss_fn: `loss_fn(model, batch)` returns the loss, a scalar.
        stages: how the stages are found: "traced" (PyTorch: the forward is traced), "modules"
            (those called one after another), "auto" (traced where that works), or their paths.
        compress: numbers of bits (8, 4, 2) that plans may pack what a stage keeps into; gradients
            are off by the rounding then, see `xmem.compress_activations`.
        offload: "disk" or "host": plans may move what a stage keeps there until its backward. The
            seconds it takes are those of this disk, now.
        directory: of the scratch file for "disk"; None: $XMEM_OFFLOAD_DIR, or the system's for
            temporary files.
        repeats: how many steps are timed: of each operation the least counts, and of stages of the
            same bytes the median.
        name: for people; the model's class otherwise.

    Returns:
        A chain that can be planned (`xmem.plan`); what follows the stages, the loss included, is
        its last stage.

    Raises:
        UsageError: no stages are found, or they are not called in the step, once.
        CompositionError: the model is checkpointed or planned already.
        MeasurementError: a block of `xmem.measure` is open.
        OffloadError: the directory is missing or cannot be written to, or the disk is full.
    """
    from xmem.profiling import profile as run

    return run(
        active(),
        model,
        batch,
        loss_fn,
        stages=stages,
        compress=compress,
        offload=offload,
        directory=directory,
        repeats=repeats,
        name=name,
    )


def plan(
    profile_or_model: Any,
    batch: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    budget: float | str,
    gap: float | None = None,
    verify: bool = True,
    compare: bool = False,
) -> Plan:
    """Return the fastest way to train within a budget, proven, and kept to by a real step.

    The plan is run for a step and measured; if the step holds more than the budget, the model is
    planned anew with what it held more, at most a few rounds. More budget never gives a slower plan
    from the same profile. `plan.apply(model)` puts it to use.

    Args:
        profile_or_model: what `xmem.profile` returned, any chain, or a model.
        batch: of a model; see `xmem.profile`.
        loss_fn: of a model; see `xmem.profile`.
        budget: bytes that the step may hold beside parameters, their gradients and the optimizer's
            state: an int, text such as "2GiB", or a share of what a step holds that keeps all that
            its stages make, a float up to 1.0 or "30%". The batch counts.
        gap: by what share of a step the plan may be slower than the best; see
            `xmem.planner.solve`.
        verify: run it; a chain without a model is only planned.
        compare: also run plain steps in turn with planned ones, to measure the plan's cost in time;
            those keep everything, so that must fit.

    Raises:
        InfeasibleBudgetError: no plan fits; it has the least budget that does.
        UsageError: the budget makes no sense.
    """
    from xmem.planner import DEFAULT_GAP, Chain
    from xmem.planning import make_plan

    chain = profile_or_model
    if not isinstance(chain, Chain):
        if loss_fn is None:
            raise UsageError(
                "to plan a model, give a batch and the loss too: xmem.plan(model, batch, loss_fn,"
                " budget=...); or profile it first: xmem.plan(xmem.profile(...), budget=...)"
            )
        chain = profile(chain, batch, loss_fn)
    gap = DEFAULT_GAP if gap is None else gap
    return make_plan(chain, budget, gap=gap, verify=verify, compare=compare)
