"""Operations that update tensors in the memory they have.

`Var.update` of Jittor 1.3.11 takes over what an operation has computed in memory of its own, so
that a parameter is there twice while it is updated. Here the operation writes where the old value
is, if it is the last one to read it: `native/donating.cc` decides that as it runs, at its place in
the order of execution. A view, a snapshot, a kept graph or a reader that has not run yet goes on
seeing the old value, and the new one gets memory of its own, as in plain Jittor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import jittor as jt

from xmem_jittor import gradients, native

_DONATE = '((void (*)(Var*, Var*))(size_t)data["donate"])(in{0}, out{0});\n'


def update_in_place(
    targets: Sequence[Any], others: Sequence[Any], source: str, data: Mapping[str, float]
) -> None:
    """Ask for an update; the handles stand for the new values from now on.

    What can be trained stays so, and the new values have no history.

    Args:
        targets: they hold their values in `out0->mem_ptr` and so on when the source runs, and are
            changed there.
        others: tensors that are read, `in` with the numbers behind those of the targets.
        source: C++ that is run.
        data: numbers that it reads, addresses of functions too.
    """
    donations = (_DONATE.format(i) for i in range(len(targets)))
    with gradients.updating():
        found = jt.code(
            inputs=[*targets, *others],
            outputs=[jt.wrap_var_addr(target.var_ptr) for target in targets],
            data={**data, "donate": native.address_of(native.donating().xmem_jittor_donate)},
            cpu_src="".join(donations) + source,
        )
        for target, new in zip(targets, found, strict=True):
            target.update(new)


def donated() -> tuple[int, int]:
    """Return how many tensors have been updated in place, and how many had to be copied."""
    counts = (ctypes.c_longlong * 2)()
    native.donating().xmem_jittor_donated(counts)
    return counts[0], counts[1]
