"""What each node of a forward's graph is, and what it depends on (torch.fx, PyTorch 2.13).

By names of functions, as nothing is run. A name that is missing here costs a stage or a copy; the
result is right all the same, but for functions that change a tensor in place and are not named so.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.proxy import TraceError
from torch.nn import functional

from xmem_torch.graphs import Traced, nodes_in

_PLAIN_ATTRIBUTE = re.compile("shape|dtype|device|ndim|layout|requires_grad|is_cuda|names")
_PLAIN_METHOD = re.compile("size|dim|ndimension|numel|nelement|stride|element_size")
_VIEW = re.compile(
    "view|view_as|reshape|flatten|unflatten|transpose|permute|movedim|moveaxis|swapaxes|swapdims"
    "|squeeze|unsqueeze|expand|expand_as|narrow|select|chunk|split|unbind|tensor_split|t|adjoint"
    "|real"
)
_VIEW_ATTRIBUTE = re.compile("m?[TH]|real")
_VIEW_MODULES = (torch.nn.Flatten, torch.nn.Unflatten, torch.nn.Identity)
_PERHAPS_SAME = re.compile("to|contiguous|float|double|half|bfloat16|type|type_as|cpu|cuda")
"""Methods that may return what they are given."""


class Kinds:
    """What each node of a graph is, and what it depends on."""

    def __init__(self, traced: Traced, module: Any) -> None:
        self._module = module
        self.nodes = [n for n in traced.graph.nodes if n.op not in ("placeholder", "output")]
        [output] = [n for n in traced.graph.nodes if n.op == "output"]
        self.returned = set(nodes_in(output.args))
        self._views: set[Node] = set()
        self._plain: set[Node] = set()
        self.apart: set[Node] = set()
        self._inputs = set(traced.inputs.values())
        for node in self.nodes:
            self._sort_in(node)
        outside = self._views | self._plain | self.apart
        self.work: list[Node] = [n for n in self.nodes if n not in outside]
        self.place = {n: i for i, n in enumerate(self.work)}

    def _sort_in(self, node: Node) -> None:
        read = nodes_in((node.args, node.kwargs))
        if node.op == "get_attr":
            self._views.add(node)
            return
        if self._asks_size(node, read):
            self._plain.add(node)
        elif self._is_view(node, read):
            self._views.add(node)
        else:
            free = node.op != "call_module" or not any(True for _ in self.called(node).parameters())
            if free and all(r in self._inputs or self._is_apart(r) for r in read):
                self.apart.add(node)

    def _is_apart(self, node: Node) -> bool:
        """Say whether neither a parameter nor work is behind a node."""
        if node.op == "get_attr":
            return not isinstance(_found(self._module, node), torch.nn.Parameter)
        if node in self._views or node in self._plain:
            read = nodes_in((node.args, node.kwargs))
            return all(r in self._inputs or self._is_apart(r) for r in read)
        return node in self.apart

    def called(self, node: Node) -> Any:
        """Return the module that a node calls."""
        return self._module.get_submodule(str(node.target))

    def plain(self, node: Node) -> bool:
        """Say whether a node is a size, a type or the like."""
        return node in self._plain

    def view(self, node: Node) -> bool:
        """Say whether a node is made anew where it is read."""
        return node in self._views

    def _asks_size(self, node: Node, read: Sequence[Node]) -> bool:
        if node.target is getattr:
            return _matches(_PLAIN_ATTRIBUTE, node.args[1])
        if bool(read) and all(r in self._plain for r in read):
            home = getattr(node.target, "__module__", None)
            return node.op == "call_method" or home in ("_operator", "builtins", "math")
        return node.op == "call_method" and _matches(_PLAIN_METHOD, node.target)

    def _is_view(self, node: Node, read: Sequence[Node]) -> bool:
        if node.op == "call_module":
            module = self.called(node)
            return type(module) in _VIEW_MODULES and not module._forward_hooks
        if node.target is getattr:
            return _matches(_VIEW_ATTRIBUTE, node.args[1])
        if node.target is operator.getitem:
            source, index = node.args
            parts = source in self._views and source.op != "get_attr"  # of a chunk or a split
            return parts or (
                isinstance(index, (tuple, slice, type(...)))
                and all(r in self._plain for r in nodes_in(index))
            )
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        return _matches(_VIEW, name)

    def roots(self, node: Node, *, through_plain: bool = False) -> set[Node]:
        """Return the work and what is apart that the arguments of a node stand for."""
        found: set[Node] = set()
        pending = nodes_in((node.args, node.kwargs))
        while pending:
            read = pending.pop()
            if read in self._views or (through_plain and read in self._plain):
                pending += nodes_in((read.args, read.kwargs))
            else:
                found.add(read)
        return found

    def readers(self, node: Node) -> set[Node]:
        """Return the work, and what is apart, that reads a node, through views and sizes."""
        found: set[Node] = set()
        pending = list(node.users)
        while pending:
            user = pending.pop()
            if user in self._views or user in self._plain:
                pending += user.users
            else:
                found.add(user)
        return found

    def end_of(self, node: Node) -> int:
        """Return the place of the last work that reads what a node makes."""
        last, pending = self.place[node], list(node.users)
        while pending:
            user = pending.pop()
            if user in self.place:
                last = max(last, self.place[user])
            elif user in self._views:
                pending += user.users
            elif user.op == "output":
                last = len(self.work)
        return last

    def sources_of(self, node: Node) -> set[int] | None:
        """Return whose memory the value of some work may be, by place; None if it is new."""
        same = node.target is operator.getitem or node.target is getattr
        if not same and not (node.op == "call_method" and _matches(_PERHAPS_SAME, node.target)):
            return None
        return self.where(node.args[0])

    def where(self, value: Any) -> set[int]:
        """Return the places of the work behind a value; -1 for what is apart."""
        return {self.place.get(node, -1) for node in self._behind(value)} or {-1}

    def _behind(self, value: Any) -> set[Node]:
        if not isinstance(value, Node):
            return set()
        return self.roots(value) if value in self._views else {value}

    def keep_together(self, whole: set[int]) -> None:
        """Forbid cuts between a tensor and what changes it, and between a tuple and its parts.

        Raises:
            TraceError: an input, a parameter or a buffer is changed in place, which running again
                would do again.
        """
        for node in self.nodes:
            for changed in _changed_by(node, self.called):
                behind = self._behind(changed)
                if node in self.apart and behind and behind <= self.apart:
                    continue
                first = min(self.where(changed))
                if first < 0 or node not in self.place:
                    raise TraceError("a forward changes an input or a buffer in place")
                whole.update(range(first + 1, self.place[node] + 1))
        for node in self.work:
            parts = [u for u in node.users if _is_part(u) and u in self.place]
            if len(parts) == len(node.users):
                for part in parts:
                    whole.update(range(self.place[node] + 1, self.place[part] + 1))


def _is_part(node: Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], (int, str))


def _found(module: Any, node: Node) -> Any:
    value = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _changed_by(node: Node, called: Callable[[Node], Any]) -> Iterable[Any]:
    """Return what a node changes in place."""
    if node.op == "call_module":
        return node.args[:1] if getattr(called(node), "inplace", False) else ()
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if "out" in node.kwargs:
        return [node.kwargs["out"]]
    if name.endswith("_") and not name.endswith("__"):
        return node.args[:1]
    function: Any = getattr(functional, name, None)
    if function is None or function is not node.target:
        return ()
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a function in C, which has no `inplace`
        return ()
    return node.args[:1] if given.get("inplace") else ()


def _matches(names: re.Pattern[str], name: Any) -> bool:
    return isinstance(name, str) and names.fullmatch(name) is not None
