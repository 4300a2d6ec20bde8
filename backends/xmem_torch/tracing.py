"""A model's forward, taken apart into stages by tracing (torch.fx, PyTorch 2.13).

`graphs.py` traces, `cuts.py` cuts. A forward that takes another path for other arguments (a mask
or none), in another training mode, or with other modules in the places of those that were there, is
traced again; it must have the same stages.

Limits: hooks that are put later on the modules that were traced into (the model's own aside) are
not seen, nor are modules exchanged later that are no submodules. Where several stages read views of
one tensor, gradients may be added up in another order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from xmem.containers import fill
from xmem.errors import CompositionError
from xmem_torch.cuts import Cut, cut
from xmem_torch.graphs import REFUSALS, Traced, opens, signature_of, trace
from xmem_torch.nodes import Kinds
from xmem_torch.pieces import Program, Submodules

_FOREIGN = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.jit")
_VARIANTS = 16

Call = Callable[[int, "Stage", Sequence[Any], Mapping[str, Any]], Any]


def traced(model: Any) -> TracedStages | None:
    """Take a model's forward apart; see `xmem.playing.Plans.traced`.

    If the model's own cannot be traced and all it has is one module, that module's is.
    """
    module = model
    while isinstance(module, torch.nn.Module):
        stages = _stages(module)
        if stages is not None:
            return stages
        children = [child for child in module._modules.values() if child is not None]
        if len(children) != 1 or module._parameters or not opens(children[0]):
            return None
        [module] = children
    return None


def _stages(module: Any) -> TracedStages | None:
    if "forward" in vars(module) or type(module).__module__.startswith(_FOREIGN):
        return None
    parameters = signature_of(module).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    for constants in (defaults, {}) if defaults else ({},):
        try:
            variant = _Variant(module, constants)
        except REFUSALS:
            continue
        stages = TracedStages(module, variant.names)
        stages.remember(variant)
        return stages
    return None


class TracedStages:
    """A forward in stages; see `xmem.playing.TracedStages`.

    A copy or a pickle of it belongs to the copied model: it is traced again when it first runs.
    """

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self.names = names
        self.module = module
        self._variants: dict[Any, _Variant] = {}

    def __reduce__(self) -> Any:
        return TracedStages, (self.module, self.names)

    def forward(self, call: Call) -> Forward:
        """Return the forward; each intermediate value is let go of before its last reader runs."""
        return Forward(self, call)

    def variant(self, constants: Mapping[str, Any], extra: tuple[str, ...]) -> _Variant:
        """Return the graph for some arguments and the present training mode.

        Raises:
            CompositionError: there is none with the same stages.
        """
        known = self._variants.get(_key(constants, extra))
        if known is not None and known.fits():
            return known
        self._variants = {k: v for k, v in self._variants.items() if v.modules.unchanged()}
        name = type(self.module).__name__
        try:
            variant = _Variant(self.module, constants, extra)
        except REFUSALS as error:
            raise CompositionError(
                f"the forward of {name} was taken apart into stages, and with these arguments"
                f" ({', '.join(constants)} as they are) it cannot be traced: {error}. Call it as"
                " it was planned."
            ) from error
        if variant.names != self.names:
            differing = sorted({*variant.names} ^ {*self.names})
            raise CompositionError(
                f"the forward of {name} takes another path with these arguments, in this training"
                f" mode or with these modules: stages {differing} are in one of the two only. Call"
                " it as it was planned, or make a plan for this."
            )
        self.remember(variant)
        return variant

    def remember(self, variant: _Variant) -> None:
        """Keep a graph for calls with the same arguments; few are kept."""
        if len(self._variants) >= _VARIANTS:
            self._variants.clear()
        self._variants[variant.key] = variant


class Forward:
    """A forward in stages, in place of the model's own; copied and pickled with it.

    Args:
        stages: of the model.
        call: runs one.
    """

    def __init__(self, stages: TracedStages, call: Call) -> None:
        self._stages = stages
        self._call = call

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(self._stages.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages."""
        signature = self.__signature__
        given = signature.bind(*args, **kwargs).arguments
        constants, inputs, extra = {}, {}, {}
        for parameter in signature.parameters.values():
            name = parameter.name
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = given.get(name, {})
            elif name not in given:
                constants[name] = parameter.default
            elif given[name] is None or isinstance(given[name], (bool, str)):
                constants[name] = given[name]
            else:
                inputs[name] = given[name]
        inputs.update(extra)
        del args, kwargs, given
        return self._stages.variant(constants, tuple(sorted(extra))).run(inputs, self._call)


def _key(constants: Mapping[str, Any], extra: tuple[str, ...]) -> Any:
    return tuple((name, id(value)) for name, value in constants.items()), extra


class Stage:
    """The function of one stage.

    Attributes:
        name: the path of its main module, or what its last function is called in the graph.
        modules: those that it calls.
    """

    def __init__(self, name: str, modules: Sequence[Any], program: Program) -> None:
        self.name = name
        self.modules = modules
        self._piece = program

    def __call__(self, *values: Any) -> Any:
        """Run it on what it reads."""
        env = dict(zip(self._piece.reads, values, strict=True))
        del values
        found = self._piece.run(env)
        return found[0] if len(found) == 1 else tuple(found)

    def __repr__(self) -> str:
        return f"<stage {self.name!r}>"


def _name(kinds: Kinds, work: Sequence[Node], taken: dict[str, int]) -> str:
    """Return what a stage is called: after its module with most parameters, or its last node."""
    modules = [n for n in work if n.op == "call_module"]

    def size(node: Node) -> int:
        return sum(p.numel() for p in kinds.called(node).parameters())

    name = str(max(reversed(modules), key=size).target) if modules else work[-1].name
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}#{taken[name]}"


class _Variant:
    """One graph of a forward, with its stages."""

    def __init__(
        self, module: Any, constants: Mapping[str, Any], extra: tuple[str, ...] = ()
    ) -> None:
        self._constants = constants  # their ids are in the key
        self.key = _key(constants, extra)
        traced = trace(module, constants, extra)
        found = cut(traced, module)
        self._opened = traced.opened
        self._modes = [m.training for m in self._opened]
        self.modules = Submodules(module, traced)
        self._template = traced.template
        self._inputs = traced.inputs
        self._actions, stages = _actions(module, traced, found)
        self.names = tuple(stage.name for stage in stages)
        last: dict[Node, int] = {}
        for at, (program, *_) in enumerate(self._actions):
            last.update((node, at) for node in program.reads)
        self._last = last

    def fits(self) -> bool:
        """Say whether the model is as it was traced: its training mode, and its modules."""
        return self._modes == [m.training for m in self._opened] and self.modules.unchanged()

    def run(self, inputs: Mapping[str, Any], call: Call) -> Any:
        """Run the forward."""
        env = {node: inputs[name] for name, node in self._inputs.items() if node in self._last}
        del inputs
        for at, (program, index, stage) in enumerate(self._actions):
            values = [env.pop(n) if self._last[n] == at else env[n] for n in program.reads]
            if stage is None:
                found = program.run(dict(zip(program.reads, values, strict=True)))
            else:
                made = call(index, stage, tuple(values), {})
                found = [made] if len(program.outputs) == 1 else list(made)
                del made
            del values
            if at == len(self._actions) - 1:
                return fill(self._template, found)
            env.update(zip(program.outputs, found, strict=True))
            del found
            for node in program.outputs:
                if node not in self._last:
                    del env[node]
        raise AssertionError("the last action returns")


Action = tuple[Program, int, Stage | None]


def _actions(module: Any, traced: Traced, found: Cut) -> tuple[list[Action], list[Stage]]:
    """Return what is run, in order: stages, and what is apart; last what is returned."""
    order = {node: at for at, node in enumerate(traced.graph.nodes)}
    [output] = [n for n in traced.graph.nodes if n.op == "output"]
    returned = list(output.args[0])
    kinds = found.kinds
    actions: list[Action] = []
    stages: list[Stage] = []
    taken: dict[str, int] = {}

    def apart(time: int) -> None:
        for node, at in found.times.items():
            if at == time:
                made = lambda n, own=node: n is own or kinds.view(n)  # noqa: E731
                actions.append((Program(module, [node], made, order), -1, None))

    for index, work in enumerate(found.stages):
        apart(index)
        own = set(work)

        def made(node: Node, index: int = index, own: set[Node] = own) -> bool:
            if node.op == "placeholder" or node in kinds.place:
                return node in own
            return kinds.view(node) or found.times.get(node, index + 1) > index

        last = index == len(found.stages) - 1
        end = kinds.place[work[-1]] + 1
        targets = [n for n in work if kinds.end_of(n) >= end and not last]
        if last:
            roots = {n: {n} if n in own else kinds.roots(n) & own for n in returned}
            targets = list(dict.fromkeys(n for n in returned if roots[n] and not kinds.plain(n)))
        program = Program(module, targets, made, order, work)
        held = [m for m in program.modules() if m not in traced.opened]
        stage = Stage(_name(kinds, work, taken), held, program)
        stages.append(stage)
        actions.append((program, index, stage))
    apart(len(found.stages))
    made_last = set(actions[-1][0].outputs)
    final = Program(module, returned, lambda n: kinds.view(n) and n not in made_last, order)
    actions.append((final, -1, None))
    return actions, stages
