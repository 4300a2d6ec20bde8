"""States of a share of the parameters on each rank."""

import numpy as np
import pytest
import ranks
from shared_out import furthest

import xmem

MPI = {"use_mpi": "1"}  # this process has turned it off for itself
PROGRAM = """
sys.path.insert(0, sys.path[0] + "/on_jittor")
import jittor as jt
from jittor import nn
from ranked import *

r, w = here.rank, here.size
found, said = {}, {}
KINDS = {
    "adam": lambda p: xmem.api.active().training.make_optimizer("adam", p, learning_rate=1e-3),
    "jt.Adam": lambda p: jt.optim.Adam(p.parameters(), 1e-3),
    "jt.AdamW": lambda p: jt.optim.AdamW(p.parameters(), 1e-3, weight_decay=0.1),
    "jt.SGD": lambda p: jt.optim.SGD(p.parameters(), 1e-2, momentum=0.9),
    "adamw": lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, state_bits=32),
    "8 bits": lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, min_elements=1),
}

def refused(call):
    try:
        call()
    except xmem.XmemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"

def made(kind, parallel=True):
    net = chain()
    optimizer = KINDS[kind](net)
    assert xd.shard_optimizer(optimizer) is optimizer
    if parallel:
        xd.data_parallel(net, optimizer)
    return net, optimizer

def whole(kind):
    return train(net := chain(), KINDS[kind](net)), values(net)

def scheduled(net, optimizer, part_of):
    optimizer.lr = 1e-3 if optimizer.n_step < 5 else 1e-4
    optimizer.step(loss_of(net, *part_of(0)))

for kind in KINDS if w == 2 else ["adam"]:
    net, optimizer = made(kind)
    train(net, optimizer, r, w)
    found[kind] = listed(values(net))
for parts in (2,):
    net, optimizer = made("adam")
    train(net, optimizer, r, w, parts=parts, model=net)
    found["accumulated"] = listed(values(net))
net, optimizer = made("adam")
xmem.apply_checkpointing(net, "sqrt")
train(net, optimizer, r, w)
found["checkpointed"] = listed(values(net))
if w == 2:
    net, optimizer = made("jt.Adam")
    train(net, optimizer, r, w, step=scheduled)
    found["scheduled"] = listed(values(net))
    net, optimizer = made("adam", parallel=False)
    train(net, optimizer, r, w)
    found["alone"] = listed(values(net))
    net, optimizer = made("adam")
    optimizer.add_param_group({"params": [jt.ones((64, 64)), jt.ones((64, 64))]})
    said["added"] = [len(optimizer.param_groups[1][n]) for n in ("params", "m")]
    said["twice"] = refused(lambda: xd.shard_optimizer(optimizer))
    said["kind"] = refused(lambda: xd.shard_optimizer(jt.optim.Adan(chain().parameters(), 1e-3)))
    stepped = jt.optim.Adam(net.parameters(), 1e-3)
    stepped.step(loss_of(net, *(jt.array(v[0]) for v in batches(steps=1))))
    said["stepped"] = refused(lambda: xd.shard_optimizer(stepped))
    said["masters"] = refused(lambda: xmem.cast_model(net, "float16", optimizer=optimizer))
    net, optimizer = made("adam")
    state = optimizer.state_dict()
    said["own"] = [len(state["defaults"]["param_groups"][0]["m"]), len(net.parameters())]

def state_bytes(make, shard):
    before = live_bytes()
    net = weights(nn.Sequential(*[Block(256) for _ in range(8)]))
    held = live_bytes() - before
    optimizer = make(net)
    if shard:
        xd.shard_optimizer(optimizer)
        xd.data_parallel(net, optimizer)
    x = jt.array(np.ones((4, 256), "float32"))
    for _ in range(2):
        xmem.backward((net(x) ** 2).mean(), optimizer)
        xmem.optimizer_step(optimizer)
        xmem.zero_grad(optimizer)
    del x
    return live_bytes() - before - held

said["bytes"] = {kind: [state_bytes(KINDS[kind], s) for s in (False, True)]
                 for kind in (("adam", "jt.Adam", "adamw", "8 bits") if w == 2 else ("adam",))}
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
    from ranked import chain, loss_of, train, values

    makers = {
        "adam": lambda p: backend.training.make_optimizer("adam", p, learning_rate=1e-3),
        "jt.Adam": lambda p: jt.optim.Adam(p.parameters(), 1e-3),
        "jt.AdamW": lambda p: jt.optim.AdamW(p.parameters(), 1e-3, weight_decay=0.1),
        "jt.SGD": lambda p: jt.optim.SGD(p.parameters(), 1e-2, momentum=0.9),
        "adamw": lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, state_bits=32),
        "8 bits": lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, min_elements=1),
    }

    def scheduled(net, optimizer, part_of):
        optimizer.lr = 1e-3 if optimizer.n_step < 5 else 1e-4
        optimizer.step(loss_of(net, *part_of(0)))

    found = {}
    for kind, make in makers.items():
        net = chain()
        train(net, make(net))
        found[kind] = values(net)
    net = chain()
    train(net, makers["jt.Adam"](net), step=scheduled)
    found["scheduled"] = values(net)
    return found


def difference(report, name, reference):
    return furthest({k: np.array(v) for k, v in report["found"][name].items()}, reference)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["adam", "accumulated", "checkpointed"])
def test_ranks_train_as_one_process_on_the_whole_batch(reported, alone, size, name):
    for report in reported[size]:
        assert difference(report, name, alone["adam"]) <= 1e-6


@pytest.mark.parametrize("kind", ["jt.Adam", "jt.AdamW", "jt.SGD", "adamw", "scheduled"])
def test_optimizers_of_jittor_and_of_xmem_are_sharded(reported, alone, kind):
    for report in reported[2]:
        assert difference(report, kind, alone[kind]) <= 1e-6


def test_states_in_few_bits_are_sharded(reported, alone):
    first, second = (report["found"]["8 bits"] for report in reported[2])
    assert first == second
    # Rounding is seeded by a parameter's place, which is another among a rank's own.
    assert difference(reported[2][0], "8 bits", alone["8 bits"]) <= 2e-3


def test_gradients_are_averaged_once_without_data_parallel_too(reported, alone):
    for report in reported[2]:
        assert difference(report, "alone", alone["adam"]) <= 1e-6


@pytest.mark.parametrize("kind", ["adam", "jt.Adam", "adamw", "8 bits"])
def test_a_rank_keeps_half_of_the_states(reported, kind):
    for report in reported[2]:
        whole, own = report["said"]["bytes"][kind]
        assert own <= 0.51 * whole, (own, whole)


def test_four_ranks_keep_a_quarter_each(reported):
    for report in reported[4]:
        whole, own = report["said"]["bytes"]["adam"]
        assert own <= 0.26 * whole, (own, whole)


def test_a_state_dict_is_of_the_ranks_own_share(reported):
    counts = [report["said"]["own"] for report in reported[2]]
    assert sum(own for own, _ in counts) == counts[0][1]


def test_parameters_that_are_added_are_shared_out_too(reported):
    for report in reported[2]:
        assert report["said"]["added"] == [2, 1]


def test_what_cannot_be_sharded_is_refused_with_the_reason(reported):
    for report in reported[2]:
        said = report["said"]
        assert "already" in said["twice"]
        assert "Adan" in said["kind"]
        assert "has states already" in said["stepped"]
        assert "masters are not sharded" in said["masters"]
