"""The kernel's claim protocol, modelled: two store warps per CTA, one staging buffer, claims from a counter.

`check` assumes that a CTA claims a tile when it is done with one. The kernel has two store warps that each run ahead on
their own steps, and claims earlier: when a warp comes to the last step of a tile ("look"), if that turn comes soon;
else, and always where more than one CTA must be resident, when the last step has its turn and the staging buffer
("buffer"), so that no turn is left to wait for. This model makes every event of a store warp a separate step and runs
them in random order; earlier claims where more than one CTA must be resident are the negative controls, and deadlock.
"""

import itertools
import random
from collections import Counter, deque

import pytest

from cute_dash import registry
from cute_dash.config import CLAIM_LOOKAHEAD, get_config
from cute_dash.problem import MASKS, Window, normalize_mask
from cute_dash.schedule import needs_one_cta
from cute_dash.validation import TESTED_SCHEDULES

ORDERED = sorted(TESTED_SCHEDULES - {"unordered"})


class Cta:
    """What one CTA's store warps have left to do, and how far its staging buffer is.

    A step of the running number `it` belongs to warp it % 2, which takes its turn, adds and releases, in this order,
    and then only looks at its next step. Steps are staged one after the other: the buffer must have been read. The
    kernel waits for the buffer before it waits for a turn, but for the last to add to a dQ tile; here every turn may
    come first.
    """

    def __init__(self):
        self.steps = (deque(), deque())  # of each warp: (it, dQ tile, lock value, whether it claims)
        self.has_looked = [False, False]  # at its next step
        self.holds_turn = [False, False]
        self.has_buffer = [False, False]
        self.num_steps = 0
        self.num_added = 0
        self.claims_left = 1  # a CTA begins with a claim, and makes another where its protocol says so

    def take(self, schedule, shape, work_idx, sequence=0):
        tile = schedule.get_work_tile(work_idx, shape)
        num_steps = schedule.get_num_steps(tile, shape)
        self.claims_left += num_steps == 0  # nothing to wait for: the next is claimed at once
        for member, step in itertools.product(range(shape.group_size), range(num_steps)):
            m_block = schedule.get_m_block(step, tile, shape)
            target = (sequence, tile.batch_idx, tile.head_idx * shape.group_size + member, m_block)
            lock_value = schedule.get_lock_value(m_block, tile, shape)
            claims = (member, step) == (shape.group_size - 1, num_steps - 1)
            self.steps[self.num_steps % 2].append((self.num_steps, target, lock_value, claims))
            self.num_steps += 1


class Kernel:
    """All CTAs of a launch.

    Args:
        claim_after: the event of a tile's last step that claims the next tile, "look", "turn", "buffer" or "add".
        claims_early: whether "look" does, if the turn comes soon; by default as in the kernel.
    """

    def __init__(self, schedule, shape, num_ctas, claim_after="buffer", claims_early=None):
        self.schedule, self.shape, self.claim_after = schedule, shape, claim_after
        self.claims_early = schedule.min_resident_ctas(shape) == 1 if claims_early is None else claims_early
        self.ctas = [Cta() for _ in range(num_ctas)]
        self.semaphores = Counter()
        self.num_claimed = 0
        self.num_work = shape.num_work_tiles

    def claim(self, cta):
        cta.claims_left -= 1
        cta.take(self.schedule, self.shape, self.num_claimed)

    def enabled(self):
        """The events that can happen now, as (cta, event, warp)."""
        for cta in self.ctas:
            if cta.claims_left and self.num_claimed < self.num_work:
                yield cta, "claim", None
            for warp in (0, 1):
                if not cta.steps[warp]:
                    continue
                it, target, lock_value, _ = cta.steps[warp][0]
                if not cta.has_looked[warp]:
                    yield cta, "look", warp
                elif not cta.holds_turn[warp]:
                    if self.semaphores[target] == lock_value:
                        yield cta, "turn", warp
                elif not cta.has_buffer[warp]:
                    if cta.num_added == it:  # the steps before have left it
                        yield cta, "buffer", warp
                else:
                    yield cta, "add", warp

    def happen(self, cta, event, warp):
        if event == "claim":
            self.claim(cta)
            self.num_claimed += 1
            return
        it, target, lock_value, claims = cta.steps[warp][0]
        if event == "look":
            cta.has_looked[warp] = True
        elif event == "turn":
            cta.holds_turn[warp] = True
        elif event == "buffer":
            cta.has_buffer[warp] = True
        else:  # adding and passing the turn on need no other CTA, so they are one event
            cta.num_added += 1
            cta.has_looked[warp] = cta.holds_turn[warp] = cta.has_buffer[warp] = False
            self.semaphores[target] += 1
            cta.steps[warp].popleft()
        comes_soon = self.semaphores[target] >= lock_value - CLAIM_LOOKAHEAD
        if claims and (event == self.claim_after or (event == "look" and self.claims_early and comes_soon)):
            cta.claims_left += 1
            if event == "look":  # the step claims once
                cta.steps[warp][0] = it, target, lock_value, False

    def run(self, rng):
        """True if every work tile was finished, False if no event was left before."""
        while events := list(self.enabled()):
            self.happen(*rng.choice(events))
        return self.num_claimed == self.num_work and not any(any(cta.steps) for cta in self.ctas)


class PackedKernel(Kernel):
    """Sequences of different lengths: each has its own orders and turnstiles, and some claims between them are void."""

    def __init__(self, schedule, shapes, num_ctas, rng):
        super().__init__(schedule, shapes[0], num_ctas, claims_early=True)
        self.work = []
        for sequence, shape in enumerate(shapes):
            self.work += [(shape, work_idx, sequence) for work_idx in range(shape.num_work_tiles)]
            self.work += [None] * rng.randint(0, shape.num_heads)
        self.num_work = len(self.work)

    def claim(self, cta):
        if (work := self.work[self.num_claimed]) is None:
            return  # the CTA claims once more
        cta.claims_left -= 1
        shape, work_idx, sequence = work
        cta.take(self.schedule, shape, work_idx, sequence)


def shape_of(seqlen_q, seqlen_k, num_heads, head_dim, causal, window_size=(-1, -1), group_size=1):
    causal, window = normalize_mask(causal, window_size, seqlen_q, seqlen_k)
    config = get_config(head_dim, causal, window is not None)
    return config.make_shape(1, num_heads, seqlen_q, seqlen_k, window, group_size)


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ORDERED)
def test_no_timing_deadlocks_the_kernels_claims(name, mask, group_size):
    """The last lengths leave a window's first KV tiles no step."""
    rng = random.Random(name)
    schedule = registry.load(name)
    window_size = (150, 20) if mask == "local" else (-1, -1)
    for seqlen_q, seqlen_k in ((384, 384), (300, 300), (1000, 1000), (520, 900), (900, 520), (100, 700)):
        shape = shape_of(seqlen_q, seqlen_k, 3, 64, mask == "causal", window_size, group_size)
        if not schedule.can_implement(shape):
            continue
        residents = schedule.min_resident_ctas(shape)
        for num_ctas in {residents, residents + 1, residents + 3, 20}:
            for _ in range(5):
                assert Kernel(schedule, shape, num_ctas).run(rng), f"{shape} with {num_ctas} CTAs"


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [name for name in ORDERED if needs_one_cta(registry.load(name))])
def test_no_timing_deadlocks_sequences_of_different_lengths(name, mask):
    rng = random.Random(name)
    schedule = registry.load(name)
    window = Window(150, 20) if mask == "local" else None
    config = get_config(64, mask == "causal", window is not None)
    for _ in range(10):
        lengths = [(rng.randint(1, 600), rng.randint(1, 600)) for _ in range(rng.randint(1, 5))]
        shapes = [config.make_shape(1, 2, *pair, window, 2) for pair in lengths]
        for num_ctas in (1, 2, 5, 20):
            assert PackedKernel(schedule, shapes, num_ctas, rng).run(rng), f"{lengths} with {num_ctas} CTAs"


@pytest.mark.parametrize(("claim_after", "claims_early"), [("turn", False), ("look", False), ("buffer", True)])
def test_a_claim_with_a_turn_outstanding_deadlocks(claim_after, claims_early):
    """A tile can come to its last step, or have that turn, before others; it then claims a tile that these wait for."""
    schedule, shape = registry.load("symmetric_shift"), shape_of(384, 384, 2, 64, True)
    assert schedule.min_resident_ctas(shape) == 2
    rng = random.Random(0)
    outcomes = {Kernel(schedule, shape, 2, claim_after, claims_early).run(rng) for _ in range(200)}
    assert False in outcomes


def test_tiles_without_steps_are_among_those_tested():
    shape = shape_of(100, 700, 3, 64, False, (150, 20))
    schedule = registry.load("shortest_first")
    tiles = [schedule.get_work_tile(i, shape) for i in range(shape.num_work_tiles)]
    assert [schedule.get_num_steps(tile, shape) for tile in tiles].count(0) == 9


def test_the_model_refuses_too_few_residents():
    schedule, shape = registry.load("shift"), shape_of(512, 512, 2, 64, False)
    assert schedule.min_resident_ctas(shape) == 4
    assert not any(Kernel(schedule, shape, 3).run(random.Random(seed)) for seed in range(10))
