"""Random chains, and an exhaustive search over all their schedules, independent of the solver."""

import heapq
import itertools
import json
import math
from pathlib import Path

from hypothesis import strategies as st

from xmem.planner import Chain, Op, Option, Stage, simulate

DATA = Path(__file__).parent / "data" / "planner"
REAL = ("gpt2s_B2_T256", "bert24_B4_T128", "resnet50_B4", "vgg16_B2", "unet3d_b16_S48")


def load(name):
    return Chain.from_dict(json.loads((DATA / "chains" / f"{name}.json").read_text()))


def oracle():
    """Return (chain, what is known of one of its budgets) for each instance."""
    results = json.loads((DATA / "oracle.json").read_text())["results"]
    return [(Chain.from_dict(r["chain"]), b) for r in results for b in r["budgets"]]


@st.composite
def stages(draw, options):
    size = draw(st.integers(0, 20))
    fng = draw(st.integers(0, 30))
    inner = draw(st.integers(0, 60))
    tf, tb, f, b = (draw(st.integers(0, most)) for most in (15, 40, 3, 60))
    rows = [Option("keep all", fng + f, b, size + inner, tf, tb)]
    for k in range(1, options):
        slower, kept = draw(st.integers(0, 9)), inner // 4 if k == 1 else 0
        rows.append(
            Option(f"o{k}", fng + f + slower, b + slower, size + kept, inner + tf, tb + inner)
        )
    return Stage("", fng, draw(st.integers(0, 12)), tuple(rows)), size


@st.composite
def chains(draw, most=7, states=17_000):
    """A chain with so few states that an exhaustive search ends: (2 (options + 1)) ** n.

    Half of them are made of few kinds of stages, so that the solver shares their fronts.
    """
    options = draw(st.sampled_from([1, 1, 1, 2, 3]))
    n = draw(st.integers(1, min(most, int(math.log(states) / math.log(2 * options + 2)))))
    kinds = draw(st.lists(stages(options), min_size=1, max_size=draw(st.sampled_from([2, n]))))
    row = [draw(st.sampled_from(kinds)) for _ in range(n)]
    sizes = (draw(st.integers(0, 20)), *(size for _, size in row))
    return Chain("drawn", tuple(stage for stage, _ in row), sizes)


def draw_chain(random, n, options, *, kinds=None, scale=1):
    """Return a chain from a `random.Random`, with odd bytes and times that are not whole.

    Args:
        kinds: of how many different stages; None: all different.
        scale: of the bytes.
    """

    def stage():
        size = random.randint(1, 32) * scale + random.randint(0, 999) * (scale > 1)
        fng = random.uniform(2, 40) * 1e-3
        inner = int(random.uniform(0.5, 6) * random.randint(1, 32) * scale)
        f = fng * random.choice([1, 1, 1.05])
        b, tf = f * random.uniform(1.7, 2.4), int(size * random.random())
        tb = size + int(inner * random.uniform(0, 0.5))
        slower = inner / scale * random.uniform(1e-5, 2e-4)
        rows = [
            Option("keep all", f, b, size + inner, tf, tb),
            Option("compressed", f + slower, b + slower, size + inner // 4, inner + tf, tb + inner),
            Option("offload", f + 2 * slower, b + 2 * slower, size, inner + tf, tb + inner),
        ]
        return Stage("", fng, int(size * random.uniform(0, 2)), tuple(rows[:options])), size

    made = [stage() for _ in range(kinds or n)]
    row = [random.choice(made) for _ in range(n)] if kinds else made
    sizes = (random.randint(1, 32) * scale, *(size for _, size in row))
    return Chain(f"drawn n={n} options={options}", tuple(s for s, _ in row), sizes)


def store_all_peak(chain):
    ops = [Op("G", i) for i in range(len(chain.stages))]
    backward = [Op("B", i) for i in reversed(range(len(chain.stages)))]
    return simulate(chain, [*ops, Op("L"), *backward])[1]


def budget_at(chain, fraction, least):
    """Return the budget at a fraction of the way from the least to that which stores all."""
    return int(least + fraction * (store_all_peak(chain) - least))


# ---------------------------------------------------------------- all schedules: shortest path
def best_of_all(chain, budget):
    """Return the seconds of the fastest schedule whatever, or None: Dijkstra over all states.

    A state: which a_j stand by themselves (bits), what each stage keeps (-1: nothing), and the
    index of the gradient (n+1 before the loss).
    """
    n = len(chain.stages)
    start = (0, (-1,) * n, n + 1)
    if chain.value_bytes[0] > budget:
        return None
    best, queue, count = {start: 0}, [(0, 0, start)], itertools.count(1)
    done = set()
    while queue:
        seconds, _, state = heapq.heappop(queue)
        if state[2] == 0:
            return seconds
        if state in done:
            continue
        done.add(state)
        for more, after in _steps(chain, budget, state):
            if seconds + more < best.get(after, math.inf):
                best[after] = seconds + more
                heapq.heappush(queue, (seconds + more, next(count), after))
    return None


def _steps(chain, budget, state):
    values, kept, gradient = state
    n, a = len(chain.stages), chain.value_bytes
    held = a[0] + sum(a[j] for j in range(1, n + 1) if values >> j & 1)
    held += sum(chain.stages[i].options[k].kept_bytes for i, k in enumerate(kept) if k >= 0)
    held += a[gradient] if gradient <= n else 0
    free = budget - held

    def there(j):
        return j == 0 or values >> j & 1 or kept[j - 1] >= 0

    for i, stage in enumerate(chain.stages[:gradient]):
        if not there(i) or kept[i] >= 0:
            continue
        if not values >> (i + 1) & 1 and a[i + 1] + stage.temporary_bytes <= free:
            yield stage.forward_seconds, (values | 1 << (i + 1), kept, gradient)
        for k, o in enumerate(stage.options):
            if o.kept_bytes + o.forward_extra_bytes <= free:
                yield o.forward_seconds, (values, (*kept[:i], k, *kept[i + 1 :]), gradient)
    if gradient == n + 1:
        if there(n) and a[n] <= free:
            yield 0, (values, kept, n)
    elif kept[gradient - 1] >= 0 and there(gradient - 1):
        i = gradient - 1
        o = chain.stages[i].options[kept[i]]
        if o.backward_extra_bytes <= free:
            yield o.backward_seconds, (values, (*kept[:i], -1, *kept[i + 1 :]), i)
    for j in range(1, n + 1):
        if values >> j & 1:
            yield 0, (values & ~(1 << j), kept, gradient)
    for i in range(n):
        if kept[i] >= 0:
            yield 0, (values, (*kept[:i], -1, *kept[i + 1 :]), gradient)


# ---------------------------------------------------------------- the family: all of its schedules
def family(chain):
    """Return (peak, seconds) of every schedule of the family, each played by `simulate`."""
    n = len(chain.stages)
    played = (simulate(chain, ops) for ops in _schedules(chain, 0, n, held=False))
    return [(peak, seconds) for seconds, peak in played]


def _schedules(chain, s, t, *, held):
    """Yield the schedules of "gradient from a_{t+1} to a_s"; held: stage t is kept, a_t is not."""
    n = len(chain.stages)
    options = {i: range(len(stage.options)) for i, stage in enumerate(chain.stages)}
    if s == n:
        yield [Op("L")]
    elif s == t:
        yield from [[Op("B", s)]] if held else [[Op("G", s, k), Op("B", s)] for k in options[s]]
    else:
        for k in options[s]:
            for inner in _schedules(chain, s + 1, t, held=held):
                yield [Op("G", s, k), *inner, Op("B", s)]
        for q in range(s + 1, t + 1):
            run = [Op("N", s)]
            for i in range(s + 1, q):
                run += [Op("N", i), Op("Da", i)]
            seconds = list(_schedules(chain, s, q - 1, held=False))
            for first in _schedules(chain, q, t, held=held):
                for second in seconds:
                    yield [*run, *first, Op("Da", q), *second]
            if q < min(t, n):
                for k in options[q]:
                    seconds = list(_schedules(chain, s, q, held=True))
                    for first in _schedules(chain, q + 1, t, held=held):
                        for second in seconds:
                            yield [*run, Op("G", q, k), Op("Da", q), *first, *second]
