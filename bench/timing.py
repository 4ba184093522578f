"""Two regimes of timing, on any clock: short alternating bursts, and long loops under the power cap.

The clock is a parameter, so that the order and the arithmetic are testable without a GPU. All times in ms per call.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import fmean, median
from typing import Any, Protocol, TypeVar

Call = Callable[[], object]
K = TypeVar("K", bound=Hashable)


class Clock(Protocol):
    """A time line on which work is queued; marks are read once it has passed them."""

    def mark(self) -> Any:
        """A point on the time line, after all work queued so far."""

    def wait(self, mark: Any) -> None:
        """Returns once the work queued before `mark` is done."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Time between two marks that have been waited for."""


@dataclass(frozen=True)
class Timing:
    """Times of one candidate, ms per call: `ms` is the figure to quote, the others its spread."""

    ms: float
    ms_min: float
    ms_max: float


@dataclass(frozen=True)
class BurstPlan:
    """How long a burst measurement is.

    Attributes:
        rounds: times that each candidate is timed.
        round_ms: a candidate's back-to-back calls in one round take about this long.
        min_calls, max_calls: bounds on their number.
        warmup_ms: untimed calls before the first round, over all candidates.
    """

    rounds: int = 7
    round_ms: float = 8.0
    min_calls: int = 3
    max_calls: int = 20
    warmup_ms: float = 200.0

    def num_calls(self, ms: float) -> int:
        """Back-to-back calls in one round for a candidate that takes about `ms` per call."""
        return min(self.max_calls, max(self.min_calls, ceil(self.round_ms / max(ms, 1e-6))))


def order_in_round(keys: Sequence[K], round_idx: int) -> list[K]:
    """The candidates' order in a round: a zigzag 0, 1, n - 1, 2, n - 2, ..., in each round one further.

    Whose neighbour one is matters: behind an order in which SMs idle the clock is higher, behind a fast kernel lower,
    by up to 10%. So everybody follows everybody else equally often: once in n rounds, or, where n is odd and every
    other round runs backwards, twice in 2 n (Williams, Australian Journal of Scientific Research A 2, 1949). In fewer
    rounds, nobody follows the same neighbour more than twice where there are five or more.
    """
    num = len(keys)
    zigzag = [place // 2 + 1 if place % 2 else -place // 2 for place in range(num)]
    order = [keys[(place + round_idx) % num] for place in zigzag]
    return order[::-1] if num % 2 and round_idx % 2 else order


def time_burst(calls: Mapping[K, Call], clock: Clock, plan: BurstPlan) -> dict[K, Timing]:
    """Times all candidates in rounds in which they alternate.

    Args:
        calls: one call of each candidate; it may return anything.
        clock: where the calls queue their work.
        plan: rounds, calls per round and warm-up.
    Returns:
        Median, least and greatest over the rounds, of a round's mean per call.
    """
    estimates = _warm_up(calls, clock, plan.warmup_ms)
    samples: dict[K, list[float]] = {key: [] for key in calls}
    for round_idx in range(plan.rounds):
        spans = {}
        for key in order_in_round(list(calls), round_idx):
            num_calls = plan.num_calls(estimates[key])
            calls[key]()  # untimed: keeps the queue ahead of the first mark and replaces the neighbour's cache contents
            spans[key] = (*_timed(calls[key], num_calls, clock), num_calls)
        for key, (start, end, num_calls) in spans.items():  # nothing waits before the whole round is queued
            clock.wait(end)
            samples[key].append(clock.elapsed_ms(start, end) / num_calls)
    return {key: Timing(median(ms), min(ms), max(ms)) for key, ms in samples.items()}


def time_sustained(call: Call, clock: Clock, seconds: float, settle_s: float = 1.0, batch_ms: float = 50.0) -> Timing:
    """Times one candidate in a loop that never lets the device rest.

    Args:
        call: one call of the candidate.
        clock: where the call queues its work.
        seconds: length of the loop; must exceed `settle_s`.
        settle_s: the start of the loop that is left out, until clocks have settled under the power cap.
        batch_ms: about how long the calls between two marks take.
    Returns:
        Mean per call after `settle_s`, with the least and greatest batch.
    Raises:
        ValueError: the loop is too short.
    """
    if seconds <= settle_s:
        raise ValueError(f"sustained={seconds} must exceed the {settle_s} s that are left out at its start")
    estimate = _warm_up({None: call}, clock, 0.0)[None]
    num_calls = max(1, ceil(batch_ms / max(estimate, 1e-6)))
    marks = [clock.mark()]
    while True:
        for _ in range(num_calls):
            call()
        marks.append(clock.mark())
        # one batch stays queued while the one before it is waited for
        clock.wait(marks[-2])
        if clock.elapsed_ms(marks[0], marks[-2]) >= seconds * 1e3:
            break
    clock.wait(marks[-1])
    settled = [
        clock.elapsed_ms(start, end) / num_calls
        for start, end in pairwise(marks)
        if clock.elapsed_ms(marks[0], start) >= settle_s * 1e3
    ]
    return Timing(fmean(settled), min(settled), max(settled))


def _timed(call: Call, num_calls: int, clock: Clock) -> tuple[Any, Any]:
    """The marks around `num_calls` back-to-back calls."""
    start = clock.mark()
    for _ in range(num_calls):
        call()
    return start, clock.mark()


def _warm_up(calls: Mapping[K, Call], clock: Clock, warmup_ms: float) -> dict[K, float]:
    """Runs all candidates in turn for `warmup_ms` and at least once; returns about how long a call of each takes."""
    estimates: dict[K, float] = {}
    total_ms = 0.0
    while calls and (not estimates or total_ms < warmup_ms):
        for key, call in calls.items():
            call()
            start, end = _timed(call, 2, clock)
            clock.wait(end)
            estimates[key] = clock.elapsed_ms(start, end) / 2
            total_ms += 3 * estimates[key]
    return estimates
