"""Attention backward for one KV tile per CTA at a time, on Hopper (sm_90a): the main kernel.

For a work tile (n_block of one stream) and each m_block it visits, in the schedule's loop order:

    (1) S^T  = K Q^T          (tile_n, tile_m)      P^T  = exp2(scale * log2e * S^T - LSE * log2e), see `stats`
    (2) dP^T = V dO^T         (tile_n, tile_m)      dS^T = P^T * (dP^T - dPsum)
    (3) dV  += P^T dO         (tile_n, head_dim_v)  P^T from registers, or by columns from shared memory
    (4) dQ   = dS K           (tile_m, head_dim)    added to the fp32 dQ tile in the schedule's accumulation order
    (5) dK  += dS^T Q         (tile_n, head_dim)    dS^T from registers, or by columns from shared memory

The two consumer warpgroups share a step out by keys, each with 64 of the tile's 128, or, where dK and dV of 128 keys
exceed the registers, by columns: (1) and (2) by queries, (3) to (5) by columns of the head dim, for all 64 keys. With
96 keys (`swap_operands`) S, dP, dV^T and dK^T are computed instead, whose columns are keys, 48 for each warpgroup; (4)
is as with 64.

Warp roles of a CTA (4 producer warps, then the consumer warpgroups):

    LOAD                loads K, V once per work tile and Q/LSE/dPsum, dO per step (TMA)
    STORE_DQ_EVEN/ODD   take turns on the steps: wait for the tile's turn, add the staged dQ partial, pass the turn on.
                        One warp alone cannot: completion, fence and flag of one step must hide behind the next step.
                        Whoever has a work tile's last step claims the next tile and decodes it for all warps; after a
                        tile without steps EVEN does
    MMA warpgroups      everything above, then dK and dV

The last to add to a dQ tile finishes it: the store warp brings the sum so far into the staging buffer, the MMA
warpgroups add theirs, scale and round, and what leaves is a dQ tile in the output dtype.

Pipelines (producer -> consumers; full: what arrives; empty: who arrives):

    ring_Q   LOAD -> MMA     full: Q and LSE, dPsum; a work tile's first also K     empty: each MMA warp after (5)
    ring_dO  LOAD -> MMA     full: dO; a work tile's first also V                   empty: each MMA warp after (3)
    ring_KV  LOAD -> MMA     full: only with a window, see `open_KV`
                             empty: one MMA warp after the last step of all, or when dK and dV have left sK and sV
    ring_work STORE_DQ -> all  full: a work tile, or `NO_TILE`
                             empty: each reading warp, those of MMA in the epilogue, where they read it once more
    sums[parity]                a store warp's own: the sum so far has arrived
    dQFree[parity]              store warp -> the other one, of this parity: the staging buffer has been read
    dQEmpty[warpgroup]          store warp -> MMA warpgroup: the staging buffer is theirs, and `sDuty` says what for;
                                awaited while (4) runs
    dQFull[warpgroup][parity]   MMA warpgroup -> store warp: its half of the dQ partial, or of dQ, is staged

dK and dV leave through the memory of sdS (`prefetch_KV`), so that the next K and V load during the epilogue, or, where
that does not fit, through sK and sV.

The tiles have head_dim_padded columns, those of V, dO and dV head_dim_v_padded. Where the tensors have less, the TMA
loads zeros for the columns beyond, which add nothing to S and dP, and leaves out those of dQ, dK and dV when it stores.

With several query heads per KV head (GQA, MQA) a work tile takes the schedule's steps for one query head after the
other: dK and dV stay in registers for the whole group, and each query head has dQ tiles and turnstiles of its own.

With sequences of different lengths (`varlen`) each sequence is ordered by the schedule as a batch of one, and their
work tiles are claimed sequence by sequence; a role enters the sequence of its work tile and then sees nothing else.

CTAs are persistent and claim work tiles from an atomic counter in tile order, each before the end of the tile before
(`publish_claim`: when, and why then). The order of additions to dQ is kept by `semaphore`; lock value 0 stores instead
of adding, so dQaccum is never zero-filled. A sliding window can leave a KV tile no step, because no query sees its
keys: all roles then pass it by but for the epilogue, which writes zeros.
Everything the schedule decides is asked of `self.schedule` through the protocol; the kernel knows no schedule.

Sources: FlashAttention-2 and -3 papers (tiling, warp specialization), DASH (arXiv 2601.21824; order as a schedule).
"""

from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cute_dash.config import CLAIM_LOOKAHEAD, NUM_WORK_STAGES, BwdConfig
from cute_dash.ints import maximum, minimum, where
from cute_dash.kernels import debug, mask, semaphore, varlen, wgmma
from cute_dash.kernels.bundles import Gmem, QTile, Rings, Smem, TmaAtoms, map_rows
from cute_dash.kernels.copy import (
    bulk_add_f32,
    bulk_store,
    copy_vector,
    fragment_registers,
    fragment_slots,
    partition_tma,
)
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.pipeline import Ring, make_ring
from cute_dash.kernels.roles import (
    NUM_PRODUCER_WARPS,
    NUM_WORKING_PRODUCER_WARPS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    NamedBarrierBwd,
    WarpRole,
)
from cute_dash.kernels.stats import LOG2_E, make_stats
from cute_dash.kernels.varlen import Sequence
from cute_dash.kernels.wgmma import Gemm, issue_gemm, make_accumulator, stage_of, transpose_view
from cute_dash.kernels.workspace import get_first_tile
from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, WorkTile

NO_TILE = -1  # in place of a work tile's numbers: there is none left


class DQDuty(IntEnum):
    """What the MMA warpgroups do with their dQ partial; `sDuty` holds one."""

    STAGE = 0  # others add after this CTA: as it is, in fp32
    FINISH = 1  # the last: add the sum so far, then scale and round
    FINISH_ALONE = 2  # the only one: scale and round


class Turn(NamedTuple):
    """A work tile's place in the accumulation order of a dQ tile."""

    lock_value: Int32
    finishes: Boolean  # the last one, where the main kernel finishes dQ


def is_tile(tile: WorkTile) -> Boolean:
    """Whether a claim brought a work tile."""
    return tile.n_block != NO_TILE


class MmaContext(NamedTuple):
    """What an MMA thread keeps for the whole kernel."""

    gemm_S: Gemm
    gemm_dP: Gemm
    gemm_dV: Gemm
    gemm_dK: Gemm
    gemm_dQ: Gemm
    stats: tuple
    store_S: cute.TiledCopy
    tRS_sdS: cute.Tensor
    tRS_sP: cute.Tensor | None
    tdQsdQ: cute.Tensor
    tidx: Int32
    warpgroup_idx: Int32
    softmax_scale: Float32


class FlashAttentionBackwardSm90:
    """The main backward kernel for one configuration, dtype and schedule."""

    def __init__(self, config: BwdConfig, dtype, schedule: Schedule, debug: bool = False, cooperative: bool = False):
        self.config = config
        self.cooperative = cooperative
        self.dtype = dtype
        self.schedule = schedule
        self.debug = debug
        self.fuse_dQ = config.fuse_dQ and schedule.ordered
        self.stats = make_stats(config)
        self.num_mma_warps = 4 * config.num_mma_warpgroups
        self.num_mma_threads = WARPGROUP_THREADS * config.num_mma_warpgroups
        self.num_threads = WARPGROUP_THREADS + self.num_mma_threads
        self.shape_S = config.in_order(config.tile_n, config.tile_m)
        self.dQ_values = config.tile_m * config.head_dim_padded // config.num_mma_warpgroups

    # ---- host ------------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(
        self,
        gmem: Gmem,
        extents: Extents,
        softmax_scale: Float32,
        num_ctas: Int32,
        stream,
    ):
        """Launches the kernel. `gmem` holds plain tensors; num_ctas must all be able to be resident."""
        config = self.config
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tiles = wgmma.get_tiles(config)
        layouts = wgmma.make_operand_layouts(self.dtype, config, staged=False)
        if const_expr(extents.varlen):
            gmem = map_rows(gmem, varlen.make_ragged, varlen.make_ragged)
        atom_Q, mQ = cpasync.make_tiled_tma_atom(load, gmem.mQ, layouts.Q, tiles.Q)
        atom_K, mK = cpasync.make_tiled_tma_atom(load, gmem.mK, layouts.K, tiles.K)
        atom_V, mV = cpasync.make_tiled_tma_atom(load, gmem.mV, layouts.V, tiles.V)
        atom_dO, mdO = cpasync.make_tiled_tma_atom(load, gmem.mdO, layouts.dO, tiles.dO)
        atom_dK, mdK = cpasync.make_tiled_tma_atom(store, gmem.mdK, layouts.K, tiles.K)
        atom_dV, mdV = cpasync.make_tiled_tma_atom(store, gmem.mdV, layouts.V, tiles.V)
        atom_dQ, mdQ = None, None
        if const_expr(self.fuse_dQ):
            tile_dQ = wgmma.get_dQ_piece(config)
            layout_dQ = wgmma.make_smem_layout(self.dtype, tile_dQ)
            atom_dQ, mdQ = cpasync.make_tiled_tma_atom(store, gmem.mdQ, layout_dQ, tile_dQ)
        self.kernel(
            gmem._replace(mQ=mQ, mK=mK, mV=mV, mdO=mdO, mdK=mdK, mdV=mdV, mdQ=mdQ),
            TmaAtoms(atom_Q, atom_K, atom_V, atom_dO, atom_dK, atom_dV, atom_dQ),
            extents,
            softmax_scale,
        ).launch(
            grid=(num_ctas, 1, 1),
            block=(self.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=not self.cooperative,
            cooperative=self.cooperative,
        )

    def shared_storage(self):
        """The CTA's shared memory as a cute.struct."""
        config = self.config
        stages = config.num_stages
        element = self.dtype

        def tile(dtype, num_elements, alignment=1024):
            return cute.struct.Align[cute.struct.MemRange[dtype, num_elements], alignment]

        @cute.struct
        class SharedStorage:
            ring_Q: cute.struct.MemRange[Int64, 2 * stages]
            ring_dO: cute.struct.MemRange[Int64, 2 * config.num_stages_dO]
            ring_KV: cute.struct.MemRange[Int64, 2]
            ring_work: cute.struct.MemRange[Int64, 2 * NUM_WORK_STAGES]
            sums: cute.struct.MemRange[Int64, 2]
            sWork: cute.struct.MemRange[Int32, len(WorkTile._fields) * NUM_WORK_STAGES]
            sDuty: cute.struct.MemRange[Int32, 1]
            sOnes: tile(BFloat16, config.ones_size, 128)
            sStats: tile(Float32, config.stats_size * stages, 128)
            sQ: tile(element, config.tile_m * config.head_dim_padded * stages)
            sdO: tile(element, config.tile_m * config.head_dim_v_padded * config.num_stages_dO)
            sK: tile(element, config.tile_n * config.head_dim_padded)
            sV: tile(element, config.tile_n * config.head_dim_v_padded)
            sdS: tile(element, config.dS_size)
            sP: tile(element, config.P_size)
            sdQ: tile(Float32, config.tile_m * config.head_dim_padded)

        return SharedStorage

    # ---- device ----------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(self, gmem: Gmem, atoms: TmaAtoms, extents: Extents, softmax_scale: Float32):
        config = self.config
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.shared_storage())
        smem = self.make_smem(storage)
        rings = Rings(
            make_ring(storage.ring_Q.data_ptr(), config.num_stages),
            make_ring(storage.ring_dO.data_ptr(), config.num_stages_dO),
            make_ring(storage.ring_KV.data_ptr(), 1, has_full=config.local),
            make_ring(storage.ring_work.data_ptr(), NUM_WORK_STAGES),
            storage.sums.data_ptr(),
        )
        if warp_idx == WarpRole.LOAD:
            for atom in atoms:
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                rings.Q.init(1, self.num_mma_warps)
                rings.dO.init(1, self.num_mma_warps)
                rings.KV.init(1, 1)
                rings.work.init(1, self.num_mma_warps + NUM_WORKING_PRODUCER_WARPS)
                for parity in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(rings.sums + parity, 1)
            cute.arch.mbarrier_init_fence()
        if const_expr(config.stats_by_gemm):
            tidx = cute.arch.thread_idx()[0]
            if tidx < config.ones_size:
                self.stats.fill_ones(smem.sOnes, tidx)
            cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        if warp_idx < NUM_PRODUCER_WARPS:
            cute.arch.setmaxregister_decrease(config.num_producer_regs)
            if warp_idx == WarpRole.LOAD:
                self.load_warp(gmem, atoms, extents, smem, rings)
            if warp_idx == WarpRole.STORE_DQ_EVEN or warp_idx == WarpRole.STORE_DQ_ODD:
                self.store_dQ_warp(gmem, atoms, extents, smem, rings, warp_idx - WarpRole.STORE_DQ_EVEN)
        else:
            cute.arch.setmaxregister_increase(config.num_mma_regs)
            self.mma_warpgroup(gmem, atoms, extents, smem, rings, softmax_scale)

    def make_smem(self, storage) -> Smem:
        config = self.config
        stages = config.num_stages
        layouts = wgmma.make_operand_layouts(self.dtype, config, staged=True)
        sK = storage.sK.get_tensor(layouts.K.outer, swizzle=layouts.K.inner)
        sV = storage.sV.get_tensor(layouts.V.outer, swizzle=layouts.V.inner)
        sdK, sdV, sP, sOnes = sK, sV, None, None
        if config.prefetch_KV:
            sdV = storage.sdS.get_tensor(layouts.V.outer, swizzle=layouts.V.inner)
            sdK = storage.sdS.get_tensor(layouts.K.outer, swizzle=layouts.K.inner)
            sdK = cute.make_tensor(sdK.iterator + config.tile_n * config.head_dim_v_padded, sdK.layout)
        if config.split_columns:
            sP = storage.sP.get_tensor(layouts.dS.outer, swizzle=layouts.dS.inner)
        if config.stats_by_gemm:
            sOnes = storage.sOnes.get_tensor(cute.make_layout(config.ones_size))
        num_warpgroups = config.num_mma_warpgroups
        rows, columns = wgmma.get_dQ_piece(config)
        layout_dQ = wgmma.make_smem_layout(self.dtype, (rows, columns))
        # dQ pieces lie over the fp32 ones of their warpgroup, which take twice the bytes
        layout_dQ_outer = cute.append(layout_dQ.outer, cute.make_layout(num_warpgroups, stride=2 * rows * columns))
        return Smem(
            sQ=storage.sQ.get_tensor(layouts.Q.outer, swizzle=layouts.Q.inner),
            sK=sK,
            sV=sV,
            sdK=sdK,
            sdV=sdV,
            sdO=storage.sdO.get_tensor(layouts.dO.outer, swizzle=layouts.dO.inner),
            sdS=storage.sdS.get_tensor(layouts.dS.outer, swizzle=layouts.dS.inner),
            sP=sP,
            sStats=storage.sStats.get_tensor(cute.make_layout((config.stats_size, stages))),
            sOnes=sOnes,
            sdQaccum=storage.sdQ.get_tensor(cute.make_layout((self.dQ_values, num_warpgroups))),
            sdQ=storage.sdQ.get_tensor(layout_dQ_outer, swizzle=layout_dQ.inner, dtype=self.dtype),
            sWork=storage.sWork.get_tensor(cute.make_layout((len(WorkTile._fields), NUM_WORK_STAGES))),
            sDuty=storage.sDuty.get_tensor(cute.make_layout(1)),
        )

    def make_shape(self, extents: Extents) -> ProblemShape:
        return extents.make_shape(self.config)

    def get_q_tile(self, step: Int32, member: Int32, tile: WorkTile, shape: ProblemShape) -> QTile:
        """The Q tile of a step of the query head number `member` of the tile's group."""
        head_idx = tile.head_idx * shape.group_size + member
        stream = tile.batch_idx * shape.num_query_heads + head_idx
        return QTile(self.schedule.get_m_block(step, tile, shape), head_idx, stream)

    def get_num_work(self, extents: Extents) -> Int32:
        """With sequences of different lengths: the first work index that ends a CTA."""
        end = extents.mCuSeqlensK[extents.batch]
        return get_first_tile(end, extents.batch, self.config.tile_n) * extents.num_heads

    def find_work(self, extents: Extents, work_idx: Int32) -> tuple[Sequence, Int32]:
        """With sequences of different lengths: the sequence of a work index, and the index among those of the sequence.

        A sequence's first KV tile, times KV heads, is its first work index. Called by a whole warp.
        """
        tile_n = self.config.tile_n
        n_tile = work_idx // extents.num_heads
        idx = varlen.find_sequence(extents.mCuSeqlensK, n_tile, extents.batch, tile_n)
        sequence = varlen.load_sequence(extents, idx)
        return sequence, work_idx - get_first_tile(sequence.start_k, idx, tile_n) * extents.num_heads

    def enter_work(self, gmem: Gmem, extents: Extents, tile: WorkTile) -> tuple[Gmem, Extents, WorkTile]:
        """What a role works on for a claimed work tile: the tensors, the extents and the tile in its sequence alone.

        All of the problem, where the lengths are equal.
        """
        if not extents.varlen:
            return gmem, extents, tile
        sequence = varlen.load_sequence(extents, tile.batch_idx)
        first_m = get_first_tile(sequence.start_q, sequence.idx, self.config.tile_m)
        gmem = map_rows(
            gmem,
            lambda mX: varlen.view_ragged(mX, sequence.start_q, sequence.seqlen_q),
            lambda mX: varlen.view_ragged(mX, sequence.start_k, sequence.seqlen_k),
        )
        gmem = gmem._replace(
            mStats=varlen.view_tiles(gmem.mStats, 1, first_m),
            mdQaccum=varlen.view_tiles(gmem.mdQaccum, 2, first_m),
            mSemaphore=varlen.view_tiles(gmem.mSemaphore, 0, first_m),
        )
        extents = extents.make_sequence(sequence.seqlen_q, sequence.seqlen_k)
        return gmem, extents, tile._replace(batch_idx=Int32(0))

    def next_work(self, smem: Smem, ring: Ring, work_it: Int32) -> WorkTile:
        """The work tile claimed as this CTA's number `work_it`, or `NO_TILE`; read by a whole consumer warp."""
        tile = self.read_work(smem, ring, work_it)
        self.release_work(ring, work_it)
        return tile

    def read_work(self, smem: Smem, ring: Ring, work_it: Int32) -> WorkTile:
        """`next_work` that can be repeated until the warp has said `release_work`."""
        ring.wait_full(work_it)
        slot = ring.slot(work_it)
        return WorkTile(*(cute.arch.make_warp_uniform(smem.sWork[i, slot]) for i in range(len(WorkTile._fields))))

    def release_work(self, ring: Ring, work_it: Int32):
        cute.arch.sync_warp()
        ring.arrive_empty(work_it)

    # ---- LOAD ------------------------------------------------------------------------------------------------------

    @cute.jit
    def load_warp(self, gmem: Gmem, atoms: TmaAtoms, extents: Extents, smem: Smem, rings: Rings):
        # the preprocess kernel writes LSE and dPsum, and bulk copies read them
        cute.arch.griddepcontrol_wait()
        cute.arch.fence_proxy("async.global")
        cute.arch.griddepcontrol_launch_dependents()
        it, work_it = Int32(0), Int32(0)
        tile = self.next_work(smem, rings.work, work_it)
        while is_tile(tile):
            it = self.load_work_tile(gmem, atoms, extents, smem, rings, tile, it, work_it)
            work_it += 1
            tile = self.next_work(smem, rings.work, work_it)

    @cute.jit
    def load_work_tile(
        self,
        gmem: Gmem,
        atoms: TmaAtoms,
        extents: Extents,
        smem: Smem,
        rings: Rings,
        tile: WorkTile,
        it: Int32,
        work_it: Int32,
    ) -> Int32:
        config = self.config
        gmem, extents, tile = self.enter_work(gmem, extents, tile)
        shape = self.make_shape(extents)
        tiles = wgmma.get_tiles(config)
        # (tile_n, head_dim_padded), (tile_n, head_dim_v_padded)
        gK = cute.local_tile(gmem.mK[None, None, tile.head_idx, tile.batch_idx], tiles.K, (tile.n_block, 0))
        gV = cute.local_tile(gmem.mV[None, None, tile.head_idx, tile.batch_idx], tiles.V, (tile.n_block, 0))
        tKsK, tKgK = partition_tma(atoms.K, smem.sK, gK)
        tVsV, tVgV = partition_tma(atoms.V, smem.sV, gV)
        q_bytes, dO_bytes = config.tile_m * config.head_dim_padded * 2, config.tile_m * config.head_dim_v_padded * 2
        k_bytes, v_bytes = config.tile_n * config.head_dim_padded * 2, config.tile_n * config.head_dim_v_padded * 2
        # K and V come from memory, and there is the time of a step until they may be loaded
        cute.prefetch(atoms.K, tKgK)
        cute.prefetch(atoms.V, tVgV)
        for member in cutlass.range(shape.group_size, unroll=1):
            for step in cutlass.range(self.schedule.get_num_steps(tile, shape), unroll=1):
                m_block, head_idx, stream = self.get_q_tile(step, member, tile, shape)
                # (tile_m, head_dim_padded, num_m_blocks), (tile_m, head_dim_v_padded, num_m_blocks)
                gQ = cute.local_tile(gmem.mQ[None, None, head_idx, tile.batch_idx], tiles.Q, (None, 0))
                gdO = cute.local_tile(gmem.mdO[None, None, head_idx, tile.batch_idx], tiles.dO, (None, 0))
                tQsQ, tQgQ = partition_tma(atoms.Q, smem.sQ, gQ)
                tdOsdO, tdOgdO = partition_tma(atoms.dO, smem.sdO, gdO)
                is_first = (step == 0) & (member == 0)
                stage, stage_dO = rings.Q.slot(it), rings.dO.slot(it)
                rings.Q.wait_empty(it)
                barrier_Q = rings.Q.expect_bytes(it, q_bytes + config.stats_size * 4 + where(is_first, k_bytes, 0))
                cute.copy(atoms.Q, tQgQ[None, m_block], tQsQ[None, stage], tma_bar_ptr=barrier_Q)
                copy_vector(gmem.mStats[None, m_block, stream], smem.sStats[None, stage], barrier_Q)
                rings.dO.wait_empty(it)
                barrier_dO = rings.dO.expect_bytes(it, dO_bytes + where(is_first, v_bytes, 0))
                cute.copy(atoms.dO, tdOgdO[None, m_block], tdOsdO[None, stage_dO], tma_bar_ptr=barrier_dO)
                if is_first:
                    # behind the first Q and dO, which need not wait for it
                    self.open_KV(rings.KV, work_it)
                    cute.copy(atoms.K, tKgK, tKsK, tma_bar_ptr=barrier_Q)
                    cute.copy(atoms.V, tVgV, tVsV, tma_bar_ptr=barrier_dO)
                it += 1
        if const_expr(config.local):
            if self.schedule.get_num_steps(tile, shape) == 0:
                self.open_KV(rings.KV, work_it)  # no query sees these keys: nothing to load
        return it

    def open_KV(self, ring: Ring, work_it: Int32):
        """Waits until K and V of a work tile may be loaded.

        With a window it says so to the MMA warpgroups. They could otherwise pass by several tiles without steps while
        LOAD waits for the first, and a parity cannot tell a round of the ring from the one after the next.
        """
        ring.wait_empty(work_it)
        if self.config.local:
            with cute.arch.elect_one():
                ring.arrive_full(work_it)

    # ---- STORE_DQ --------------------------------------------------------------------------------------------------

    @cute.jit
    def store_dQ_warp(self, gmem: Gmem, atoms: TmaAtoms, extents: Extents, smem: Smem, rings: Rings, parity: Int32):
        """One of the two store warps: handles the steps whose running number has this parity."""
        # the preprocess kernel resets the semaphores and the claim counter, and may zero dQaccum for bulk additions
        cute.arch.griddepcontrol_wait()
        cute.arch.fence_proxy("async.global")
        it, work_it, num_sums = Int32(0), Int32(0), Int32(0)
        if parity == 0:
            self.publish_claim(gmem, extents, smem, rings.work, work_it)
        else:
            self.release_dQ_buffer(parity)
        claimed = self.next_work(smem, rings.work, work_it)
        while is_tile(claimed):
            own_gmem, own_extents, tile = self.enter_work(gmem, extents, claimed)
            shape = self.make_shape(own_extents)
            num_steps = self.schedule.get_num_steps(tile, shape)
            for member in cutlass.range(shape.group_size, unroll=1):
                for step in cutlass.range((it + parity) & 1, num_steps, 2, unroll=1):
                    q_tile = self.get_q_tile(step, member, tile, shape)
                    turn = self.get_turn(q_tile, tile, shape)
                    claims = (step == num_steps - 1) & (member == shape.group_size - 1)
                    if const_expr(not self.cooperative):
                        if claims:
                            if self.comes_soon(own_gmem, own_extents, q_tile, turn):
                                self.publish_claim(gmem, extents, smem, rings.work, work_it + 1)
                                claims = Boolean(False)
                    if const_expr(self.fuse_dQ):
                        # before the buffer is there, because the sum so far must then be loaded into it
                        if turn.finishes:
                            self.wait_turn(own_gmem, own_extents, q_tile, tile, turn.lock_value)
                    self.take_dQ_buffer(parity)
                    num_sums = self.hand_dQ_buffer(own_gmem, smem, rings, parity, q_tile, turn, num_sums)
                    if const_expr(self.schedule.ordered):
                        if not turn.finishes:
                            self.wait_turn(own_gmem, own_extents, q_tile, tile, turn.lock_value)
                    if claims:
                        self.publish_claim(gmem, extents, smem, rings.work, work_it + 1)
                    self.send_dQ(own_gmem, atoms, smem, parity, q_tile, tile.batch_idx, turn)
                    self.finish_dQ(own_gmem, own_extents, parity, q_tile, tile.n_block, turn)
                it += num_steps
            if const_expr(self.config.local):
                if num_steps == 0 and parity == 0:
                    self.publish_claim(gmem, extents, smem, rings.work, work_it + 1)
            work_it += 1
            claimed = self.next_work(smem, rings.work, work_it)
        if parity == it & 1:
            self.take_dQ_buffer(parity)  # the last release, so that the barrier ends balanced

    @cute.jit
    def publish_claim(self, gmem: Gmem, extents: Extents, smem: Smem, ring: Ring, work_it: Int32):
        """Claims the next work tile and hands it to all warps, or `NO_TILE`, which ends them.

        Called for the last step of the current tile: as soon as its warp comes to it, if its turn `comes_soon`, so that
        what the next tile begins with is on its way before the last step; else when the turn and the staging buffer are
        there. A tile without steps claims at once.

        That cannot deadlock where every tile waits for earlier-claimed ones only: the tile of the least number that is
        not finished is one that some CTA works on, and all that it waits for is done. Where tiles wait for
        later-claimed ones (`cooperative`) an early claim could, so there all wait for the turn: the step before has
        given the buffer back after its own, so the CTA holds or has passed on every turn of its tile, and `check` has
        proved that with such claims nothing can deadlock.

        Not always early, because a claimed tile queues behind the turns of the current one: claimed before the last
        turn was waited for, tiles of `longest_first` took three times as long, and of serial orders more. When a claim
        is made changes no bits: a tile's place in every order is the schedule's.
        """
        tile, is_void = self.locate_work(extents, semaphore.claim_next(gmem.mCounter.iterator))
        if const_expr(extents.varlen):
            while is_void:
                tile, is_void = self.locate_work(extents, semaphore.claim_next(gmem.mCounter.iterator))
        ring.wait_empty(work_it)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(WorkTile._fields)):
                smem.sWork[i, ring.slot(work_it)] = tile[i]
            ring.arrive_full(work_it)

    def locate_work(self, extents: Extents, work_idx: Int32) -> tuple[WorkTile, Boolean]:
        """The work tile of a work index, and whether nobody works on it; called by a whole warp.

        Beyond the last index it is `NO_TILE`, which is not void. With sequences of different lengths batch_idx is the
        number of the sequence, and indices are void that are left over, or belong to a sequence without queries or
        keys. Schedules are asked about what they have promised to answer only, lengths from 1 and indices of tiles:
        elsewhere they may divide by zero.
        """
        shape, own_idx, is_void = self.make_shape(extents), work_idx, Boolean(False)
        num_work = shape.num_work_tiles
        if extents.varlen:
            sequence, own_idx = self.find_work(extents, work_idx)
            seqlen_q, seqlen_k = sequence.seqlen_q, sequence.seqlen_k
            shape = self.make_shape(extents.make_sequence(maximum(seqlen_q, 1), maximum(seqlen_k, 1)))
            num_work = self.get_num_work(extents)
            is_left_over = own_idx >= shape.num_work_tiles
            is_void = (work_idx < num_work) & (is_left_over | (seqlen_q == 0) | (seqlen_k == 0))
        tile = self.schedule.get_work_tile(minimum(own_idx, shape.num_work_tiles - 1), shape)
        if extents.varlen:
            tile = tile._replace(batch_idx=sequence.idx)
        numbers = tile.n_block, tile.head_idx, tile.batch_idx
        return WorkTile(*(Int32(where(work_idx < num_work, x, NO_TILE)) for x in numbers)), is_void

    def get_turn(self, q_tile: QTile, tile: WorkTile, shape: ProblemShape) -> Turn:
        """The place of `tile` in the order of dQ tile `q_tile`; without an order nobody is the first or finishes."""
        if not self.schedule.ordered:
            return Turn(Int32(-1), Boolean(False))
        lock_value = self.schedule.get_lock_value(q_tile.m_block, tile, shape)
        is_last = lock_value == self.schedule.get_lock_count(q_tile.m_block, tile, shape) - 1
        return Turn(Int32(lock_value), Boolean(self.fuse_dQ & is_last))

    @cute.jit
    def hand_dQ_buffer(
        self,
        gmem: Gmem,
        smem: Smem,
        rings: Rings,
        parity: Int32,
        q_tile: QTile,
        turn: Turn,
        num_sums: Int32,
    ) -> Int32:
        """Gives the free staging buffer to the MMA warpgroups, to the last of an order with the sum so far in it.

        Returns the number of sums that this warp has loaded.
        """
        if const_expr(self.fuse_dQ):
            duty = Int32(DQDuty.STAGE.value)
            if turn.finishes:
                duty = Int32(DQDuty.FINISH_ALONE.value)
                if turn.lock_value > 0:
                    duty = Int32(DQDuty.FINISH.value)
                    self.load_sum(gmem, smem, rings.sums + parity, q_tile)
                    cute.arch.mbarrier_wait(rings.sums + parity, num_sums & 1)
                    num_sums += 1
            if cute.arch.lane_idx() == 0:
                smem.sDuty[0] = duty
            cute.arch.sync_warp()
        for warpgroup_idx in cutlass.range_constexpr(self.config.num_mma_warpgroups):
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrierBwd.dQ_empty(warpgroup_idx),
                number_of_threads=WARPGROUP_THREADS + WARP_THREADS,
            )
        return num_sums

    @cute.jit
    def load_sum(self, gmem: Gmem, smem: Smem, barrier: cute.Pointer, q_tile: QTile):
        """Starts the copy of what has been added to a dQ tile into the staging buffer."""
        # once more in the lane that copies, which need not be the one that waited for the turn
        cute.arch.fence_proxy("async.global")
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.num_mma_warpgroups * self.dQ_values * 4)
        for warpgroup_idx in cutlass.range_constexpr(self.config.num_mma_warpgroups):
            gSum = gmem.mdQaccum[None, warpgroup_idx, q_tile.m_block, q_tile.stream]
            copy_vector(gSum, smem.sdQaccum[None, warpgroup_idx], barrier)

    @cute.jit
    def comes_soon(self, gmem: Gmem, extents: Extents, q_tile: QTile, turn: Turn) -> Boolean:
        """Whether at most CLAIM_LOOKAHEAD contributors are before this one on dQ tile `q_tile`; unordered, none is."""
        if const_expr(not self.schedule.ordered):
            return Boolean(True)
        return semaphore.peek(self.semaphore_of(gmem, extents, q_tile)) >= turn.lock_value - CLAIM_LOOKAHEAD

    @cute.jit
    def wait_turn(self, gmem: Gmem, extents: Extents, q_tile: QTile, tile: WorkTile, lock_value: Int32):
        """Waits until it is the turn of `tile` on dQ tile `q_tile`."""
        counter = self.semaphore_of(gmem, extents, q_tile)
        if cute.arch.lane_idx() == 0:
            if const_expr(self.debug):
                seen = semaphore.wait_turn_bounded(counter, lock_value)
                if seen != lock_value:
                    debug.report_stuck(gmem, tile, q_tile, lock_value, seen)
            else:
                semaphore.wait_turn(counter, lock_value)
        cute.arch.sync_warp()

    def semaphore_of(self, gmem: Gmem, extents: Extents, q_tile: QTile) -> cute.Pointer:
        """The turnstile of a dQ tile."""
        num_m_blocks = gmem.mSemaphore.shape[0] if extents.varlen else self.make_shape(extents).num_m_blocks
        return gmem.mSemaphore.iterator + (q_tile.stream * num_m_blocks + q_tile.m_block)

    @cute.jit
    def send_dQ(
        self,
        gmem: Gmem,
        atoms: TmaAtoms,
        smem: Smem,
        parity: Int32,
        q_tile: QTile,
        batch_idx: Int32,
        turn: Turn,
    ):
        """Starts adding the staged dQ partial to dQ tile `q_tile`, or storing the finished tile."""
        for warpgroup_idx in cutlass.range_constexpr(self.config.num_mma_warpgroups):
            cute.arch.barrier(
                barrier_id=NamedBarrierBwd.dQ_full(warpgroup_idx, parity),
                number_of_threads=WARPGROUP_THREADS + WARP_THREADS,
            )
            if const_expr(self.fuse_dQ):
                if turn.finishes:
                    self.store_piece(gmem, atoms, smem, q_tile, batch_idx, warpgroup_idx)
                else:
                    self.add_piece(gmem, smem, q_tile, warpgroup_idx, turn.lock_value)
            else:
                self.add_piece(gmem, smem, q_tile, warpgroup_idx, turn.lock_value)

    @cute.jit
    def store_piece(
        self, gmem: Gmem, atoms: TmaAtoms, smem: Smem, q_tile: QTile, batch_idx: Int32, warpgroup_idx: cutlass.Constexpr
    ):
        """Stores a warpgroup's piece of dQ; rows beyond seqlen_q are clipped by the TMA."""
        piece = wgmma.get_dQ_piece(self.config)
        gdQ = cute.local_tile(
            gmem.mdQ[None, None, q_tile.head_idx, batch_idx],
            piece,
            wgmma.locate_dQ_piece(self.config, q_tile.m_block, warpgroup_idx),
        )
        tdQsdQ, tdQgdQ = partition_tma(atoms.dQ, smem.sdQ[None, None, warpgroup_idx], gdQ)
        cute.copy(atoms.dQ, tdQsdQ, tdQgdQ)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def add_piece(self, gmem: Gmem, smem: Smem, q_tile: QTile, warpgroup_idx: cutlass.Constexpr, lock_value: Int32):
        """Adds a warpgroup's piece to dQaccum; the first one stores, so that nothing needs to be zero."""
        num_bytes = self.dQ_values * 4
        if cute.arch.lane_idx() == 0:
            source = smem.sdQaccum[None, warpgroup_idx].iterator
            target = gmem.mdQaccum[None, warpgroup_idx, q_tile.m_block, q_tile.stream].iterator
            if lock_value == 0:
                bulk_store(source, target, num_bytes)
            else:
                bulk_add_f32(source, target, num_bytes)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish_dQ(self, gmem: Gmem, extents: Extents, parity: Int32, q_tile: QTile, n_block: Int32, turn: Turn):
        """Passes the staging buffer on, waits for the addition to be complete and passes the turn on."""
        lane_idx = cute.arch.lane_idx()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        self.release_dQ_buffer(parity)
        if lane_idx == 0:
            if const_expr(self.debug):
                cute.arch.cp_async_bulk_wait_group(0)
                debug.record_addition(gmem, q_tile, n_block)
            if not turn.finishes:
                cute.arch.cp_async_bulk_wait_group(0)
                if const_expr(self.schedule.ordered):
                    semaphore.release_turn(self.semaphore_of(gmem, extents, q_tile))
                else:
                    cute.arch.fence_proxy("async.global")  # the postprocess kernel reads through the generic proxy

    def release_dQ_buffer(self, parity: Int32):
        """Tells the other store warp that the staging buffer may be overwritten."""
        cute.arch.barrier_arrive(barrier_id=NamedBarrierBwd.dQ_free(1 - parity), number_of_threads=2 * WARP_THREADS)

    def take_dQ_buffer(self, parity: Int32):
        """Waits until the other store warp has released the staging buffer."""
        cute.arch.barrier(barrier_id=NamedBarrierBwd.dQ_free(parity), number_of_threads=2 * WARP_THREADS)

    # ---- MMA -------------------------------------------------------------------------------------------------------

    @cute.jit
    def mma_warpgroup(
        self, gmem: Gmem, atoms: TmaAtoms, extents: Extents, smem: Smem, rings: Rings, softmax_scale: Float32
    ):
        context = self.make_mma_context(smem, softmax_scale)
        tiles = wgmma.get_tiles(self.config)
        acc_dK = make_accumulator(context.gemm_dK.tiled_mma, self.config.in_order(*tiles.K))
        acc_dV = make_accumulator(context.gemm_dV.tiled_mma, self.config.in_order(*tiles.V))
        it, work_it = Int32(0), Int32(0)
        claimed = self.read_work(smem, rings.work, work_it)
        while is_tile(claimed):
            _, own_extents, tile = self.enter_work(gmem, extents, claimed)
            shape = self.make_shape(own_extents)
            num_steps = self.schedule.get_num_steps(tile, shape)
            acc_dK.fill(0.0)
            acc_dV.fill(0.0)
            if const_expr(self.config.local):
                rings.KV.wait_full(work_it)
            if const_expr(self.config.prefetch_KV):
                self.wait_dKV_sent()
            if const_expr(self.config.K_in_regs):
                if num_steps > 0:
                    rings.Q.wait_full(it)
                    wgmma.load_operand_A(context.gemm_S.tiled_mma, smem.sK, context.gemm_S.tCrA, context.tidx)
            for _ in cutlass.range(shape.group_size, unroll=1):
                for step in cutlass.range(num_steps, unroll=1):
                    m_block = self.schedule.get_m_block(step, tile, shape)
                    if self.hides_own_keys(context, shape, m_block, tile.n_block):
                        self.pass_hidden_keys(context, smem, rings, it)
                    else:
                        self.mma_step(context, own_extents, smem, rings, acc_dK, acc_dV, m_block, tile.n_block, it)
                    it += 1
            acc_dK.store(acc_dK.load() * softmax_scale)
            # once more, because there are no registers to keep it over the steps
            own_gmem, _, tile = self.enter_work(gmem, extents, self.read_work(smem, rings.work, work_it))
            self.release_work(rings.work, work_it)
            self.epilogue_dKV(own_gmem, atoms, smem, rings.KV, context, acc_dK, acc_dV, tile, work_it)
            work_it += 1
            claimed = self.read_work(smem, rings.work, work_it)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def make_mma_context(self, smem: Smem, softmax_scale: Float32) -> MmaContext:
        config = self.config
        tidx = cute.arch.thread_idx()[0] - NUM_PRODUCER_WARPS * WARP_THREADS
        warpgroup_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        mma_S = wgmma.make_tiled_mma_SdP(self.dtype, config, config.K_in_regs)
        mma_dP = wgmma.make_tiled_mma_SdP(self.dtype, config)
        mma_dK = wgmma.make_tiled_mma_dKV(self.dtype, config, config.head_dim_padded)
        mma_dV = wgmma.make_tiled_mma_dKV(self.dtype, config, config.head_dim_v_padded)
        mma_dQ = wgmma.make_tiled_mma_dQ(self.dtype, config)
        gemm_dQ = Gemm.partition(mma_dQ, warpgroup_idx, smem.sdS, transpose_view(smem.sK))
        gemm_S = Gemm.partition(mma_S, warpgroup_idx, *config.in_order(None if config.K_in_regs else smem.sK, smem.sQ))
        if const_expr(config.K_in_regs):
            gemm_S = gemm_S._replace(tCrA=wgmma.make_operand_A(mma_S, smem.sK, tidx))
        store_S, tRS_sdS = self.partition_scores(mma_S, smem.sdS, tidx)
        sPt, sdSt, tRS_sP = None, None, None
        if const_expr(config.split_columns):
            sPt, sdSt = transpose_view(smem.sP), transpose_view(smem.sdS)
            _, tRS_sP = self.partition_scores(mma_S, smem.sP, tidx)
        return MmaContext(
            gemm_S=gemm_S,
            gemm_dP=Gemm.partition(mma_dP, warpgroup_idx, *config.in_order(smem.sV, smem.sdO)),
            gemm_dV=Gemm.partition(mma_dV, warpgroup_idx, *config.in_order(sPt, transpose_view(smem.sdO))),
            gemm_dK=Gemm.partition(mma_dK, warpgroup_idx, *config.in_order(sdSt, transpose_view(smem.sQ))),
            gemm_dQ=gemm_dQ,
            stats=self.stats.partition(smem, warpgroup_idx),
            store_S=store_S,
            tRS_sdS=tRS_sdS,
            tRS_sP=tRS_sP,
            tdQsdQ=fragment_slots(
                smem.sdQaccum[None, warpgroup_idx].iterator,
                self.dQ_values // WARPGROUP_THREADS,
                tidx % WARPGROUP_THREADS,
            ),
            tidx=tidx,
            warpgroup_idx=warpgroup_idx,
            softmax_scale=softmax_scale,
        )

    def partition_scores(self, mma_S: cute.TiledMma, sX: cute.Tensor, tidx: Int32):
        """How P or dS, laid out as accumulators of S^T or S, are stored in sX (tile_m, tile_n, num_stages)."""
        return wgmma.make_store_C(mma_S, sX, tidx, transpose=not self.config.swap_operands)

    def hides_own_keys(self, context: MmaContext, shape: ProblemShape, m_block: Int32, n_block: Int32) -> Boolean:
        """Whether no query of a step sees a key of this warpgroup; False where nobody looks."""
        if not self.config.skip_hidden_keys:
            return Boolean(False)
        num_keys = self.config.tile_n // self.config.num_mma_warpgroups
        first_key = n_block * self.config.tile_n + context.warpgroup_idx * num_keys
        return shape.hides_keys(m_block, first_key, num_keys)

    @cute.jit
    def pass_hidden_keys(self, context: MmaContext, smem: Smem, rings: Rings, it: Int32):
        """A step in which no query sees a key of this warpgroup: its dS is 0, and it computes its part of dQ only."""
        rings.Q.wait_full(it)
        rings.dO.wait_full(it)
        acc_dP = make_accumulator(context.gemm_dP.tiled_mma, self.shape_S)
        acc_dP.fill(0.0)
        rdS = wgmma.to_operand_A(acc_dP, self.dtype)
        wgmma.store_C(context.store_S, rdS, context.tRS_sdS[None, None, None, self.slot_dS(it)])
        self.sync_dS()
        acc_dQ = self.gemm_dQ(context, self.slot_dS(it))
        rings.dO.arrive_empty(it)
        duty = self.accept_dQ_buffer(context, smem)
        warpgroup.wait_group(0)
        rings.Q.arrive_empty(it)
        self.stage_dQ(context, smem, acc_dQ, duty, it)

    @cute.jit
    def mma_step(
        self,
        context: MmaContext,
        extents: Extents,
        smem: Smem,
        rings: Rings,
        acc_dK: cute.Tensor,
        acc_dV: cute.Tensor,
        m_block: Int32,
        n_block: Int32,
        it: Int32,
    ):
        """The five GEMMs of one (m_block, n_block) pass."""
        shape = self.make_shape(extents)
        config = self.config
        stage, stage_dO = rings.Q.slot(it), rings.dO.slot(it)
        # (1) S^T = K Q^T
        rings.Q.wait_full(it)
        products = self.stats.products_S(context.stats, stage)
        acc_S = self.gemm_ss(context.gemm_S, self.shape_S, *config.in_order(None, stage), *products)
        # (2) dP^T = V dO^T
        rings.dO.wait_full(it)
        products = self.stats.products_dP(context.stats, stage)
        acc_dP = self.gemm_ss(context.gemm_dP, self.shape_S, *config.in_order(None, stage_dO), *products)
        warpgroup.wait_group(1)
        # P^T = exp2(scale * log2e * S^T - LSE * log2e)
        if shape.needs_mask(m_block, n_block):
            place = self.get_score_place(context)
            mask.apply_mask(acc_S, shape, m_block, n_block, *place, transposed=not config.swap_operands)
        self.stats.softmax(acc_S, context.stats, stage, context.softmax_scale * LOG2_E)
        rP = wgmma.to_operand_A(acc_S, self.dtype)
        # dS^T = P^T * (dP^T - dPsum)
        warpgroup.wait_group(0)
        self.stats.softmax_backward(acc_S, acc_dP, context.stats, stage)
        rdS = wgmma.to_operand_A(acc_dP, self.dtype)
        if const_expr(config.num_dS_stages == 1):
            # all have finished the GEMMs of the step before, which read the one stage of dS and P
            self.sync_warpgroups()
        wgmma.store_C(context.store_S, rdS, context.tRS_sdS[None, None, None, self.slot_dS(it)])
        if const_expr(config.split_columns):
            self.add_by_columns(context, smem, rings, acc_dK, acc_dV, rP, it)
        else:
            self.add_by_keys(context, smem, rings, acc_dK, acc_dV, rP, rdS, it)

    def slot_dS(self, it: Int32) -> Int32:
        """The stage of dS and P that a step has."""
        return Int32(0) if self.config.num_dS_stages == 1 else it % self.config.num_dS_stages

    def sync_dS(self):
        """Waits until every warpgroup has staged its dS, and P if it does.

        All have then finished the GEMMs of the step before that read its stages, which are free again.
        """
        cute.arch.fence_view_async_shared()
        self.sync_warpgroups()

    def sync_warpgroups(self):
        """Waits until every MMA warpgroup is here, within a step."""
        # the form that is not .aligned, because a warpgroup that passes hidden keys is at another instruction
        cute.arch.inline_ptx(f"barrier.sync {NamedBarrierBwd.PdS.value}, {self.num_mma_threads};")

    def get_score_place(self, context: MmaContext) -> tuple[Int32, Int32]:
        """Where this thread's part of S^T, or S, lies in the tile: `tidx` and `first_column` of `mask.apply_mask`."""
        if not self.config.split_columns:
            return context.tidx, Int32(0)
        return context.tidx % WARPGROUP_THREADS, context.warpgroup_idx * self.config.score_columns

    @cute.jit
    def add_by_keys(
        self,
        context: MmaContext,
        smem: Smem,
        rings: Rings,
        acc_dK: cute.Tensor,
        acc_dV: cute.Tensor,
        rP: cute.Tensor,
        rdS: cute.Tensor,
        it: Int32,
    ):
        """(3) to (5) where a warpgroup has the keys of its S^T: P^T and dS^T stay in registers."""
        stage, stage_dS = rings.Q.slot(it), self.slot_dS(it)
        # (3) dV += P^T dO
        issue_gemm(acc_dV, True, (context.gemm_dV.tiled_mma, rP, stage_of(context.gemm_dV.tCrB, stage)))
        self.sync_dS()
        # (4) dQ = dS K
        acc_dQ = self.gemm_dQ(context, stage_dS)
        warpgroup.wait_group(1)
        rings.dO.arrive_empty(it)
        # (5) dK += dS^T Q
        issue_gemm(acc_dK, True, (context.gemm_dK.tiled_mma, rdS, stage_of(context.gemm_dK.tCrB, stage)))
        duty = self.accept_dQ_buffer(context, smem)
        warpgroup.wait_group(1)
        self.stage_dQ(context, smem, acc_dQ, duty, it)
        warpgroup.wait_group(0)
        rings.Q.arrive_empty(it)

    @cute.jit
    def add_by_columns(
        self,
        context: MmaContext,
        smem: Smem,
        rings: Rings,
        acc_dK: cute.Tensor,
        acc_dV: cute.Tensor,
        rP: cute.Tensor,
        it: Int32,
    ):
        """(3) to (5) where a warpgroup has columns of all keys: P^T and dS^T go through shared memory.

        dK comes first, so that the next Q arrives during the others, and dV last, behind which dQ is staged; or
        where dO has fewer stages than Q (`add_dV_first`) dV comes first and dK last.
        """
        in_order, stage_dS = self.config.in_order, self.slot_dS(it)
        wgmma.store_C(context.store_S, rP, context.tRS_sP[None, None, None, stage_dS])
        self.sync_dS()
        # (5) dK += dS^T Q, (3) dV += P^T dO
        dK = acc_dK, context.gemm_dK.product(*in_order(stage_dS, rings.Q.slot(it)))
        dV = acc_dV, context.gemm_dV.product(*in_order(stage_dS, rings.dO.slot(it)))
        (first, last), (first_ring, last_ring) = (dK, dV), (rings.Q, rings.dO)
        if const_expr(self.config.add_dV_first):
            (first, last), (first_ring, last_ring) = (dV, dK), (rings.dO, rings.Q)
        issue_gemm(first[0], True, first[1])
        # (4) dQ = dS K
        acc_dQ = self.gemm_dQ(context, stage_dS)
        issue_gemm(last[0], True, last[1])
        warpgroup.wait_group(2)
        first_ring.arrive_empty(it)
        duty = self.accept_dQ_buffer(context, smem)
        warpgroup.wait_group(1)
        self.stage_dQ(context, smem, acc_dQ, duty, it)
        warpgroup.wait_group(0)
        last_ring.arrive_empty(it)

    def gemm_dQ(self, context: MmaContext, stage_dS: Int32) -> cute.Tensor:
        """Issues this warpgroup's part of dQ = dS K."""
        return self.gemm_ss(context.gemm_dQ, (self.config.tile_m, self.config.head_dim_padded), stage_dS, None)

    def gemm_ss(
        self, gemm: Gemm, shape_mn, stage_A: Int32 | None, stage_B: Int32 | None, *products: tuple
    ) -> cute.Tensor:
        """Issues A B, both in shared memory, plus further products into a new accumulator."""
        acc = make_accumulator(gemm.tiled_mma, shape_mn)
        issue_gemm(acc, False, gemm.product(stage_A, stage_B), *products)
        return acc

    def accept_dQ_buffer(self, context: MmaContext, smem: Smem) -> Int32:
        """Waits for the staging buffer; returns what to do with it. While dQ is computed, which hides the latencies."""
        cute.arch.barrier(
            barrier_id=NamedBarrierBwd.dQ_empty(context.warpgroup_idx),
            number_of_threads=WARPGROUP_THREADS + WARP_THREADS,
        )
        return cute.arch.make_warp_uniform(smem.sDuty[0]) if self.fuse_dQ else Int32(DQDuty.STAGE.value)

    @cute.jit
    def stage_dQ(self, context: MmaContext, smem: Smem, acc_dQ: cute.Tensor, duty: Int32, it: Int32):
        """Hands this warpgroup's part of the dQ partial, or of the finished dQ tile, to the store warp of this step."""
        if const_expr(self.fuse_dQ):
            if duty == DQDuty.STAGE.value:
                cute.autovec_copy(fragment_registers(acc_dQ), context.tdQsdQ)
            else:
                self.finish_piece(context, smem, acc_dQ, duty)
        else:
            cute.autovec_copy(fragment_registers(acc_dQ), context.tdQsdQ)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(
            barrier_id=NamedBarrierBwd.dQ_full(context.warpgroup_idx, it & 1),
            number_of_threads=WARPGROUP_THREADS + WARP_THREADS,
        )

    @cute.jit
    def finish_piece(self, context: MmaContext, smem: Smem, acc_dQ: cute.Tensor, duty: Int32):
        """Stages this warpgroup's part of dQ = softmax_scale * (sum so far + partial), rounded."""
        piece = fragment_registers(acc_dQ)
        if duty == DQDuty.FINISH.value:
            for i in cutlass.range_constexpr(cute.size(piece, mode=[1])):
                sum_so_far = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(context.tdQsdQ[None, i], sum_so_far)
                for j in cutlass.range_constexpr(4):
                    piece[j, i] = piece[j, i] + sum_so_far[j]
        acc_dQ.store(acc_dQ.load() * context.softmax_scale)
        # every thread of the warpgroup has read its share of what now is overwritten
        cute.arch.barrier(barrier_id=NamedBarrierBwd.dQ_sum(context.warpgroup_idx), number_of_threads=WARPGROUP_THREADS)
        mma_piece = wgmma.make_tiled_mma_dQ_piece(self.dtype, self.config)
        sdQ = smem.sdQ[None, None, context.warpgroup_idx]
        # duty // 4 is 0, which the compiler does not know: there are no registers to keep the addresses over the steps
        tidx = context.tidx % WARPGROUP_THREADS + duty // 4
        store_dQ, tRS_sdQ = wgmma.make_store_C(mma_piece, sdQ, tidx, transpose=False)
        wgmma.store_C(store_dQ, wgmma.to_operand_A(acc_dQ, self.dtype), tRS_sdQ)

    @cute.jit
    def epilogue_dKV(
        self,
        gmem: Gmem,
        atoms: TmaAtoms,
        smem: Smem,
        ring_KV: Ring,
        context: MmaContext,
        acc_dK: cute.Tensor,
        acc_dV: cute.Tensor,
        tile: WorkTile,
        work_it: Int32,
    ):
        """Writes dK and dV of the work tile; rows beyond seqlen_k are clipped by the TMA."""
        tiles = wgmma.get_tiles(self.config)
        gdK = cute.local_tile(gmem.mdK[None, None, tile.head_idx, tile.batch_idx], tiles.K, (tile.n_block, 0))
        gdV = cute.local_tile(gmem.mdV[None, None, tile.head_idx, tile.batch_idx], tiles.V, (tile.n_block, 0))
        # every warpgroup has read sK, sV and sdS for the last time
        self.sync_epilogue()
        if const_expr(self.config.prefetch_KV):
            if self.is_first_mma_warp():
                ring_KV.arrive_empty(work_it)
        # n_block is no less than 0, which the compiler does not know, as in `finish_piece`
        tidx = context.tidx + minimum(tile.n_block, 0)
        self.write_gradient(context.gemm_dV, acc_dV, smem.sdV, tidx)
        self.write_gradient(context.gemm_dK, acc_dK, smem.sdK, tidx)
        self.sync_epilogue()
        if self.is_first_mma_warp():
            self.store_gradient(atoms.dV, smem.sdV, gdV)
            self.store_gradient(atoms.dK, smem.sdK, gdK)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(not self.config.prefetch_KV):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                ring_KV.arrive_empty(work_it)

    @cute.jit
    def wait_dKV_sent(self):
        """Waits until dK and dV of the work tile before have left sdS, so that steps may write there."""
        if self.is_first_mma_warp():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync_epilogue()

    def write_gradient(self, gemm: Gemm, acc: cute.Tensor, sdX: cute.Tensor, tidx: Int32):
        """Rounds this thread's part of dK or dV into shared memory."""
        tiled_copy, tRS_sdX = wgmma.make_store_C(gemm.tiled_mma, sdX, tidx, transpose=self.config.swap_operands)
        wgmma.store_C(tiled_copy, wgmma.round_registers(acc, self.dtype), tRS_sdX)
        cute.arch.fence_view_async_shared()

    def store_gradient(self, atom: cute.CopyAtom, sdX: cute.Tensor, gdX: cute.Tensor):
        """Starts the copy of dK or dV to global memory. Called by a whole warp."""
        tdXsdX, tdXgdX = partition_tma(atom, sdX, gdX)
        cute.copy(atom, tdXsdX, tdXgdX)

    def sync_epilogue(self):
        cute.arch.barrier(barrier_id=NamedBarrierBwd.Epilogue.value, number_of_threads=self.num_mma_threads)

    def is_first_mma_warp(self) -> Boolean:
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == WarpRole.MMA
