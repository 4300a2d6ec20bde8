"""Memory per rank and communication per step on paper; schedules and rings, simulated.

Sources: what ZeRO keeps and sends, Samyam Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", SC 2020 (there in half precision, here in float32; its ZeRO-1
sends 2 P, since gradients go to their owners only); pairs of layers, Mohammad Shoeybi et al.,
"Megatron-LM", 2019; bubbles, Yanping Huang et al., "GPipe", NeurIPS 2019; micro-batches alive,
Deepak Narayanan et al., ICML 2021; rings, Pitch Patarasuk and Xin Yuan, JPDC 2009.
"""

from dataclasses import dataclass

MIB = 2**20
BUCKET = 25 * MIB

FORMULAS = {
    "data_parallel": (
        "(1 + k) P + max(A, P) + t; where gradients are copied into a bucket of b, at most P, which"
        " is there while A still is: (1 + k) P + max(A, P - b) + b + t",
        "2 r P",
    ),
    "zero1": (
        "(1 + k / n) P + max(A, P) + t; with such a bucket (1 + k / n) P + max(A, P - b) + b + t",
        "3 r P: gradients to all (2), parameters from their owners (1); 2 r P where gradients"
        " go to their owners only",
    ),
    "zero3": (
        "(1 + k) P / n + max(A, P / n) + 2 B + t; where blocks are computed again, A is their"
        " inputs, R each",
        "3 r P: parameters for forward and for backward, gradients to their owners; PyTorch"
        " gathers the last block once",
    ),
    "tensor_parallel": (
        "(1 + k) Q + max(A (n + 1) / 2 n, Q) + t, Q = pairs / n + the rest",
        "4 r R for each pair of layers: the output and the gradient of the input, summed up",
    ),
    "pipeline": (
        "(2 + k) P_i + alive_i A_i / m + R + (t - 2 R) / m, alive_i = min(m, n - i), R for the"
        " inputs of the whole batch",
        "R to the next stage, R to the one before",
    ),
}


@dataclass(frozen=True)
class Model:
    """A chain of equal layers, and how a framework trains it.

    Attributes:
        layers: how many.
        layer_bytes: parameters of one.
        activation_bytes: what a layer keeps of a whole batch.
        boundary_bytes: what goes from one layer to the next, of a whole batch (R).
        besides_bytes: what a step takes besides activations and gradients (t).
        copies_gradients: whether a bucket is there beside activations, besides the gradients.
        gradients_to_all: whether ZeRO-1 sums gradients on all ranks, or on their owners only.
        width: of a layer.
        is_lazy: a framework that computes a step late: ZeRO-3 keeps what enters a block and
            computes it again.
    """

    layers: int
    layer_bytes: int
    activation_bytes: float
    boundary_bytes: int
    besides_bytes: float
    copies_gradients: bool
    gradients_to_all: bool
    width: int
    is_lazy: bool

    @property
    def parameter_bytes(self):
        return self.layers * self.layer_bytes


def peak_bytes(model, technique, n):
    """Return a rank's peak; None where the model cannot be divided so."""
    k, whole = 2, model.parameter_bytes
    kept, besides = (model.layers - 1) * model.activation_bytes, model.besides_bytes
    if n == 1:
        return (1 + k) * whole + max(kept, whole) + besides
    if technique in ("data_parallel", "zero1"):
        states = k / n if technique == "zero1" else k
        bucket = min(BUCKET, whole) if model.copies_gradients else 0
        return (1 + states) * whole + max(kept, whole - bucket) + bucket + besides
    if technique == "zero3":
        if model.is_lazy:
            kept = (model.layers - 1) * model.boundary_bytes
        return (1 + k) * whole / n + max(kept, whole / n) + 2 * model.layer_bytes + besides
    if technique == "tensor_parallel":
        if model.width % n:
            return None
        pairs = model.layers // 2 * 2
        part = (pairs / n + model.layers - pairs) * model.layer_bytes
        return (1 + k) * part + max(kept * (n + 1) / (2 * n), part) + besides
    if n > model.layers:
        return None
    micro = 2 * n
    heaviest = -(-model.layers // n)  # the first stage keeps most micro-batches
    stage = heaviest * model.layer_bytes
    alive = min(micro, n)
    kept_here = heaviest * model.activation_bytes * (model.layers - 1) / model.layers
    inputs = model.boundary_bytes
    scratch = (besides - 2 * inputs) / micro
    return (2 + k) * stage + alive / micro * kept_here + inputs + scratch


def sent_bytes(model, technique, n):
    """Return what a rank sends in a step, the rank that sends most; None where it cannot be."""
    if n == 1:
        return 0
    share, whole = (n - 1) / n, model.parameter_bytes
    if technique == "data_parallel":
        return 2 * share * whole
    if technique == "zero1":
        return (3 if model.gradients_to_all else 2) * share * whole
    if technique == "zero3":
        return share * (3 * whole - (0 if model.is_lazy else model.layer_bytes))
    if technique == "tensor_parallel":
        if model.width % n:
            return None
        # The first pair's input is the batch, which wants no gradient.
        return (4 * (model.layers // 2) - 2) * share * model.boundary_bytes
    if n > model.layers:
        return None
    return (2 if n > 2 else 1) * model.boundary_bytes


def ring_all_reduce(n, chunks_of):
    """Pass the parts of a sum around a ring; returns steps and bytes that each rank sends.

    Every rank begins with its own numbers, and must end with the sum of all: that is asserted.
    """
    parts = [[float(rank + 1)] * n for rank in range(n)]
    steps = sent = 0
    for phase in ("reduce", "gather"):
        for step in range(n - 1):
            moving = []
            for rank in range(n):
                part = (rank - step + (phase == "gather")) % n
                moving.append(((rank + 1) % n, part, parts[rank][part]))
            for to, part, value in moving:
                parts[to][part] = value if phase == "gather" else parts[to][part] + value
            steps += 1
            sent += chunks_of / n
    assert all(value == n * (n + 1) / 2 for rank in parts for value in rank)
    return steps, sent


def simulate_pipeline(schedule, n, micro):
    """Run a schedule in ticks, backward twice as long as forward; returns idle share and alive."""
    from xmem.distributed.schedules import most_alive, order

    works = [order(schedule, s, stages=n, micro_batches=micro) for s in range(n)]
    alive = [most_alive(w) for w in works]
    works = [[w for w in stage if w.kind in ("forward", "backward")] for stage in works]
    done, free, at = {}, [0.0] * n, [0] * n
    while any(at[s] < len(works[s]) for s in range(n)):
        moved = False
        for s in range(n):
            while at[s] < len(works[s]):
                work = works[s][at[s]]
                if work.kind == "forward":
                    needs = done.get(("forward", s - 1, work.micro_batch), 0.0 if s == 0 else None)
                elif s == n - 1:
                    needs = done.get(("forward", s, work.micro_batch))
                else:
                    needs = done.get(("backward", s + 1, work.micro_batch))
                if needs is None:
                    break
                free[s] = max(free[s], needs) + (1 if work.kind == "forward" else 2)
                done[(work.kind, s, work.micro_batch)] = free[s]
                at[s] += 1
                moved = True
        assert moved, "the schedule waits in a circle"
    length = max(free)
    return 1 - 3 * micro / length, alive


def schedule_lines():
    """Return the simulated schedules beside their formulas."""
    lines = [
        "| stages | micro-batches | idle, 1f1b | gpipe | (n - 1) / (m + n - 1) | alive, 1f1b |"
        " gpipe | ring: steps | 2 (n - 1) | bytes each rank sends of 1 MiB | 2 (n - 1) / n |",
        "|---:|---:|---:|---:|---:|---|---|---:|---:|---:|---:|",
    ]
    for n in (2, 4, 8, 16, 32, 64):
        for micro in (n, 4 * n):
            idle, alive = simulate_pipeline("1f1b", n, micro)
            idle_gpipe, alive_gpipe = simulate_pipeline("gpipe", n, micro)
            expected = (n - 1) / (micro + n - 1)
            assert abs(idle - expected) < 1e-9, (n, micro, idle, expected)
            assert abs(idle_gpipe - expected) < 1e-9
            steps, sent = ring_all_reduce(n, MIB)
            assert steps == 2 * (n - 1)
            lines.append(
                f"| {n} | {micro} | {idle:.3f} | {idle_gpipe:.3f} | {expected:.3f} |"
                f" {alive[0]} to {alive[-1]} | {alive_gpipe[0]} | {steps} | {2 * (n - 1)} |"
                f" {sent / MIB:.3f} MiB | {2 * (n - 1) / n:.3f} |"
            )
    return [*lines, ""]
