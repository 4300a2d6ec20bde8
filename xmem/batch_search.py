"""Which batch size to try next: a search that expects peaks to grow as they do in training.

A step's peak is, over a range of batch sizes, the largest of a few straight lines: each phase of
the step (forward, backward, update) has a part that is there at any size and one that grows with
it. Two facts follow, with S bytes that are there in every phase (parameters, optimizer state):

- from one size b with peak p, b (limit - S) / (p - S) is not too large;
- the line through two sizes is not too steep, so where it meets the limit is not too small.

While these two are far apart the first is tried, which leads out of the sizes where the update
sets the peak; then the second, which is exact as soon as both sizes have their peak in one phase.
Kernels that are chosen by the batch size break the rule, so nothing is believed: each answer is
tried, and so is the next size above it. Answers that prove wrong make the search narrow down by
eighths, quarters and halves, or stride out by doubles; so it needs few tries more than bisection
where peaks are of another shape (hypothesis: at most twice as many, and six).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xmem.errors import MeasurementError, UsageError

_NEAR = 1.15
"""How far the two estimates may be apart for the steeper one to be tried."""

_MOST_GROWTH = 32
"""How much larger than all before it a size may be: its batch takes memory that nobody limits."""

_SMALL_SHARE = 0.05
_GROWTH = 4
"""Where what grows with the size has so small a share in the peak, sizes grow so fast."""

_CLEAR = 32
"""After a refusal the smaller estimate must be below it by such a part of the gap to be tried."""

_ENOUGH_REFUSALS = 4
"""After so many the peaks are not what is expected here, and the gap is halved."""

_FLAT = 1 << 20
"""A peak that is the same over such a range of sizes does not depend on the size."""


@dataclass(frozen=True)
class Space:
    """The sizes that may be tried.

    Attributes:
        minimum: the smallest.
        maximum: the largest, or None.
        multiple_of: sizes are multiples of it.
    """

    minimum: int
    maximum: int | None
    multiple_of: int

    @classmethod
    def of(cls, minimum: int, maximum: int | None, multiple_of: int) -> Space:
        """Round the bounds inwards to multiples.

        Raises:
            UsageError: a bound is no positive int, or no size is left between them.
        """
        given = {"minimum": minimum, "maximum": maximum, "multiple_of": multiple_of}
        for name, value in given.items():
            if name == "maximum" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: an int of at least 1 is needed")
        least = -(-minimum // multiple_of) * multiple_of
        most = None if maximum is None else maximum // multiple_of * multiple_of
        if most is not None and most < least:
            raise UsageError(
                f"no batch size is a multiple of {multiple_of} between minimum={minimum} and"
                f" maximum={maximum}"
            )
        return cls(least, most, multiple_of)

    def down(self, size: float) -> int:
        """Return the multiple at or below a size."""
        return int(size) // self.multiple_of * self.multiple_of


@dataclass
class Search:
    """What is known so far, and what to try next.

    Attributes:
        space: the sizes that may be tried.
        limit_bytes: what a step may reach.
        best: the largest size that fits, or None.
        too_large: the least size above it that does not, or None.
        expected: where the search expected the largest size, the first time it did, or None.
    """

    space: Space
    limit_bytes: int
    best: int | None = None
    too_large: int | None = None
    expected: int | None = None
    _peaks: dict[int, int] = field(default_factory=dict)
    _static_bytes: int = 0
    _refusals: int = 0
    _refusals_in_a_row: int = 0
    _strides: int = 0

    def next_size(self) -> int | None:
        """Return the size to try, or None when the largest is known or the minimum does not fit.

        Raises:
            MeasurementError: the peak does not depend on the size.
        """
        step, most = self.space.multiple_of, self.space.maximum
        if self.best is None:
            if self.too_large is None:
                return self.space.minimum
            # Kernels chosen by the size make the smallest one the hungriest now and then.
            second = self.space.minimum + step
            alone = self.too_large == self.space.minimum
            return second if alone and (most is None or second <= most) else None
        if self.best == most:
            return None
        if self.too_large is not None and self.too_large - self.best <= step:
            return None
        least = self.best + step
        if self.too_large is not None:
            most = self.too_large - step
        size = max(self.space.down(self._guess()), least)
        return size if most is None else min(size, most)

    def predicted_bytes(self, size: int) -> int | None:
        """Return the peak at a size on the line through the two largest that fit."""
        line = self._line()
        if line is None:
            return None
        (size_0, peak_0), slope = line
        return round(peak_0 + slope * (size - size_0))

    def fits(self, size: int, peak_bytes: int, static_bytes: int) -> None:
        """Take up that a size fits.

        Args:
            size: it.
            peak_bytes: the most that was allocated.
            static_bytes: what was there before a step in the middle of training.
        """
        if self.best is None:
            self._static_bytes = static_bytes
            if self.too_large is not None and self.too_large < size:
                self.too_large = None  # the smallest size was the hungriest
        predicted = self.predicted_bytes(size)
        surprise = predicted is not None and predicted > self.limit_bytes
        self._strides = self._strides + 1 if surprise else 0
        self.best = size
        self._peaks[size] = peak_bytes
        self._refusals_in_a_row = 0

    def does_not_fit(self, size: int) -> None:
        """Take up that a size does not fit."""
        self.too_large = size
        self._refusals += 1
        self._refusals_in_a_row += 1
        self._strides = 0

    def _line(self) -> tuple[tuple[int, int], float] | None:
        if len(self._peaks) < 2:
            return None
        first, last = sorted(self._peaks)[-2:]
        slope = (self._peaks[last] - self._peaks[first]) / (last - first)
        return (last, self._peaks[last]), slope

    def _guess(self) -> float:
        assert self.best is not None
        safe, steep = self._estimates()
        low, high = self.best, self.too_large
        if high is not None and self._refusals >= _ENOUGH_REFUSALS:
            return (low + high) / 2
        if high is not None and self._refusals_in_a_row:
            clear = high - max((high - low) / _CLEAR, self.space.multiple_of)
            if self._refusals_in_a_row == 1 and low < self.space.down(safe) <= clear:
                return safe
            # What was expected has proved wrong: give up an eighth of the gap, a quarter, a half.
            share = min(2.0 ** (self._refusals_in_a_row - 4), 0.5)
            return high - max(share * (high - low), self.space.multiple_of)
        if steep is not None and (high is not None or steep <= _NEAR * safe):
            if self.expected is None:
                self.expected = max(self.space.down(steep), low)
            stride = self.space.multiple_of * (1 << self._strides)
            return max(steep, low + stride)
        if steep is not None:  # where most is there at any size, the first leads on too slowly
            safe = max(safe, min(steep, 2.0 * low))
        # Rounded up: of few sizes, the one that is refused also shows that the one below is it.
        return safe + self.space.multiple_of

    def _estimates(self) -> tuple[float, float | None]:
        """Return a size that should not be too large, and one that should not be too small."""
        assert self.best is not None
        low, peak = self.best, self._peaks[self.best]
        above = peak - self._static_bytes
        safe = float(low * _MOST_GROWTH)
        if above > 0:
            safe = min(safe, low * (self.limit_bytes - self._static_bytes) / above)
        line = self._line()
        if line is None:
            return safe, None
        if abs(line[1]) * low <= _SMALL_SHARE * above:
            self._check_flat()
            return max(safe, float(_GROWTH * low)), None
        if line[1] < 0:
            return safe, None
        return safe, min(low + (self.limit_bytes - peak) / line[1], float(low * _MOST_GROWTH))

    def _check_flat(self) -> None:
        sizes = sorted(self._peaks)
        if sizes[-1] >= _FLAT * sizes[0] and len(set(self._peaks.values())) == 1:
            raise MeasurementError(
                f"the peak is {self._peaks[sizes[0]]} bytes at batch size {sizes[0]} and at"
                f" {sizes[-1]}: it does not depend on what make_step is given. Let"
                " make_step(batch_size) build a batch of that size, or give maximum=."
            )
