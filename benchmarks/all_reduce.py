"""All-reduce: many small tensors in buckets, and what compression sends, errs and costs.

    python benchmarks/all_reduce.py [folder for all_reduce.json and all_reduce.md] [backend ...]

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
        found[str(compress)] = {
            "sent_bytes": sum(counted.sent_bytes.values()),
            "error": float(np.linalg.norm(error) / np.linalg.norm(wanted)),
            "seconds": timed(lambda how=compress: xd.all_reduce(tensor, compress=how), 5),
        }
        del result
    return found


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
        found[f"{compress}{' with error feedback' if feedback else ''}"] = statistics.mean(
            losses[-LAST:]
        )
    return found


def on_rank(name, folder, part):
    """Measure a part on this rank."""
    import xmem
    import xmem.distributed as xd

    backend = xmem.use(name, device="cpu")
    if name == "torch":
        import torch

        torch.set_num_threads(1)
    here = xd.init(timeout=300)
    parts = {"many": of_many, "large": of_large, "trained": trained}
    on_ranks.leave(folder, here, parts[part](backend, here))


def many_lines(rows):
    """Return the table of many small tensors."""
    lines = [
        f"{SMALL:,} float32 tensors of {ELEMENTS} elements, {SMALL * ELEMENTS * 4:,} bytes in all,"
        f" buckets of {BUCKET:,} bytes.",
        "",
        "| backend | ranks | in buckets | one by one | the framework's call, one by one | times"
        " faster than one by one | times faster than the framework's | extra bytes, in place |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (backend, world), found in rows.items():
        buckets, single, own = (found["seconds"][name] for name in TURNS)
        lines.append(
            f"| {backend} | {world} | {buckets * 1e3:.1f} ms | {single * 1e3:.0f} ms"
            f" | {own * 1e3:.1f} ms | {single / buckets:.1f} | {own / buckets:.1f}"
            f" | {found['extra_bytes']:,} |"
        )
    return lines


def large_lines(rows):
    """Return the table of compression."""
    lines = [
        f"{LARGE:,} float32 elements, {4 * LARGE:,} bytes.",
        "",
        "| backend | ranks | travels as | bytes sent by a rank | to float32's | error | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for (backend, world), found in rows.items():
        whole = found["None"]["sent_bytes"]
        lines += [
            f"| {backend} | {world} | {'float32' if compress == 'None' else compress}"
            f" | {row['sent_bytes']:,} | {row['sent_bytes'] / whole:.4f}"
            f" | {100 * row['error']:.4f} % | {row['seconds'] * 1e3:.0f} ms |"
            for compress, row in found.items()
        ]
    return lines


def trained_lines(rows):
    """Return the table of losses."""
    lines = [
        f"Loss after {STEPS} steps of `gpt2-text` on 2 ranks.",
        "",
        "| backend | gradients travel as | loss | to float32's |",
        "|---|---|---|---|",
    ]
    for backend, found in rows.items():
        lines += [
            f"| {backend} | {way.replace('None', 'float32')} | {loss:.4f}"
            f" | {100 * (loss / found['None'] - 1):+.2f} % |"
            for way, loss in found.items()
        ]
    return lines


def main(folder, backends):
    """Print and write all tables."""
    many, large, losses = {}, {}, {}
    for backend in backends:
        for world in WORLDS:
            many[backend, world] = on_ranks.start(__file__, backend, world, "many")[0]
            large[backend, world] = on_ranks.start(__file__, backend, world, "large")[0]
            print(many[backend, world], large[backend, world], file=sys.stderr)
        losses[backend] = on_ranks.start(__file__, backend, 2, "trained", limit_seconds=1800)[0]
        print(losses[backend], file=sys.stderr)
    parts = [many_lines(many), large_lines(large), trained_lines(losses)]
    text = "\n\n".join("\n".join(lines) for lines in parts) + "\n"
    print(text)
    if folder:
        raw = {
            "many": [{"backend": b, "ranks": n, **row} for (b, n), row in many.items()],
            "large": [{"backend": b, "ranks": n, **row} for (b, n), row in large.items()],
            "trained": losses,
        }
        (Path(folder) / "all_reduce.json").write_text(json.dumps(raw, indent=1) + "\n")
        (Path(folder) / "all_reduce.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        on_rank(*sys.argv[2:5])
    else:
        given = sys.argv[1:]
        chosen = [word for word in given if word in BACKENDS]
        folders = [word for word in given if word not in BACKENDS]
        main(folders[0] if folders else None, chosen or list(BACKENDS))
