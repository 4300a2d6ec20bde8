"""Which module runs inside a block, and whose memory stays whatever backward reads.

Relies on PyTorch's global module hooks (`torch.nn.modules.module.register_module_forward_hook`,
2.13), which run for every module call in the process: those of other threads are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from xmem.containers import leaves
from xmem_torch.owned import Owned, storages


class Running:
    """The modules that run, in a block.

    Args:
        model: names layers by their paths in it; None: in the outermost module that runs.
        admit: is told of each outermost module before it runs, and may refuse it.

    Attributes:
        owned: the parameters and buffers of all modules that ran.
    """

    def __init__(self, model: Any, admit: Callable[[torch.nn.Module], None]) -> None:
        self._model = model
        self._admit = admit
        self._thread = 0
        self._stack: list[torch.nn.Module] = []
        self._paths: dict[torch.nn.Module, str] = {}
        self.owned = Owned()
        self._inputs: set[int] = set()
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Begin to follow module calls of this thread."""
        self._thread = threading.get_ident()
        if self._model is not None:
            self._admit(self._model)
            self._know(self._model)
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def end(self) -> None:
        """Stop, and let go of all modules."""
        for handle in self._handles:
            handle.remove()
        self._stack.clear()
        self._paths.clear()
        self.owned.forget()

    @property
    def innermost(self) -> tuple[torch.nn.Module | None, str]:
        """The innermost module that runs, with its path."""
        if not self._stack:
            return None, ""
        module = self._stack[-1]
        return module, self._paths.get(module, "")

    def is_input(self, tensor: torch.Tensor) -> bool:
        """Say whether the outermost module was given it as data: its caller holds it, mostly."""
        return tensor.untyped_storage()._cdata in self._inputs

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._stack:
            if module not in self._paths or self._model is None:
                self._admit(module)
            self._know(module)
            given = [t for t in leaves(args, torch.Tensor) if not t.requires_grad]
            self._inputs = storages(given)
        self._stack.append(module)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or module not in self._stack:
            return
        while self._stack.pop() is not module:
            pass
        if not self._stack:
            self._inputs = set()

    def _know(self, outermost: torch.nn.Module) -> None:
        inside = list(outermost.named_modules())
        if self._model is None:
            self._paths = {module: path for path, module in inside}
        elif outermost is self._model:
            self._paths.update((module, path) for path, module in inside)
        else:
            for path, module in inside:
                self._paths.setdefault(module, path)
        self.owned.add(module for _, module in inside)
