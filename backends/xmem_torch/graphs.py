"""The graph of a model's outer forward, by torch.fx (PyTorch 2.13).

torch.fx runs a forward once with stand-ins (Proxy) for its inputs. Around it:

* repeated blocks and all they contain are single nodes, so what they do inside does not matter; a
  wrapper that cannot be traced becomes one, too;
* functions that make tensors (`torch.arange`, `torch.rand`) become nodes by a TorchFunctionMode:
  torch.fx would run them once and keep the result for ever;
* whatever a graph cannot say is refused: a mode (no_grad, autocast, saved-tensor hooks) entered
  inside, a constant made on the way, Python's or NumPy's random numbers, an attribute set in the
  forward. torch.fx would leave it out silently.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from xmem.casting import current
from xmem.containers import Slot, take_apart
from xmem.layouts import find_blocks
from xmem.randomness import Streams
from xmem_torch.attributes import Attributes
from xmem_torch.checkpoint import Checkpoint
from xmem_torch.passes import top_hooks

REFUSALS = (
    ValueError,  # TraceError is one: a Proxy in an `if` or a loop
    NotImplementedError,  # an argument that a graph cannot hold
    RuntimeError,  # len() of a Proxy
    TypeError,  # range(), int(), item assignment; PyTorch's own parser of arguments
    NameError,  # a module or parameter that is not the model's
    AttributeError,  # and, as for the rest, a forward that a Proxy led astray
    LookupError,
    AssertionError,
    ArithmeticError,
)
"""What comes out of a forward that is run with Proxies."""

Constants = Mapping[str, Any]

_MAKES_A_TENSOR = re.compile(
    "arange|empty|empty_strided|eye|full|linspace|logspace|normal|ones|rand|randint|randn|randperm"
    "|scalar_tensor|sparse_coo_tensor|tensor|tril_indices|triu_indices|zeros|[a-z]+_window"
)
_FACTORIES = frozenset(getattr(torch, n) for n in dir(torch) if _MAKES_A_TENSOR.fullmatch(n))

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Traced:
    """A graph with what it stands for.

    Attributes:
        graph: its output node takes the list of the Proxies in the returned value.
        inputs: the placeholder of each argument that is given.
        template: the returned value with a Slot for each of them.
        opened: the modules that were traced into.
    """

    graph: Graph
    inputs: Mapping[str, Node]
    template: Any
    opened: Sequence[Any]


def trace(module: Any, constants: Constants, extra: Sequence[str] = ()) -> Traced:
    """Trace a module's forward.

    Args:
        module: the module.
        constants: the arguments that are not inputs of the graph, with their values.
        extra: keywords that go into the forward's `**kwargs`.

    Raises:
        REFUSALS: it cannot be traced.
    """
    tracer = _Tracer(module, constants, extra)
    with _no_trace_left(module), _Factories(tracer):
        graph = tracer.trace(module)
    return Traced(graph, tracer.inputs, tracer.template, tracer.opened)


def opens(module: Any) -> bool:
    """Say whether a module is looked into: a Sequential, or one with repeated blocks inside."""
    return isinstance(module, torch.nn.Sequential) or bool(find_blocks(Checkpoint(), module))


def _closed(module: Any) -> Iterator[Any]:
    """Yield the repeated blocks of a model; of a Sequential, those inside."""
    for listed in find_blocks(Checkpoint(), module):
        repeated = Counter(type(block) for _, block in listed)
        for _, block in listed:
            if repeated[type(block)] < 2 or isinstance(block, torch.nn.Sequential):
                yield from _closed(block)
            else:
                yield block


def _untouched(module: Any) -> bool:
    """Say whether calling a module is no more than its class's forward."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" not in vars(module) and not any(getattr(module, name) for name in hooks)


class _Tracer(Tracer):  # type: ignore[misc, unused-ignore]
    def __init__(self, module: Any, constants: Constants, extra: Sequence[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._constants = constants
        self._extra = extra
        self._closed = set(_closed(module))
        self._around = _ambient()
        self.inputs: dict[str, Node] = {}
        self.template: Any = None
        self.opened = [module]

    def is_leaf_module(self, m: Any, module_qualified_name: str) -> bool:
        return m in self._closed or not (opens(m) and _untouched(m))

    def call_module(
        self, m: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return self.create_proxy("call_module", path, args, kwargs)
        before, opened = len(self.graph.nodes), len(self.opened)
        self.opened.append(m)
        try:
            return forward(*args, **kwargs)
        except REFUSALS:
            for node in reversed(list(self.graph.nodes)[before:]):
                self.graph.erase_node(node)
            del self.opened[opened:]
            self._closed.add(m)
        return self.create_proxy("call_module", path, args, kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> Any:
        if _ambient() != self._around:
            raise TraceError("a forward enters a mode (no_grad, autocast, saved-tensor hooks)")
        return super().create_node(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if isinstance(attr_val, torch.nn.Parameter):
            # No cache: its nodes may be erased when a wrapper turns out to be untraceable.
            return super().getattr(attr, attr_val, {})
        if isinstance(attr_val, torch.Tensor):
            for path, buffer in self.root.named_buffers():
                if buffer is attr_val:
                    return self.create_proxy("get_attr", path, (), {})
        return attr_val

    def get_fresh_qualname(self, prefix: str) -> str:
        raise TraceError("a forward uses a constant that is no attribute of its modules")

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        positional: list[Any] = [self.root]
        keywords: dict[str, Any] = {}
        for name, parameter in signature_of(self.root).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                raise TraceError("a forward that takes *args")
            if parameter.kind is parameter.VAR_KEYWORD:
                keywords.update((key, self._placeholder(key)) for key in self._extra)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                keywords[name] = self._argument(name)
            else:
                positional.append(self._argument(name))

        def run(*args: Any) -> Any:
            returned = root_fn(*args, **keywords)
            found: list[Any] = []
            self.template = take_apart(returned, Proxy, found)
            if not _is_plain(self.template):
                raise TraceError(f"a forward that returns {type(returned).__name__}")
            return found

        return run, positional

    def _argument(self, name: str) -> Any:
        return self._constants[name] if name in self._constants else self._placeholder(name)

    def _placeholder(self, name: str) -> Any:
        proxy = self.create_proxy("placeholder", name, (), {})
        self.inputs[name] = proxy.node
        return proxy


def signature_of(module: Any) -> inspect.Signature:
    """Return the signature of a module's class's forward, without self."""
    found = inspect.signature(type(module).forward)
    return found.replace(parameters=list(found.parameters.values())[1:])


def _is_plain(template: Any) -> bool:
    """Say whether no Proxy or tensor can hide in what is no list, tuple or dict."""
    if isinstance(template, Mapping):
        template = list(template.values())
    if isinstance(template, (list, tuple)):
        return all(map(_is_plain, template))
    return isinstance(template, (Slot, *_PLAIN))


class _Factories(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _FACTORIES:
            return self._tracer.create_proxy("call_function", function, args, kwargs or {})
        return function(*args, **(kwargs or {}))


def _ambient() -> tuple[Any, ...]:
    """Return the modes in force, which a graph cannot hold."""
    casts = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return (*grad, *casts, id(current()), top_hooks())


@contextmanager
def _no_trace_left(module: Any) -> Iterator[None]:
    """Refuse, and put back, what a forward changes besides returning a value.

    Raises:
        TraceError: it set an attribute or drew random numbers.
    """
    attributes = Attributes(module.modules())
    streams, watched, state = Streams(), Streams(), torch.get_rng_state()
    try:
        yield
    finally:
        changed = attributes.put_back()
        watched.first_pass_ended()
        drawn = watched.drawn or _bytes(torch.get_rng_state()) != _bytes(state)
        streams.rewind()
        torch.set_rng_state(state)
    if changed or drawn:
        raise TraceError("a forward sets attributes or draws random numbers in Python")


def _bytes(state: torch.Tensor) -> bytes:
    with _disable_current_modes():  # under FakeTensorMode there would be no values
        return bytes(state.numpy().tobytes())


def nodes_in(nodes: Any) -> list[Node]:
    """Return the nodes in nested arguments, in order, each once."""
    found: list[Node] = []
    pending = [nodes]
    while pending:
        value = pending.pop()
        if isinstance(value, slice):
            value = (value.start, value.stop, value.step)
        if isinstance(value, dict):
            value = tuple(value.values())
        if isinstance(value, (list, tuple)):
            pending.extend(reversed(value))
        elif isinstance(value, Node):
            found.append(value)
    return list(dict.fromkeys(found))
