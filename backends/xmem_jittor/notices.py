"""What checkpointing on Jittor says to people: refusals and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import jittor as jt

from xmem.errors import CompositionError, XmemWarning
from xmem.kept import Found
from xmem_jittor import native

_EAGER = (
    "jt.flags.lazy_execution is 0, which keeps every tensor that Python sees. Checkpointed regions"
    " run lazily all the same, or they would save nothing; whatever is outside of them is kept. Set"
    " jt.flags.lazy_execution = 1 for training."
)

_eager_told = False
_waited_told = False
_aside_told: set[str] = set()


def warn_input_stays(name: str) -> None:
    """Say that a stage's input is held although the plan drops it."""
    warnings.warn(
        f"the plan keeps {name!r} without its input, and its backward may compare the two (pooling,"
        " a maximum), which an input that was computed again, and rounded otherwise, would"
        " falsify. The input is held; xmem.plan makes no such plans on Jittor.",
        XmemWarning,
        stacklevel=2,
    )


def refuse_twice(name: str) -> NoReturn:
    """Say that a region's gradients come once."""
    raise CompositionError(
        f"gradients were asked for twice through the checkpointed {name!r}. It gives its inputs"
        " back in the first backward; compute the loss again, or call jt.grad once for all targets."
    )


def refuse_twice_differentiated() -> None:
    """Say that second derivatives are not to be had."""
    raise CompositionError(
        "second derivatives were asked for through a checkpointed region. It is differentiated"
        " once and keeps nothing for a second time; take checkpointing off what you differentiate"
        " twice (receipt.undo())."
    )


def refuse_filled_containers(name: str) -> NoReturn:
    """Say that what a region hands out must be returned."""
    raise CompositionError(
        f"{name!r} cannot be recomputed: it changes a list or a dict that it is given. On Jittor"
        " whatever a checkpointed function hands out has to be returned by it."
    )


def told_of(found: Found) -> bool:
    """Say whether a tensor's place needs no telling: its warning has been given."""
    return found.bound and found.place in _aside_told


def tell_of_kept(name: str, found: Found) -> None:
    """Say that a tensor put elsewhere carries no gradient.

    One in a container is refused. One in an attribute or a variable is warned of, once for each:
    models keep their last output there to be looked at.
    """
    if not found.bound:
        raise CompositionError(
            f"the checkpointed {name!r} puts a tensor that it computes into a list or a dict, in"
            f" {found.place}. On Jittor it would carry no gradient there. Let the function return"
            " it and store what the region returns, or store y.detach() if no loss is made of it."
        )
    if found.place not in _aside_told:
        _aside_told.add(found.place)
        warnings.warn(
            f"the checkpointed {name!r} has put a tensor into {found.place}. On Jittor it carries"
            " no gradient; if a loss is to be made of it, let the function return it.",
            XmemWarning,
            stacklevel=3,
        )


def warn_if_eager() -> None:
    """Say, once, that tensors outside of regions are kept."""
    global _eager_told
    if not jt.flags.lazy_execution and not _eager_told:
        _eager_told = True
        warnings.warn(_EAGER, XmemWarning, stacklevel=3)


def warn_cut_short(name: str) -> None:
    """Say that blocks of one segment are recomputed apart."""
    warnings.warn(
        f"a segment was cut short after block {name!r}: the next block of the segment was not"
        " called with what it returned. The result is the same, more is kept than asked for. End a"
        " segment there, or use the layout 'every'.",
        XmemWarning,
        stacklevel=3,
    )


def refuse_out_of_order(name: str, left: Sequence[str]) -> NoReturn:
    """Say that stages are called in order, each once."""
    what = f"stage {left[0]!r} is next" if left else "all stages have been called"
    raise CompositionError(
        f"the planned stage {name!r} is called out of order: {what}. A plan is for a forward pass"
        " that calls each stage once, in the order of the plan."
    )


def refuse_no_tensor(name: str) -> NoReturn:
    """Say that the first stage takes a tensor."""
    raise CompositionError(
        f"the planned stage {name!r} takes no tensor, so that there is nothing to start from. Let"
        " the first stage take the batch."
    )


def refuse_output(name: str, count: int) -> NoReturn:
    """Say that a stage returns one tensor."""
    raise CompositionError(
        f"the planned stage {name!r} returns {count} tensors; a stage of a plan returns one, of"
        " floating-point numbers. Cut the chain at another place."
    )


def refuse_other_readers(name: str, called: int, stages: int) -> NoReturn:
    """Say that the gradient of a stage's output came by another way than the next stage."""
    if called < stages:
        raise CompositionError(
            f"the forward pass left the plan early: {called} of {stages} stages were called, and"
            f" gradients are asked for through the output of {name!r}. Call all stages before"
            " backward, or take the plan off the model."
        )
    raise CompositionError(
        f"the output of the planned stage {name!r} is read by something else than a stage, which"
        " asks for its gradient. On Jittor gradients come to it through stages only. Hand it to a"
        " stage as an argument, as it is; pass y.detach() where no gradient is needed; or let one"
        " stage span both readers."
    )


def refuse_unpacked_twice(name: str) -> NoReturn:
    """Say that the gradients of what was packed come once."""
    raise CompositionError(
        f"gradients were asked for twice through {name!r}, whose activations were packed or"
        " offloaded. They are given back in the first backward; compute the loss again, or call"
        " jt.grad once for all targets."
    )


def refuse_unpacked_twice_differentiated() -> None:
    """Say that second derivatives are not to be had."""
    raise CompositionError(
        "second derivatives were asked for through layers whose activations were packed or"
        " offloaded. They are differentiated once; compute what you differentiate twice outside"
        " of the block of xmem.compress_activations or xmem.offload_activations."
    )


def warn_if_waited_for(outputs: Sequence[Any]) -> None:
    """Say, once, that values were computed before their backward was built."""
    global _waited_told
    if _waited_told or not all(native.saving().xmem_jittor_is_there(v.var_ptr) for v in outputs):
        return
    _waited_told = True
    warnings.warn(
        "a value was waited for before backward (loss.item(), loss.sync(), print(loss)). Jittor"
        " then keeps also what backward would have computed again by the way, so that compressed"
        " activations save less. Ask for gradients first, then look at the loss.",
        XmemWarning,
        stacklevel=3,
    )
