"""Orders of pipeline stages: complete, without circles, and with little alive."""

import itertools

import pytest

from xmem.distributed.schedules import Work, most_alive, order
from xmem.errors import UsageError

ALL = [
    (schedule, stages, micro_batches)
    for schedule in ("gpipe", "1f1b")
    for stages, micro_batches in itertools.product(range(1, 9), range(1, 13))
    if schedule == "gpipe" or micro_batches >= stages
]


def orders(schedule, stages, micro_batches):
    return [
        order(schedule, stage, stages=stages, micro_batches=micro_batches)
        for stage in range(stages)
    ]


def received(stage, work, stages):
    """Name the message that a work begins with, as (sender, receiver, kind, micro-batch)."""
    if work.kind == "forward" and stage > 0:
        return (stage - 1, stage, "output", work.micro_batch)
    if work.kind == "backward" and stage < stages - 1:
        return (stage + 1, stage, "gradient", work.micro_batch)
    return None


def sent(stage, work, stages):
    """Name the message that a work ends with."""
    if work.kind == "forward" and stage < stages - 1:
        return (stage, stage + 1, "output", work.micro_batch)
    if work.kind == "backward" and stage > 0:
        return (stage, stage - 1, "gradient", work.micro_batch)
    return None


def run(programs):
    """Run stages until none can go on: a receive waits for its send, a wait for its receive.

    Messages between two stages are taken in the order they were sent in, as MPI does. Returns how
    far each came, and by receiver the messages in the order taken.
    """
    stages = len(programs)
    position = [0] * stages
    under_way = {}
    taken = {}
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while position[stage] < len(program):
                work = program[position[stage]]
                if not can_go(stage, work, stages, under_way, taken):
                    break
                if (message := sent(stage, work, stages)) is not None:
                    under_way.setdefault(message[:2], []).append(message)
                position[stage] += 1
                moved = True
    return position, taken


def can_go(stage, work, stages, under_way, taken):
    """Say whether a work can go on now, and take its message."""
    if work.kind == "output_sent":
        return (stage, stage + 1, "output", work.micro_batch) in taken
    if work.kind == "gradient_sent":
        return (stage, stage - 1, "gradient", work.micro_batch) in taken
    message = received(stage, work, stages)
    if message is None:
        return True
    queue = under_way.get(message[:2], [])
    if not queue:
        return False
    assert queue[0] == message, "another message came first"
    taken[queue.pop(0)] = True
    return True


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), ALL)
def test_every_stage_comes_to_its_end_even_if_messages_are_only_taken_when_asked_for(
    schedule, stages, micro_batches
):
    programs = orders(schedule, stages, micro_batches)
    position, taken = run(programs)
    assert position == [len(program) for program in programs]
    assert len(taken) == 2 * (stages - 1) * micro_batches


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), ALL)
def test_every_micro_batch_goes_forward_once_then_backward_once_and_every_message_is_waited_for(
    schedule, stages, micro_batches
):
    for stage, program in enumerate(orders(schedule, stages, micro_batches)):
        numbers = list(range(micro_batches))
        by_kind = {
            kind: [work.micro_batch for work in program if work.kind == kind]
            for kind in ("forward", "backward", "output_sent", "gradient_sent")
        }
        assert by_kind["forward"] == by_kind["backward"] == numbers
        assert by_kind["output_sent"] == (numbers if stage < stages - 1 else [])
        assert by_kind["gradient_sent"] == (numbers if stage > 0 else [])
        place = {(work.kind, work.micro_batch): i for i, work in enumerate(program)}
        assert len(place) == len(program)
        for number in numbers:
            assert place["forward", number] < place["backward", number]
            if stage < stages - 1:
                assert place["forward", number] < place["output_sent", number]
            if stage > 0:
                assert place["backward", number] < place["gradient_sent", number]


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), ALL)
def test_a_stage_of_1f1b_keeps_no_more_micro_batches_than_stages_follow_it_and_itself(
    schedule, stages, micro_batches
):
    kept = [most_alive(program) for program in orders(schedule, stages, micro_batches)]
    if schedule == "gpipe":
        assert kept == [micro_batches] * stages
    else:
        assert kept == [min(stages - stage, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize(("schedule", "stages", "micro_batches"), ALL)
def test_a_stage_holds_at_most_one_gradient_that_is_being_sent(schedule, stages, micro_batches):
    for program in orders(schedule, stages, micro_batches)[1:]:
        sending = most = 0
        for work in program:
            sending += {"backward": 1, "gradient_sent": -1}.get(work.kind, 0)
            most = max(most, sending)
        assert most == 1


def test_waiting_too_early_is_a_circle_that_the_simulation_finds():
    programs = orders("1f1b", 2, 4)
    first = list(programs[0])
    early = Work("output_sent", 3)
    first.remove(early)
    first.insert(first.index(Work("forward", 3)), early)
    position, _ = run([tuple(first), programs[1]])
    assert position[0] < len(first)


@pytest.mark.parametrize(
    ("schedule", "stage", "stages", "micro_batches", "message"),
    [
        ("1f1", 0, 2, 4, "Did you mean '1f1b'"),
        ("gpipe", 2, 2, 4, "numbers 0 to 1"),
        ("gpipe", 0, 0, 4, "stages=0"),
        ("gpipe", 0, 2, 0, "micro_batches=0"),
        ("gpipe", 0, 2, True, "micro_batches=True"),
        ("gpipe", 0, 2, 2.0, "micro_batches=2.0"),
        ("1f1b", 0, 4, 3, "less than the 4 stages"),
    ],
)
def test_what_makes_no_pipeline_is_refused(schedule, stage, stages, micro_batches, message):
    with pytest.raises(UsageError, match=message):
        order(schedule, stage, stages=stages, micro_batches=micro_batches)
