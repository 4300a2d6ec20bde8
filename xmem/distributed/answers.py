"""What ranks tell each other where they meet: which call each makes, and what went wrong there."""

from __future__ import annotations

import json
from typing import Any


def read(raw: bytes) -> dict[str, Any]:
    """Return a rank's answer; those of calls that tell no more are only a name.

    Has "what", the name of the call, and "error", "" where there is none.
    """
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        answer = {"what": raw.decode("utf-8", "replace")[:80]}
    return {"what": "", "error": "", **answer}
