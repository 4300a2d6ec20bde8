"""Sharded states as one process would have them: saved, loaded, across worlds."""

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
NOT_OURS = ("pt", "pth", "bin")
KINDS = {
    "adam": lambda p: xmem.api.active().training.make_optimizer("adam", p, learning_rate=1e-3),
    "jt.Adam": lambda p: jt.optim.Adam(p.parameters(), 1e-3),
    "adamw": lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, min_elements=1, state_bits=8),
}
found, said = {}, {}
folder = os.environ["FOLDER"]

def refused(call):
    try:
        call()
    except xmem.XmemError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"

def made(how, kind):
    net = chain(seed=5, norm=nn.BatchNorm)
    if how == "sharded":
        xd.shard_model(net)
    optimizer = KINDS[kind](net)
    if how == "states":
        xd.shard_optimizer(optimizer)
    if how in ("states", "parallel"):
        xd.data_parallel(net, optimizer)
    return net, optimizer

def steps(net, optimizer):
    return train(net, optimizer, r, w, steps=3)

for kind in KINDS:
    for how in ("parallel", "states", "sharded"):
        path = f"{folder}/{how}-{kind}.pkl"
        if w == 2:
            net, optimizer = made(how, kind)
            steps(net, optimizer)
            xd.save(path, net, optimizer)
        else:
            net, optimizer = made(how, kind)
            xd.load(path, net, optimizer)
        if w == 2 or kind == "adam":
            steps(net, optimizer)
            found[f"{how} {kind}"] = listed(values(net))

if w == 2:
    # From one way of sharing to another.
    net, optimizer = made("sharded", "jt.Adam")
    xd.load(f"{folder}/states-jt.Adam.pkl", net, optimizer)
    steps(net, optimizer)
    found["over"] = listed(values(net))
    # Masters are what is saved, in float32.
    net, optimizer = made("parallel", "adam")
    receipt = xmem.cast_model(net, "float16", optimizer=optimizer)
    steps(net, optimizer)
    state = xd.full_state(net, optimizer)
    receipt.undo()
    mine = values(net)
    if r == 0:
        said["masters"] = furthest({k: v.numpy() for k, v in state["model"].items()}, mine)
    said["others"] = state is None
    layer = xd.shard_linear(nn.Linear(8, 6), dim="out")
    other = xd.shard_linear(nn.Linear(6, 8), dim="in")
    pair = nn.Sequential(layer, nn.GELU(), other)
    state = xd.full_state(pair)
    if r == 0:
        said["parts"] = {k: list(v.shape) for k, v in state["model"].items()}
        changed = {k: v.numpy() + 1.0 for k, v in state["model"].items()}
    xd.load_full_state(pair, None, {"model": changed} if r == 0 else None)
    again = xd.full_state(pair)
    if r == 0:
        said["cut"] = furthest({k: v.numpy() for k, v in again["model"].items()}, changed)
    # A state of something else changes nothing.
    net, optimizer = made("sharded", "adam")
    before = values(net)
    wrong = {"model": {"a": np.zeros(3)}}
    said["other model"] = refused(lambda: xd.load_full_state(net, None, wrong if r == 0 else None))
    small = xd.full_state(chain(blocks=1))
    said["other size"] = refused(lambda: xd.load_full_state(net, None, small))
    said["other kind"] = refused(lambda: xd.load(f"{folder}/sharded-adamw.pkl", net, optimizer))
    junk = f"{folder}/junk.pkl"
    if r == 0:
        with open(junk, "wb") as file:
            file.write(b"hello world")
    said["junk"] = refused(lambda: xd.load(junk, net, optimizer))
    before_saving = sorted(os.listdir(folder))
    said["names"] = [refused(lambda: xd.save(f"{folder}/state.{end}", net)) for end in NOT_OURS]
    said["nothing written"] = sorted(os.listdir(folder)) == before_saving
    said["changed"] = furthest(values(net), before)
report(found=found, said=said)
xd.destroy()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    environment = {**MPI, "FOLDER": str(folder)}
    at = tmp_path_factory.mktemp("two")
    return ranks.run("jittor", PROGRAM, at, ranks=2, environment=environment, limit=600)


@pytest.fixture(scope="module")
def four(folder, two, tmp_path_factory):
    environment = {**MPI, "FOLDER": str(folder)}
    at = tmp_path_factory.mktemp("four")
    return ranks.run("jittor", PROGRAM, at, ranks=4, environment=environment, limit=600)


def difference(report, name, reference):
    return furthest({k: np.array(v) for k, v in report["found"][name].items()}, reference)


@pytest.mark.parametrize("how", ["parallel", "states", "sharded"])
@pytest.mark.parametrize("kind", ["adam", "jt.Adam", "adamw"])
def test_one_process_goes_on_where_ranks_have_stopped(backend, two, folder, how, kind):
    import jittor as jt
    from jittor import nn
    from ranked import chain, train, values

    makers = {
        "adam": lambda p: backend.training.make_optimizer("adam", p, learning_rate=1e-3),
        "jt.Adam": lambda p: jt.optim.Adam(p.parameters(), 1e-3),
        "adamw": lambda p: xmem.optim.AdamW(p.parameters(), lr=1e-3, min_elements=1, state_bits=8),
    }
    state = jt.load(str(folder / f"{how}-{kind}.pkl"))
    net = chain(norm=nn.BatchNorm)
    optimizer = makers[kind](net)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(net, optimizer, steps=3)
    # States in 8 bits are rounded with seeds by place, which is another in a share.
    limit = 2e-3 if kind == "adamw" else 1e-6
    assert difference(two[0], f"{how} {kind}", values(net)) <= limit


@pytest.mark.parametrize("how", ["parallel", "states", "sharded"])
def test_four_ranks_go_on_where_two_have_stopped(two, four, how):
    reference = {k: np.array(v) for k, v in two[0]["found"][f"{how} adam"].items()}
    for report in four:
        assert difference(report, f"{how} adam", reference) <= 1e-6


def test_a_state_passes_from_one_way_of_sharing_to_another(two):
    reference = {k: np.array(v) for k, v in two[0]["found"]["states jt.Adam"].items()}
    for report in two:
        assert difference(report, "over", reference) <= 1e-6


def test_masters_are_saved_in_float32(two):
    assert two[0]["said"]["masters"] == 0.0
    assert [report["said"]["others"] for report in two] == [False, True]


def test_parts_of_layers_are_put_together_and_cut(two):
    assert two[0]["said"]["parts"] == {
        "0.weight": [6, 8],
        "0.bias": [6],
        "2.weight": [8, 6],
        "2.bias": [8],
    }
    assert two[0]["said"]["cut"] == 0.0


def test_a_state_of_something_else_is_refused_and_changes_nothing(two):
    for report in two:
        said = report["said"]
        assert "another model" in said["other model"]
        assert "DistributedError" in said["other size"] or "UsageError" in said["other size"]
        assert "of 26 parameters" in said["other kind"]
        assert said["changed"] == 0.0


def test_names_that_jittor_takes_for_pytorchs_are_refused_and_nothing_is_written(two):
    for rank, report in enumerate(two):
        for end, told in zip(("pt", "pth", "bin"), report["said"]["names"], strict=True):
            assert told.startswith("DistributedError" if rank else "UsageError")
            assert f"a name in '.{end}'" in told
            assert "state.pkl" in told
        assert report["said"]["nothing written"]
        assert "is no file that jt.save wrote" in report["said"]["junk"]
