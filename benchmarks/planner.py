"""The planner against rules of thumb, against its bounds, and against the clock.

    python benchmarks/planner.py [folder for planner.json and planner.md]

Overheads are of plans and layouts that `simulate` has played. Seconds are the least of several
runs, of this process's processor time, so that other processes disturb less; each row of the
second table runs in a process of its own, for its memory. "rotor" is the optimum of the persistent
family on exact bytes (`keeps=False`), which the oracle confirms. A peer's own rotor is measured
where Rockmate is importable (pip install rockmate, in an environment of its own).
"""

import dataclasses
import json
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from planner_chains import REAL, budget_at, draw_chain, load
from planner_peers import rockmate_rotor

from xmem.errors import InfeasibleBudgetError
from xmem.planner import Chain, Option, Stage, heuristic, least_budget_bytes, simulate, solve

FRACTIONS = (0.1, 0.3, 0.5, 0.7)
RULES = ("uniform", "sqrt", "interval", "every")


def blocks(count):
    """Return GPT-2's chain with another number of blocks, all equal."""
    gpt = load("gpt2s_B2_T256")
    a = gpt.value_bytes
    stages = (gpt.stages[0], *[gpt.stages[1]] * count, gpt.stages[-1])
    return Chain(f"gpt{count}", stages, (a[0], *[a[1]] * (count + 1), a[-1]))


def drawn(n, options=1, seed=0):
    return draw_chain(random.Random(seed), n, options, scale=2**20)


def walk(n, seed=0):
    """Return a chain whose sizes wander over powers of two: harder, since bytes are few."""
    rand, size, sizes, stages = random.Random(seed), 2**24, [2**24], []
    for i in range(n):
        size = min(max(int(size * 2.0 ** rand.choice([-1, 0, 0, 0, 0, 1])), 2**20), 2**26)
        f = rand.uniform(2, 40) * 1e-3
        inner = int(size * rand.uniform(0.5, 8))
        tb = sizes[-1] + int(inner * rand.uniform(0, 0.5))
        extra, temporary = (int(size * rand.uniform(0, most)) for most in (1, 2))
        option = Option("keep all", f, f * rand.uniform(1.7, 2.4), size + inner, extra, tb)
        stages.append(Stage(str(i), f, temporary, (option,)))
        sizes.append(size)
    return Chain(f"walk{n}", tuple(stages), tuple(sizes))


# ---------------------------------------------------------------- overheads
def rule_overhead(chain, rule, budget):
    """Return a rule's overhead, or None where it does not fit the budget."""
    try:
        ops = heuristic(chain, rule, budget_bytes=budget)
    except InfeasibleBudgetError:
        return None
    seconds, peak = simulate(chain, ops)
    return seconds / chain.store_all_seconds - 1 if peak <= budget else None


def overheads(chain, fraction):
    budget = budget_at(chain, fraction, least_budget_bytes(chain))
    plan = solve(chain, budget)
    whole = chain.store_all_seconds
    return {
        "chain": chain.name,
        "stages": len(chain.stages),
        "fraction": fraction,
        "budget_bytes": budget,
        "plan": plan.overhead,
        "bound": plan.bound_seconds / whole - 1,
        "gap": plan.gap,
        "rotor": solve(chain, budget, gap=0, keeps=False).overhead,
        **{rule: rule_overhead(chain, rule, budget) for rule in RULES},
    }


# ---------------------------------------------------------------- seconds
def cases():
    """Return rows of (what, how to make the chain, fraction, kernel, target s, target MiB)."""
    rows = []
    for name in ("bert24_B4_T128", "rand_n24"):
        rows += [(f"{name}, Python", (load, name), f, None, 0.05, None) for f in FRACTIONS]
    for seed in range(4):
        one, three = (drawn, 24, 1, seed), (drawn, 24, 3, seed)
        rows.append((f"24 drawn ({seed}), Python", one, 0.1, None, 0.05, None))
        rows.append((f"24 drawn ({seed}), 3 options, Python", three, 0.1, None, 0.1, None))
    for n, most in ((50, 0.01), (100, 0.15), (200, 0.25)):
        rows += [(f"rand_n{n}", (load, f"rand_n{n}"), f, "native", most, None) for f in FRACTIONS]
    for make, seed in ((drawn, 0), (walk, 0), (walk, 1)):
        what = f"400 {make.__name__} ({seed})"
        how = (drawn, 400, 1, seed) if make is drawn else (walk, 400, seed)
        rows += [(what, how, f, "native", 2, 150) for f in FRACTIONS]
        rows.append((what, how, 0.02, "native", 15, 300))
    for f in FRACTIONS:
        rows.append(("96 equal blocks", (blocks, 96), f, "native", 0.015, None))
        rows.append(("96 equal blocks, Python", (blocks, 96), f, None, 0.35, None))
        rows.append(("200 drawn, 3 options", (drawn, 200, 3), f, "native", 1, None))
    rows.append(("400 equal blocks", (blocks, 400), 0.3, "native", 2, 150))
    return rows


def resident(field):
    """Return VmRSS or VmHWM in MiB; ru_maxrss would be the parent's as well."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def clocked(function, seconds=2.0, runs=15):
    """Return the least processor seconds of several runs, at most `seconds` in all but one."""
    least, total = math.inf, 0.0
    for _ in range(runs):
        start = time.process_time()
        result = function()
        took = time.process_time() - start
        least, total = min(least, took), total + took
        if total > seconds:
            break
    return least, result


def timed(number):
    what, (make, *how), fraction, kernel, most_seconds, most_mib = cases()[number]
    chain = make(*how)
    budget = budget_at(chain, fraction, least_budget_bytes(chain, kernel="native"))
    before = resident("VmRSS")
    seconds, plan = clocked(lambda: solve(chain, budget, kernel=kernel))
    grown = resident("VmHWM") - before
    peer = rockmate_rotor(chain, budget) if kernel else None
    return {
        "what": what,
        "stages": len(chain.stages),
        "fraction": fraction,
        "seconds": seconds,
        "target_seconds": most_seconds,
        "grown_mib": grown,
        "process_mib": before + grown,
        "target_mib": most_mib,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "peer_seconds": peer and peer[0],
        "peer_overhead": peer and peer[1] and peer[1] / chain.store_all_seconds - 1,
    }


# ---------------------------------------------------------------- tables
def percent(value):
    return "–" if value is None else f"{100 * value:.2f}"


def overhead_table(rows):
    names = ("plan", "bound", "rotor", *RULES)
    lines = [
        "Overhead of recomputation, % of a step that stores all; –: does not fit the budget.",
        "",
        "| chain | stages | fraction | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for row in rows:
        values = " | ".join(percent(row[name]) for name in names)
        lines.append(f"| {row['chain']} | {row['stages']} | {row['fraction']} | {values} |")
    return "\n".join(lines)


def speed_table(rows):
    lines = [
        "Processor time of `solve` at the default gap, the least of several runs; MiB by which the"
        " process has grown meanwhile.",
        "",
        "| what | fraction | ms | target ms | MiB | target MiB | overhead % | gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['fraction']} | {1e3 * row['seconds']:.1f}"
            f" | {1e3 * row['target_seconds']:.0f} | {row['grown_mib']:.0f}"
            f" | {row['target_mib'] or '–'} | {percent(row['overhead'])} | {row['gap']:.0e} |"
        )
    return "\n".join(lines)


def peer_table(rows):
    rows = [row for row in rows if row["peer_seconds"] is not None]
    if not rows:
        return "Rockmate's rotor: not importable here."
    lines = [
        "Rockmate's rotor in C (2.0.0, 500 slots), the same chain and budget.",
        "",
        "| what | fraction | rotor ms | ours ms | ratio | rotor overhead % | ours % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['what']} | {row['fraction']} | {1e3 * row['peer_seconds']:.1f}"
            f" | {1e3 * row['seconds']:.1f} | {row['peer_seconds'] / row['seconds']:.1f}"
            f" | {percent(row['peer_overhead'])} | {percent(row['overhead'])} |"
        )
    return "\n".join(lines)


def main(folder=None):
    names = (*REAL, "rand_n24", "rand_n50", "rand_n100", "rand_n200")
    # Rotor and the bound know no skips, so the U-Net is compared as if it had none.
    chains = [dataclasses.replace(load(name), skips=()) for name in names]
    chains.append(blocks(96))
    quality = [overheads(chain, fraction) for chain in chains for fraction in FRACTIONS]
    speed = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for number in range(len(cases())):
            row = pool.apply(timed, (number,))
            speed.append(row)
            print(row["what"], row["fraction"], row["seconds"], file=sys.stderr, flush=True)
    missed = [
        row
        for row in speed
        if row["seconds"] > row["target_seconds"]
        or (row["target_mib"] and row["grown_mib"] > row["target_mib"])
    ]
    verdict = f"{len(speed) - len(missed)} of {len(speed)} rows within their targets."
    text = "\n\n".join((overhead_table(quality), speed_table(speed), verdict, peer_table(speed)))
    print(text)
    if folder:
        record = {"overheads": quality, "speed": speed}
        (Path(folder) / "planner.json").write_text(json.dumps(record, indent=1) + "\n")
        (Path(folder) / "planner.md").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
