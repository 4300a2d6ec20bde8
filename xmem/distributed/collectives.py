"""Reduce, gather and exchange tensors over ranks, checked, in buckets, in few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xmem.distributed.arguments import (
    Given,
    bucket_bytes_of,
    check_compress,
    check_op,
    check_reducible,
    check_source,
    single,
)
from xmem.distributed.buckets import buckets
from xmem.distributed.feedback import ErrorFeedback
from xmem.distributed.reducing import Plan, added_in_float32, simple
from xmem.distributed.sending import Handle, Job, run
from xmem.distributed.signatures import Asked, agree
from xmem.distributed.squeezing import HALVES
from xmem.distributed.world import current, joined
from xmem.distributing import Compression, Op
from xmem.sizes import format_size

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "buckets",
    "reduce_scatter",
]

_BUCKET = "25MiB"


def all_reduce(
    tensors: Any,
    op: Op = "sum",
    *,
    bucket: int | str = _BUCKET,
    compress: Compression | None = None,
    error_feedback: ErrorFeedback | None = None,
    in_place: bool = False,
    async_: bool = False,
) -> Any:
    """Combine a tensor, or a list of them, over all ranks.

    Lists are sent in buckets: tensors of one type one after another in a buffer. A tensor as large
    as a bucket goes alone, without a copy where the framework can. What `compress` does not name
    travels as it is; sums of halves are added up in float32 (`xmem.distributed.squeezing`).

    Args:
        tensors: a tensor or a sequence of tensors, of any float or integer type.
        op: "sum", "mean" (floats) or "max".
        bucket: the most that a buffer holds, in bytes or like "25MiB"; with `compress`, the most
            that all buffers hold together.
        compress: what floats travel as; "int8" packs blocks of 256 by xmem's codec. Sums over 65504
            are lost in "fp16".
        error_feedback: an `ErrorFeedback` that lives as long as the training: what compression
            lost is added the next time.
        in_place: write the results into the tensors.
        async_: return at once; `.wait()` gives the result. All buffers exist at once then.

    Returns:
        What was given, combined: a tensor, or a list of them; or what waits for it. Results of a
        list may be views of one buffer.

    Raises:
        CollectiveMismatchError: ranks called something else, or with other shapes or types; raised
            on every rank, before anything is sent.
        CollectiveTimeoutError: ranks did not come within the timeout; it names them.
        RankLostError: ranks are gone; it names them.
        UsageError: an argument that is not known.
    """
    given = Given(tensors)

    def check() -> Asked:
        check_op(op)
        check_compress(compress, op, error_feedback)
        asked = Asked(
            "all_reduce",
            (
                ("op", op),
                ("compress", compress),
                ("error_feedback", error_feedback is not None),
                ("bucket", bucket_bytes_of(bucket)),
                ("in_place", bool(in_place)),
            ),
            given.kinds("all_reduce"),
        )
        for dtype in {kind.dtype for kind in asked.kinds}:
            check_reducible(dtype, op)
        given.check_distinct("all_reduce", in_place=in_place)
        if error_feedback is not None:
            error_feedback.check(asked.kinds, compress, bucket_bytes_of(bucket), current().size)
        return asked

    asked = agree("all_reduce", check)
    if error_feedback is not None:
        error_feedback.bind(asked.kinds, compress, bucket_bytes_of(bucket), current().size)
    plan = Plan(given, asked.kinds, in_place)
    jobs = plan.reductions(op, bucket_bytes_of(bucket), compress, error_feedback)
    return _carried_out(jobs, plan.finish, asked, async_=async_, again=plan.sends_again)


def broadcast(
    tensors: Any,
    source: int = 0,
    *,
    bucket: int | str = _BUCKET,
    in_place: bool = False,
    async_: bool = False,
) -> Any:
    """Give every rank the source's values of a tensor or a list of them.

    Args:
        tensors: a tensor or a sequence of tensors, of the same types and shapes on every rank.
        source: the rank that has the values.
        bucket: see `all_reduce`.
        in_place: write the values into the tensors.
        async_: see `all_reduce`.

    Raises:
        CollectiveMismatchError: see `all_reduce`.
        UsageError: there is no such rank.
    """
    given = Given(tensors)

    def check() -> Asked:
        check_source(source)
        settings = (("source", source), ("bucket", bucket_bytes_of(bucket)), ("in_place", in_place))
        given.check_distinct("broadcast", in_place=in_place)
        return Asked("broadcast", settings, given.kinds("broadcast"))

    asked = agree("broadcast", check)
    plan = Plan(given, asked.kinds, in_place)
    jobs = plan.broadcasts(source, bucket_bytes_of(bucket))
    return _carried_out(jobs, plan.finish, asked, async_=async_)


def all_gather(tensor: Any, *, async_: bool = False) -> Any:
    """Give every rank the tensors of all: (...) -> (world_size, ...)."""
    distributed, world = joined(), current()
    asked = agree("all_gather", lambda: single("all_gather", tensor))
    size_bytes = asked.size_bytes * world.size
    job = simple("all_gather", size_bytes, lambda: distributed.all_gather(tensor))
    return _carried_out([job], _only, asked, async_=async_)


def reduce_scatter(tensor: Any, op: Op = "sum", *, async_: bool = False) -> Any:
    """Combine over ranks, each keeps its part: (world_size, ...) -> (...).

    Sums of halves are added up in float32.
    """
    distributed = joined()

    def check() -> Asked:
        check_op(op)
        asked = single("reduce_scatter", tensor, parted=True, settings=(("op", op),))
        check_reducible(asked.kinds[0].dtype, op)
        return asked

    asked = agree("reduce_scatter", check)
    (kind,) = asked.kinds
    if kind.dtype in HALVES.values() and op != "max":
        job = added_in_float32(distributed, current(), tensor, kind, op)
    else:
        job = simple(
            "reduce_scatter", kind.size_bytes, lambda: distributed.reduce_scatter(tensor, op)
        )
    return _carried_out([job], _only, asked, async_=async_)


def all_to_all(tensor: Any, *, async_: bool = False) -> Any:
    """Send part j to rank j: (world_size, ...) -> (world_size, ...), by sender."""
    distributed = joined()
    asked = agree("all_to_all", lambda: single("all_to_all", tensor, parted=True))
    job = simple("all_to_all", asked.size_bytes, lambda: distributed.all_to_all(tensor))
    return _carried_out([job], _only, asked, async_=async_)


def _only(results: Sequence[Any]) -> Any:
    return results[0]


def _carried_out(
    jobs: list[Job],
    finish: Callable[[list[Any]], Any],
    asked: Asked,
    *,
    async_: bool,
    again: bool = False,
) -> Any:
    number = len(asked.kinds)
    tensors = "1 tensor" if number == 1 else f"{number} tensors"
    label = f"{asked.what} of {tensors} ({format_size(asked.size_bytes)})"
    if async_:
        return Handle(jobs, finish, label, sends_again=again)
    return run(jobs, finish, label)
