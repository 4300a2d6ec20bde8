"""Let tests import their helpers, whatever the import mode; draw the same examples every time.

`make soak` explores: it sets XMEM_EXPLORE, and hypothesis draws anew.
"""

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from fakes.environment import crashy

settings.register_profile("repeatable", derandomize=True)
if not os.environ.get("XMEM_EXPLORE"):
    settings.load_profile("repeatable")

__all__ = ["crashy"]
