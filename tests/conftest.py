"""Let tests import their helpers, whatever the import mode."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fakes.environment import crashy

__all__ = ["crashy"]
