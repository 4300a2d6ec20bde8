"""A piece of a forward's graph that can be run (torch.fx, PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

from torch.fx import Node

from xmem_torch.graphs import Traced, nodes_in


class Program:
    """Nodes to run one after the other."""

    def __init__(
        self,
        module: Any,
        targets: Iterable[Node],
        made: Callable[[Node], bool],
        order: Mapping[Node, int],
        work: Iterable[Node] = (),
    ) -> None:
        self.outputs = list(targets)
        self.reads: list[Node] = []
        nodes: set[Node] = set()
        pending = [*self.outputs, *work]
        while pending:
            node = pending.pop()
            if node in nodes or node in self.reads:
                continue
            if made(node):
                nodes.add(node)
                pending += nodes_in((node.args, node.kwargs))
            else:
                self.reads.append(node)
        self.reads.sort(key=order.__getitem__)
        self.nodes = sorted(nodes, key=order.__getitem__)
        self._called = {
            n: module.get_submodule(n.target) for n in self.nodes if n.op == "call_module"
        }
        self._held = {n: _held(module, n.target) for n in self.nodes if n.op == "get_attr"}
        last = {
            n: at
            for at, node in enumerate(self.nodes)
            for n in (node, *nodes_in((node.args, node.kwargs)))
        }
        self._dropped: list[list[Node]] = [[] for _ in self.nodes]
        for node, at in last.items():
            if node not in self.outputs:
                self._dropped[at].append(node)

    def modules(self) -> list[Any]:
        """Return the modules that it calls, and those whose parameters it reads."""
        owners = [owner for owner, _ in self._held.values()]
        return list(dict.fromkeys([*self._called.values(), *owners]))

    def run(self, env: dict[Node, Any]) -> list[Any]:
        """Run the nodes on the values that they read."""
        for node, dropped in zip(self.nodes, self._dropped, strict=True):
            args, kwargs = _filled(node.args, env), _filled(node.kwargs, env)
            for gone in dropped:
                env.pop(gone, None)
            if node.op == "call_function":
                env[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                env[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_module":
                env[node] = self._called[node](*args, **kwargs)
            else:
                owner, name = self._held[node]
                env[node] = getattr(owner, name)
            del args, kwargs
            if node in dropped:  # nobody reads it
                del env[node]
        return [env[node] for node in self.outputs]


class Submodules:
    """What lies where a traced forward looks for the modules that it calls.

    Args:
        module: whose forward it is.
        traced: the forward.
    """

    def __init__(self, module: Any, traced: Traced) -> None:
        paths = [str(n.target) for n in traced.graph.nodes if n.op in _IN_MODULES]
        around = {above for path in paths for above in _above(path)}
        found = [module.get_submodule(path) for path in sorted(around)]
        self._held = [
            (holder._modules, holder._modules.copy())
            for holder in dict.fromkeys([*found, *traced.opened])
        ]

    def unchanged(self) -> bool:
        """Say whether the same modules lie there now."""
        return all(
            len(now) == len(was) and all(map(is_, now.values(), was.values()))
            for now, was in self._held
        )


def _above(path: str) -> list[str]:
    """Return the paths of all that a module or parameter lies in; "" is the model's own."""
    names = path.split(".")
    return [".".join(names[:length]) for length in range(len(names))]


_IN_MODULES = ("call_module", "get_attr")


def _held(module: Any, path: str) -> tuple[Any, str]:
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def _filled(value: Any, env: Mapping[Node, Any]) -> Any:
    """Return nested arguments with values for nodes, and plain lists and dicts for torch.fx's."""
    if isinstance(value, Node):
        return env[value]
    if isinstance(value, (list, tuple)):
        made = [_filled(part, env) for part in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {key: _filled(part, env) for key, part in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(_filled(part, env) for part in parts))
    return value
