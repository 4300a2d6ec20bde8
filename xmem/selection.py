"""What a person names when saved tensors are to be treated: layers and tensors to skip."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

from xmem.errors import UsageError, XmemWarning, unknown
from xmem.layouts import modules_of

if TYPE_CHECKING:
    from xmem.backend import Backend
    from xmem.saving import Candidate


class Selection:
    """Says which saved tensors are skipped, and knows which layers were met.

    Args:
        backend: knows the modules of a model.
        skip: tensors, and layers with all inside: paths, modules, classes.
        model: where paths begin; None: not known.

    Attributes:
        model: see above.

    Raises:
        UsageError: `skip` is no sequence.
    """

    def __init__(self, backend: Backend, skip: Sequence[Any], model: Any) -> None:
        if isinstance(skip, (str, type)) or not isinstance(skip, (Sequence, Set)):
            raise UsageError(f"skip is {_shown(skip)}: give a sequence, e.g. ('head',)")
        self.model = model
        self._backend = backend
        self._skip = tuple(skip)
        self._inside = [self._modules_inside(item) for item in self._skip]
        self._met: set[str] = set()
        self._skipping: set[int] = set()

    def skips(self, candidate: Candidate) -> bool:
        """Say whether a tensor is skipped, and note by which items, and its layer."""
        self._met.add(candidate.layer)
        found = [n for n, item in enumerate(self._skip) if self._holds(n, item, candidate)]
        self._skipping.update(found)
        return bool(found)

    def check_names(self, others: Iterable[tuple[str, str]] = ()) -> None:
        """Refuse paths that lead nowhere in the model, where it is known.

        Args:
            others: paths beside those in `skip`, with the argument that they were given in.

        Raises:
            UsageError: names the path and the nearest one.
        """
        named = [*others, *(("skip", item) for item in self._skip if isinstance(item, str))]
        capability = self._backend.checkpoint
        if not named or not capability.is_module(self.model):
            return
        paths = {"", *(path for path, _ in modules_of(capability, self.model))}
        for argument, path in named:
            if path not in paths:
                raise UsageError(unknown(f"layer in {argument}", path, paths - {""}))

    def warn_of_missed(self, technique: str, others: Iterable[str] = ()) -> None:
        """Warn of layers that were named, and of which nothing is saved for backward.

        Args:
            technique: what they were named for.
            others: paths beside those in `skip`.
        """
        if not self._met:
            return
        missed: list[Any] = [path for path in others if path not in self._met]
        missed += [item for n, item in enumerate(self._skip) if n not in self._skipping]
        if missed:
            valid = unknown("layer", missed[0], self._met).partition("Valid: ")[2]
            warnings.warn(
                f"{technique}: of {', '.join(map(_shown, missed))} nothing was saved for"
                " backward, so to name it changes nothing. What several layers save"
                " is the first one's, and bits are a layer's own, not of those inside. Layers that"
                f" something was saved of: {valid}",
                XmemWarning,
                stacklevel=4,
            )

    def _holds(self, number: int, item: Any, candidate: Candidate) -> bool:
        """Say whether an item of `skip` is or holds what a candidate belongs to."""
        if item is candidate.tensor or id(candidate.module) in self._inside[number]:
            return True
        if isinstance(item, type):
            return isinstance(candidate.module, item)
        path = candidate.layer
        return isinstance(item, str) and (path == item or path.startswith(f"{item}."))

    def _modules_inside(self, item: Any) -> set[int]:
        """Return the ids of a module and of all inside it; of those of a class in the model."""
        capability = self._backend.checkpoint
        roots = [item] if capability.is_module(item) else []
        if isinstance(item, type) and capability.is_module(self.model):
            everything = (m for _, m in modules_of(capability, self.model))
            roots = [m for m in everything if isinstance(m, item)]
        return {
            id(m) for root in roots for m in (root, *(m for _, m in modules_of(capability, root)))
        }


def _shown(item: Any) -> str:
    if isinstance(item, type):
        return item.__name__
    return repr(item) if isinstance(item, (str, int)) else f"a {type(item).__name__}"
