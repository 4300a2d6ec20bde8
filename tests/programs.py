"""Random programs: models of small parts, and what of them is recomputed.

Declared without a framework; `program_models` makes models of them. Every part takes and returns
(batch, width).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ACTIVATIONS = ("relu", "tanh", "gelu", "sigmoid", "silu")
STYLES = (
    "module",
    "method",
    "closure",
    "partial",
    "keyword",
    "dict",
    "tuple",
    "none",
    "number",
    "outside",
    "closed over",
    "no input",
    "first of two",
    "second of two",
    "both of two",
    "passed on",
)
QUIET = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Linear:
    bias: bool = True
    frozen: bool = False


@dataclass(frozen=True)
class Wide:
    """Linear to another width, GELU, and back."""

    hidden: int
    frozen: bool = False


@dataclass(frozen=True)
class Activation:
    kind: str


@dataclass(frozen=True)
class LayerNorm:
    frozen: bool = False


@dataclass(frozen=True)
class BatchNorm:
    frozen: bool = False


@dataclass(frozen=True)
class Dropout:
    probability: float


@dataclass(frozen=True)
class Shared:
    """A call of one of the program's shared chains."""

    index: int


@dataclass(frozen=True)
class Chain:
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Residual:
    chain: Chain


@dataclass(frozen=True)
class Detached:
    """x + f(x), with no gradients through f."""

    chain: Chain


@dataclass(frozen=True)
class Aside:
    """Computes f(x) and returns x: a branch that the loss does not reach."""

    chain: Chain
    kept: bool


@dataclass(frozen=True)
class Region:
    """A call through `xmem.checkpoint`; the style says with what arguments."""

    style: str
    chain: Chain


@dataclass(frozen=True)
class Step:
    """A call of a block.

    Attributes:
        block: its index.
        skip: which earlier output is added to its input (0 is the model's input), or None.
        dropped: nobody reads its output.
        region: the model calls it through `xmem.checkpoint`.
    """

    block: int
    skip: int | None = None
    dropped: bool = False
    region: bool = False


@dataclass(frozen=True)
class Program:
    """A model and a plan.

    Attributes:
        width: of every part.
        batch: how many rows.
        front: "constant" or "learnt" input, or "embedding" of integers, or that as a "region".
        shared: chains that several parts may call.
        blocks: chains.
        steps: the calls of the blocks.
        layout: for apply_checkpointing; tuples are segments of indices of blocks; None for none.
        chosen: the indices of the blocks that the layout is for, where it is no tuple.
        passes: how many times forward and backward run.
    """

    width: int
    batch: int
    front: str
    shared: tuple[Chain, ...]
    blocks: tuple[Chain, ...]
    steps: tuple[Step, ...]
    layout: str | int | tuple[tuple[int, ...], ...] | None = None
    chosen: tuple[int, ...] = ()
    passes: int = 1


@dataclass(frozen=True)
class Sizes:
    """What sizes are drawn from, and how large programs get."""

    widths: tuple[int, ...]
    batches: tuple[int, ...]
    parts: int
    depth: int
    blocks: int


# Kinds of parts as often as they shall come; those of the second line hold a chain.
_SIMPLE = "linear linear linear wide activation activation layernorm batchnorm dropout dropout"
_HOLDING = "residual detached aside region region region region region"


@st.composite
def _parts(draw: Any, sizes: Sizes, depth: int, shared: int) -> Any:
    kinds = _SIMPLE + " shared shared" * (shared > 0) + f" {_HOLDING}" * (depth > 0)
    return draw(_part(draw(st.sampled_from(kinds.split())), sizes, depth, shared))


def _part(kind: str, sizes: Sizes, depth: int, shared: int) -> st.SearchStrategy[Any]:
    seldom = st.sampled_from([False, False, False, True])
    inner = chains(sizes, depth - 1, shared)
    return {
        "linear": lambda: st.builds(Linear, st.booleans(), seldom),
        "wide": lambda: st.builds(Wide, st.sampled_from(sizes.widths), seldom),
        "activation": lambda: st.builds(Activation, st.sampled_from(ACTIVATIONS)),
        "layernorm": lambda: st.builds(LayerNorm, seldom),
        "batchnorm": lambda: st.builds(BatchNorm, seldom),
        "dropout": lambda: st.builds(Dropout, st.sampled_from([0.25, 0.5])),
        "shared": lambda: st.builds(Shared, st.integers(0, shared - 1)),
        "residual": lambda: st.builds(Residual, inner),
        "detached": lambda: st.builds(Detached, inner),
        "aside": lambda: st.builds(Aside, inner, st.booleans()),
        "region": lambda: st.builds(Region, st.sampled_from(STYLES), inner),
    }[kind]()


def chains(
    sizes: Sizes, depth: int, shared: int, *, least: int = 1, region: bool = False
) -> st.SearchStrategy[Chain]:
    """Draw chains; with `region`, such that have one at the top."""
    parts = st.deferred(lambda: _parts(sizes, depth, shared))
    drawn = st.lists(parts, min_size=least, max_size=sizes.parts).map(tuple)
    if not region:
        return drawn.map(Chain)
    regions = st.builds(
        Region, st.sampled_from(STYLES), chains(sizes, depth - 1, shared, least=least)
    )
    after = st.lists(parts, max_size=1).map(tuple)
    return st.builds(lambda a, r, b: Chain((*a, r, *b)), after, regions, after)


@st.composite
def programs(draw: Any, sizes: Sizes, *, layouts: bool = True) -> Program:
    """Draw programs, each with regions of its own or a layout.

    Args:
        draw: Hypothesis's.
        sizes: what sizes are drawn from.
        layouts: whether there are layouts, or regions only.
    """
    planned = layouts and draw(st.booleans())
    shared = tuple(draw(st.lists(chains(sizes, 0, 0), max_size=2)))
    if planned:
        block = chains(sizes, draw(st.sampled_from([0, 0, 1])), len(shared), least=2)
        blocks = tuple(draw(st.lists(block, min_size=2, max_size=sizes.blocks)))
    else:
        block = chains(sizes, sizes.depth, len(shared), least=2, region=True)
        blocks = tuple(draw(st.lists(block, min_size=1, max_size=2)))
    steps = draw(_steps(len(blocks)))
    layout: Any = None
    chosen: tuple[int, ...] = ()
    if planned:
        places = st.lists(st.integers(0, len(blocks) - 1), unique=True, min_size=1)
        chosen = tuple(sorted(draw(st.just(range(len(blocks))) | places)))
        whole = st.sampled_from(["every", "sqrt", *range(1, len(chosen) + 1)])
        layout = draw(whole | _segments(len(blocks)))
        chosen = () if isinstance(layout, tuple) else chosen
    return Program(
        width=draw(st.sampled_from(sizes.widths)),
        batch=draw(st.sampled_from(sizes.batches)),
        front=draw(st.sampled_from(["learnt", "constant", "embedding", "region"])),
        shared=shared,
        blocks=blocks,
        steps=steps,
        layout=layout,
        chosen=chosen,
        passes=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def _steps(draw: Any, blocks: int) -> tuple[Step, ...]:
    """Draw calls: each block once, then some once more."""
    steps: list[Step] = []
    outputs = 1
    seldom = st.sampled_from([False] * 9 + [True])
    again = draw(st.lists(st.integers(0, blocks - 1), max_size=2))
    for index in (*range(blocks), *again):
        skip = draw(st.none() | st.integers(0, outputs - 1))
        dropped = draw(seldom)
        steps.append(Step(index, skip, dropped, draw(seldom)))
        outputs += not dropped
    return tuple(steps)


@st.composite
def _segments(draw: Any, blocks: int) -> tuple[tuple[int, ...], ...]:
    """Draw which segment each block belongs to, if to any, in whatever order."""
    found: dict[int, list[int]] = {}
    for index in draw(st.permutations(range(blocks))):
        place = draw(st.none() | st.integers(0, 2))
        if place is not None:
            found.setdefault(place, []).append(index)
    return tuple(map(tuple, found.values())) or ((0,),)


def examples(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Return the first examples of a strategy, the same in every run."""
    found: list[Any] = []

    @seed(0)
    @settings(QUIET, max_examples=count, phases=[Phase.generate])
    @given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found
