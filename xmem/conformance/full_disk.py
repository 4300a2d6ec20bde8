"""A disk that has no more room, for tests: no file of this process may grow beyond a size.

What a framework compiles meanwhile is not what is tested: a compiler that it starts, in a Python
process of its own, writes as before. Without that, such tests pass only where every kernel that
they need, also after the failure, has been compiled by an earlier run.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIFT = """\
import resource

_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Let writes beyond so many bytes of a file fail with EFBIG; Python ignores the signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = os.environ.get("PYTHONPATH")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_LIFT)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, path]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            if path is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = path
