"""Which line of a person's code keeps what leaks: one step is run under `sys.settrace`.

Only once a leak is known, and only lines outside of installed packages: after each line the holder
is looked at, and the line that changed it is the one. Where a debugger or a coverage tool traces
already, no line is known.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from xmem.leak_names import OPTIMIZED, Owner

_HERE = str(Path(__file__).parent)
_INSTALLED = (sysconfig.get_paths()["stdlib"], "<frozen", "<string>")


def is_of_user(frame: FrameType) -> bool:
    """Say whether a frame runs code that is neither xmem's nor installed."""
    path = frame.f_code.co_filename
    name = str(frame.f_globals.get("__name__", ""))
    if path.startswith(_HERE) or name.startswith(("xmem.", "xmem_")):
        return name.startswith("xmem.conformance")
    return not path.startswith(_INSTALLED) and "site-packages" not in path


class LineFinder:
    """Finds the lines that change holders, between `start` and `stop`."""

    def __init__(self, owners: Sequence[Owner | None], fingerprint: Callable[[Any], Any]) -> None:
        """Take what tells two values of a variable apart, `fingerprint`."""
        self._owners = [(n, owner) for n, owner in enumerate(owners) if owner is not None]
        self._fingerprint = fingerprint
        self._frames: list[FrameType] = []
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
        if self._tracing:
            self._tracing = False
            sys.settrace(None)
            self._note_this_line()
            for frame in self._frames:
                frame.f_trace = None
                # Before Python 3.13 a traced frame keeps a copy of its variables: let them go.
                held = frame.f_locals if frame.f_code.co_flags & OPTIMIZED else None
                if type(held) is dict:
                    held.clear()
        self._frames.clear()
        self._last.clear()
        self._at.clear()
        self._owners.clear()
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
        return self._on_line if is_of_user(frame) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self._tracing or len(self._found) == len(self._owners):
            return None
        for number, owner in self._owners:
            if owner.count is None and owner.code not in (None, frame.f_code):
                continue
            if number not in self._found and self._look(owner, frame) != self._last[number]:
                self._found[number] = self._line_before(frame, event)
        if event == "return":
            self._at.pop(id(frame), None)
        else:
            self._at[id(frame)] = frame.f_lineno
        return self._on_line

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
