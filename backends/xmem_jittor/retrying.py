"""`on_oom="trim_and_retry"`: an execution that memory ended for goes on after garbage is collected.

So does one under `"offload"`, when the pool has moved all that it can.

Inside Jittor's executor nothing of Python may run: collecting garbage there could free nodes that
it is about to execute, and a finalizer could start an execution inside another. But an execution
that failed can be taken up again where it stopped: what ran is finished, the rest is pending. So
the calls that execute are wrapped, for as long as the policy holds: when one fails for memory, the
garbage is collected, the cache given back, and the call made once more. (The pool itself gives its
cache back before it lets a request fail, under every policy.)

The calls are those of `executing.py`; other ways into the executor raise at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xmem_jittor import executing


class Retrying:
    """Wraps Jittor's executing calls, and takes the wrappers away again.

    Attributes:
        retries: how many calls have been made once more.
    """

    def __init__(
        self,
        ran_out: Callable[[BaseException], bool],
        clear: Callable[[], object],
        cause: Callable[[], BaseException | None],
    ) -> None:
        """Args: what tells that memory ran out, gives back all that can be, and says why not."""
        self._ran_out = ran_out
        self._clear = clear
        self._cause = cause
        self._is_on = False
        self.retries = 0

    @property
    def is_on(self) -> bool:
        """Whether the calls are wrapped."""
        return self._is_on

    def start(self) -> None:
        """Wrap the calls."""
        if not self.is_on:
            executing.be_around(self._retried)
        self._is_on = True

    def stop(self) -> None:
        """Let the calls be as they were."""
        executing.go_away(self._retried)
        self._is_on = False

    def _retried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if not self._ran_out(error):
                raise
        self._clear()
        self.retries += 1
        try:
            return call()
        except RuntimeError as error:
            raise error from self._cause()
