"""Conversion of finished dQ tiles by one warp, in the shadow of the GEMMs (device).

The fp32 tile was completed in global memory a moment ago and comes back from L2 in pieces of 16 columns of one
warpgroup's accumulator, in register order. The warp acts as each thread of the MMA warpgroups in turn: it takes that
thread's registers from the piece, scales and rounds them, and stores them with the same stmatrix partition that an MMA
thread would use. The finished tile leaves through the TMA.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_dash.config import CONVERT_PIECE, CONVERT_STAGES, BwdConfig
from cute_dash.kernels import wgmma
from cute_dash.kernels.bundles import Gmem, QTile, Smem, TmaAtoms
from cute_dash.kernels.copy import copy_vector, fragment_slots, partition_tma
from cute_dash.kernels.pipeline import Ring
from cute_dash.kernels.roles import WARP_THREADS, WARPGROUP_THREADS


class DQConverter:
    """Converts dQ tiles of one configuration."""

    def __init__(self, config: BwdConfig, dtype):
        self.config = config
        self.dtype = dtype

    @cute.jit
    def convert_tile(
        self,
        gmem: Gmem,
        atoms: TmaAtoms,
        smem: Smem,
        ring: Ring,
        q_tile: QTile,
        batch_idx: Int32,
        softmax_scale: Float32,
    ):
        """dQ tile = softmax_scale * dQaccum tile, rounded; rows beyond seqlen_q are clipped by the TMA.

        Piece p holds 16 columns of one warpgroup's accumulator, in register order. A tile goes round the ring of pieces
        an even number of times, so slots and phases start anew with each tile and are known at trace time.
        """
        config = self.config
        source = gmem.mdQaccum[None, 0, q_tile.m_block, q_tile.stream].iterator
        num_pieces = config.tile_m * config.head_dim_padded // CONVERT_PIECE
        assert num_pieces % (2 * CONVERT_STAGES) == 0
        for piece in cutlass.range_constexpr(CONVERT_STAGES):
            self.load_piece(source, smem, ring, piece)
        # sdQ_out is free once the TMA store of the tile before has read it
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        for piece in cutlass.range_constexpr(num_pieces):
            ring.wait_full(piece)
            self.convert_piece(smem, piece, softmax_scale)
            cute.arch.sync_warp()
            if const_expr(piece + CONVERT_STAGES < num_pieces):
                self.load_piece(source, smem, ring, piece + CONVERT_STAGES)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        tile_q = (config.tile_m, config.head_dim_padded)
        gdQ = cute.local_tile(gmem.mdQ[None, None, q_tile.head_idx, batch_idx], tile_q, (q_tile.m_block, 0))
        tdQsdQ, tdQgdQ = partition_tma(atoms.dQ, smem.sdQ_out, gdQ)
        cute.copy(atoms.dQ, tdQsdQ, tdQgdQ)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def load_piece(self, source: cute.Pointer, smem: Smem, ring: Ring, piece: cutlass.Constexpr[int]):
        """Starts the copy of one piece of dQaccum to its slot."""
        barrier = ring.expect_bytes(piece, CONVERT_PIECE * 4)
        gPiece = cute.make_tensor((source + piece * CONVERT_PIECE).align(16), cute.make_layout(CONVERT_PIECE))
        copy_vector(gPiece, smem.sPieces[None, piece % CONVERT_STAGES], barrier)

    @cute.jit
    def convert_piece(self, smem: Smem, piece: cutlass.Constexpr[int], softmax_scale: Float32):
        """Rounds one piece into sdQ_out, acting as each of the four warps whose registers it holds in turn."""
        config = self.config
        lane_idx = cute.arch.lane_idx()
        mma_dQ = wgmma.make_tiled_mma_dQ(self.dtype, config)
        pieces_per_warpgroup = config.tile_m * config.head_dim_padded // config.num_mma_warpgroups // CONVERT_PIECE
        warpgroup_idx, columns = piece // pieces_per_warpgroup, piece % pieces_per_warpgroup
        sPiece = smem.sPieces[None, piece % CONVERT_STAGES]
        for warp in cutlass.range_constexpr(4):
            thread = warp * WARP_THREADS + lane_idx
            acc = cute.make_rmem_tensor(cute.make_layout((4, 2)), Float32)
            cute.autovec_copy(fragment_slots(sPiece.iterator, 8, thread), acc)
            acc.store(acc.load() * softmax_scale)
            tiled_copy, tRS_sdQ = wgmma.make_store_C(
                mma_dQ, smem.sdQ_out, warpgroup_idx * WARPGROUP_THREADS + thread, transpose=False
            )
            rounded = wgmma.to_operand_A(acc, self.dtype)
            target = tRS_sdQ[(None, columns), None, None]
            cute.copy(tiled_copy, cute.make_tensor(rounded.iterator, cute.make_layout(target.shape)), target)
