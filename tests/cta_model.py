"""A model of the backward kernel's warps: every role of a few CTAs, barrier by barrier as in the kernel's code.

With as many warps as matter. What a step needs of other CTAs is one turnstile per dQ tile; what is computed is nothing.
"""

import itertools
from collections import Counter
from typing import NamedTuple

from cute_dash.config import CLAIM_LOOKAHEAD, NUM_MMA_WARPGROUPS, NUM_WORK_STAGES
from cute_dash.kernels.roles import NUM_WORKING_PRODUCER_WARPS
from tests.sm_model import Buffer, BulkGroup, Mbarrier, NamedBarrier, Ring, Tasks, check, copy_in, ready

WARPS = 2  # of an MMA warpgroup: enough to be out of step with each other
NUM_MMA_WARPS = NUM_MMA_WARPGROUPS * WARPS
Q_BYTES, STATS_BYTES, DO_BYTES, K_BYTES, V_BYTES, SUM_BYTES = 1, 2, 4, 8, 16, 32  # any numbers


class Turn(NamedTuple):
    """One step of a work tile, as the store warps see it."""

    dQ_tile: tuple
    lock_value: int | None  # None: the schedule has no order
    finishes: bool

    @property
    def adds_sum(self):
        return self.finishes and self.lock_value > 0


def list_turns(config, schedule, shape, work_idx, sequence):
    """The steps of a work tile."""
    tile = schedule.get_work_tile(work_idx, shape)
    m_blocks = [schedule.get_m_block(step, tile, shape) for step in range(schedule.get_num_steps(tile, shape))]
    turns = []
    for member, m_block in itertools.product(range(shape.group_size), m_blocks):
        dQ_tile = (sequence, tile.batch_idx, tile.head_idx, member, m_block)
        value = schedule.get_lock_value(m_block, tile, shape)
        is_last = value == schedule.get_lock_count(m_block, tile, shape) - 1
        turns.append(
            Turn(dQ_tile, value, is_last and config.fuse_dQ) if schedule.ordered else Turn(dQ_tile, None, False)
        )
    return turns


class Kernel(Tasks):
    """A launch. Several shapes are sequences of different lengths; `bug` names the rule that is broken, if any."""

    def __init__(self, config, schedule, shapes, num_ctas, rng, bug=None):
        super().__init__(rng)
        self.config, self.bug = config, bug
        cooperative = len(shapes) == 1 and schedule.min_resident_ctas(shapes[0]) > 1
        self.claims_early = not cooperative or bug == "claims are early where tiles wait for later ones"
        self.work = []  # the steps of every work index; None: void
        for sequence, shape in enumerate(shapes):
            indices = range(shape.num_work_tiles)
            self.work += [list_turns(config, schedule, shape, work_idx, sequence) for work_idx in indices]
            self.work += [None] * (len(shapes) - 1)
        self.num_claimed = 0
        self.num_steps_left = sum(map(len, filter(None, self.work)))
        self.semaphores = Counter()
        self.ctas = [Cta(self) for _ in range(num_ctas)]

    def claim(self):
        """The steps of the next work tile; None if there is none left."""
        for turns in self.work[self.num_claimed :]:
            self.num_claimed += 1
            if turns is not None:
                return turns

    def run(self):
        super().run()
        check(self.num_steps_left == 0, "steps are left")
        for cta in self.ctas:
            cta.check_end()


class Cta:
    def __init__(self, kernel):
        config = kernel.config
        self.kernel, self.config = kernel, config
        self.Q, self.dO = (Ring(stages, NUM_MMA_WARPS) for stages in (config.num_stages, config.num_stages_dO))
        self.KV = Ring(1, 1)
        self.work = Ring(NUM_WORK_STAGES, NUM_MMA_WARPS + NUM_WORKING_PRODUCER_WARPS)
        self.sums = [Mbarrier(1) for _ in range(2)]
        self.named_barriers, self.buffers = [], []
        self.PdS, self.epilogue = self.make_named(2, NUM_MMA_WARPS)
        self.dQ_free = self.make_named(2, 2)
        self.dQ_empty, self.dQ_sum = (self.make_named(NUM_MMA_WARPGROUPS, WARPS + i) for i in (1, 0))
        self.dQ_full = [self.make_named(2, WARPS + 1) for _ in range(NUM_MMA_WARPGROUPS)]
        self.sQ = self.make_buffers("sQ", config.num_stages)
        self.sdO = self.make_buffers("sdO", config.num_stages_dO)
        self.sdS, self.sP = (self.make_buffers(name, config.num_dS_stages) for name in ("sdS", "sP"))
        self.sdQ, self.sWork = self.make_buffers("sdQ", NUM_MMA_WARPGROUPS), self.make_buffers("sWork", NUM_WORK_STAGES)
        (self.sK,), (self.sV,), (self.sDuty,) = (self.make_buffers(name, 1) for name in ("sK", "sV", "sDuty"))
        self.claimed = {}  # what is in sWork: the steps, None at the end
        self.duty = None  # what is in sDuty: the Turn
        self.dKV_group = BulkGroup(kernel)
        for role in (self.load(), *map(self.store_dQ, range(2)), *map(self.mma, range(NUM_MMA_WARPS))):
            kernel.start(role)

    def make_named(self, count, num_warps):
        self.named_barriers += (barriers := [NamedBarrier(num_warps) for _ in range(count)])
        return barriers

    def make_buffers(self, name, count):
        self.buffers += (buffers := [Buffer(name) for _ in range(count)])
        return buffers

    def check_end(self):
        check(not any(barrier.arrived for barrier in self.named_barriers), "a named barrier ends unbalanced")
        for buffer in self.buffers:
            check(buffer.num_writes == buffer.num_reads == 0, f"{buffer.name}: {buffer.tag} is not used up")

    # ---- claimed work tiles

    def publish_claim(self, work_it):
        turns = self.claimed[work_it] = self.kernel.claim()
        yield from self.work.wait_empty(work_it)
        num_reads = NUM_WORKING_PRODUCER_WARPS + NUM_MMA_WARPS * (1 if turns is None else 2)
        self.sWork[work_it % NUM_WORK_STAGES].write(work_it, 1, num_reads)
        self.work.arrive_full(work_it)

    def read_work(self, work_it):
        yield from self.work.wait_full(work_it)
        self.sWork[work_it % NUM_WORK_STAGES].end_read(work_it)
        return self.claimed[work_it]

    def next_work(self, work_it):
        turns = yield from self.read_work(work_it)
        self.work.arrive_empty(work_it)
        return turns

    # ---- LOAD

    def load(self):
        it = 0
        for work_it in itertools.count():
            turns = yield from self.next_work(work_it)
            if turns is None:
                return
            for step in range(len(turns)):
                yield from self.load_step(it, step == 0, work_it, len(turns))
                it += 1
            if not turns:
                yield from self.open_KV(work_it)

    def load_step(self, it, is_first, work_it, num_steps):
        stage, stage_dO, kernel = it % self.config.num_stages, it % self.config.num_stages_dO, self.kernel
        yield from self.Q.wait_empty(it)
        k_bytes = K_BYTES if is_first and kernel.bug != "K is not announced" else 0
        barrier_Q = self.Q.arrive_full(it, Q_BYTES + STATS_BYTES + k_bytes)
        copy_in(kernel, self.sQ[stage], it, 2, NUM_MMA_WARPS, barrier_Q, Q_BYTES)
        copy_in(kernel, self.sQ[stage], it, 2, NUM_MMA_WARPS, barrier_Q, STATS_BYTES)
        yield from self.dO.wait_empty(it)
        barrier_dO = self.dO.arrive_full(it, DO_BYTES + V_BYTES * is_first)
        copy_in(kernel, self.sdO[stage_dO], it, 1, NUM_MMA_WARPS, barrier_dO, DO_BYTES)
        if is_first:
            yield from self.open_KV(work_it)
            copy_in(kernel, self.sK, ("K", work_it), 1, num_steps * NUM_MMA_WARPS, barrier_Q, K_BYTES)
            copy_in(kernel, self.sV, ("V", work_it), 1, num_steps * NUM_MMA_WARPS, barrier_dO, V_BYTES)

    def open_KV(self, work_it):
        yield from self.KV.wait_empty(work_it)
        if self.config.local:
            self.KV.arrive_full(work_it)

    # ---- STORE_DQ

    def store_dQ(self, parity):
        group, it, num_sums = BulkGroup(self.kernel), 0, 0
        if parity == 0:
            yield from self.publish_claim(0)
        else:
            self.dQ_free[0].arrive(parity)
        for work_it in itertools.count():
            turns = yield from self.next_work(work_it)
            if turns is None:
                break
            for step in range((it + parity) & 1, len(turns), 2):
                next_it = work_it + 1 if step == len(turns) - 1 else None
                yield from self.store_step(parity, it + step, turns[step], group, num_sums, next_it)
                num_sums += turns[step].adds_sum
            it += len(turns)
            if not turns and parity == 0:
                yield from self.publish_claim(work_it + 1)
        if parity == it & 1:
            yield from self.dQ_free[parity].sync(parity)
        group.check_exit()

    def store_step(self, parity, it, turn, group, num_sums, next_it):
        """`next_it`: the number of the claim that comes with this step, if one does."""
        if next_it is not None and self.kernel.claims_early and self.comes_soon(turn):
            yield from self.publish_claim(next_it)
            next_it = None
        if turn.finishes:
            yield from self.wait_turn(turn)
        if self.kernel.bug != "the staging buffer is not awaited":
            yield from self.dQ_free[parity].sync(parity)
        if turn.adds_sum:
            self.sums[parity].arrive(SUM_BYTES * NUM_MMA_WARPGROUPS)
            for sdQ in self.sdQ:
                copy_in(self.kernel, sdQ, ("sum", it), 1, WARPS, self.sums[parity], SUM_BYTES)
            yield from self.sums[parity].wait(num_sums & 1)
        self.sDuty.write(it, 1, NUM_MMA_WARPS)
        self.duty = turn
        for barrier in self.dQ_empty:
            barrier.arrive("store")
        if not turn.finishes:
            yield from self.wait_turn(turn)
        if next_it is not None:
            yield from self.publish_claim(next_it)
        for sdQ, barriers in zip(self.sdQ, self.dQ_full, strict=True):
            yield from barriers[parity].sync("store")
            group.copy_out(sdQ, ("dQ", it))
        yield from group.wait(read=True)
        self.dQ_free[1 - parity].arrive(parity)
        if not turn.finishes:
            yield from group.wait(read=False)
            self.kernel.semaphores[turn.dQ_tile] += 1
        self.kernel.num_steps_left -= 1

    def comes_soon(self, turn):
        return turn.lock_value is None or self.kernel.semaphores[turn.dQ_tile] >= turn.lock_value - CLAIM_LOOKAHEAD

    def wait_turn(self, turn):
        if turn.lock_value is not None:
            yield lambda: self.kernel.semaphores[turn.dQ_tile] == turn.lock_value

    # ---- MMA

    def mma(self, warp):
        it, bug = 0, self.kernel.bug
        for work_it in itertools.count():
            turns = yield from self.read_work(work_it)
            if turns is None:
                break
            if early := bug == "the work slot is released before it is read again":
                self.work.arrive_empty(work_it)
            if self.config.local and bug != "MMA runs ahead of LOAD":
                yield from self.KV.wait_full(work_it)
            if self.config.prefetch_KV:
                yield from self.wait_dKV_sent(warp, turns)
            if self.config.K_in_regs and turns:
                yield from self.Q.wait_full(it)
                self.sK.begin_read(("K", work_it))
            for _ in turns:
                yield from self.mma_step(warp, it, work_it)
                it += 1
            yield from self.read_work(work_it)
            if not early:
                self.work.arrive_empty(work_it)
            yield from self.write_dKV(warp, work_it)
        if warp == 0:
            if bug != "a CTA exits while dK and dV are being read":
                yield from self.dKV_group.wait(read=True)
            self.dKV_group.check_exit()

    def wait_dKV_sent(self, warp, turns):
        bug = self.kernel.bug
        if bug == "dK and dV are not awaited":
            return
        if bug == "a tile without steps does not wait for dK and dV" and not turns:
            return
        if warp == 0:
            yield from self.dKV_group.wait(read=True)
        yield from self.epilogue.sync(warp)

    def mma_step(self, warp, it, work_it):
        stage, stage_dO = it % self.config.num_stages, it % self.config.num_stages_dO
        stage_dS, warpgroup = it % self.config.num_dS_stages, warp // WARPS
        staged = [self.sdS[stage_dS]] + [self.sP[stage_dS]] * self.config.split_columns
        yield from self.Q.wait_full(it)
        self.sQ[stage].begin_read(it)
        self.sK.begin_read(("K", work_it))
        yield from self.dO.wait_full(it)
        self.sdO[stage_dO].begin_read(it)
        self.sV.begin_read(("V", work_it))
        yield ready
        self.sV.end_read(("V", work_it))
        if self.config.num_dS_stages == 1 and self.kernel.bug != "P and dS are written over those of the step before":
            yield from self.PdS.sync(warp)
        for buffer in staged:
            buffer.write(("dS", it), NUM_MMA_WARPS, NUM_MMA_WARPS)
        yield from self.PdS.sync(warp)
        for buffer in staged:
            buffer.begin_read(("dS", it))
        yield ready
        inputs = [(self.dO, self.sdO[stage_dO]), (self.Q, self.sQ[stage])]
        dK_first = self.config.split_columns and not self.config.add_dV_first
        early, late = reversed(inputs) if dK_first else inputs
        self.release(*early, it)
        yield from self.dQ_empty[warpgroup].sync(warp)
        self.sDuty.end_read(it)
        parts = [
            self.stage_dQ(warp, warpgroup, it, self.duty),
            self.finish_reads(it, [(self.sK, ("K", work_it)), *((buffer, ("dS", it)) for buffer in staged)], late),
        ]
        # a warpgroup whose keys are hidden has nothing left to read when it has its part of dQ; any step may be one
        hidden = self.config.skip_hidden_keys and (it + warpgroup) % 3 == 0
        for part in reversed(parts) if hidden else parts:
            yield from part

    def finish_reads(self, it, reads, late):
        yield ready
        for buffer, tag in reads:
            buffer.end_read(tag)
        self.release(*late, it)

    def release(self, ring, buffer, it):
        buffer.end_read(it)
        ring.arrive_empty(it)

    def stage_dQ(self, warp, warpgroup, it, duty):
        yield ready
        if duty.adds_sum:
            self.sdQ[warpgroup].end_read(("sum", it))
        if duty.finishes and self.kernel.bug != "dQ is written while others read the sum":
            yield from self.dQ_sum[warpgroup].sync(warp)
        self.sdQ[warpgroup].write(("dQ", it), WARPS, 1)
        self.dQ_full[warpgroup][it & 1].arrive(warp)

    def write_dKV(self, warp, work_it):
        prefetches, bug, dKV = self.config.prefetch_KV, self.kernel.bug, ("dKV", work_it)
        buffers = self.sdS if prefetches else (self.sK, self.sV)
        if early := bug == "K and V are released before all have read them":
            if warp == 0:
                self.KV.arrive_empty(work_it)
        yield from self.epilogue.sync(warp)
        if prefetches and warp == 0 and not early:
            self.KV.arrive_empty(work_it)
        for buffer in buffers:
            buffer.write(dKV, NUM_MMA_WARPS, 1)
        yield from self.epilogue.sync(warp)
        if warp == 0:
            for buffer in buffers:
                self.dKV_group.copy_out(buffer, dKV)
            if not prefetches:
                if bug != "K and V are loaded over dK and dV":
                    yield from self.dKV_group.wait(read=True)
                self.KV.arrive_empty(work_it)
