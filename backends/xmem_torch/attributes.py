"""What modules hold in attributes, to be put back after a forward that was run aside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xmem.containers import snapshot, unchanged


class Attributes:
    """The attributes of modules as they are now, with the contents of lists and dicts.

    Args:
        modules: those that will run.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self._before = [(m, dict(vars(m)), _contents(m)) for m in modules]

    def put_back(self) -> bool:
        """Undo what has been set, added or removed since; returns whether anything was."""
        changed = False
        for module, attributes, contents in self._before:
            if unchanged(_contents(module), contents):
                continue
            changed = True
            vars(module).clear()
            vars(module).update(attributes)
            for name, was in contents.items():
                _refill(attributes[name], was)
        return changed


def _contents(module: Any) -> dict[str, Any]:
    return {name: snapshot(value) for name, value in vars(module).items()}


def _refill(container: Any, was: Any) -> None:
    if type(container) is dict:
        container.clear()
        container.update(was)
    elif type(container) is list:
        container[:] = was
