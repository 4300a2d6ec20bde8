"""Which line of a person's code keeps what leaks: one step is run under `sys.settrace`.

Only once a leak is known, and only lines outside of installed packages: after each line the holder
is looked at, and the line that changed it is the one. Where a debugger or a coverage tool traces
already, no line is known. Nothing that goes wrong here reaches the traced code.
"""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from xmem.leak_names import Owner, forget_variables

_HERE = str(Path(__file__).parent)
_INSTALLED = (sysconfig.get_paths()["stdlib"], "<frozen", "<string>")
_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_of_user(frame: FrameType) -> bool:
    """Say whether a frame runs code that is neither xmem's nor installed."""
    path = frame.f_code.co_filename
    name = str(frame.f_globals.get("__name__", ""))
    if path.startswith(_HERE) or name.startswith(("xmem.", "xmem_")):
        return name.startswith("xmem.conformance")
    return not path.startswith(_INSTALLED) and "site-packages" not in path


def stack_level() -> int:
    """Return the `stacklevel` by which the function that calls this one warns at a user's line."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not is_of_user(frame):
        frame = frame.f_back
        level += 1
    return level


class LineFinder:
    """Finds the lines that change holders, between `start` and `stop`."""

    def __init__(self, owners: Sequence[Owner | None], fingerprint: Callable[[Any], Any]) -> None:
        """Take what tells two values of a variable apart, `fingerprint`."""
        self._owners = [(n, owner) for n, owner in enumerate(owners) if owner is not None]
        self._fingerprint = fingerprint
        self._frames: list[FrameType] = []
        self._paused: list[FrameType] = []  # generators that the step has entered
        self._last: dict[int, Any] = {}
        self._at: dict[int, int] = {}  # the line that each function is at
        self._found: dict[int, str] = {}
        self._tracing = False

    def start(self) -> bool:
        """Begin to trace this thread; False where somebody else does."""
        if sys.gettrace() is not None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_of_user(frame):
                self._frames.append(frame)
            frame = frame.f_back
        for number, owner in self._owners:
            within = next((f for f in self._frames if f.f_code is owner.code), None)
            self._last[number] = self._look(owner, within)
        for each in self._frames:
            each.f_trace = self._on_line
            self._at[id(each)] = each.f_lineno
        self._tracing = True
        sys.settrace(self._on_call)
        return True

    def stop(self) -> dict[int, str]:
        """End tracing; returns "file:line" by the owner's number, where that was changed."""
        try:
            if self._tracing:
                self._note_this_line()
        finally:
            self._tracing = False
            if sys.gettrace() == self._on_call:  # a debugger may have begun meanwhile
                sys.settrace(None)
            for frame in self._frames:
                if frame.f_trace == self._on_line:
                    frame.f_trace = None
            for frame in (*self._frames, *self._paused):
                forget_variables(frame)
            for each in (self._frames, self._paused, self._last, self._at, self._owners):
                each.clear()
        return self._found

    def _note_this_line(self) -> None:
        """Credit the line that ends the step with what no line before it has changed."""
        for number, owner in self._owners:
            changed = owner.count is not None and self._look(owner, None) != self._last[number]
            if changed and number not in self._found and self._frames:
                innermost = self._frames[0]
                file = Path(innermost.f_code.co_filename).name
                self._found[number] = f"{file}:{innermost.f_lineno}"

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._tracing:  # ended by another thread, which cannot end it here
            sys.settrace(None)
            return None
        if not is_of_user(frame):
            return None
        if frame.f_code.co_flags & _PAUSES:
            self._paused.append(frame)
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._tracing or len(self._found) >= len(self._owners):
            return None
        try:
            self._compare(frame, event)
        except Exception:  # noqa: BLE001  it would end what is traced
            self._owners.clear()
        if event == "return":
            self._at.pop(id(frame), None)
        else:
            self._at[id(frame)] = frame.f_lineno
        return self._on_line

    def _compare(self, frame: FrameType, event: str) -> None:
        for number, owner in self._owners:
            if owner.count is None and owner.code not in (None, frame.f_code):
                continue
            if number not in self._found and self._look(owner, frame) != self._last[number]:
                self._found[number] = self._line_before(frame, event)

    def _line_before(self, frame: FrameType, event: str) -> str:
        """Return the line that has just run: of this function, or the one that calls it."""
        number = frame.f_lineno if event == "return" else self._at.get(id(frame))
        ran: FrameType | None = frame if number is not None else frame.f_back
        if ran is None:
            ran = frame
        return f"{Path(ran.f_code.co_filename).name}:{number or ran.f_lineno}"

    def _look(self, owner: Owner, frame: FrameType | None) -> Any:
        if owner.count is not None:
            return len(owner.holder)
        if owner.code is not None:
            value = None if frame is None else frame.f_locals.get(owner.name)
        elif isinstance(owner.holder, dict):
            value = owner.holder.get(owner.name)
        else:
            value = getattr(owner.holder, owner.name, None)
        return (id(value), self._fingerprint(value))
