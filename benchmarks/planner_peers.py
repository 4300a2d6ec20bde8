"""Planners of others, where they are importable; none is a dependency of anything.

Rockmate (PyPI `rockmate` 2.0.0; X. Zhao, T. Le Hellard, L. Eyraud-Dubois et al., ICML 2023) has
rotor's dynamic program in C. Its compiled part is all that is needed here.
"""

import importlib
import math
import time
from types import SimpleNamespace

from xmem.errors import InvalidScheduleError
from xmem.planner import Op, simulate

SLOTS = 500
MOST_STAGES = 200  # 400 take about a minute and 800 MiB


def rockmate_rotor(chain, budget_bytes):
    """Return the seconds that Rockmate's rotor needs, and those of its plan, or None without it.

    The plan's seconds are None where it finds none, or where its plan exceeds the budget.
    """
    try:
        solver = importlib.import_module("rockmate.solvers.rk_rotor.csolver")
    except ImportError:
        return None
    n = len(chain.stages)
    if n > MOST_STAGES:
        return None
    unit = budget_bytes / SLOTS
    slotted = _slotted(chain, unit)
    room = SLOTS - slotted.cw[0]
    start = time.process_time()
    table = solver.RkTable(slotted, SLOTS)
    found = table.get_opt(room)
    seconds = time.process_time() - start
    if math.isinf(found) or found < 0:
        return seconds, None
    try:
        played, peak = simulate(chain, _ops(table.build_sequence(room)))
    except InvalidScheduleError:
        return seconds, None
    return seconds, played if peak <= budget_bytes else None


def _slotted(chain, unit):
    """Return the chain as Rockmate holds one: sizes in slots, rounded up, and a loss at its end."""

    def slots(size):
        return math.ceil(size / unit)

    a = chain.value_bytes
    by_option = [list(enumerate(stage.options)) for stage in chain.stages]
    return SimpleNamespace(
        ln=len(chain.stages),
        fw=[[o.forward_seconds for _, o in row] for row in by_option] + [[0.0]],
        bw=[[o.backward_seconds for _, o in row] for row in by_option] + [[0.0]],
        cw=[slots(size) for size in a] + [0],
        cbw=[[], *[[slots(o.kept_bytes) for _, o in row] for row in by_option], [0]],
        fwd_tmp=[[slots(o.forward_extra_bytes) for _, o in row] for row in by_option] + [[0]],
        # It counts a_i in, and the gradients not: they are part of what is extra here.
        bwd_tmp=[
            [slots(max(o.backward_extra_bytes + a[i + 1] - a[i], 0)) for _, o in row]
            for i, row in enumerate(by_option)
        ]
        + [[0]],
        ff_fwd_tmp=[slots(stage.temporary_bytes) for stage in chain.stages] + [0],
        ff_fw=[stage.forward_seconds for stage in chain.stages] + [0.0],
        nb_sol=[len(row) for row in by_option] + [1],
    )


def _ops(sequence):
    """Return Rockmate's sequence as a schedule: values are dropped after their last use."""
    ops = []
    for item in sequence:
        kind = type(item).__name__
        if kind == "SeqLoss":
            ops.append(Op("L"))
        elif kind == "SeqBlockFe":
            ops.append(Op("G", item.index, item.option))
        elif kind == "SeqBlockBwd":
            ops.append(Op("B", item.index))
        else:
            ops.append(Op("N", item.index))
            if kind == "SeqBlockFn" and item.index:
                ops.append(Op("Da", item.index))
    return _dropped(ops)


def _dropped(ops):
    """Drop a value before its stage's backward is followed by one of an earlier stage."""
    alive, out = set(), []
    for op in ops:
        out.append(op)
        if op.code == "N":
            alive.add(op.index + 1)
        elif op.code == "Da":
            alive.discard(op.index)
        elif op.code == "B" and op.index in alive:
            alive.discard(op.index)
            out.append(Op("Da", op.index))
    return out
