"""What to try when memory ran out, in order of what it should save of this very model.

Bytes are computed from what was live when the request was refused, so they say what a technique
would have saved by then; later parts of the step may hold more. A technique that is in force
already is not named.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

from xmem.diagnosis import Advice
from xmem.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

COMPRESSED_SHARE = 0.75
"""What 8 bits save of an activation in float32."""

PACKED_STATE_SHARE = 0.73
"""What 8 bits save of an optimizer's float32 states, one float32 a block included."""

LEAST_SHARE = 0.01
"""Of what is live: what saves less, and is not enough, is not worth a line."""


@dataclass(frozen=True)
class Evidence:
    """What advice is computed from, as it was when a request was refused.

    Attributes:
        phase: of the step.
        requested_bytes: what was asked for.
        missing_bytes: what would have had to be free for the request.
        by_category: live bytes by category.
        blocks: of each block of the model: the activations made in it, and of these the last one,
            which the next block reads.
        running_bytes: inside the block that made the request, of its activations; None: it was made
            in none of them.
        large_activation_bytes: activations large enough to be compressed.
        largest_gradient_bytes: the largest single gradient.
        free_bytes: held by the pool for nobody, or None.
        largest_free_bytes: its largest piece, or None.
        in_force: techniques that are on already, or that are not to be had here.
    """

    phase: str
    requested_bytes: int
    missing_bytes: int
    by_category: Mapping[str, int]
    blocks: Sequence[tuple[int, int]] = ()
    running_bytes: int | None = None
    large_activation_bytes: int = 0
    largest_gradient_bytes: int = 0
    free_bytes: int | None = None
    largest_free_bytes: int | None = None
    in_force: frozenset[str] = frozenset()

    def of(self, *categories: str) -> int:
        """Return the bytes of some categories."""
        return sum(self.by_category.get(category, 0) for category in categories)


def advise(evidence: Evidence, limit_bytes: int | None) -> tuple[Advice, ...]:
    """Return what to try: the largest expected saving first, a higher limit last."""
    found = [
        advice
        for rule in (
            _recompute,
            _compress,
            _offload,
            _half,
            _batch,
            _states,
            _gradients,
            _fragments,
        )
        for advice in rule(evidence)
        if advice.technique not in evidence.in_force
    ]
    found.sort(key=lambda advice: -1 if advice.expected_bytes is None else advice.expected_bytes)
    found.reverse()
    if limit_bytes is not None:
        found.append(_limit(evidence, limit_bytes))
    return tuple(found)


def _saving(
    evidence: Evidence, technique: str, call: str, why: str, expected: float
) -> Iterator[Advice]:
    size = floor(expected)
    is_little = size < LEAST_SHARE * sum(evidence.by_category.values())
    if size > 0 and not (is_little and size < evidence.missing_bytes):
        yield Advice(
            technique=technique,
            call=call,
            why=why,
            expected_bytes=size,
            is_enough=size >= evidence.missing_bytes,
        )


def _recompute(evidence: Evidence) -> Iterator[Advice]:
    """Keep what enters each block; one inside exists: of the block that runs, or is run again."""
    if "plan" in evidence.in_force or not evidence.of("activation"):
        return
    if not evidence.blocks:
        yield Advice(
            technique="checkpoint",
            call="xmem.apply_checkpointing(model, 'every', blocks=[...])",
            why="keeps what enters the blocks that you name, computes their inside again",
        )
        return
    inside = [made - handed_on for made, handed_on in evidence.blocks]
    kept = max(inside) if evidence.running_bytes is None else evidence.running_bytes
    yield from _saving(
        evidence,
        "checkpoint",
        "xmem.apply_checkpointing(model, 'every')",
        f"keeps what enters {len(inside)} blocks, computes their inside again",
        sum(inside) - kept,
    )


def _compress(evidence: Evidence) -> Iterator[Advice]:
    yield from _saving(
        evidence,
        "compress_activations",
        "with xmem.compress_activations(bits=8): loss = ...",
        f"packs {format_size(evidence.large_activation_bytes)} of activations into 8 bits",
        evidence.large_activation_bytes * COMPRESSED_SHARE,
    )


def _offload(evidence: Evidence) -> Iterator[Advice]:
    yield from _saving(
        evidence,
        "on_oom=offload",
        'xmem.pool.configure(on_oom="offload")',
        f"lets {format_size(evidence.large_activation_bytes)} of activations leave for the disk"
        " when memory runs out",
        evidence.large_activation_bytes,
    )


def _half(evidence: Evidence) -> Iterator[Advice]:
    """Half of the activations, less the copies of weights that forward leaves in half."""
    yield from _saving(
        evidence,
        "autocast",
        "with xmem.autocast(): loss = ...",
        "keeps activations in half precision, beside copies of the weights",
        (evidence.of("activation") - evidence.of("parameter")) / 2,
    )


def _batch(evidence: Evidence) -> Iterator[Advice]:
    """Activations, scratch and the batch grow with it; so does the request, outside of updates."""
    scaling = evidence.of("activation", "temporary", "input")
    asked = 0 if evidence.phase == "optimizer" else evidence.requested_bytes
    if not scaling or "smaller batch" in evidence.in_force:
        return
    exact = 1 - evidence.missing_bytes / (scaling + asked)
    factor = floor(exact * 100) / 100
    if factor <= 0:
        yield from _saving(
            evidence,
            "smaller batch",
            "xmem.accumulate(steps=2)",
            "halves the batch; no batch is small enough by itself",
            scaling / 2,
        )
        return
    saved = scaling - floor(scaling * factor)
    enough = saved + asked - floor(asked * factor) >= evidence.missing_bytes
    yield Advice(
        technique="smaller batch",
        call="xmem.find_batch_size(make_step)",
        why=f"{factor:.2f} of this batch would have fitted; xmem.accumulate keeps the update",
        expected_bytes=saved,
        is_enough=enough,
    )


def _states(evidence: Evidence) -> Iterator[Advice]:
    yield from _saving(
        evidence,
        "quantize_optimizer",
        "xmem.quantize_optimizer(optimizer, bits=8)",
        "packs the optimizer's states into 8 bits",
        evidence.of("optimizer") * PACKED_STATE_SHARE,
    )


def _gradients(evidence: Evidence) -> Iterator[Advice]:
    held = evidence.of("gradient")
    if evidence.phase == "forward" and "accumulate" not in evidence.in_force:
        yield from _saving(
            evidence,
            "zero_grad",
            "xmem.zero_grad(optimizer)",
            "gives back the gradients of the last step, before forward",
            held,
        )
    elif "accumulate" not in evidence.in_force:
        yield from _saving(
            evidence,
            "optimizer_in_backward",
            "xmem.optimizer_in_backward(model, optimizer)",
            "updates each parameter in backward, so that gradients never all exist",
            held - evidence.largest_gradient_bytes,
        )


def _fragments(evidence: Evidence) -> Iterator[Advice]:
    """There would have been room, in pieces that are too small."""
    free, largest = evidence.free_bytes, evidence.largest_free_bytes
    if free is None or largest is None or not largest < evidence.requested_bytes <= free:
        return
    yield from _saving(
        evidence,
        "trim",
        "xmem.pool.trim()",
        f"the pool holds {format_size(free)} for nobody, in pieces of at most"
        f" {format_size(largest)}; or preallocate them in one: xmem.pool.preallocate(...)",
        free,
    )


def _limit(evidence: Evidence, limit_bytes: int) -> Advice:
    needed = limit_bytes + evidence.missing_bytes
    return Advice(
        technique="limit",
        call=f"xmem.pool.configure(limit={needed})",
        why=f"lets this request through: {format_size(needed)}; a later one may need more",
        expected_bytes=0,
        is_enough=True,
    )
