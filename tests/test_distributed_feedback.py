import numpy as np
import pytest
from fakes.threads import Threads, put_in_place, tensor

from xmem.distributed import ErrorFeedback, all_reduce
from xmem.errors import UsageError


@pytest.fixture
def two(monkeypatch):
    ranks = Threads(2)
    put_in_place(monkeypatch, ranks)
    return ranks


def drawn(rank, count):
    return tensor(np.random.default_rng(rank).normal(size=count))


def mean_errors(ranks, steps, *, feedback, count=600):
    """Return the relative error of the mean over steps of one sum, on each rank."""

    def program(rank):
        kept = ErrorFeedback() if feedback else None
        values = [drawn(rank, count), drawn(rank + 9, 7)]
        found = [all_reduce(values, compress="int8", error_feedback=kept) for _ in range(steps)]
        wanted = drawn(0, count) + drawn(1, count)
        mean = np.mean([results[0] for results in found], axis=0)
        return float(np.linalg.norm(mean - wanted) / np.linalg.norm(wanted))

    return ranks.run(program)


def test_what_was_lost_is_added_the_next_time(two):
    assert max(mean_errors(two, 20, feedback=True)) < 0.1 * min(
        mean_errors(two, 20, feedback=False)
    )


def test_its_bytes_are_four_for_each_element(two):
    def program(rank):
        feedback = ErrorFeedback()
        all_reduce(drawn(rank, 1000), compress="int8", error_feedback=feedback)
        return feedback.size_bytes

    assert two.run(program) == [4000, 4000]  # half for what was sent, half for the sum


@pytest.mark.filterwarnings("ignore:invalid value")
def test_losses_that_are_not_finite_are_forgotten(two):
    def program(rank):
        feedback = ErrorFeedback()
        bad = drawn(rank, 600)
        bad[::100] = np.inf
        all_reduce(bad, compress="int8", error_feedback=feedback)
        result = all_reduce(drawn(rank, 600), compress="int8", error_feedback=feedback)
        wanted = drawn(0, 600) + drawn(1, 600)
        return float(np.linalg.norm(result - wanted) / np.linalg.norm(wanted))

    assert max(two.run(program)) < 0.01


@pytest.mark.parametrize(
    "other",
    [
        lambda f: all_reduce(tensor([1.0] * 5), compress="int8", error_feedback=f),
        lambda f: all_reduce([tensor([1.0] * 6)] * 2, compress="int8", error_feedback=f),
        lambda f: all_reduce(tensor([1.0] * 6), compress="fp16", error_feedback=f),
        lambda f: all_reduce(tensor([1.0] * 6), compress="int8", bucket=64, error_feedback=f),
    ],
)
def test_it_serves_one_list_of_tensors_and_is_unchanged_by_a_refusal(two, other):
    def program(rank):
        feedback = ErrorFeedback()
        all_reduce(tensor([1.0] * 6), compress="int8", error_feedback=feedback)
        before = feedback.size_bytes
        with pytest.raises(UsageError, match=r"1 tensors, the first float32 \(6,\)"):
            other(feedback)
        assert feedback.size_bytes == before
        all_reduce(tensor([1.0] * 6), compress="int8", error_feedback=feedback)
        feedback.reset()
        assert feedback.size_bytes == 0
        other(feedback)
        return True

    assert two.run(program) == [True, True]


def test_a_mismatch_binds_it_to_nothing(two):
    def program(rank):
        feedback = ErrorFeedback()
        with pytest.raises(ValueError, match="ranks called different things"):
            all_reduce(tensor([1.0] * (5 + rank)), compress="int8", error_feedback=feedback)
        all_reduce(tensor([1.0] * 9), compress="int8", error_feedback=feedback)
        return True

    assert two.run(program) == [True, True]


def test_training_with_it_reaches_the_loss_of_float32(two):
    # a stiff quadratic, gradients of two halves of the data
    rows = np.random.default_rng(5).normal(size=(64, 300)) * np.linspace(0.05, 1.5, 300)
    goal = rows @ np.random.default_rng(6).normal(size=300)

    def train(rank, compress):
        feedback = ErrorFeedback() if compress else None
        mine, target = rows[rank::2], goal[rank::2]
        weights = np.zeros(300)
        for _ in range(300):
            gradient = tensor(mine.T @ (mine @ weights - target) / len(mine))
            mean = all_reduce(gradient, "mean", compress=compress, error_feedback=feedback)
            weights -= 0.02 * np.asarray(mean, "float64")
        return float(np.mean((rows @ weights - goal) ** 2))

    exact = two.run(train, None)
    packed = two.run(train, "int8")
    assert packed[0] == packed[1]
    assert packed[0] == pytest.approx(exact[0], rel=0.01), (packed, exact)
