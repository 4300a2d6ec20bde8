"""All-reduce: many small tensors in buckets, and what compression sends, errs and costs.

    python benchmarks/all_reduce.py [FOLDER] [PART ...] [BACKEND ...]

FOLDER is for all_reduce.json and all_reduce.md. PART: many, large, trained; all where none is
named. What is not run keeps the figures that the folder's all_reduce.json has, and the page says
of each row when it was measured.

On 2 and 4 ranks of this host, over loopback (PyTorch: gloo; Jittor: MPI), one thread each.

1,000 float32 tensors of 256 elements, as biases and norms have them: `xmem.distributed.all_reduce`
of the list (buckets of 1 MiB), against the same call for each tensor, and against the framework's
own call for each (`torch.distributed.all_reduce`; `Var.mpi_all_reduce`, synced). The least time of
some turns counts, since ranks wait for each other and other load only adds. Extra memory is what
the call takes at its peak, in place, to the byte.

4 million float32 elements, normally distributed and independent on the ranks: bytes sent, relative
error of the sum (norm of the difference to the norm of the sum), time. Then 300 steps of the small
GPT on characters (`gpt2-text`), half of each batch on either rank: the mean loss of the last 20.
"""

import json
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import on_ranks

BACKENDS = ("torch", "jittor")
WORLDS = (2, 4)
SMALL, ELEMENTS, BUCKET = 1000, 256, 1 << 20
LARGE = 4_000_000
TURNS = {"buckets": 15, "one by one": 3, "framework": 15}
STEPS, LAST = 300, 20
COMPRESS = (None, "bf16", "fp16", "int8")
TRAINED = ((None, False), ("bf16", False), ("int8", False), ("int8", True))


def timed(call, rounds):
    """Return the least seconds of a call that all ranks begin together."""
    import xmem.distributed as xd

    seconds = []
    for _ in range(rounds):
        xd.barrier()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def own_call(name):
    """Return the framework's own all-reduce of one tensor."""
    if name == "torch":
        import torch.distributed as dist

        return dist.all_reduce
    return lambda tensor: tensor.mpi_all_reduce("add").sync()


def of_many(backend, here):
    """Measure many small tensors."""
    import xmem
    import xmem.distributed as xd

    random = np.random.default_rng(here.rank)
    tensors = [
        backend.models.tensor(random.normal(size=ELEMENTS).astype("float32"))
        for _ in range(SMALL)
    ]  # fmt: skip
    synchronize = backend.measure.synchronize
    synchronize()
    reduce = own_call(backend.name)

    def in_buckets(**options):
        xd.all_reduce(tensors, bucket=BUCKET, **options)
        synchronize()

    def one_by_one():
        for tensor in tensors:
            xd.all_reduce(tensor)
        synchronize()

    def by_framework():
        for tensor in tensors:
            reduce(tensor)
        synchronize()

    ways = {"buckets": in_buckets, "one by one": one_by_one, "framework": by_framework}
    for way in (in_buckets, by_framework):
        way()
    found = {"seconds": {name: timed(way, TURNS[name]) for name, way in ways.items()}}
    in_buckets(in_place=True)
    with xmem.measure() as measured:
        in_buckets(in_place=True)
    return {**found, "extra_bytes": measured.peak_above_static_bytes}


def of_large(backend, here):
    """Measure compression of a large tensor."""
    import xmem.distributed as xd

    every = [
        np.random.default_rng(rank).normal(size=LARGE).astype("float32")
        for rank in range(here.size)
    ]
    wanted = np.sum(every, axis=0, dtype="float64")
    tensor = backend.models.tensor(every[here.rank])
    found = {}
    for compress in COMPRESS:
        xd.traffic(reset=True)
        result = xd.all_reduce(tensor, compress=compress)
        counted = xd.traffic()
        error = result.numpy() - wanted
        found[compress or "float32"] = {
            "sent_bytes": sum(counted.sent_bytes.values()),
            "error": float(np.linalg.norm(error) / np.linalg.norm(wanted)),
            "seconds": timed(lambda how=compress: xd.all_reduce(tensor, compress=how), 5),
        }
        del result
    return {"as": found}


def trained(backend, here):
    """Return the loss after training with gradients that travel in several ways."""
    import xmem
    import xmem.distributed as xd
    from xmem.workloads import make_batch, make_weights, workload

    declared = workload("gpt2-text", "quick")
    found = {}
    for compress, feedback in TRAINED:
        model = backend.models.build(declared.model, make_weights(declared))
        optimizer = xmem.optim.AdamW(list(model.parameters()), 1e-3)
        parallel = xd.data_parallel(model, optimizer, compress=compress, error_feedback=feedback)
        losses = []
        for step in range(STEPS):
            x, y = (
                np.array_split(part, here.size)[here.rank] for part in make_batch(declared, step)
            )
            output = parallel(backend.models.tensor(x))
            loss = backend.models.loss(declared.loss, output, backend.models.tensor(y))
            xmem.backward(loss, optimizer)
            xmem.optimizer_step(optimizer)
            xmem.zero_grad(optimizer)
            losses.append(float(xd.all_reduce(loss, "mean").item()))
        way = f"{compress or 'float32'}{' with error feedback' if feedback else ''}"
        found[way] = statistics.mean(losses[-LAST:])
    return {"losses": found}


def table(columns, rows):
    """Return a table's lines."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def many_lines(found):
    """Return the table of many small tensors."""
    columns = (
        "backend", "ranks", "in buckets", "one by one", "the framework's call, one by one",
        "times faster than one by one", "times faster than the framework's",
        "extra bytes, in place", "measured",
    )  # fmt: skip
    rows = []
    for run in found:
        buckets, single, own = (run["seconds"][name] for name in TURNS)
        rows.append((
            run["backend"], run["ranks"], f"{buckets * 1e3:.1f} ms", f"{single * 1e3:.0f} ms",
            f"{own * 1e3:.1f} ms", f"{single / buckets:.1f}", f"{own / buckets:.1f}",
            f"{run['extra_bytes']:,}", run["measured"],
        ))  # fmt: skip
    bytes_in_all = f"{SMALL * ELEMENTS * 4:,} bytes in all, buckets of {BUCKET:,} bytes"
    head = f"{SMALL:,} float32 tensors of {ELEMENTS} elements, {bytes_in_all}."
    why = (
        "xmem compares what the ranks ask for before each call; the framework's own does not."
        " Ranks of one host meet in shared memory or over loopback, where a call costs least, so"
        " that buckets save least there."
    )
    return [head, why, "", *table(columns, rows)]


def large_lines(found):
    """Return the table of compression."""
    columns = (
        "backend", "ranks", "travels as", "bytes sent by a rank", "to float32's", "error", "time",
        "measured",
    )  # fmt: skip
    rows = [
        (
            run["backend"], run["ranks"], compress, f"{row['sent_bytes']:,}",
            f"{row['sent_bytes'] / run['as']['float32']['sent_bytes']:.4f}",
            f"{100 * row['error']:.4f} %", f"{row['seconds'] * 1e3:.0f} ms", run["measured"],
        )
        for run in found
        for compress, row in run["as"].items()
    ]  # fmt: skip
    return [f"{LARGE:,} float32 elements, {4 * LARGE:,} bytes.", "", *table(columns, rows)]


def trained_lines(found):
    """Return the table of losses."""
    columns = ("backend", "gradients travel as", "loss", "to float32's", "measured")
    rows = [
        (
            run["backend"], way, f"{loss:.4f}",
            f"{100 * (loss / run['losses']['float32'] - 1):+.2f} %", run["measured"],
        )
        for run in found
        for way, loss in run["losses"].items()
    ]  # fmt: skip
    return [f"Loss after {STEPS} steps of `gpt2-text` on 2 ranks.", "", *table(columns, rows)]


def bars(raw):
    """Return what was to be reached, what was, and whether it is."""
    rows = []
    for run in raw["many"]:
        name = f"{run['backend']}, {run['ranks']} ranks"
        extra = run["extra_bytes"]
        for way, than in (("one by one", "one by one"), ("framework", "the framework's call")):
            times = run["seconds"][way] / run["seconds"]["buckets"]
            what = f"{name}: buckets, times faster than {than}"
            rows.append((what, f"{times:.1f}", "at least 3", times >= 3))
        rows.append((f"{name}: extra bytes", extra, f"at most {BUCKET}", extra <= BUCKET))
    for run in raw["large"]:
        name = f"{run['backend']}, {run['ranks']} ranks: int8"
        share = run["as"]["int8"]["sent_bytes"] / run["as"]["float32"]["sent_bytes"]
        error = run["as"]["int8"]["error"]
        rows.append((f"{name}, bytes to float32's", f"{share:.4f}", "at most 0.27", share <= 0.27))
        rows.append((f"{name}, error", f"{100 * error:.2f} %", "at most 1 %", error <= 0.01))
    for run in raw["trained"]:
        apart = abs(run["losses"]["int8 with error feedback"] / run["losses"]["float32"] - 1)
        name = f"{run['backend']}: int8 with error feedback, loss apart from float32's"
        rows.append((name, f"{100 * apart:.2f} %", "at most 1 %", apart <= 0.01))
    return table(
        ("bar", "measured", "wanted", ""),
        [(*row, "holds" if holds else "MISSED") for *row, holds in rows],
    )


PARTS = {
    "many": (of_many, WORLDS, many_lines),
    "large": (of_large, WORLDS, large_lines),
    "trained": (trained, (2,), trained_lines),
}


def on_rank(name, folder, part):
    """Measure a part on this rank."""
    import xmem
    import xmem.distributed as xd

    backend = xmem.use(name, device="cpu")
    if name == "torch":
        import torch

        torch.set_num_threads(1)
    here = xd.init(timeout=300)
    on_ranks.leave(folder, here, PARTS[part][0](backend, here))


def kept(path):
    """Return the runs of each part that a file has."""
    found = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return {part: found.get(part, []) for part in PARTS}


def put(runs, run):
    """Put a run in the place of an older one of the same backend and ranks, or at the end."""
    names = [(other["backend"], other["ranks"]) for other in runs]
    here = (run["backend"], run["ranks"])
    if here in names:
        runs[names.index(here)] = run
    else:
        runs.append(run)


def main(folder, parts, backends):
    """Measure, print all tables, and write them."""
    raw = kept(folder / "all_reduce.json" if folder else None)
    for backend in backends:
        for part in parts:
            for world in PARTS[part][1]:
                found = on_ranks.start(__file__, backend, world, part, limit_seconds=1800)[0]
                today = datetime.now(timezone.utc).date().isoformat()
                put(raw[part], {"backend": backend, "ranks": world, "measured": today, **found})
    show(raw, folder)


def show(raw, folder):
    """Print the page, and write it."""
    page = [lines(raw[part]) for part, (_, _, lines) in PARTS.items()]
    text = "\n\n".join("\n".join(lines) for lines in [*page, bars(raw)]) + "\n"
    if folder:
        (folder / "all_reduce.json").write_text(json.dumps(raw, indent=1) + "\n")
        (folder / "all_reduce.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_rank(*sys.argv[2:5])
    else:
        given = sys.argv[1:]
        folders = [word for word in given if word not in (*PARTS, *BACKENDS)]
        main(
            Path(folders[0]) if folders else None,
            [word for word in given if word in PARTS] or list(PARTS),
            [word for word in given if word in BACKENDS] or list(BACKENDS),
        )
