"""Kill, stop or fail one of several ranks, and see what becomes of the others."""

import contextlib
import json
import os
import random
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import ranks

TIMEOUT_SECONDS = 25.0

# What each rank does until something ends it; `ready()` says that it may come.
PROGRAMS = {
    "idle": """
        ready()
        while True:
            time.sleep(0.01)
    """,
    "compute": """
        ready()
        while True:
            sum(range(1_000_000))
    """,
    "all-reduce": """
        tensor = x(np.ones(200_000, np.float32))
        xd.all_reduce([tensor, tensor], "mean")
        ready()
        while True:
            xd.all_reduce([tensor, tensor], "mean")
    """,
    "gathers": """
        tensor = x(np.ones((here.size, 50_000), np.float32))
        def step():
            xd.all_gather(tensor)
            xd.reduce_scatter(tensor)
            xd.all_to_all(tensor)
            xd.broadcast(tensor)
        step()
        ready()
        while True:
            step()
    """,
    "barrier": """
        xd.barrier()
        ready()
        if here.rank != VICTIM:
            xd.barrier()
        while True:
            time.sleep(0.01)
    """,
    "throw": """
        xd.barrier()
        ready()
        if here.rank == VICTIM:
            raise ValueError("the third batch is empty")
        xd.barrier()
    """,
}
# A loop in the framework's own words: its backward communicates by itself.
TRAINING = {
    "torch": """
        import torch
        def train(steps=None):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            model = xd.data_parallel(model, optimizer)
            data = torch.ones(32, 256)
            done = 0
            while done != steps:
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
                done += 1
                if steps is None and done == 1:
                    ready()
        train(2)
    """,
    "jittor": """
        import jittor as jt
        def train(steps=None):
            model = jt.nn.Sequential(*[jt.nn.Linear(256, 256) for _ in range(8)])
            optimizer = jt.optim.SGD(model.parameters(), 1e-3)
            model = xd.data_parallel(model, optimizer)
            data = jt.ones((32, 256))
            done = 0
            while done != steps:
                optimizer.step((model(data) ** 2).mean())
                jt.sync_all()
                done += 1
                if steps is None and done == 1:
                    ready()
        train(2)
    """,
}
SHORT_SECONDS = 4.0


def training(backend, *, short=False):
    """The loop; `short`: once all is imported and compiled, ranks wait 4 s for each other only."""
    again = f"xd.destroy()\nxd.init(timeout={SHORT_SECONDS})\n" if short else ""
    return _joined(TRAINING[backend], f"{again}train()\n")


_HEAD = """
    import time
    x = xmem.use({backend!r}, device="cpu").models.tensor
    VICTIM = {victim}
    ready = lambda: report(pid=os.getpid())
"""


def moment(seed):
    """Some time within the first second; `make soak` draws anew."""
    return random.Random(None if os.environ.get("XMEM_EXPLORE") else seed).random()


@dataclass
class Death:
    """How a job ended after one rank was done something to.

    Attributes:
        status: the launcher's exit status.
        seconds: from then to the end.
        output: what all printed.
        processes: by rank.
    """

    status: int
    seconds: float
    output: str
    processes: list

    def said(self, rank):
        """What a rank printed."""
        prefix = f"[{rank}] "
        lines = self.output.splitlines()
        return "\n".join(line[len(prefix) :] for line in lines if line.startswith(prefix))


def die(
    backend,
    body,
    folder,
    *,
    victim=1,
    size=2,
    delay=0.3,
    how=signal.SIGKILL,
    timeout=None,
    options=(),
):
    """Run a program, send one rank a signal after a while, and wait for the end.

    Args:
        how: the signal; None where the program itself fails.
        options: more of them for the launcher.
    """
    timeout = timeout or TIMEOUT_SECONDS
    folder = Path(folder)
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    head = _HEAD.format(backend=backend, victim=victim)
    process = ranks.start(
        backend,
        _joined(head, body),
        folder,
        ranks=size,
        timeout=timeout,
        environment={"TMPDIR": str(temporary)},
        options=options,
    )
    try:
        reports = [folder / f"{rank}.json" for rank in range(size)]
        ready = ranks.wait_for(
            lambda: all(path.exists() for path in reports) or process.poll() is not None,
            "ranks ready",
            limit=240,
        )
        assert ready
        assert all(path.exists() for path in reports), process.output_file.read_text()
        pids = [json.loads(path.read_text())["pid"] for path in reports]
        time.sleep(delay)
        descendants = ranks.session_of(process.pid)
        ports = listening([*pids, *descendants])
        if how is not None:  # else it may be over by now
            assert ports, "this job must listen somewhere, or the check below checks nothing"
        began = time.monotonic()
        if how is not None:
            os.kill(pids[victim], how)
        status = process.wait(timeout + 30)
        seconds = time.monotonic() - began
        assert_nothing_is_left(process.pid, [*pids, *descendants], ports, temporary)
    finally:
        ranks.end(process)
    output = process.output_file.read_text(errors="replace")
    return Death(status, seconds, output, pids)


def assert_others_name(death, victim, *, kind="RankLostError", within=TIMEOUT_SECONDS):
    """Every other rank ended in time, with an error of ours that names the victim."""
    for rank in range(len(death.processes)):
        if rank == victim:
            continue
        said = death.said(rank)
        found = re.findall(rf"^.*{kind}.*$", said, re.MULTILINE)
        assert found, f"rank {rank} has no {kind}:\n{death.output[-5000:]}"
        assert any(re.search(rf"\brank {victim}\b", line) for line in found), found
    assert death.seconds < within, f"{death.seconds:.1f} s\n{death.output[-5000:]}"


def assert_nothing_is_left(launcher, processes, ports, temporary):
    """No process, file, port or shared memory of a job is there after its end."""
    for pid in processes:
        assert not is_running(pid), f"process {pid} of the job is still there"
    assert not ports & {socket for _, socket in listeners()}, "ports of the job are still open"
    folder = Path("/dev/shm")
    kept = "torchinductor_*"  # PyTorch's cache of compiled code, made by whatever imports it
    files = set(temporary.iterdir()) - set(temporary.glob(kept))
    left = [*folder.glob(f"xmem-launch-{launcher}-*"), *files]
    assert not left, f"left behind: {left}"
    segments = [path for path in folder.glob("*") if opened_by(path, processes)]
    assert not segments, f"left behind: {segments}"


def opened_by(path, processes):
    """Say whether a segment of Open MPI carries the number of one of the processes."""
    return any(re.search(rf"\b{pid}\b", path.name) for pid in processes)


def is_running(pid):
    """Say whether a process is there, and not only its exit status."""
    with contextlib.suppress(OSError):
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def listening(processes):
    """Return the sockets that processes listen on, by their numbers: ports are soon used anew."""
    found = set()
    for pid in processes:
        with contextlib.suppress(OSError):
            for link in (Path("/proc") / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    socket = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
                    if socket:
                        found.add(socket[1])
    return found & {socket for _, socket in listeners()}


def listeners():
    """Return (port, socket) of all that listens on this host."""
    found = []
    for name in ("tcp", "tcp6"):
        for line in (Path("/proc/net") / name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.append((int(fields[1].rpartition(":")[2], 16), fields[9]))
    return found


def _joined(*parts):
    from textwrap import dedent

    return "\n".join(dedent(part) for part in parts)
