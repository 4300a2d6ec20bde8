"""Models of random programs, from a kit of a framework's parts.

A kit has what differs between frameworks: `linear(weight, bias)`, `layer_norm(weight, bias)`,
`batch_norm(weight, bias)`, `embedding(weight)`, `activation(kind)`, `dropout(probability, path)`,
`parameter(array, frozen)`, `modules(list)`, `tanh(x)`, and `module(mixin)`, which makes a module
class whose forward is the mixin's `run`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import programs as p

VOCABULARY = 5


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class ChainRun:
    def run(self, x):
        self.calls[0] += 1
        for part in self.parts:
            x = part(x)
        return x


class WideRun:
    def run(self, x):
        return self.back(self.bent(self.there(x)))


class ResidualRun:
    def run(self, x):
        return x + self.chain(x)


class DetachedRun:
    def run(self, x):
        return x + self.chain(x).detach()


class AsideRun:
    def run(self, x):
        y = self.chain(x)
        if self.kept is not None:
            self.kept.append(y)
        return x


class RegionRun:
    def run(self, x):
        return getattr(self, "_" + self.style.replace(" ", "_"))(x)

    def _module(self, x):
        return self.call(self.chain, x)

    def _method(self, x):
        return self.call(self.chain.run, x)

    def _closure(self, x):
        chain = self.chain
        return self.call(lambda v: chain(v) + v, x)

    def _partial(self, x):
        return self.call(functools.partial(self.chain), x)

    def _keyword(self, x):
        chain = self.chain
        return self.call(lambda *, by, v: chain(v) * by, v=x, by=self.tanh(x))

    def _dict(self, x):
        chain = self.chain
        given = {"x": x, "by": [self.tanh(x)], "text": "kept"}
        return self.call(lambda given: chain(given["x"]) * given["by"][0], given)

    def _tuple(self, x):
        chain = self.chain
        return self.call(lambda pair: chain(pair[0]) + pair[1], (x, self.tanh(x)))

    def _none(self, x):
        chain = self.chain
        return self.call(lambda v, mask: chain(v) if mask is None else v * mask, x, None)

    def _number(self, x):
        chain = self.chain
        return self.call(lambda v, by, times: chain(v) * by * times, x, 2, times=0.5)

    def _outside(self, x):
        return self.call(lambda v: self.chain(v) * self.outside, x)

    def _closed_over(self, x):
        chain, by = self.chain, self.tanh(x)
        return self.call(lambda v: chain(v) * by, x)

    def _no_input(self, x):
        chain = self.chain
        return self.call(lambda: chain(x))

    def _two(self, x):
        chain, tanh = self.chain, self.tanh
        return self.call(lambda v: (chain(v), tanh(v) + v), x)

    def _first_of_two(self, x):
        return self._two(x)[0]

    def _second_of_two(self, x):
        return self._two(x)[1]

    def _both_of_two(self, x):
        first, second = self._two(x)
        return first * self.tanh(second)

    def _passed_on(self, x):
        chain = self.chain
        same, y = self.call(lambda v: (v, chain(v)), x)
        return same + y


class ModelRun:
    def run(self, x):
        if self.embedding is not None:
            x = self.call(self.embedding, x) if self.front == "region" else self.embedding(x)
        outputs = [x]
        for step in self.steps:
            x = outputs[-1] if step.skip is None else outputs[-1] + outputs[step.skip]
            block = self.blocks[step.block]
            y = self.call(block, x) if step.region else block(x)
            if not step.dropped:
                outputs.append(y)
        return outputs[-1]


_COMPOSED = {p.Residual: ResidualRun, p.Detached: DetachedRun, p.Aside: AsideRun}


class Builder:
    """Builds a program's model; the same weights each time.

    Attributes:
        model: the model, with `.blocks`.
        parameters: by path.
        frozen: the paths of those that ask for no gradient.
        norms: the BatchNorms by path.
        calls: how often each chain has run, by path, each in a list of one.
        regions: by path, whether they lie in another region.
        kept: outputs of branches that the loss does not reach.
    """

    def __init__(self, kit: Any, program: p.Program, call: Callable[..., Any]) -> None:
        self._kit = kit
        self._program = program
        self._call = call
        self._numbers = np.random.default_rng(7)
        self._inside = 0
        self.parameters: dict[str, Any] = {}
        self.frozen: set[str] = set()
        self.norms: dict[str, Any] = {}
        self.calls: dict[str, list[int]] = {}
        self.regions: dict[str, bool] = {}
        self.kept: list[Any] = []
        self._shared = [self._part(s, f"shared.{i}") for i, s in enumerate(program.shared)]
        self.model = kit.module(ModelRun)()
        self.model.steps = program.steps
        self.model.front, self.model.call = program.front, call
        self.model.embedding = None
        if program.front in ("embedding", "region"):
            self.model.embedding = kit.embedding(
                self._parameter("embedding", (VOCABULARY, program.width))
            )
        planned = program.chosen
        if isinstance(program.layout, tuple):
            planned = tuple(i for segment in program.layout for i in segment)
        called = {step.block for step in program.steps if step.region}
        blocks = []
        for index, block in enumerate(program.blocks):
            path = f"blocks.{index}"
            inside = (index in planned) + (index in called)
            if inside:
                self.regions[path] = inside == 2
            self._inside += inside
            blocks.append(self._part(block, path))
            self._inside -= inside
        self.model.blocks = kit.modules(blocks)

    def _parameter(self, path: str, shape: tuple[int, ...], frozen: bool = False) -> Any:
        values = self._numbers.standard_normal(shape) * 0.5
        if len(shape) == 1:  # scales stay away from zero
            values = 1 + values / 2
        self.parameters[path] = self._kit.parameter(values.astype(np.float32), frozen)
        if frozen:
            self.frozen.add(path)
        return self.parameters[path]

    def _linear(self, path: str, width: int, out: int, frozen: bool, bias: bool = True) -> Any:
        weight = self._parameter(f"{path}.weight", (out, width), frozen)
        return self._kit.linear(
            weight, self._parameter(f"{path}.bias", (out,), frozen) if bias else None
        )

    def _part(self, part: Any, path: str) -> Any:
        kit, width = self._kit, self._program.width
        if isinstance(part, p.Linear):
            return self._linear(path, width, width, part.frozen, part.bias)
        if isinstance(part, p.Activation):
            return kit.activation(part.kind)
        if isinstance(part, p.Dropout):
            return kit.dropout(part.probability, path)
        if isinstance(part, p.Shared):
            return self._shared[part.index]
        if isinstance(part, (p.LayerNorm, p.BatchNorm)):
            weight, bias = (
                self._parameter(f"{path}.{name}", (width,), part.frozen)
                for name in ("weight", "bias")
            )
            if isinstance(part, p.LayerNorm):
                return kit.layer_norm(weight, bias)
            self.norms[path] = kit.batch_norm(weight, bias)
            return self.norms[path]
        if isinstance(part, p.Wide):
            made = kit.module(WideRun)()
            made.there = self._linear(f"{path}.there", width, part.hidden, part.frozen)
            made.bent = kit.activation("gelu")
            made.back = self._linear(f"{path}.back", part.hidden, width, part.frozen)
            return made
        if isinstance(part, p.Chain):
            made = kit.module(ChainRun)()
            made.calls = self.calls[path] = [0]
            made.parts = kit.modules(
                [self._part(inner, f"{path}.{i}") for i, inner in enumerate(part.parts)]
            )
            return made
        if isinstance(part, p.Region):
            return self._region(part, path)
        made = kit.module(_COMPOSED[type(part)])()
        if isinstance(part, p.Aside):
            made.kept = self.kept if part.kept else None
        made.chain = self._part(part.chain, path)
        return made

    def _region(self, part: p.Region, path: str) -> Any:
        made = self._kit.module(RegionRun)()
        made.call, made.style, made.tanh = self._call, part.style, self._kit.tanh
        if part.style == "outside":
            made.outside = self._parameter(f"{path}:outside", (self._program.width,))
        self.regions[path] = self._inside > 0
        self._inside += 1
        made.chain = self._part(part.chain, path)
        self._inside -= 1
        return made
