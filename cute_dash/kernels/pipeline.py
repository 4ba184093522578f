"""Rings of shared-memory stages guarded by mbarriers (device).

A ring has `num_stages` slots. Use number `it` (0, 1, 2, ...) of the ring falls on slot it % num_stages, in round
it // num_stages; producer and consumers count `it` themselves, which is all the state there is.

    full[slot]    producer arrives (with the bytes the TMA will bring), consumers wait
    empty[slot]   consumers arrive when they are done with the slot, the producer waits; free at the start

A ring whose slots are filled together with those of another one has no `full` of its own.
"""

from functools import lru_cache
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Barriers(NamedTuple):
    """`full` and `empty` point to num_stages mbarriers each."""

    full: cute.Pointer | None  # None: what arrives is announced on the barriers of another ring
    empty: cute.Pointer


class Ring(Barriers):
    """One ring; `make_ring` makes the subclass with its number of stages.

    The number is on the class, not in the tuple, because ints in a tuple turn into run-time values when the tuple
    enters a dynamic `if` or loop.
    """

    num_stages: int

    def init(self, num_producers: int, num_consumers: int) -> None:
        """Initialises the mbarriers with their arrive counts. Called by one thread."""
        for stage in range(self.num_stages):
            if self.full is not None:
                cute.arch.mbarrier_init(self.full + stage, num_producers)
            cute.arch.mbarrier_init(self.empty + stage, num_consumers)

    def slot(self, it: Int32) -> Int32:
        return Int32(0) if self.num_stages == 1 else it % self.num_stages

    def phase(self, it: Int32) -> Int32:
        return (it if self.num_stages == 1 else it // self.num_stages) & 1

    def wait_full(self, it: Int32) -> None:
        cute.arch.mbarrier_wait(self.full + self.slot(it), self.phase(it))

    def wait_empty(self, it: Int32) -> None:
        # the first round passes at once: a fresh mbarrier counts as having completed phase 1
        cute.arch.mbarrier_wait(self.empty + self.slot(it), self.phase(it) ^ 1)

    def expect_bytes(self, it: Int32, num_bytes: int) -> cute.Pointer:
        """Arrives on full[slot] announcing `num_bytes`; returns the mbarrier for the copies. Called by a whole warp."""
        barrier = self.full + self.slot(it)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, num_bytes)
        return barrier

    def arrive_full(self, it: Int32) -> None:
        """Called by one thread per producer."""
        cute.arch.mbarrier_arrive(self.full + self.slot(it))

    def arrive_empty(self, it: Int32) -> None:
        """Called by a whole warp; one arrival."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.slot(it))


@lru_cache
def _ring_class(num_stages: int) -> type[Ring]:
    return type(f"Ring{num_stages}", (Ring,), {"num_stages": num_stages})


def make_ring(barriers: cute.Pointer, num_stages: int, has_full: bool = True) -> Ring:
    """A ring over 2 * num_stages mbarriers, or over num_stages without those for what arrives."""
    if not has_full:
        return _ring_class(num_stages)(None, barriers)
    return _ring_class(num_stages)(barriers, barriers + num_stages)
