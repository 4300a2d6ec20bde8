"""Data parallelism on ranks: gradients averaged once, whatever asks for them."""

import numpy as np
import pytest
import ranks
from shared_out import furthest

import xmem

MPI = {"use_mpi": "1"}  # this process has turned it off for itself
PROGRAM = """
sys.path.insert(0, sys.path[0] + "/on_jittor")
import time
import jittor as jt
from jittor import nn
from ranked import *

COSTS = [("alone", 1 << 18, None), ("two", 600_000, None), ("all", 1 << 25, None),
         ("bf16", 600_000, "bf16"), ("int8", 600_000, "int8")]
r, w = here.rank, here.size
adam = lambda net: xmem.api.active().training.make_optimizer("adam", net, learning_rate=1e-3)
found, said = {}, {}

def made(**options):
    net = chain(seed=r)  # rank 0's are everybody's
    optimizer = adam(net)
    assert xd.data_parallel(net, optimizer, **options) is net
    return net, optimizer

def refused(call):
    try:
        call()
    except xmem.XmemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"
"""

LOOPS = """
def native_step(net, optimizer, part_of):
    optimizer.step(loss_of(net, *part_of(0)))

def native_backward(net, optimizer, part_of):
    optimizer.zero_grad()
    optimizer.backward(loss_of(net, *part_of(0)))
    optimizer.step()

def apart(net, optimizer, part_of):
    with xd.no_sync(net):
        optimizer.backward(loss_of(net, *part_of(0)) / 2)
    optimizer.backward(loss_of(net, *part_of(1)) / 2)
    optimizer.step()

def clipped(net, optimizer, part_of):
    xmem.backward(loss_of(net, *part_of(0)), optimizer)
    xmem.clip_grad_norm_(optimizer, 0.1)
    xmem.optimizer_step(optimizer)
    xmem.zero_grad(optimizer)

scaler = xmem.GradScaler(init_scale=1024.0)
def scaled(net, optimizer, part_of):
    xmem.backward(scaler.scale(loss_of(net, *part_of(0))), optimizer)
    scaler.unscale_(optimizer)
    xmem.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    scaler.update()

def checkpointed(net):
    xmem.apply_checkpointing(net, "sqrt")

def compressed(net, optimizer, part_of):
    with xmem.compress_activations(bits=8, min_bytes=1):
        loss = loss_of(net, *part_of(0))
    xmem.backward(loss, optimizer)
    xmem.optimizer_step(optimizer)

def traced(name, parts=1, prepare=lambda net: None, model=False, **options):
    step = options.pop("step", None)
    net, optimizer = made(**options)
    prepare(net)
    xd.traffic(reset=True)
    kept = net if model else None
    losses = train(net, optimizer, r, w, parts=parts, step=step, model=kept)
    found[name], said[name + " calls"] = listed(values(net)), xd.traffic().calls
    found[name]["loss"] = [0.0 if loss is None else float(loss) for loss in losses]

traced("plain")
traced("buckets", bucket="4KiB")
traced("accumulated", parts=2, model=True)
traced("accumulated without model=", parts=2)
traced("checkpointed", prepare=checkpointed)
if w == 2:
    traced("native step", step=native_step)
    traced("native backward", step=native_backward)
    traced("no_sync", parts=2, step=apart)
    traced("clipped", step=clipped)
    traced("scaled", step=scaled)
    traced("compressed", step=compressed)
"""

REST = """
if w == 2:
    for kind in ("bf16", "fp16", "int8"):
        traced(kind, compress=kind)
    net = chain(norm=nn.BatchNorm)
    optimizer = adam(net)
    xd.data_parallel(net, optimizer)
    train(net, optimizer, r, w)
    found["batch norm"] = listed(values(net))
    net, optimizer = made()
    receipt = xmem.cast_model(net, "float16", optimizer=optimizer)
    losses = train(net, optimizer, r, w)
    receipt.undo()
    found["masters"] = listed(values(net))
    train(net, optimizer, r, w, steps=1)  # what casting has taken off did not take ours with it
    found["after masters"] = listed(values(net))

    net, optimizer = made()
    x, y = batches(steps=1)
    with xd.no_sync(net):
        xmem.backward(loss_of(net, mine(x[0], r, w), mine(y[0], r, w)), optimizer)
        own = loss_of(net, mine(x[0], r, w), mine(y[0], r, w))
        said["own"] = refused(lambda: optimizer.step(own))
    said["pending"] = [refused(lambda: xmem.optimizer_step(optimizer)),
                       refused(lambda: xmem.clip_grad_norm_(optimizer, 1.0)),
                       refused(lambda: optimizer.step())]
    said["twice"] = refused(lambda: xd.data_parallel(net, optimizer))
    said["not parallel"] = refused(lambda: xd.no_sync(chain()).__enter__())
    other = chain()
    early = adam(other)
    said["masters first"] = refused(lambda: xmem.cast_model(other, "float16", optimizer=early))
    # One rank overflows, all skip the step.
    net, optimizer = made()
    scaler = xmem.GradScaler(init_scale=1024.0)
    before = values(net)
    bad = loss_of(net, mine(x[0], r, w), mine(y[0], r, w)) * (float("inf") if r else 1.0)
    xmem.backward(scaler.scale(bad), optimizer)
    scaler.step(optimizer)
    scaler.update()
    said["skipped"] = [furthest(values(net), before), scaler.get_scale()]
    # An optimizer that is not ours is averaged by Jittor, as ever, and methods are put back.
    net = chain()
    plain = adam(net)
    plain.backward(loss_of(net, mine(x[0], r, w), mine(y[0], r, w)))
    said["plain"] = plain.param_groups[0]["grads"][0].numpy().ravel().tolist()
    del net, optimizer, other, early, plain, scaler, before, bad, receipt
    gc.collect()
    said["method"] = jt.optim.Optimizer.backward.__module__
    # The gradients take one bucket more, and not themselves again; what is told is true.
    said["costs"] = {}
    for name, bucket, kind in COSTS:
        wide = weights(nn.Sequential(*[Block(256) for _ in range(8)]))
        optimizer = jt.optim.Optimizer(wide.parameters(), 1e-3)
        xd.data_parallel(wide, optimizer, bucket=bucket, compress=kind)
        for _ in range(2):
            x = jt.array(np.ones((4, 256), "float32")).sync()
            start = live_bytes()
            reset_peak()
            xd.traffic(reset=True)
            if r and name == "two":
                time.sleep(0.3)  # the other rank waits
            begun = time.perf_counter()
            xmem.backward(wide(x).mean(), optimizer)
            jt.sync(optimizer.param_groups[0]["grads"])
            seconds = time.perf_counter() - begun
            peak, told = peak_bytes() - start, xd.traffic()
            held = sum(g.nbytes for g in optimizer.param_groups[0]["grads"])
            xmem.zero_grad(optimizer)
        said["costs"][name] = [peak, held, told.buffer_bytes, told.seconds, seconds]
        del wide, optimizer
    # One call's time counts once, whoever looks at the clock.
    large = jt.ones((1 << 20,)).sync()
    xd.all_reduce(large)
    xd.traffic(reset=True)
    begun = time.perf_counter()
    xd.all_reduce(large)
    said["call"] = [xd.traffic().seconds, time.perf_counter() - begun]
    # Halves are rounded to nearest: cut off, they would be off by 2e-3 in the mean.
    line = nn.Linear(512, 4, bias=False)
    optimizer = jt.optim.Optimizer(line.parameters(), 1.0)
    xd.data_parallel(line, optimizer, compress="bf16")
    x = np.random.RandomState(0).rand(1, 512).astype("float32") + 1
    optimizer.backward(line(jt.array(x)).sum())
    off = optimizer.param_groups[0]["grads"][0].numpy()[0] / x[0] - 1
    said["rounding"] = [float(np.abs(off).max()), float(np.abs(off.mean()))]
report(found=found, said=said)
xd.destroy()
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    folders = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (2, 4)}
    return {
        size: ranks.run(
            "jittor", PROGRAM + LOOPS + REST, folder, ranks=size, environment=MPI, limit=600
        )
        for size, folder in folders.items()
    }


@pytest.fixture(scope="module")
def alone(backend):
    """Return what one process gets on the whole batch."""
    from jittor import nn
    from ranked import chain, train, values

    def adam(net):
        return backend.training.make_optimizer("adam", net, learning_rate=1e-3)

    def clipped(net, optimizer, part_of):
        xmem.backward(((net(part_of(0)[0]) - part_of(0)[1]) ** 2).mean(), optimizer)
        xmem.clip_grad_norm_(optimizer, 0.1)
        xmem.optimizer_step(optimizer)

    found = {}
    for name, kinds, step in (
        ("plain", {}, None),
        ("clipped", {}, clipped),
        ("batch norm", {"norm": nn.BatchNorm}, None),
    ):
        net = chain(**kinds)
        losses = train(net, adam(net), step=step)
        found[name] = values(net)
        found[f"{name} losses"] = losses
    return found


EQUAL = ["plain", "buckets", "accumulated", "accumulated without model=", "checkpointed"]
LOOPED = ["native step", "native backward", "no_sync"]


def difference(report, name, reference):
    found = {k: np.array(v) for k, v in report["found"][name].items() if k != "loss"}
    return furthest(found, reference)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_ranks_train_as_one_process_on_the_whole_batch(reported, alone, size, name):
    for report in reported[size]:
        assert difference(report, name, alone["plain"]) <= 1e-6
    losses = np.mean([report["found"][name]["loss"] for report in reported[size]], axis=0)
    assert np.abs(losses / alone["plain losses"] - 1).max() <= 1e-6


@pytest.mark.parametrize("name", LOOPED)
def test_gradients_are_averaged_once_whatever_loop_asks_for_them(reported, alone, name):
    for report in reported[2]:
        assert difference(report, name, alone["plain"]) <= 1e-6


@pytest.mark.parametrize("name", ["clipped", "scaled"])
def test_clipping_and_scaling_see_averages(reported, alone, name):
    for report in reported[2]:
        assert difference(report, name, alone["clipped"]) <= 1e-6


def test_batch_normalisation_sees_the_whole_batch(reported, alone):
    for report in reported[2]:
        assert difference(report, "batch norm", alone["batch norm"]) <= 1e-6


def test_gradients_travel_once_per_update_where_accumulation_is_told_the_model(reported):
    for report in reported[2]:
        assert report["said"]["plain calls"]["all_reduce"] == 10
        assert report["said"]["accumulated calls"]["all_reduce"] == 10
        assert report["said"]["no_sync calls"]["all_reduce"] == 10
        assert report["said"]["accumulated without model= calls"]["all_reduce"] == 20
        assert report["said"]["buckets calls"]["all_reduce"] > 40


@pytest.mark.parametrize(
    ("kind", "limit"), [("bf16", 5e-3), ("fp16", 5e-3), ("int8", 1e-2), ("compressed", 1e-2)]
)
def test_ranks_stay_equal_in_few_bits(reported, alone, kind, limit):
    first, second = (report["found"][kind] for report in reported[2])
    assert all(first[name] == second[name] for name in first if name != "loss")
    assert 1e-7 < difference(reported[2][0], kind, alone["plain"]) <= limit


def test_masters_are_averaged_in_float32(reported, alone):
    first, second = (report["found"] for report in reported[2])
    assert first["masters"] == second["masters"]
    assert first["after masters"] == second["after masters"] != first["masters"]
    assert difference(reported[2][0], "masters", alone["plain"]) <= 1e-2


def test_gradients_of_no_sync_are_not_stepped_by(reported):
    for report in reported[2]:
        assert all("they were added up under no_sync" in said for said in report["said"]["pending"])
        assert "inside no_sync" in report["said"]["own"]


def test_what_would_average_twice_or_nothing_is_refused(reported):
    for report in reported[2]:
        assert "already" in report["said"]["twice"]
        assert "not data-parallel" in report["said"]["not parallel"]
        assert "before cast_model" in report["said"]["masters first"]


def test_all_ranks_skip_a_step_that_one_cannot_take(reported):
    for report in reported[2]:
        assert report["said"]["skipped"] == [0.0, 512.0]


def test_other_optimizers_stay_jittors(reported):
    first, second = (report["said"] for report in reported[2])
    assert first["plain"] == second["plain"]
    assert first["method"] == "jittor.optim"


def test_a_small_bucket_is_all_that_gradients_take_more(reported):
    for report in reported[2]:
        costs = report["said"]["costs"]
        (small, held, *_), (whole, *_) = costs["alone"], costs["all"]
        # Weights go one by one here: the bucket is smaller than two of them.
        assert small <= held + (1 << 18) + (64 << 10), (small, held)
        assert whole <= 2 * held, (whole, held)


def test_what_aggregation_costs_is_told(reported):
    weight, bias, blocks = 4 * 256 * 256, 4 * 256, 8
    two = 2 * (weight + bias) + bias  # what fits into 600 kB, from the end
    padded, parts = 4 * 2 * 258 * 256, 2 * (258 * 256 + 4 * 258)  # for int8, in blocks of 256
    expected = {
        "alone": 0,
        "two": two,
        "all": blocks * (weight + bias),
        "bf16": 2 * two,
        "int8": 2 * padded + 2 * parts,
    }
    for report in reported[2]:
        costs = report["said"]["costs"]
        assert {name: told for name, (_, _, told, *_) in costs.items()} == expected
        for name, (peak, held, told, seconds, whole_seconds) in costs.items():
            # A bucket is what its gradients lie in afterwards, and one gradient waits for it.
            assert peak - held <= max(told - two, 0) + weight + (64 << 10), (name, peak, held)
            assert 0 < seconds <= whole_seconds, name
        assert report["said"]["call"][0] <= report["said"]["call"][1]
    assert reported[2][0]["said"]["costs"]["two"][3] >= 0.2


def test_halves_on_their_way_are_rounded_to_nearest(reported):
    for report in reported[2]:
        largest, mean = report["said"]["rounding"]
        assert largest <= 2**-8
        assert mean <= 5e-4
