"""Who does what in a CTA of the backward kernel: warp roles and named barriers."""

from enum import IntEnum

NUM_PRODUCER_WARPS = 4  # a warpgroup, of which the last has nothing to do
NUM_WORKING_PRODUCER_WARPS = 3
WARP_THREADS = 32
WARPGROUP_THREADS = 128


class WarpRole(IntEnum):
    """Warps of the producer warpgroup; warps from MMA on are the consumer warpgroups."""

    LOAD = 0
    STORE_DQ_EVEN = 1
    STORE_DQ_ODD = 2
    MMA = NUM_PRODUCER_WARPS


class NamedBarrierBwd(IntEnum):
    """Hardware barrier ids of a CTA; 0 belongs to sync_threads().

    dQFull has one barrier per consumer warpgroup and step parity, dQEmpty and dQSum one per consumer warpgroup, dQFree
    one per store warp.
    """

    PdS = 1
    Epilogue = 2
    dQEmpty = 3
    dQFull = 5
    dQSum = 9
    dQFree = 11

    @staticmethod
    def dQ_full(warpgroup_idx, parity):
        return NamedBarrierBwd.dQFull.value + 2 * warpgroup_idx + parity

    @staticmethod
    def dQ_empty(warpgroup_idx):
        return NamedBarrierBwd.dQEmpty.value + warpgroup_idx

    @staticmethod
    def dQ_sum(warpgroup_idx):
        return NamedBarrierBwd.dQSum.value + warpgroup_idx

    @staticmethod
    def dQ_free(parity):
        return NamedBarrierBwd.dQFree.value + parity
