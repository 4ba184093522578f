"""After the main kernel: dQ = softmax_scale * dQaccum, rounded once to the output dtype.

For unordered schedules, under which no contributor knows that it is the last; otherwise that one does this.
One CTA per (m_block, stream). dQaccum holds the accumulator registers of the dQ GEMM in flat order; the same tiled MMA
partitions the output, so each thread converts what one thread of the main kernel computed. Q tiles that see no key
have no contributor and dQaccum holds nothing for them: their dQ is zero.
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_dash.config import BwdConfig
from cute_dash.kernels import varlen, wgmma
from cute_dash.kernels.copy import fragment_registers, fragment_slots, partition_tma
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.roles import WARPGROUP_THREADS


class PostGmem(NamedTuple):
    mdQ: cute.Tensor  # (seqlen_q, head_dim, num_heads, batch)
    mdQaccum: cute.Tensor  # (values per warpgroup, num_warpgroups, num_m_blocks, num_streams)


class FlashAttentionBackwardPostprocess:
    """The postprocess kernel of one configuration."""

    def __init__(self, config: BwdConfig, dtype):
        self.config = config
        self.dtype = dtype
        self.num_threads = WARPGROUP_THREADS * config.num_mma_warpgroups

    @cute.jit
    def __call__(self, gmem: PostGmem, extents: Extents, softmax_scale: Float32, stream):
        tile = (self.config.tile_m, self.config.head_dim_padded)
        mdQ = varlen.make_ragged(gmem.mdQ) if const_expr(extents.varlen) else gmem.mdQ
        layout = self.make_layout()
        atom, mdQ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mdQ, layout, tile)
        num_m_blocks, num_streams = gmem.mdQaccum.shape[2], gmem.mdQaccum.shape[3]
        self.kernel(gmem._replace(mdQ=mdQ), atom, extents, softmax_scale).launch(
            grid=(num_m_blocks * num_streams, 1, 1), block=(self.num_threads, 1, 1), stream=stream, use_pdl=True
        )

    def make_layout(self):
        """Of the converted tile in shared memory, (tile_m, head_dim_padded)."""
        tile = (self.config.tile_m, self.config.head_dim_padded)
        return wgmma.make_smem_layout(self.dtype, tile, columns_per_mma=wgmma.get_dQ_piece(self.config)[1])

    @cute.kernel
    def kernel(self, gmem: PostGmem, atom: cute.CopyAtom, extents: Extents, softmax_scale: Float32):
        config = self.config
        tidx = cute.arch.thread_idx()[0]
        block_idx = cute.arch.block_idx()[0]
        num_m_blocks = gmem.mdQaccum.shape[2]
        stream = block_idx // num_m_blocks
        m_block = block_idx - stream * num_m_blocks
        batch_idx = stream // extents.num_query_heads
        head_idx = stream - batch_idx * extents.num_query_heads

        layout = self.make_layout()
        sdQ = SmemAllocator().allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        mma_dQ = wgmma.make_tiled_mma_dQ(self.dtype, config)
        acc = wgmma.make_accumulator(mma_dQ, (config.tile_m, config.head_dim_padded))
        acc.fill(0.0)
        cute.arch.griddepcontrol_wait()
        if const_expr(extents.varlen):
            gmem, extents, m_block = self.enter_sequence(gmem, extents, m_block)
        shape = extents.make_shape(config)
        if shape.get_n_block_max(m_block) > 0:
            partial = gmem.mdQaccum[None, tidx // WARPGROUP_THREADS, m_block, stream]
            source = fragment_slots(partial.iterator, cute.size(acc), tidx % WARPGROUP_THREADS)
            cute.autovec_copy(source, fragment_registers(acc))
        acc.store(acc.load() * softmax_scale)

        tiled_copy, tRS_sdQ = wgmma.make_store_C(mma_dQ, sdQ, tidx, transpose=False)
        wgmma.store_C(tiled_copy, wgmma.to_operand_A(acc, self.dtype), tRS_sdQ)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            gdQ = cute.local_tile(
                gmem.mdQ[None, None, head_idx, batch_idx], (config.tile_m, config.head_dim_padded), (m_block, 0)
            )
            tdQsdQ, tdQgdQ = partition_tma(atom, sdQ, gdQ)
            cute.copy(atom, tdQsdQ, tdQgdQ)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def enter_sequence(self, gmem: PostGmem, extents: Extents, m_tile: Int32) -> tuple[PostGmem, Extents, Int32]:
        """The tensors, extents and m_block of a tile's sequence alone; the tokens behind the last one see no key."""
        sequence, m_block = varlen.find_query_tile(extents, m_tile, self.config.tile_m)
        gmem = PostGmem(
            varlen.view_ragged(gmem.mdQ, sequence.start_q, sequence.seqlen_q),
            varlen.view_tiles(gmem.mdQaccum, 2, m_tile - m_block),
        )
        return gmem, extents.make_sequence(sequence.seqlen_q, sequence.seqlen_k), m_block
