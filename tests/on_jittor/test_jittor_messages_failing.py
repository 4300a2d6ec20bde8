"""Messages that cannot be: an error on every rank that says why, and no hang."""

import json

import pytest
import ranks

PROGRAM = """
import signal
import time
import jittor as jt
from xmem.distributed import roll
from xmem_jittor import communication, messages, ranks

rank, size = here.rank, here.size


def meet(name, timeout):
    # A new world for each case: what failed stays failed. Files, since nothing else works now.
    ranks.abort()
    open(os.path.join(FOLDER, f"{name}-{rank}"), "w").close()
    while not all(os.path.exists(os.path.join(FOLDER, f"{name}-{r}")) for r in range(size)):
        time.sleep(0.01)
    ranks.start("auto", timeout, "cpu")


def failed(action):
    begun = time.monotonic()
    try:
        action()
    except Exception as error:
        told = dict(type=type(error).__name__, text=str(error))
        told["is_runtime"] = isinstance(error, RuntimeError)
    else:
        told = dict(type=None, text="")
    failure = ranks.last_failure()
    told["seconds"] = time.monotonic() - begun
    told["reason"] = failure and failure.reason
    told["ranks"] = failure and failure.ranks
    told["message"] = failure and failure.message
    return told


found = {}
x = jt.ones((3,))

meet("count", 30.0)
found["count"] = failed(lambda: messages.all_reduce(jt.ones((3 + rank,))).sync())
found["after"] = failed(lambda: ranks.exchange(b"hello"))
found["after, lazy"] = failed(lambda: messages.token().sync())

meet("kind", 30.0)
call = messages.all_gather if rank == 0 else messages.all_reduce
found["kind"] = failed(lambda: call(x).sync())

meet("type", 30.0)
y = x.int32() if rank == 0 else x
found["type"] = failed(lambda: communication.all_reduce(y, "sum"))

meet("source", 30.0)
found["source"] = failed(lambda: communication.broadcast(x, rank))


def paired():
    if rank == 0:
        messages.wait(messages.send(jt.ones((1 << 20,)), 1))
        messages.token().sync()
    elif rank == 1:
        messages.receive((2,), "float32", 0).sync()
    else:
        messages.token().sync()


meet("pair", 30.0)
found["pair"] = failed(paired)

meet("late", 1.0)
if rank == size - 1:
    time.sleep(2.5)
    found["late"] = None
else:
    found["late"] = failed(lambda: communication.all_reduce(x, "sum"))

meet("late in a pair", 1.0)
if rank == 1:
    time.sleep(2.5)
    found["late in a pair"] = None
elif rank == 0:
    found["late in a pair"] = failed(lambda: messages.receive((3,), "float32", 1).sync())

meet("signal", 30.0)


def alarm(number, frame):
    raise InterruptedError("the alarm")


if rank == 0:
    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    found["signal"] = failed(lambda: communication.all_reduce(x, "sum"))

# What waits in the graph from a world that is gone does not run in the next one.
stale = messages.all_reduce(x)
meet("stale", 30.0)
found["stale"] = failed(lambda: stale.sync())
found["next"] = messages.all_reduce(jt.ones((2,))).numpy().tolist()
del stale

meet("lost", 30.0)
table = roll.share(rank, size, ranks.exchange)
ranks.watch(table)
messages.all_reduce(x).sync()
entry = table.entry(rank)
found["roll"] = [entry.entered, entry.finished, entry.doing]
ranks.exchange(b"")
if rank == size - 1:
    table.fail("ValueError: no more data")
    time.sleep(1.5)
    found["lost"] = None
else:
    found["lost"] = failed(lambda: communication.all_reduce(x, "sum"))

meet("victims", 30.0)
table = roll.share(rank, size, ranks.exchange)
ranks.watch(table)
if rank:
    table.fail("RankLostError: rank 2" if rank == 1 else "MemoryError: all gone")
    time.sleep(1.5)
    found["victims"] = None
else:
    found["victims"] = failed(lambda: communication.all_reduce(x, "sum"))

meet("left", 30.0)
table = roll.share(rank, size, ranks.exchange)
ranks.watch(table)
if rank == size - 1:
    table.leave()
    time.sleep(1.5)
    found["left"] = None
else:
    found["left"] = failed(lambda: communication.all_reduce(x, "sum"))

meet("missing", 1.0)
ranks.abort()
os.environ["OMPI_COMM_WORLD_SIZE"] = "7"
found["other"] = failed(lambda: ranks.start("auto", 1.0, "cpu"))
os.environ["OMPI_COMM_WORLD_SIZE"] = "3"
if rank == 0:
    found["missing"] = failed(lambda: ranks.start("auto", 1.0, "cpu"))
else:
    time.sleep(2.0)
    found["missing"] = None
report(**found)
sys.stdout.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failing")
    program = f"FOLDER = {str(folder)!r}\n{PROGRAM}"
    process = ranks.start("jittor", program, folder, ranks=3)
    ranks.finish(process)
    output = process.output_file.read_text(errors="replace")
    assert (folder / "2.json").exists(), output[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_ranks_that_reduce_different_counts_all_learn_what_each_called(reports):
    for rank, report in enumerate(reports):
        told = report["count"]
        assert told["type"] == "RuntimeError"  # Jittor's own, from inside the graph
        for other in range(3):
            assert f"rank {other} called all_reduce (sum) of {3 + other} float32" in told["text"]
        _, said = told["text"].split("xmem.distributed: ")
        assert said.splitlines()[0] == told["message"]  # without the colours of Jittor's log
        assert told["reason"] == "mismatch"
        assert told["ranks"] == [other for other in range(3) if other != rank]
        assert told["seconds"] < 10


def test_after_a_failure_every_further_call_fails_at_once(reports):
    for report in reports:
        told = report["after"]
        assert told["type"] == "CollectiveMismatchError"
        assert told["is_runtime"]
        assert told["seconds"] < 1
        assert "has failed before" in report["after, lazy"]["text"]


def test_other_kinds_types_and_sources_are_mismatches_too(reports):
    for report in reports:
        assert "rank 0 called all_gather of 3 float32" in report["kind"]["text"]
        assert "rank 2 called all_reduce (sum) of 3 float32" in report["kind"]["text"]
        assert report["type"]["type"] == "CollectiveMismatchError"
        assert "rank 0 called all_reduce (sum) of 3 int32" in report["type"]["text"]
        assert "rank 2 called broadcast of 3 float32 from rank 2" in report["source"]["text"]


def test_sender_and_receiver_both_learn_that_they_do_not_fit(reports):
    for report in reports[:2]:
        assert "rank 0 called send of 1048576 float32 to rank 1" in report["pair"]["text"]
        assert "rank 1 called receive of 2 float32 from rank 0" in report["pair"]["text"]
        assert report["pair"]["reason"] == "mismatch"
    assert reports[2]["pair"]["type"] is None


def test_a_timeout_names_who_is_late_and_only_those(reports):
    for report in reports[:2]:
        assert report["late"]["type"] == "CollectiveTimeoutError"
        assert report["late"]["ranks"] == [2]
        assert "waited 1 s" in report["late"]["text"]
        assert "rank 2" in report["late"]["text"]
        assert 0.9 < report["late"]["seconds"] < 2.4
    assert reports[0]["late in a pair"]["ranks"] == [1]
    assert reports[0]["late in a pair"]["reason"] == "timeout"


def test_a_rank_that_has_failed_or_left_is_named_long_before_the_timeout(reports):
    for report in reports[:2]:
        assert report["lost"]["type"] == "RankLostError"
        assert report["lost"]["ranks"] == [2]
        assert "rank 2 failed (ValueError: no more data)" in report["lost"]["text"]
        assert report["lost"]["seconds"] < 5
        assert report["left"]["type"] == "RankLostError"
        assert "rank 2 has left" in report["left"]["text"]
        assert report["left"]["seconds"] < 5


def test_the_rank_that_failed_first_is_named_and_not_those_that_lost_it(reports):
    assert reports[0]["victims"]["ranks"] == [2]
    assert "MemoryError: all gone" in reports[0]["victims"]["text"]


def test_what_a_signal_s_handler_raises_ends_a_wait(reports):
    told = reports[0]["signal"]
    assert (told["type"], told["text"]) == ("InterruptedError", "the alarm")
    assert told["seconds"] < 5


def test_what_waits_from_a_world_that_is_gone_does_not_run_in_the_next(reports):
    for report in reports:
        assert "a world of ranks that this process has left" in report["stale"]["text"]
        assert report["next"] == [3.0, 3.0]


def test_the_roll_shows_what_a_rank_does(reports):
    for report in reports:
        assert report["roll"] == [1, 1, "all_reduce (sum) of 3 float32"]


def test_an_mpi_that_is_not_the_launcher_s_is_refused(reports):
    for report in reports:
        assert report["other"]["type"] == "DistributedError"
        assert "mpirun has started 7 processes, and MPI knows 3" in report["other"]["text"]


def test_ranks_that_do_not_come_to_the_start_are_named(reports):
    assert reports[0]["missing"]["type"] == "CollectiveTimeoutError"
    assert reports[0]["missing"]["ranks"] == [1, 2]
