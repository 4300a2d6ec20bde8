"""Which batch size is tried next: any shape of peaks, in how many tries."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xmem.batch_search import Search, Space
from xmem.errors import MeasurementError, UsageError

MIB = 2**20


def run(peak_of, limit, *, static=0, minimum=1, maximum=None, multiple_of=1):
    """Return the largest size that the search finds, and all that it tried."""
    search = Search(Space.of(minimum, maximum, multiple_of), limit)
    tried = []
    while (size := search.next_size()) is not None:
        assert size not in tried, f"{size} again, after {tried}"
        tried.append(size)
        assert len(tried) < 200, tried
        if peak_of(size) <= limit:
            search.fits(size, peak_of(size), static)
        else:
            search.does_not_fit(size)
    return search.best, tried


def bisection(peak_of, limit, minimum=1):
    """Return the largest size that doubling and halving find, and the number of tries."""
    low, high, tried = minimum, 2 * minimum, 2
    while peak_of(high) <= limit:
        low, high, tried = high, 2 * high, tried + 1
    while high - low > 1:
        middle = (low + high) // 2
        tried += 1
        low, high = (middle, high) if peak_of(middle) <= limit else (low, middle)
    return low, tried


# Peaks as measured on two threads: an optimizer that outweighs small batches (MLP, ResNet), plain
# growth (BERT), another kernel for one item (3D U-Net).
MEASURED = {
    "mlp": (13423752, lambda b: 13423752 + max(4473868, 35000 * b + 1000000)),
    "resnet18": (8499800, lambda b: 8450000 + max(2823000 + 49160 * b, 470000 * b + 2500000)),
    "bert": (16056632, lambda b: 16054632 + 7236608 * b),
    "unet3d": (1415700, lambda b: 70872328 if b == 1 else 1022592 + 19890488 * b),
}


@pytest.mark.parametrize("times", [3.5, 4, 8, 20])
@pytest.mark.parametrize("name", MEASURED)
def test_peaks_of_real_steps_take_at_most_half_of_bisection(name, times):
    static, peak_of = MEASURED[name]
    limit = int(times * peak_of(1))
    best, tried = run(peak_of, limit, static=static)
    expected, others = bisection(peak_of, limit)
    assert best == expected
    assert 2 * len(tried) <= others, tried


LINES = st.lists(
    st.tuples(st.integers(0, 64 * MIB), st.integers(0, MIB)), min_size=1, max_size=4
).filter(lambda lines: any(slope > 100 for _, slope in lines))


@given(lines=LINES, static=st.integers(0, 64 * MIB), times=st.floats(1.01, 20))
@example(lines=[(4473868, 0), (10**6, 35000)], static=13423752, times=1.05)
def test_phases_that_grow_in_lines_are_found_exactly(lines, static, times):
    """The peak is the largest of several lines, as the phases of a step make it."""

    def peak_of(size):
        return static + max(constant + slope * size for constant, slope in lines)

    limit = int(times * peak_of(1))
    best, tried = run(peak_of, limit, static=static)
    expected, others = bisection(peak_of, limit)
    assert best == expected
    assert len(tried) <= others + 4, tried


@given(
    jumps=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10**6)), min_size=1, max_size=30),
    share=st.floats(0, 1),
    static=st.integers(0, 10**6),
)
def test_any_peaks_that_never_fall_are_found_exactly(jumps, share, static):
    """Stairs: kernels and blocks of memory come in steps."""
    ends, at, height = [], 0, static
    for width, jump in jumps:
        at, height = at + width, height + jump
        ends.append((at, height))

    def peak_of(size):
        for end, height in ends:
            if size <= end:
                return height
        return ends[-1][1] + 1000 * (size - ends[-1][0])

    limit = int(peak_of(1) + share * (ends[-1][1] - peak_of(1)))
    best, tried = run(peak_of, limit, static=static)
    expected, others = bisection(peak_of, limit)
    assert best == expected
    assert len(tried) <= 2 * others + 6, tried


@given(peaks=st.lists(st.integers(1, 1000), min_size=2, max_size=60), limit=st.integers(1, 1000))
def test_peaks_in_any_order_end_at_a_size_that_fits_below_one_that_was_refused(peaks, limit):
    def peak_of(size):
        return peaks[size - 1] if size <= len(peaks) else 2000

    best, tried = run(peak_of, limit)
    if best is None:
        assert tried == [1, 2]
        assert min(peaks[0], peaks[1]) > limit
        return
    assert peak_of(best) <= limit < peak_of(best + 1)
    assert {best, best + 1} <= set(tried)


def test_a_smallest_size_that_is_the_hungriest_does_not_end_the_search():
    _, peak_of = MEASURED["unet3d"]
    best, tried = run(peak_of, 65 * 10**6, static=1415700)
    assert best == 3
    assert tried[:2] == [1, 2]


def test_sizes_are_multiples_and_stay_between_the_bounds():
    def peak_of(size):
        return 1000 + 10 * size

    assert run(peak_of, 3000, static=1000, minimum=3, multiple_of=8)[0] == 200
    assert run(peak_of, 3079, static=1000, minimum=3, multiple_of=8)[0] == 200
    best, tried = run(peak_of, 3000, static=1000, minimum=5, maximum=70, multiple_of=4)
    assert best == 68
    assert all(size % 4 == 0 and 8 <= size <= 68 for size in tried)
    assert run(peak_of, 10**9, maximum=1, static=1000) == (1, [1])


def test_no_size_is_far_larger_than_all_before_it():
    """The batch itself takes memory that no limit of the framework's knows of."""
    _, tried = run(lambda size: 1000 + size // 1000, 3000, static=999)
    assert all(b <= 33 * a for a, b in itertools.pairwise(tried)), tried


def test_peaks_that_do_not_depend_on_the_size_are_an_error():
    with pytest.raises(MeasurementError, match="does not depend on"):
        run(lambda _: 1000, 2000)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, None, 1), "minimum=0"),
        ((True, None, 1), "minimum=True"),
        ((1, 0, 1), "maximum=0"),
        ((1, 2.5, 1), r"maximum=2\.5"),
        ((1, None, -1), "multiple_of=-1"),
        ((9, 15, 8), "no batch size is a multiple of 8 between minimum=9 and maximum=15"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds, message):
    with pytest.raises(UsageError, match=message):
        Space.of(*bounds)
