"""The arguments of collectives, checked; every message names the value and what to give."""

from __future__ import annotations

from typing import Any, get_args

from xmem.distributed.feedback import ErrorFeedback
from xmem.distributed.signatures import Asked
from xmem.distributed.world import current, joined
from xmem.distributing import Compression, Kind, Op
from xmem.errors import UsageError
from xmem.sizes import parse_size

FLOATS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Types that can be averaged and compressed, with the bytes of an element."""

INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
"""Types that can be added up."""


class Given:
    """A tensor or a list of them, as it was given."""

    def __init__(self, tensors: Any) -> None:
        self.is_list = isinstance(tensors, (list, tuple))
        self.tensors: list[Any] = list(tensors) if self.is_list else [tensors]

    def kinds(self, what: str) -> tuple[Kind, ...]:
        """Describe the tensors.

        Raises:
            UsageError: one is none that can be sent; it says which.
        """
        distributed = joined()
        found = []
        for number, tensor in enumerate(self.tensors):
            try:
                found.append(distributed.describe(tensor))
            except UsageError as error:
                which = f"tensor {number} of {len(self.tensors)}: " if self.is_list else ""
                raise UsageError(f"{what}: {which}{error}") from error
        return tuple(found)

    def check_distinct(self, what: str, *, in_place: bool) -> None:
        """Refuse to write into a tensor twice: it might be combined twice.

        Raises:
            UsageError: names both places.
        """
        places: dict[int, int] = {}
        for number, tensor in enumerate(self.tensors if in_place else ()):
            first = places.setdefault(id(tensor), number)
            if first != number:
                raise UsageError(
                    f"{what} in place: tensors {first} and {number} are the same; give it once"
                )


def single(
    what: str, tensor: Any, *, parted: bool = False, settings: tuple[tuple[str, Any], ...] = ()
) -> Asked:
    """Return what is asked for with one tensor; with `parted`, it has a part for each rank."""
    kinds = Given([tensor]).kinds(what) if not isinstance(tensor, (list, tuple)) else ()
    if not kinds:
        raise UsageError(f"{what} takes one tensor, not a {type(tensor).__name__}")
    shape, ranks = kinds[0].shape, current().size
    if parted and (not shape or shape[0] != ranks):
        raise UsageError(
            f"{what} takes a tensor with one part for each of the {ranks} ranks, (world_size, ...),"
            f" not {shape}"
        )
    return Asked(what, settings, kinds)


def check_op(op: Any) -> None:
    """Refuse operations that are not known."""
    if op not in get_args(Op):
        raise UsageError(f"op is {op!r}; there is {', '.join(map(repr, get_args(Op)))}")


def check_compress(compress: Any, op: Op, feedback: Any) -> None:
    """Refuse compression that is not known, or that the other arguments rule out."""
    if compress is not None and compress not in get_args(Compression):
        names = ", ".join(map(repr, get_args(Compression)))
        raise UsageError(f"compress is {compress!r}; there is {names} and None")
    if compress is not None and op == "max":
        raise UsageError(
            f"compress={compress!r} is for sums and means: a largest value that is rounded is none"
            " of those that were given. Leave compress out"
        )
    if feedback is None:
        return
    if not isinstance(feedback, ErrorFeedback):
        raise UsageError(
            "error_feedback is an xmem.distributed.ErrorFeedback, made once and given to every"
            f" call, not {feedback!r}"
        )
    if compress is None:
        raise UsageError("error_feedback keeps what compression lost: say compress=, too")


def check_reducible(dtype: str, op: Op) -> None:
    """Refuse types that cannot be combined so."""
    if dtype not in (*FLOATS, *INTEGERS):
        raise UsageError(
            f"{dtype} cannot be reduced; {', '.join((*FLOATS, *INTEGERS))} can: convert it before"
        )
    if op == "mean" and dtype in INTEGERS:
        raise UsageError(
            f'op="mean" of {dtype} would have to be rounded: use op="sum" and divide, or'
            " convert to a float type before"
        )


def check_source(source: Any) -> None:
    """Refuse numbers that are no ranks."""
    ranks = current().size
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < ranks:
        raise UsageError(f"source is {source!r}; ranks are 0 to {ranks - 1}")


def bucket_bytes_of(bucket: int | str) -> int:
    """Return a bucket's bytes, at least 1."""
    size_bytes = parse_size(bucket)
    if size_bytes < 1:
        raise UsageError(f"bucket is {bucket!r}: give at least 1 byte, e.g. '25MiB'")
    return size_bytes
