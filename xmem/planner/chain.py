"""The chain that is planned: stages in a row, their exact bytes and seconds, then the loss.

The symbols in brackets are those of docs/planner.md. Parameters, their gradients and optimizer
state are a constant outside the chain and outside its budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xmem.errors import SchemaError, UsageError

OPTION_NAMES = ("keep all", "compressed", "offload", "half")
"""What options are called where a file has no names, in the order of their numbers."""


LOSS_STAGE = "(loss)"
"""The name of a last stage that is no module: what follows the chain, the loss included."""


@dataclass(frozen=True)
class Option:
    """A way to keep what a stage's backward reads: option k of stage i.

    Attributes:
        name: what is kept and how, see `OPTION_NAMES`; others are welcome.
        forward_seconds: of a forward that keeps it, compression included (f).
        backward_seconds: of the backward, decompression or fetching included (b).
        kept_bytes: live between the two, with the stage's output, without its input (abar).
        forward_extra_bytes: beyond that, at the worst instant of the forward (tf).
        backward_extra_bytes: beyond everything held, at the worst instant of the backward; the
            gradients of the stage's inputs are among them, those of skips too (tb).
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    forward_extra_bytes: int
    backward_extra_bytes: int


@dataclass(frozen=True)
class Stage:
    """One stage of a chain.

    Attributes:
        name: for people.
        forward_seconds: of a forward that keeps nothing (fng).
        temporary_bytes: beyond input and output, at the worst instant of that forward (tng).
        options: the ways to keep its activations, at least one.
    """

    name: str
    forward_seconds: float
    temporary_bytes: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Skip:
    """A tensor that jumps over stages, e.g. from a U-Net's encoder to its decoder.

    Attributes:
        source: the stage whose output it is.
        target: the stage that reads it again.
        size_bytes: its bytes, and those of the gradient that the target gives it.
    """

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class Chain:
    """A model as the planner sees it.

    Attributes:
        name: for people.
        stages: in the order of the forward (stage 0 .. n-1).
        value_bytes: of what goes into stage i, and last of what comes out of the chain (a_0 ..
            a_n). A gradient has the bytes of its value. a_0, the batch, is held all step.
        skips: tensors that jump over stages. A target reads the whole output of its source, in
            every forward and in its backward.

    Raises:
        UsageError: sizes or times are negative or not finite, or numbers of things do not match.
    """

    name: str
    stages: tuple[Stage, ...]
    value_bytes: tuple[int, ...]
    skips: tuple[Skip, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or len(self.value_bytes) != len(self.stages) + 1:
            raise UsageError(
                f"chain {self.name!r} has {len(self.stages)} stages and {len(self.value_bytes)}"
                " values; it needs at least one stage, and one value more than stages"
            )
        for i, size in enumerate(self.value_bytes):
            _size(size, f"a_{i}")
        for i, stage in enumerate(self.stages):
            _check(stage, i)
        for skip in self.skips:
            _size(skip.size_bytes, f"the skip from stage {skip.source}")
            if not 0 <= skip.source < skip.target < len(self.stages):
                raise UsageError(f"a skip leads from stage {skip.source} to {skip.target}")

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def store_all_seconds(self) -> float:
        """Seconds of a step in which every stage runs once, by its fastest option."""
        fastest = (
            min(s.options, key=lambda o: o.forward_seconds + o.backward_seconds)
            for s in self.stages
        )
        return math.fsum(t for o in fastest for t in (o.forward_seconds, o.backward_seconds))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Chain:
        """Read a chain that was profiled, or one that `to_dict` gave.

        Args:
            data: a profile has lists by stage (`fwd_time`, `bwd_time`, `saved_bytes`, ...); the
                other form has `a`, `fng`, `tng` and `opt`, a list of options for each stage.

        Raises:
            SchemaError: it is neither of the two.
        """
        try:
            return cls._from_profile(data) if "fwd_time" in data else cls._from_symbols(data)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise SchemaError(f"this is no chain: {what}") from error

    @classmethod
    def _from_symbols(cls, data: Mapping[str, Any]) -> Chain:
        rows = data["opt"]
        names = data.get("stages") or [str(i) for i in range(len(rows))]
        stages = [
            Stage(name, seconds, size, tuple(_option(o, k) for k, o in enumerate(options)))
            for name, seconds, size, options in zip(
                names, data["fng"], data["tng"], rows, strict=True
            )
        ]
        return cls(data.get("name", ""), tuple(stages), tuple(data["a"]), _skips(data))

    @classmethod
    def _from_profile(cls, data: Mapping[str, Any]) -> Chain:
        columns = ("fwd_time", "bwd_time", "saved_bytes", "tmp_fwd", "tmp_bwd")
        stages = [
            Stage(name, seconds, size, (Option(OPTION_NAMES[0], *option),))
            for name, seconds, size, *option in zip(
                data["stages"],
                data["fwd_time_nograd"],
                data["tmp_fwd_nograd"],
                *(data[c] for c in columns),
                strict=True,
            )
        ]
        values = (*data["input_bytes"], data["output_bytes"][-1])
        return cls(data.get("name", ""), tuple(stages), values, _skips(data))

    def to_dict(self) -> dict[str, Any]:
        """Return the chain as JSON would hold it; `from_dict` reads it back."""
        return {
            "name": self.name,
            "n": len(self.stages),
            "stages": [s.name for s in self.stages],
            "a": list(self.value_bytes),
            "fng": [s.forward_seconds for s in self.stages],
            "tng": [s.temporary_bytes for s in self.stages],
            "opt": [[_option_to_dict(o) for o in s.options] for s in self.stages],
            "skips": [[s.source, s.target, s.size_bytes] for s in self.skips],
        }


def _option(data: Mapping[str, Any], k: int) -> Option:
    name = OPTION_NAMES[k] if k < len(OPTION_NAMES) else f"option {k}"
    numbers = (data[key] for key in ("f", "b", "abar", "tf", "tb"))
    return Option(data.get("name", name), *numbers)


def _option_to_dict(option: Option) -> dict[str, Any]:
    return {
        "name": option.name,
        "f": option.forward_seconds,
        "b": option.backward_seconds,
        "abar": option.kept_bytes,
        "tf": option.forward_extra_bytes,
        "tb": option.backward_extra_bytes,
    }


def _skips(data: Mapping[str, Any]) -> tuple[Skip, ...]:
    rows: Sequence[Sequence[int]] = data.get("skips") or ()
    return tuple(Skip(*row) for row in rows)


def _check(stage: Stage, i: int) -> None:
    names = [o.name for o in stage.options]
    if not names or len(set(names)) < len(names):
        raise UsageError(f"stage {i} has the options {names}; it needs one or more, named apart")
    _seconds(stage.forward_seconds, f"fng_{i}")
    _size(stage.temporary_bytes, f"tng_{i}")
    for k, option in enumerate(stage.options):
        _seconds(option.forward_seconds, f"f of option {k} of stage {i}")
        _seconds(option.backward_seconds, f"b of option {k} of stage {i}")
        _size(option.kept_bytes, f"abar of option {k} of stage {i}")
        _size(option.forward_extra_bytes, f"tf of option {k} of stage {i}")
        _size(option.backward_extra_bytes, f"tb of option {k} of stage {i}")


_MOST_BYTES = 2**44
"""Of one tensor, so that sums of hundreds are whole numbers in a double."""


def _size(value: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_BYTES:
        raise UsageError(f"{what} is {value!r}; bytes are whole numbers, 0 or more and below 2**44")


def _seconds(value: float, what: str) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
        raise UsageError(f"{what} is {value!r}; seconds are finite numbers, 0 or more")
