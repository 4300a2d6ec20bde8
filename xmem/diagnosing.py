"""Find out where the bytes were when a request was refused, while they are still there.

The backend's refusal says what its pool saw at that instant; what a block is for is known only now:
its owner by address, or by its birth the module and the phase that made it. So bytes move between
categories here, and sums stay.
"""

from __future__ import annotations

import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xmem import accumulating, in_backward, process
from xmem.advice import Evidence, advise
from xmem.checkpointing import is_recomputed
from xmem.compressing import MIN_BYTES
from xmem.diagnosis import Diagnosis
from xmem.holdings import Holdings, by_blocks, by_owned, largest
from xmem.layouts import find_blocks, modules_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from xmem.backend import Backend
    from xmem.pooling import Owners, PoolStats, Refusal
    from xmem.records import Category

_FRAMES = 30
_MESSAGE = 4000


def diagnose(
    backend: Backend,
    owners: Owners,
    error: BaseException,
    *,
    model: Any = None,
    optimizer: Any = None,
    refusal: Refusal | None,
) -> Diagnosis:
    """Return what is known of an error, before anything is freed.

    Args:
        backend: whose memory ran out.
        owners: what the block has seen.
        error: the framework's.
        model: names modules and parameters.
        optimizer: names gradients and states.
        refusal: the request, where the backend knows it and it is this error's.
    """
    stats = backend.pool.stats()
    owned = _owned(backend, model, optimizer)
    names = backend.pool.parameter_names(model, optimizer)
    if refusal is None or refusal.by_category is None:
        allocated = stats.allocated_bytes if refusal is None else refusal.allocated_bytes
        blocks = () if refusal is None else refusal.blocks
        holdings = by_owned(backend, owned, allocated, blocks, names)
    else:
        holdings = by_blocks(backend, owners, refusal, owned, names)
    reserved = stats.reserved_bytes if refusal is None else refusal.reserved_bytes
    largest_free = stats.largest_free_bytes if refusal is None else refusal.largest_free_bytes
    found = Diagnosis(
        backend=backend.name,
        device=backend.device,
        framework_version=backend.framework_version,
        xmem_version=_version(),
        phase=_last_phase(owners) if refusal is None else owners.phase_of(refusal),
        module="" if refusal is None else owners.module_of(refusal),
        may_be_updated=owners.may_be_updated(refusal)
        or ("backward" in owners.phases and in_backward.steps_in_backward(optimizer)),
        requested_bytes=None if refusal is None else refusal.requested_bytes,
        allocated_bytes=sum(holdings.by_category.values()),
        reserved_bytes=reserved,
        limit_bytes=_limit(stats, refusal),
        process_bytes=stats.process_bytes or process.gpu_process_bytes(),
        largest_free_bytes=largest_free,
        fragmentation=_fragmentation(holdings, reserved),
        by_category={name: size for name, size in holdings.by_category.items() if size},
        owners=largest(holdings),
        settings=_settings(backend),
        stack=_stack(error),
        message=str(error)[:_MESSAGE],
    )
    evidence = _evidence(backend, owners, holdings, found, model, optimizer)
    return _with_advice(found, evidence)


def bare(backend: Backend, error: BaseException) -> Diagnosis:
    """Return what is known without asking anybody."""
    return Diagnosis(
        backend=backend.name,
        device=backend.device,
        framework_version=backend.framework_version,
        xmem_version=_version(),
        phase="outside",
        may_be_updated=True,
        stack=_stack(error),
        message=str(error)[:_MESSAGE],
    )


def _owned(backend: Backend, model: Any, optimizer: Any) -> dict[Category, list[Any]]:
    """Return the tensors of model and optimizer that have memory."""
    if model is None and optimizer is None:
        return {}
    owned = backend.measure.owned(model, optimizer, None)
    return {
        category: [t for t in tensors if backend.pool.tensor_bytes(t)]
        for category, tensors in owned.items()
    }


def _last_phase(owners: Owners) -> Any:
    order = ("optimizer", "backward", "forward")
    return next((phase for phase in order if phase in owners.phases), "outside")


def _limit(stats: PoolStats, refusal: Refusal | None) -> int | None:
    return stats.limit_bytes if refusal is None else refusal.limit_bytes


def _fragmentation(holdings: Holdings, reserved: int | None) -> float | None:
    if not reserved:
        return None
    return 1 - sum(holdings.by_category.values()) / reserved


def _settings(backend: Backend) -> dict[str, str]:
    found = dict(backend.measure.settings())
    found |= {f"pool.{name}": str(value) for name, value in backend.pool.in_force().items()}
    return found


def _stack(error: BaseException) -> tuple[str, ...]:
    """Return where the error came from, without lines of source; files by their last two names."""
    frames = traceback.extract_tb(error.__traceback__, limit=-_FRAMES)
    return tuple(
        f"{'/'.join(PurePath(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}"
        for frame in frames
    )


def _version() -> str:
    import xmem

    return xmem.__version__


def _evidence(
    backend: Backend,
    owners: Owners,
    holdings: Holdings,
    found: Diagnosis,
    model: Any,
    optimizer: Any,
) -> Evidence:
    free = None
    if found.reserved_bytes is not None and found.limit_bytes is None:
        free = found.reserved_bytes - (found.allocated_bytes or 0)
    large = sum(size for _, _, size in holdings.activations if size >= MIN_BYTES)
    return Evidence(
        phase=found.phase,
        requested_bytes=found.requested_bytes or 0,
        missing_bytes=found.missing_bytes or 0,
        by_category=found.by_category or {},
        blocks=_blocks(backend, model, holdings.activations),
        large_activation_bytes=large,
        largest_gradient_bytes=holdings.largest_gradient_bytes,
        free_bytes=free,
        largest_free_bytes=found.largest_free_bytes,
        in_force=owners.in_force | _in_force(backend, model, optimizer),
    )


def _blocks(
    backend: Backend, model: Any, activations: Iterable[tuple[int, str, int]]
) -> list[tuple[int, int]]:
    """Return of each block the bytes of its activations, and of these what was made last."""
    if not backend.offers("checkpoint") or not backend.checkpoint.is_module(model):
        return []
    paths = [path for blocks in find_blocks(backend.checkpoint, model) for path, _ in blocks]
    made: dict[str, list[int]] = {}
    for _, name, size in activations:
        path = next((p for p in paths if name == p or name.startswith(f"{p}.")), None)
        if path is not None:
            made.setdefault(path, []).append(size)
    return [(sum(sizes), sizes[-1]) for sizes in made.values()]


def _in_force(backend: Backend, model: Any, optimizer: Any) -> frozenset[str]:
    """Return what is on, and what is not to be had here."""
    found = set()
    if backend.offers("checkpoint") and backend.checkpoint.is_module(model):
        modules = [model, *(m for _, m in modules_of(backend.checkpoint, model))]
        if any(is_recomputed(held) for m in modules for held in vars(m).values()):
            found |= {"checkpoint", "plan"}
    if optimizer is None or hasattr(optimizer, "plain_state_dict"):
        found.add("quantize_optimizer")
    if optimizer is None or in_backward.steps_in_backward(optimizer):
        found |= {"optimizer_in_backward", "zero_grad"}
    missing = {"optimizer_in_backward"} & set(getattr(backend.quantize, "gaps", ()))
    for technique, capability in _NEEDED.items():
        if not backend.offers(capability):
            missing.add(technique)
    if accumulating.current() is not None:
        found.add("accumulate")
    return frozenset(found | missing)


_NEEDED = {
    "checkpoint": "checkpoint",
    "compress_activations": "saved",
    "autocast": "precision",
    "quantize_optimizer": "quantize",
    "optimizer_in_backward": "quantize",
}


def _with_advice(found: Diagnosis, evidence: Evidence) -> Diagnosis:
    import msgspec

    return msgspec.structs.replace(found, advice=advise(evidence, found.limit_bytes))
