"""Before the main kernel: dPsum = rowsum(dO * O) [- dLSE] and LSE in the form that `stats` wants, and fresh turnstiles.

One CTA per (m_block, stream). Memory bound: reads O and dO once. Rows beyond seqlen_q count as rows that see no key
(LSE = -inf), with dPsum = 0. Such a row's LSE is constant: its dLSE is not read. Also resets the dQ semaphore of its
tile and the claim counter; for an unordered schedule, whose additions find nothing stored before, it zeroes dQaccum.
With sequences of different lengths it also zeroes the gradients that no work tile writes.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from cute_dash.config import BwdConfig
from cute_dash.kernels import varlen
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.stats import make_stats
from cute_dash.kernels.workspace import get_first_tile, get_num_tiles

NUM_THREADS = 256
VECTOR = 8  # 16-bit elements in a 16-byte access


class PreGmem(NamedTuple):
    mO: cute.Tensor  # (seqlen_q, head_dim_v, num_heads, batch)
    mdO: cute.Tensor  # (seqlen_q, head_dim_v, num_heads, batch)
    mLSE_in: cute.Tensor  # (seqlen_q, num_heads, batch), natural log
    mdLSE: cute.Tensor | None  # (seqlen_q, num_heads, batch), where the LSE has a gradient of its own
    mStats: cute.Tensor  # (stats_size, num_m_blocks, num_streams)
    mdQaccum: cute.Tensor  # (values per warpgroup, num_warpgroups, num_m_blocks, num_streams)
    mSemaphore: cute.Tensor  # (num_m_blocks, num_streams)
    mCounter: cute.Tensor  # (1,)
    mdQ: cute.Tensor | None  # (seqlen_q, head_dim, num_heads, batch), where the main kernel finishes dQ
    mdK: cute.Tensor | None  # (seqlen_k, head_dim, num_heads_kv, 1), with sequences of different lengths
    mdV: cute.Tensor | None  # (seqlen_k, head_dim_v, num_heads_kv, 1), likewise


class FlashAttentionBackwardPreprocess:
    """The preprocess kernel of one configuration."""

    def __init__(self, config: BwdConfig, clear_dQaccum: bool):
        self.config = config
        self.stats = make_stats(config)
        self.clear_dQaccum = clear_dQaccum
        # a power of two, for the sums over a row
        self.threads_per_row = 1 << (config.head_dim_padded // VECTOR - 1).bit_length()
        self.rows_per_pass = NUM_THREADS // self.threads_per_row

    @cute.jit
    def __call__(self, gmem: PreGmem, extents: Extents, softmax_scale: Float32, stream):
        num_m_blocks, num_streams = gmem.mSemaphore.shape
        self.kernel(gmem, extents, softmax_scale).launch(
            grid=(num_m_blocks * num_streams, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, gmem: PreGmem, extents: Extents, softmax_scale: Float32):
        tidx = cute.arch.thread_idx()[0]
        block_idx = cute.arch.block_idx()[0]
        num_m_blocks = gmem.mSemaphore.shape[0]
        num_heads = gmem.mO.shape[2]
        stream = block_idx // num_m_blocks
        m_block = block_idx - stream * num_m_blocks
        batch_idx = stream // num_heads
        head_idx = stream - batch_idx * num_heads
        # the launch may overlap the end of the kernel before it, which may have written O or dO, or may still be using
        # this workspace
        cute.arch.griddepcontrol_wait()
        all_gmem, all_extents = gmem, extents
        if const_expr(extents.varlen):
            gmem, extents, m_block = self.enter_sequence(gmem, extents, m_block)
        shape = extents.make_shape(self.config)
        self.write_stats(gmem, tidx, m_block, head_idx, batch_idx, stream, softmax_scale)
        if tidx == 0:
            gmem.mSemaphore[m_block, stream] = Int32(0)
            if block_idx == 0:
                gmem.mCounter[0] = Int32(0)
        if const_expr(self.clear_dQaccum):
            self.clear(gmem, tidx, m_block, stream)
        if const_expr(gmem.mdQ is not None):
            if shape.get_n_block_max(m_block) == 0:
                self.clear_dQ(gmem, tidx, m_block, head_idx, batch_idx)
        if const_expr(all_extents.varlen):
            self.clear_dKV(all_gmem, all_extents, tidx, block_idx)

    def enter_sequence(self, gmem: PreGmem, extents: Extents, m_tile: Int32) -> tuple[PreGmem, Extents, Int32]:
        """The tensors, extents and m_block of a tile's sequence alone; the tokens behind the last one see no key."""
        tile_m = self.config.tile_m
        sequence, m_block = varlen.find_query_tile(extents, m_tile, tile_m)
        first_m = m_tile - m_block

        def view(mX):
            return None if mX is None else varlen.view_rows(mX, sequence.start_q, sequence.seqlen_q)

        gmem = gmem._replace(
            mO=view(gmem.mO),
            mdO=view(gmem.mdO),
            mLSE_in=view(gmem.mLSE_in),
            mdLSE=view(gmem.mdLSE),
            mdQ=view(gmem.mdQ),
            mStats=varlen.view_tiles(gmem.mStats, 1, first_m),
            mdQaccum=varlen.view_tiles(gmem.mdQaccum, 2, first_m),
            mSemaphore=varlen.view_tiles(gmem.mSemaphore, 0, first_m),
        )
        return gmem, extents.make_sequence(sequence.seqlen_q, sequence.seqlen_k), m_block

    @cute.jit
    def write_stats(self, gmem: PreGmem, tidx, m_block, head_idx, batch_idx, stream, softmax_scale: Float32):
        tile_m = self.config.tile_m
        first_row, column = tidx // self.threads_per_row, tidx % self.threads_per_row * VECTOR
        num_passes = (tile_m + self.rows_per_pass - 1) // self.rows_per_pass
        rO = cute.make_rmem_tensor((VECTOR, num_passes), gmem.mO.element_type)
        rdO = cute.make_rmem_tensor((VECTOR, num_passes), gmem.mO.element_type)
        rO.fill(0.0)
        rdO.fill(0.0)
        rLSE = cute.make_rmem_tensor(num_passes, Float32)
        rLSE.fill(-Float32.inf)
        rdLSE = cute.make_rmem_tensor(num_passes, Float32)
        rdLSE.fill(0.0)
        for i in cutlass.range_constexpr(num_passes):
            row = m_block * tile_m + first_row + i * self.rows_per_pass
            if self.is_inside(row, gmem.mO, column):
                load_vector(gmem.mO[row, None, head_idx, batch_idx], column, rO[None, i])
                load_vector(gmem.mdO[row, None, head_idx, batch_idx], column, rdO[None, i])
                if column == 0:
                    rLSE[i] = gmem.mLSE_in[row, head_idx, batch_idx]
                    if const_expr(gmem.mdLSE is not None):
                        if rLSE[i] != -Float32.inf:
                            rdLSE[i] = gmem.mdLSE[row, head_idx, batch_idx]
        cute.arch.griddepcontrol_launch_dependents()
        for i in cutlass.range_constexpr(num_passes):
            product = rO[None, i].load().to(Float32) * rdO[None, i].load().to(Float32)
            total = product.reduce(cute.ReductionOp.ADD, init_val=0.0, reduction_profile=0)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=self.threads_per_row)
            if const_expr(gmem.mdLSE is not None):
                total = total - rdLSE[i]
            row = first_row + i * self.rows_per_pass
            if column == 0 and row < tile_m:
                self.stats.write_row(gmem.mStats[None, m_block, stream], row, rLSE[i], total, softmax_scale)

    def is_inside(self, row: Int32, mX: cute.Tensor, column: Int32) -> Boolean:
        """Whether a 16-byte vector lies in a tensor (seqlen, head_dim, ...); further columns have threads only."""
        num_rows, head_dim, *_ = mX.shape
        if head_dim == self.threads_per_row * VECTOR:
            return row < num_rows
        return (row < num_rows) & (column < head_dim)

    @cute.jit
    def clear(self, gmem: PreGmem, tidx, m_block, stream):
        tile = gmem.mdQaccum[None, None, m_block, stream]
        num_vectors = cute.size(tile) // 4
        # (4, num_vectors)
        target = cute.make_tensor(tile.iterator.align(16), cute.make_layout((4, num_vectors)))
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for i in cutlass.range(tidx, num_vectors, NUM_THREADS):
            cute.autovec_copy(zeros, target[None, i])

    @cute.jit
    def clear_dQ(self, gmem: PreGmem, tidx, m_block, head_idx, batch_idx):
        self.clear_tile(gmem.mdQ, self.config.tile_m, tidx, m_block, head_idx, batch_idx)

    @cute.jit
    def clear_dKV(self, gmem: PreGmem, extents: Extents, tidx, block_idx):
        """Zeroes dK and dV of the keys that no query's sequence has; the main kernel does not come by there."""
        tile_n = self.config.tile_n
        num_tiles = get_num_tiles(extents.seqlen_k, extents.batch, tile_n) * extents.num_heads
        for i in cutlass.range(block_idx, num_tiles, cute.arch.grid_dim()[0], unroll=1):
            n_tile = i // extents.num_heads
            head_idx = i - n_tile * extents.num_heads
            idx = varlen.find_sequence(extents.mCuSeqlensK, n_tile, extents.batch + 1, tile_n)
            sequence = varlen.load_sequence(extents, idx)
            if (idx == extents.batch) | (sequence.seqlen_q == 0):
                n_block = n_tile - get_first_tile(sequence.start_k, idx, tile_n)
                for mX in (gmem.mdK, gmem.mdV):
                    view = varlen.view_rows(mX, sequence.start_k, sequence.seqlen_k)
                    self.clear_tile(view, tile_n, tidx, n_block, head_idx, 0)

    @cute.jit
    def clear_tile(self, mX: cute.Tensor, tile: cutlass.Constexpr[int], tidx, block, head_idx, batch_idx):
        """Zeroes tile number `block` of `tile` rows, as far as the tensor goes."""
        first_row, column = tidx // self.threads_per_row, tidx % self.threads_per_row * VECTOR
        zeros = cute.make_rmem_tensor(VECTOR, mX.element_type)
        zeros.fill(0.0)
        for i in cutlass.range(first_row, tile, self.rows_per_pass, unroll=1):
            row = block * tile + i
            if self.is_inside(row, mX, column):
                gRow = mX[row, None, head_idx, batch_idx]
                target = cute.make_tensor((gRow.iterator + column).align(16), cute.make_layout(VECTOR))
                cute.autovec_copy(zeros, target)


@cute.jit
def load_vector(gRow: cute.Tensor, column: Int32, rX: cute.Tensor):
    """Loads 8 contiguous 16-bit elements of a (head_dim,) row in one 16-byte access."""
    source = cute.make_tensor((gRow.iterator + column).align(16), cute.make_layout(VECTOR))
    cute.autovec_copy(source, rX)
