"""`on_oom="trim_and_retry"`: an execution that memory ended for goes on after garbage is collected.

Inside Jittor's executor nothing of Python may run: collecting garbage there could free nodes that
it is about to execute, and a finalizer could start an execution inside another. But an execution
that failed can be taken up again where it stopped: what ran is finished, the rest is pending. So
the calls that execute are wrapped, for as long as the policy holds: when one fails for memory, the
garbage is collected, the cache given back, and the call made once more. (The pool itself gives its
cache back before it lets a request fail, under every policy.)

Patched while the policy holds, on Jittor 1.3.11: `jt.sync`, `jt.sync_all`, `jt.fetch_sync`, and
of `jt.Var` the methods and properties in `_METHODS` and `_PROPERTIES`. Other ways into the executor
(the shape of a result that depends on values, eager execution) raise at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jittor as jt

_FUNCTIONS = ("sync", "sync_all", "fetch_sync")
_METHODS = ("sync", "fetch_sync", "numpy", "item")
_PROPERTIES = ("data",)


class Retrying:
    """Wraps Jittor's executing calls, and takes the wrappers away again.

    Attributes:
        retries: how many calls have been made once more.
    """

    def __init__(
        self, ran_out: Callable[[BaseException], bool], clear: Callable[[], object]
    ) -> None:
        """Args are what tells that memory ran out, and what gives back all that can be."""
        self._ran_out = ran_out
        self._clear = clear
        self._originals: list[tuple[Any, str, Any]] = []
        self.retries = 0

    @property
    def is_on(self) -> bool:
        """Whether the calls are wrapped."""
        return bool(self._originals)

    def start(self) -> None:
        """Wrap the calls."""
        if self.is_on:
            return
        for place, names in ((jt, _FUNCTIONS), (jt.Var, _METHODS)):
            for name in names:
                self._replace(place, name, self._wrapped(getattr(place, name)))
        for name in _PROPERTIES:
            original = getattr(jt.Var, name)
            self._replace(jt.Var, name, property(self._wrapped(original.__get__), original.__set__))

    def stop(self) -> None:
        """Let the calls be Jittor's own again."""
        while self._originals:
            place, name, original = self._originals.pop()
            setattr(place, name, original)

    def _replace(self, place: Any, name: str, wrapped: Any) -> None:
        self._originals.append((place, name, getattr(place, name)))
        setattr(place, name, wrapped)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def retried(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError as error:
                if not self._ran_out(error):
                    raise
            self._clear()
            self.retries += 1
            return original(*args, **kwargs)

        return retried
