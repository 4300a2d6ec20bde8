"""Parameters in shares: gathered block by block, gradients at their owners."""

import numpy as np
import pytest
import ranks
from shared_out import furthest

MPI = {"use_mpi": "1"}  # this process has turned it off for itself
PROGRAM = """
sys.path.insert(0, sys.path[0] + "/on_jittor")
import jittor as jt
from jittor import nn
from ranked import *
from odd_blocks import ODD, Dropped, odd_loss
from xmem_jittor import messages

r, w = here.rank, here.size
adam = lambda p: xmem.api.active().training.make_optimizer("adam", p, learning_rate=1e-3)
found, said = {}, {}

def refused(call):
    try:
        call()
    except xmem.XmemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"

def native(net, optimizer, part_of):
    optimizer.step(loss_of(net, *part_of(0)))

def clipped(net, optimizer, part_of):
    optimizer.backward(loss_of(net, *part_of(0)))
    optimizer.clip_grad_norm(0.1)
    optimizer.step()

scaler = xmem.GradScaler(init_scale=1024.0)
def scaled(net, optimizer, part_of):
    xmem.backward(scaler.scale(loss_of(net, *part_of(0))), optimizer)
    scaler.unscale_(optimizer)
    xmem.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    scaler.update()

def compressed(net, optimizer, part_of):
    with xmem.compress_activations(bits=8, min_bytes=1):
        loss = loss_of(net, *part_of(0))
    xmem.backward(loss, optimizer)
    xmem.optimizer_step(optimizer)

def cast(net, optimizer, part_of):
    with xmem.autocast("float16"):
        loss = loss_of(net, *part_of(0))
    xmem.backward(loss, optimizer)
    xmem.optimizer_step(optimizer)

def run(name, prepare=lambda net: None, make=adam, first=False, **options):
    net = chain(seed=r)  # rank 0's are everybody's
    if first:
        prepare(net)
    xd.shard_model(net)
    optimizer = make(net)
    if not first:
        prepare(net)
    losses = train(net, optimizer, r, w, **options)
    found[name] = listed(values(net))
    found[name]["loss"] = [0.0 if loss is None else float(loss) for loss in losses]
    return net, optimizer

checkpointing = lambda net: xmem.apply_checkpointing(net, "sqrt")
run("plain")
run("accumulated", parts=2)
run("checkpointed", checkpointing)
if w == 2:
    run("checkpointed before", checkpointing, first=True)
    run("native", step=native, make=lambda p: jt.optim.Adam(p.parameters(), 1e-3))
    run("adamw", make=lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, state_bits=32))
    run("clipped", step=clipped)
    run("scaled", step=scaled)
    run("compressed", step=compressed)
    run("cast", step=cast)
    net = xd.shard_model(chain(norm=nn.BatchNorm))
    train(net, adam(net), r, w)
    found["batch norm"] = listed(values(net))
    for name, kind in ODD.items():
        net = xd.shard_model(weights(kind()))
        optimizer = jt.optim.SGD(net.parameters(), 1e-2)
        for x, _ in zip(*batches(steps=4)):
            optimizer.step(odd_loss(net, mine(x, r, w)))
        found[name] = listed(values(net))
    # What a weight of ones is multiplied by in backward is what came out of forward.
    net = nn.Sequential(Dropped(), Dropped())
    net.train()
    xd.shard_model(net, blocks=[net[0], net[1]])
    optimizer = jt.optim.SGD(net.parameters(), 0.0)
    y = net(jt.array(batches(steps=1)[0][0]))
    summed = messages.all_reduce(y.sum(0), "mean")
    optimizer.backward(y.sum())
    own = [g.numpy() for g in optimizer.param_groups[0]["grads"] if g.numel() > 1]
    said["dropout"] = [len(own), max([0.0] + [float(abs(g - summed.numpy()).max()) for g in own])]

    net = chain()
    before = values(net)
    sharded = xd.shard_model(net)
    x, y = (jt.array(v[0]) for v in batches(steps=1))
    plain = chain()
    with jt.no_grad():
        said["evaluated"] = float(np.abs(net(x).numpy() - plain(x).numpy()).max())
    outside = net[0].linear.weight * 1.0
    said["outside"] = [list(outside.shape), bool(np.isnan(outside.numpy()).all())]
    optimizer = adam(net)
    said["again"] = refused(lambda: xd.shard_model(net))
    said["parallel"] = refused(lambda: xd.data_parallel(net, optimizer))
    said["states"] = refused(lambda: xd.shard_optimizer(optimizer))
    said["masters"] = refused(lambda: xmem.cast_model(net, "float16", optimizer=optimizer))
    said["no_sync"] = refused(lambda: xd.no_sync(net).__enter__())
    squares = lambda model, batch: ((model(batch[0]) - batch[1]) ** 2).mean()
    said["planned"] = refused(lambda: xmem.profile(net, (x, y), squares))
    other = chain()
    early = adam(other)
    said["early"] = refused(lambda: xd.shard_model(other))
    said["nested"] = refused(lambda: xd.shard_model(chain(), blocks=[net[0], net[0].linear]))
    del early

def bytes_of(mode, make):
    before = live_bytes()
    net = weights(nn.Sequential(*[Plain(512) for _ in range(8)]))
    if mode == "sharded":
        xd.shard_model(net)
    optimizer = make(net)
    if mode == "parallel":
        xd.data_parallel(net, optimizer)
    static = live_bytes() - before
    for step in range(3):
        x = jt.array(np.ones((64, 512), "float32")).sync()
        start = live_bytes()
        reset_peak()
        xmem.backward(((net(x) - x) ** 2).mean(), optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
        jt.sync_all(True)
        peak = peak_bytes() - start
    return static, static + peak

class Plain(nn.Module):
    def __init__(self, width):
        self.linear = nn.Linear(width, width)
    def execute(self, x):
        return nn.gelu(self.linear(x))

makers = {"adam": adam, "jt.Adam": lambda p: jt.optim.Adam(p.parameters(), 1e-3)}
said["bytes"] = {name: [bytes_of(m, make) for m in ("parallel", "sharded")]
                 for name, make in makers.items()}
report(found=found, said=said)
xd.destroy()
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    folders = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (2, 4)}
    return {
        size: ranks.run("jittor", PROGRAM, folder, ranks=size, environment=MPI, limit=600)
        for size, folder in folders.items()
    }


@pytest.fixture(scope="module")
def alone(backend):
    """Return what one process gets on the whole batch."""
    import jittor as jt
    from jittor import nn
    from odd_blocks import ODD, odd_loss
    from ranked import batches, chain, loss_of, train, values, weights

    import xmem

    def adam(net):
        return backend.training.make_optimizer("adam", net, learning_rate=1e-3)

    def clipped(net, optimizer, part_of):
        xmem.backward(loss_of(net, *part_of(0)), optimizer)
        xmem.clip_grad_norm_(optimizer, 0.1)
        xmem.optimizer_step(optimizer)

    found = {}
    for name, kinds, make, step in (
        ("plain", {}, adam, None),
        ("native", {}, lambda p: jt.optim.Adam(p.parameters(), 1e-3), None),
        ("adamw", {}, lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, state_bits=32), None),
        ("clipped", {}, adam, clipped),
        ("batch norm", {"norm": nn.BatchNorm}, adam, None),
    ):
        net = chain(**kinds)
        losses = train(net, make(net), step=step)
        found[name] = values(net)
        found[f"{name} losses"] = losses
    for name, kind in ODD.items():
        net = weights(kind())
        optimizer = jt.optim.SGD(net.parameters(), 1e-2)
        for x, _ in zip(*batches(steps=4), strict=True):
            optimizer.step(odd_loss(net, jt.array(x)))
        found[name] = values(net)
    return found


def difference(report, name, reference):
    found = {k: np.array(v) for k, v in report["found"][name].items() if k != "loss"}
    return furthest(found, reference)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["plain", "accumulated", "checkpointed"])
def test_ranks_train_as_one_process_on_the_whole_batch(reported, alone, size, name):
    for report in reported[size]:
        assert difference(report, name, alone["plain"]) <= 1e-6
    losses = np.mean([report["found"][name]["loss"] for report in reported[size]], axis=0)
    assert np.abs(losses / alone["plain losses"] - 1).max() <= 1e-6


@pytest.mark.parametrize(
    ("name", "as_in"),
    [
        ("checkpointed before", "plain"),
        ("native", "native"),
        ("adamw", "adamw"),
        ("clipped", "clipped"),
        ("scaled", "clipped"),
        ("batch norm", "batch norm"),
    ],
)
def test_loops_and_optimizers_are_what_they_are_in_one_process(reported, alone, name, as_in):
    for report in reported[2]:
        assert difference(report, name, alone[as_in]) <= 1e-6


@pytest.mark.parametrize("name", ["inputs", "keywords", "outputs", "loose", "tied", "lists"])
def test_blocks_of_any_signature_are_gathered(reported, alone, name):
    for report in reported[2]:
        assert difference(report, name, alone[name]) <= 1e-6


@pytest.mark.parametrize("name", ["compressed", "cast"])
def test_few_bits_inside_change_little(reported, alone, name):
    first, second = (report["found"][name] for report in reported[2])
    assert all(first[k] == second[k] for k in first if k != "loss")
    assert 1e-7 < difference(reported[2][0], name, alone["plain"]) <= 1e-2


def test_dropout_drops_the_same_in_both_passes(reported):
    counts, errors = zip(*(report["said"]["dropout"] for report in reported[2]), strict=True)
    assert counts == (1, 1)
    assert max(errors) <= 1e-4


def test_a_sharded_model_evaluates(reported):
    assert all(report["said"]["evaluated"] <= 1e-6 for report in reported[2])


def test_a_parameter_read_outside_of_its_block_is_nan_or_its_owners(reported):
    placeholders = [report["said"]["outside"] for report in reported[2]]
    assert sorted(placeholders) == [[[1], True], [[32, 32], False]]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("again", "sharded already"),
        ("parallel", "sharded"),
        ("states", "leave shard_optimizer out"),
        ("masters", "masters are not sharded"),
        ("no_sync", "in each backward"),
        ("planned", "gather parameters in another"),
        ("early", "Make the optimizer after"),
        ("nested", "List one of the two"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(reported, what, why):
    for report in reported[2]:
        assert why in report["said"][what]


@pytest.mark.parametrize("kind", ["adam", "jt.Adam"])
def test_half_of_the_bytes_is_on_each_of_two_ranks(reported, kind):
    for report in reported[2]:
        (static, peak), (own_static, own_peak) = report["said"]["bytes"][kind]
        assert own_static <= 0.52 * static, (own_static, static)
        assert own_peak <= 0.5 * peak, (own_peak, peak)


def test_a_quarter_of_the_static_bytes_is_on_each_of_four(reported):
    for report in reported[4]:
        (static, peak), (own_static, own_peak) = report["said"]["bytes"]["adam"]
        assert own_static <= 0.26 * static, (own_static, static)
        assert own_peak <= 0.35 * peak, (own_peak, peak)
