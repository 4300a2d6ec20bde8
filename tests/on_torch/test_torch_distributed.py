import os
import socket
import subprocess
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from collective_checks import judge

import xmem
import xmem.distributed as xd
from xmem.errors import UsageError

pytestmark = pytest.mark.torch

_FACTS = """
import torch
from collective_checks import Checks
checks = Checks(here, torch.from_numpy, lambda tensor: tensor.numpy())
facts = checks.facts()

leaf = torch.nn.Parameter(torch.ones(4))
given = torch.arange(6.0).reshape(2, 3)
turned = given.t()
whole = torch.zeros(4)
xd.all_reduce([leaf, turned, whole[1:3].fill_(1)], in_place=True)
facts["of_autograd"] = [
    leaf.tolist(), leaf.requires_grad, leaf.grad_fn is None, given.tolist(), whole.tolist(),
    xd.all_reduce(leaf).requires_grad,
]
xd.all_reduce(turned, in_place=True, compress="int8")
facts["turned"] = given.tolist()
facts["interface"] = os.environ.get("GLOO_SOCKET_IFNAME")
facts["long"] = [len(part) for part in xd.world.joined().exchange(b"x" * (300 + here.rank))]
refused = []
for bad in (torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
    try:
        xd.all_reduce(bad)
    except xmem.XmemError as error:
        refused.append(str(error))
facts["refused"] = refused
xd.destroy()
facts["left"] = [torch.distributed.is_initialized(), os.environ.get("GLOO_SOCKET_IFNAME")]
again = xd.init(timeout=20)
facts["again"] = [again.rank, xd.all_reduce(torch.ones(1)).tolist()]
xd.destroy()
report(**facts)
"""


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_on_ranks_give_what_numpy_gives_within_one_bucket(tmp_path, size):
    found = ranks.run("torch", _FACTS, tmp_path, ranks=size)
    for facts in found:
        judge(facts, size)
        leaf, wants, is_leaf, given, whole, result_wants = facts["of_autograd"]
        assert leaf == [size] * 4
        assert (wants, is_leaf, result_wants) == (True, True, False)
        assert given == [[0, size, 2 * size], [3 * size, 4 * size, 5 * size]]
        assert whole == [0, size, size, 0]
        squared = [value for row in facts["turned"] for value in row]
        assert squared == pytest.approx([size * size * n for n in range(6)], rel=0.05, abs=0.1)
        assert facts["interface"] == "lo"
        assert facts["long"] == [300 + rank for rank in range(size)]
        assert "use .to_dense()" in facts["refused"][0]
        assert "the tensor is on meta" in facts["refused"][1]
        assert facts["left"] == [False, None]
        assert facts["again"][1] == [size]
    assert [facts["again"][0] for facts in found] == list(range(size))


_LATE = """
import contextlib, time, torch
from xmem.distributed import failing
from xmem.errors import XmemError
pending = None
if here.rank == 0:
    pending = xd.world.joined().all_reduce(torch.ones(3), "sum")  # nobody else does
    time.sleep(0.2)
begun = time.monotonic()
xd.world.joined().abort()
facts = {"abort": time.monotonic() - begun, "left": torch.distributed.is_initialized()}
with contextlib.suppress(XmemError):
    xd.destroy()
xd.init(timeout=1)
if here.rank == 0:
    begun = time.monotonic()
    try:
        xd.all_reduce(torch.ones(3))
    except XmemError as error:
        facts.update(error=str(error), kind=type(error).__name__, ranks=error.ranks,
                     seconds=time.monotonic() - begun)
else:
    time.sleep(3)
report(**facts)
failing.current().roll.leave()  # or the launcher would end the other for the lack of this one
"""


def test_who_does_not_come_is_named_and_an_abort_waits_for_nobody(tmp_path):
    begun = time.monotonic()
    told, other = ranks.run("torch", _LATE, tmp_path, timeout=500, limit=120)
    assert told["kind"] == "CollectiveTimeoutError", told
    assert told["ranks"] == [1]
    assert 0.9 < told["seconds"] < 3, told
    for facts in (told, other):
        assert facts["abort"] < 1
        assert facts["left"] is False
    assert time.monotonic() - begun < 110  # nor does the end of the process wait


_ALONE = """
import xmem, xmem.distributed as xd
from xmem.errors import CollectiveTimeoutError
xmem.use("torch", device="cpu")
try:
    xd.init(timeout=1)
except CollectiveTimeoutError as error:
    print("told", error.ranks, error)
"""


def _started_alone(rank):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _ALONE],
        env={**os.environ, **place},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_ranks_that_do_not_come_to_the_start_are_named():
    processes = [_started_alone(rank) for rank in (0, 1)]
    for process, missing in zip(processes, (1, 0), strict=True):
        told, _ = process.communicate(timeout=100)
        assert f"told ({missing},)" in told, told


@pytest.fixture
def alone():
    xmem.use("torch", device="cpu")
    world = xd.init()
    yield world
    if xd.is_initialized():
        xd.destroy()


def test_one_process_without_a_launcher_is_a_world(alone):
    assert (alone.rank, alone.size, alone.engine) == (0, 1, "none")
    x = torch.arange(4.0)
    for compress in (None, "int8"):
        assert torch.equal(xd.all_reduce(x, "mean", compress=compress), x)
    assert torch.equal(xd.all_gather(x), x[None])
    assert torch.equal(xd.reduce_scatter(x[None]), x)
    assert torch.equal(xd.all_to_all(x[None]), x[None])
    assert xd.all_reduce(x) is not x
    xd.barrier()
    assert dist.is_initialized()  # PyTorch's own modules find a group
    xd.destroy()
    assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_group_that_the_script_has_made_is_used_and_left_alone():
    xmem.use("torch", device="cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert xd.init().size == 1
        assert dist.group.WORLD is group
        assert torch.equal(xd.all_reduce(torch.ones(2)), torch.ones(2))
        xd.destroy()
        assert dist.group.WORLD is group
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_engines_that_are_not_there_are_refused():
    xmem.use("torch", device="cpu")
    for engine in ("nccl", "mpi", "GLOO"):
        with pytest.raises(UsageError, match=f"no engine '{engine}' for PyTorch on cpu"):
            xd.init(engine)
        assert not xd.is_initialized()
        assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, and RANK is None"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT is None"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "started by mpirun"),
    ],
)
def test_an_environment_that_says_too_little_is_refused(monkeypatch, environment, why):
    xmem.use("torch", device="cpu")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=why):
        xd.init()
    assert not xd.is_initialized()
    assert not dist.is_initialized()
