"""What skips add to a chain: which values a stage reads, which gradients are held, how long.

A skip (source, target, bytes) says that stage `target` reads a_{source+1} besides its own input, in
every forward and in its backward. B(target) gives a gradient of a_{source+1} as well. It is held
until B(source+1) has run: there the chain's own gradient of a_{source+1} is made, and the two are
added in place. Several skips from one source share a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from xmem.planner.chain import Chain
from xmem.planner.schedule import Op


def read_values(chain: Chain) -> list[tuple[int, ...]]:
    """Return for each stage the j of all a_j that it reads, the batch excepted."""
    reads: list[set[int]] = [{i} - {0} for i in range(len(chain.stages))]
    for skip in chain.skips:
        reads[skip.target].add(skip.source + 1)
    return [tuple(sorted(values)) for values in reads]


def last_targets(chain: Chain) -> dict[int, tuple[int, int]]:
    """Return for each source of skips the last stage that reads it, and the most bytes."""
    found: dict[int, tuple[int, int]] = {}
    for skip in chain.skips:
        target, size = found.get(skip.source, (0, 0))
        found[skip.source] = max(target, skip.target), max(size, skip.size_bytes)
    return found


def gradient_bytes(chain: Chain) -> list[int]:
    """Return the bytes of the skips' gradients that are held beside delta_j, for j = 0 .. n."""
    sizes = [0] * (len(chain.stages) + 1)
    for source in last_targets(chain):
        for j in range(source + 2, len(sizes)):
            sizes[j] += max(
                (s.size_bytes for s in chain.skips if s.source == source and s.target >= j),
                default=0,
            )
    return sizes


def without_skips(chain: Chain) -> Chain:
    """Return the chain alone."""
    return Chain(chain.name, chain.stages, chain.value_bytes)


def pins(chain: Chain, sources: Iterable[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bytes that skips take beside the chain, as `Problem.pins`.

    Args:
        chain: a chain with skips.
        sources: those whose output is held for its targets. Of others only gradients count, as if
            their stage were kept.
    """
    n, targets = len(chain.stages), last_targets(chain)
    before, after = [0] * (n + 1), gradient_bytes(chain)
    for source in set(sources):
        size = chain.value_bytes[source + 1]
        for i in range(source + 2, n + 1):  # stage source+1 finds it as its input
            before[i] += size
        for j in range(targets[source][0] + 1, n + 1):
            after[j] += size
    return tuple(before), tuple(after)


def carried(chain: Chain, *, whole: bool) -> Chain:
    """Return a chain whose values and gradients carry the skips along, from source to target.

    Its schedules, once translated by `live`, hold no more than they do on that chain.

    Args:
        chain: a chain with skips.
        whole: count a skip in what a stage keeps as well. That is needed where a stage may be
            kept without its input, which otherwise has it.
    """
    a = list(chain.value_bytes)
    for source, (target, size) in last_targets(chain).items():
        for j in range(source + 2, target + 1):
            a[j] += max(size, chain.value_bytes[source + 1])
    stages = []
    for i, stage in enumerate(chain.stages):
        more = a[i + 1] - chain.value_bytes[i + 1]
        ends = a[i] - chain.value_bytes[i]
        stages.append(
            replace(
                stage,
                options=tuple(
                    replace(
                        o,
                        kept_bytes=o.kept_bytes + (more if whole else 0),
                        backward_extra_bytes=max(o.backward_extra_bytes, ends),
                    )
                    for o in stage.options
                ),
            )
        )
    return Chain(chain.name, tuple(stages), tuple(a))


def live(chain: Chain, ops: Sequence[Op], *, pinned: Iterable[int] = ()) -> list[Op]:
    """Return a schedule that is valid for the chain's skips, from one of the chain alone.

    Each value is held from where it was made last up to its last reader, and not longer; forwards
    whose output nobody reads are left out.

    Args:
        chain: the chain, with its skips.
        ops: a schedule of the chain without them; its drops are ignored.
        pinned: sources whose output is not made again before its last target has been
            differentiated, but held from its first forward on.
    """
    reads = read_values(chain)
    kept = _without_remakes(chain, ops, set(pinned))
    needed: set[int] = set()
    backwards: list[tuple[Op, set[int]]] = []
    for op in reversed(kept):
        after = set(needed)
        if op.code == "N" and op.index + 1 not in needed:
            continue
        if op.code in "NG":
            needed.discard(op.index + 1)
        needed.update(reads[op.index] if op.code != "L" else (len(chain.stages),))
        backwards.append((op, after))
    alone: set[int] = set()
    result: list[Op] = []
    for op, after in reversed(backwards):
        if op.code == "G" and op.index + 1 in alone:
            alone.remove(op.index + 1)
            result.append(Op("Da", op.index + 1))
        result.append(op)
        if op.code == "N":
            alone.add(op.index + 1)
        result += [Op("Da", j) for j in sorted(alone - after)]
        alone &= after
    return result


def _without_remakes(chain: Chain, ops: Sequence[Op], pinned: set[int]) -> list[Op]:
    """Drop drops, and forwards that make a pinned value a second time while it is pinned."""
    targets = last_targets(chain)
    held: set[int] = set()
    result = []
    for op in ops:
        if op.code in ("Da", "Ds") or (op.code == "N" and op.index in held):
            continue
        if op.code in "NG" and op.index in pinned:
            held.add(op.index)
        if op.code == "B":
            ended = {s for s in pinned if targets[s][0] == op.index}
            held -= ended
            pinned = pinned - ended
        result.append(op)
    return result
