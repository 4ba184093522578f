"""The whole backward call as one host function: preprocess, main and postprocess kernels on one stream."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_dash.config import BwdConfig
from cute_dash.ints import ceil_div
from cute_dash.kernels.bundles import Gmem
from cute_dash.kernels.copy import select_modes
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.flash_bwd_post import FlashAttentionBackwardPostprocess, PostGmem
from cute_dash.kernels.flash_bwd_pre import FlashAttentionBackwardPreprocess, PreGmem
from cute_dash.kernels.flash_bwd_sm90 import FlashAttentionBackwardSm90
from cute_dash.kernels.workspace import WorkspaceLayout, get_num_tiles
from cute_dash.schedule import Schedule


class AttentionBackward:
    """One configuration, dtype and schedule of the backward call; `__call__` is what gets compiled.

    `grouped` compiles the loop over the query heads of a KV head in; their number is known at run time.
    """

    def __init__(
        self,
        config: BwdConfig,
        dtype,
        schedule: Schedule,
        cooperative: bool,
        debug: bool = False,
        grouped: bool = False,
    ):
        self.config = config
        self.grouped = grouped
        self.debug = debug
        self.pre = FlashAttentionBackwardPreprocess(config, clear_dQaccum=not schedule.ordered)
        self.main = FlashAttentionBackwardSm90(config, dtype, schedule, debug, cooperative)
        self.post = FlashAttentionBackwardPostprocess(config, dtype)

    @cute.jit
    def __call__(
        self,
        mdO: cute.Tensor,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mWorkspace: cute.Tensor,
        mRecord: cute.Tensor | None,
        mStuck: cute.Tensor | None,
        mCuSeqlensQ: cute.Tensor | None,
        mCuSeqlensK: cute.Tensor | None,
        mdLSE: cute.Tensor | None,
        softmax_scale: Float32,
        window_left: Int32,
        window_right: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launches the kernels: preprocess, main and, where the main one does not finish dQ, postprocess.

        Args:
            mdO, mQ, mO, mdQ: (batch, seqlen_q, num_heads, head_dim), 16 bit; mdO and mO have head_dim_v.
            mK, mV, mdK, mdV: (batch, seqlen_k, num_heads_kv, head_dim), 16 bit; num_heads_kv = num_heads unless
                grouped; mV and mdV have head_dim_v.
            mLSE: (batch, num_heads, seqlen_q), fp32, natural log.
            mWorkspace: (WorkspaceLayout.size,), fp32, uninitialised.
            mRecord: debug builds: (batch * num_heads, num_m_blocks, num_n_blocks + 1), int32, zeros.
            mStuck: debug builds: (8,), int32, zeros.
            mCuSeqlensQ, mCuSeqlensK: (number of sequences + 1,), int32, if sequences have lengths of their own: then
                they follow each other in tensors of batch 1, and seqlen_q and seqlen_k are the tokens of all.
            mdLSE: like mLSE, its gradient, if it has one.
            window_left, window_right: sides of the window, see `Window`; not read if the configuration has none.
            num_ctas: CTAs of the main kernel; all of them must fit on the device at once.
        """
        # (batch, seqlen, num_heads, head_dim) -> (seqlen, head_dim, num_heads, batch)
        mdO, mQ, mK, mV, mO, mdQ, mdK, mdV = (
            select_modes(t, (1, 3, 2, 0)) for t in (mdO, mQ, mK, mV, mO, mdQ, mdK, mdV)
        )
        mLSE = select_modes(mLSE, (2, 1, 0))
        if const_expr(mdLSE is not None):
            mdLSE = select_modes(mdLSE, (2, 1, 0))
        seqlen_q, _, num_heads, batch = mQ.shape
        seqlen_k, _, num_heads_kv, _ = mK.shape
        extents = Extents(Int32(batch), Int32(num_heads_kv), Int32(seqlen_q), Int32(seqlen_k))
        if const_expr(self.grouped):
            extents = extents._replace(group_size=Int32(num_heads) // Int32(num_heads_kv))
        if const_expr(self.config.local):
            extents = extents._replace(window_left=window_left, window_right=window_right)
        if const_expr(mCuSeqlensQ is not None):
            num_sequences = Int32(mCuSeqlensQ.shape[0] - 1)
            extents = extents._replace(batch=num_sequences, mCuSeqlensQ=mCuSeqlensQ, mCuSeqlensK=mCuSeqlensK)
        mStats, mdQaccum, mSemaphore, mCounter = self.split_workspace(mWorkspace, extents)
        if const_expr(self.debug):
            mRecord = select_modes(mRecord, (2, 1, 0))
        fuse_dQ = const_expr(self.main.fuse_dQ)
        mdQ_main = mdQ if fuse_dQ else None
        mdKV = (mdK, mdV) if const_expr(extents.varlen) else (None, None)
        pre_gmem = PreGmem(mO, mdO, mLSE, mdLSE, mStats, mdQaccum, mSemaphore, mCounter, mdQ_main, *mdKV)
        self.pre(pre_gmem, extents, softmax_scale, stream)
        gmem = Gmem(mQ, mK, mV, mdO, mdK, mdV, mdQ_main, mStats, mdQaccum, mSemaphore, mCounter, mRecord, mStuck)
        self.main(gmem, extents, softmax_scale, num_ctas, stream)
        if const_expr(not fuse_dQ):
            self.post(PostGmem(mdQ, mdQaccum), extents, softmax_scale, stream)

    def split_workspace(self, mWorkspace: cute.Tensor, extents: Extents):
        """The tensors that share the workspace; see `WorkspaceLayout`."""
        config = self.config
        num_streams = extents.batch * extents.num_query_heads
        num_m_blocks = ceil_div(extents.seqlen_q, config.tile_m)
        if const_expr(extents.varlen):
            num_streams = extents.num_query_heads
            num_m_blocks = get_num_tiles(extents.seqlen_q, extents.batch, config.tile_m)
        layout = WorkspaceLayout(Int64(num_streams), Int64(num_m_blocks), config)
        base = mWorkspace.iterator

        def part(offset, shape, stride, dtype=Float32):
            pointer = cute.recast_ptr(base + offset, dtype=dtype) if dtype is not Float32 else base + offset
            return cute.make_tensor(pointer.align(16), cute.make_layout(shape, stride=stride))

        tile_elements = config.tile_m * config.head_dim_padded
        chunk = tile_elements // config.num_mma_warpgroups
        return (
            part(
                layout.stats,
                (config.stats_size, num_m_blocks, num_streams),
                (1, config.stats_size, Int64(num_m_blocks) * config.stats_size),
            ),
            part(
                0,
                (chunk, config.num_mma_warpgroups, num_m_blocks, num_streams),
                (1, chunk, Int64(tile_elements), Int64(num_m_blocks) * tile_elements),
            ),
            part(layout.semaphore, (num_m_blocks, num_streams), (1, num_m_blocks), Int32),
            part(layout.counter, (1,), (1,), Int32),
        )
