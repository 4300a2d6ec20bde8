"""What the code of a stage raises, on its way out of a block that explains communication.

Some frameworks raise the same types for both. What a model, a loss function or a full memory ends
with is not the other ranks' doing, and reaches the user as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class StageError(Exception):
    """Carries what a stage has raised; nobody but `Pipeline.step` sees it.

    Attributes:
        raised: that.
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(str(raised))
        self.raised = raised


@contextmanager
def computing() -> Iterator[None]:
    """Run code of a stage inside of a block that explains communication."""
    try:
        yield
    except Exception as error:
        raise StageError(error) from error
