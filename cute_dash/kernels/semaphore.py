"""The turnstile: global-memory counters that let CTAs add to one dQ tile in a fixed order (device).

One counter per dQ tile, zero at launch. The work tile with lock value v waits until the counter reads v, adds its
partial dQ and increments the counter. Where the main kernel finishes dQ, the last one loads the sum instead of adding
to it, in the same place, and nobody waits for an increment.

Why the bits cannot change, in terms of the PTX memory model. The addition is a bulk operation of the async proxy; the
counter is accessed through the generic proxy. Contributor v, one lane:

    ld.acquire.gpu counter == v            synchronizes with the release of contributor v - 1
    fence.proxy.async.global               orders that acquire before the async-proxy accesses below
    cp.(reduce.)async.bulk dQ += partial   async proxy
    cp.async.bulk.wait_group 0             complete: the writes are performed and visible to this lane. `.read` would
                                           only say that the source may be reused
    fence.proxy.async.global               orders the async-proxy writes before the generic release below
    red.release.gpu counter += 1           publishes them to contributor v + 1

Every step is by the same lane, so program order links them, and release/acquire pairs link the lanes: the additions
to one tile form a chain in happens-before order. A weaker release or an earlier one breaks the chain; both were
measured to change bits.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

WAIT_LIMIT_NS = 2_000_000_000  # debug builds give up on a turn after this long


@cute.jit
def wait_turn(counter: cute.Pointer, lock_value: Int32):
    """Spins until `counter` reads `lock_value`. Called by one lane."""
    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while seen != lock_value:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")


@cute.jit
def wait_turn_bounded(counter: cute.Pointer, lock_value: Int32) -> Int32:
    """`wait_turn` that gives up after WAIT_LIMIT_NS; returns the value last seen, equal to `lock_value` on success."""
    start = cute.arch.globaltimer()
    seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    waited = Int64(0)
    while seen != lock_value and waited < WAIT_LIMIT_NS:
        seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        waited = cute.arch.globaltimer() - start
    cute.arch.fence_proxy("async.global")
    return seen


@cute.jit
def release_turn(counter: cute.Pointer):
    """Passes the turn on. Called by the lane that waited, after its bulk operations completed."""
    cute.arch.fence_proxy("async.global")
    cute.arch.red(counter, Int32(1), op="add", dtype=Int32, sem="release", scope="gpu")


@cute.jit
def peek(counter: cute.Pointer) -> Int32:
    """What a counter reads, for the whole warp. Orders nothing: for a decision that changes no bits."""
    value = Int32(0)
    if cute.arch.lane_idx() == 0:
        value = cute.arch.load(counter, Int32, sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(value, 0)


@cute.jit
def claim_next(counter: cute.Pointer) -> Int32:
    """Claims the next number of a counter for the whole warp."""
    value = Int32(0)
    if cute.arch.lane_idx() == 0:
        value = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(value, 0)
