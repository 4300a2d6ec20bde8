"""Find out where the bytes were when a request was refused, while they are still there.

The backend's refusal says what its pool saw at that instant; what a block is for is known only now:
its owner by address, or by its birth the module and the phase that made it. So bytes move between
categories here, and sums stay.
"""

from __future__ import annotations

import re
import traceback
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from xmem import accumulating, in_backward, process
from xmem.advice import Evidence, advise
from xmem.checkpointing import is_recomputed
from xmem.compressing import MIN_BYTES
from xmem.diagnosis import Diagnosis
from xmem.following import Followed
from xmem.holdings import Holdings, by_blocks, by_owned, largest
from xmem.layouts import find_blocks, modules_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from xmem.backend import Backend
    from xmem.pooling import Owners, PoolStats, Refusal
    from xmem.records import Category

_FRAMES = 30
_CALLS = ("_wrapped_call_impl", "_call_impl")
"""How PyTorch calls a module: two of three frames, and they say nothing."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MESSAGE = 4000


def diagnose(
    backend: Backend,
    owners: Owners,
    error: BaseException,
    *,
    model: Any = None,
    optimizers: Sequence[Any] = (),
    refusal: Refusal | None,
) -> Diagnosis:
    """Return what is known of an error, before anything is freed.

    Args:
        backend: whose memory ran out.
        owners: what the block has seen.
        error: the framework's.
        model: names modules and parameters.
        optimizers: name gradients and states.
        refusal: the request, where the backend knows it and it is this error's.
    """
    stats = backend.pool.stats()
    owned = _owned(backend, model, optimizers)
    names = backend.pool.parameter_names(model, optimizers)
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
        or (
            "backward" in owners.phases
            and any(map(in_backward.steps_in_backward, optimizers or (None,)))
        ),
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
        message=_message(error),
    )
    evidence = _evidence(backend, owners, holdings, found, model, optimizers)
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
        message=_message(error),
    )


def _owned(backend: Backend, model: Any, optimizers: Sequence[Any]) -> dict[Category, list[Any]]:
    """Return the tensors of model and optimizers that have memory, each once."""
    found: dict[Category, dict[int, Any]] = {}
    pairs = [(model, one) for one in optimizers]
    if model is not None and not pairs:
        pairs = [(model, None)]
    for pair in pairs:
        for category, tensors in backend.measure.owned(*pair, None).items():
            each = {id(tensor): tensor for tensor in tensors if backend.pool.tensor_bytes(tensor)}
            found.setdefault(category, {}).update(each)
    return {category: list(each.values()) for category, each in found.items()}


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
    """Return where the error came from, without lines of source; files by their last two names.

    Of a deep stack both ends: the user's program is at the outer one.
    """
    places = [
        f"{'/'.join(PurePath(code.co_filename).parts[-2:])}:{line} in {code.co_name}"
        for code, line in (
            (frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)
        )
        if code.co_name not in _CALLS and code is not Followed.__call__.__code__
    ]
    if len(places) > _FRAMES:
        left_out = len(places) - _FRAMES
        outer = _FRAMES // 3
        places[outer : outer + left_out] = [f"... {left_out} more"]
    return tuple(places)


def _message(error: BaseException) -> str:
    """Return what the framework said, without colours."""
    return _COLOURS.sub("", str(error))[:_MESSAGE]


def _version() -> str:
    import xmem

    return xmem.__version__


def _evidence(
    backend: Backend,
    owners: Owners,
    holdings: Holdings,
    found: Diagnosis,
    model: Any,
    optimizers: Sequence[Any],
) -> Evidence:
    free = None
    if found.reserved_bytes is not None and found.limit_bytes is None:
        free = found.reserved_bytes - (found.allocated_bytes or 0)
    large = sum(size for _, _, size in holdings.activations if size >= MIN_BYTES)
    blocks = _blocks(backend, model, holdings.activations)
    inside = {path: made - handed_on for path, (made, handed_on) in blocks.items()}
    return Evidence(
        phase=found.phase,
        requested_bytes=found.requested_bytes or 0,
        missing_bytes=found.missing_bytes or 0,
        by_category=found.by_category or {},
        blocks=[size for size in blocks.values() if size[0]],
        running_bytes=inside.get(_within(found.module, blocks) or ""),
        large_activation_bytes=large,
        largest_gradient_bytes=holdings.largest_gradient_bytes,
        free_bytes=free,
        largest_free_bytes=found.largest_free_bytes,
        in_force=owners.in_force | _in_force(backend, model, optimizers),
    )


def _blocks(
    backend: Backend, model: Any, activations: Iterable[tuple[int, str, int]]
) -> dict[str, tuple[int, int]]:
    """Return of each block the bytes of its activations, and of these what was made last."""
    if not backend.offers("checkpoint") or not backend.checkpoint.is_module(model):
        return {}
    found = find_blocks(backend.checkpoint, model)
    made: dict[str, list[int]] = {path: [] for blocks in found for path, _ in blocks}
    for _, name, size in activations:
        path = _within(name, made)
        if path is not None:
            made[path].append(size)
    return {path: (sum(sizes), sizes[-1] if sizes else 0) for path, sizes in made.items()}


def _within(name: str, paths: Iterable[str]) -> str | None:
    """Return the path that a module's is at or below."""
    return next((path for path in paths if name == path or name.startswith(f"{path}.")), None)


def _in_force(backend: Backend, model: Any, optimizers: Sequence[Any]) -> frozenset[str]:
    """Return what is on, and what is not to be had here."""
    found = set()
    if backend.offers("checkpoint") and backend.checkpoint.is_module(model):
        modules = [model, *(m for _, m in modules_of(backend.checkpoint, model))]
        if any(is_recomputed(held) for m in modules for held in vars(m).values()):
            found |= {"checkpoint", "plan"}
    if all(hasattr(optimizer, "plain_state_dict") for optimizer in optimizers):
        found.add("quantize_optimizer")
    if all(map(in_backward.steps_in_backward, optimizers)):
        found |= {"optimizer_in_backward", "zero_grad"}
    missing = {"optimizer_in_backward"} & set(getattr(backend.quantize, "gaps", ()))
    for technique, capability in _NEEDED.items():
        if not backend.offers(capability):
            missing.add(technique)
    pool = backend.pool.in_force()
    if pool.get("on_oom") == "offload" or "offload_to" not in pool:
        found.add("on_oom=offload")
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
