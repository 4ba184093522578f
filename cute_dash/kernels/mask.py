"""Masking of score tiles, in the transposed score layout (device).

Score tiles are S^T: rows are keys, columns are queries. See `wgmma` for which (row, column) a register holds.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_dash.problem import ProblemShape


@cute.jit
def apply_mask(
    acc_S: cute.Tensor, shape: ProblemShape, m_block: Int32, n_block: Int32, tidx: Int32, first_column: Int32
):
    """Sets scores of masked pairs and of keys beyond seqlen_k to -inf.

    Args:
        acc_S: fp32 accumulator of this warpgroup's part of S^T.
        tidx: thread, counted so that warp w holds keys 16 * w .. 16 * w + 15 of the tile.
        first_column: the query of the tile that the part begins with.
    """
    if const_expr(shape.window is None):
        mask_keys_behind(acc_S, shape, m_block, n_block, tidx, first_column)
    else:
        # most tiles at the ends of a window have one end only
        if shape.needs_right_mask(m_block, n_block):
            mask_keys_behind(acc_S, shape, m_block, n_block, tidx, first_column)
        if shape.needs_left_mask(m_block, n_block):
            mask_keys_before(acc_S, shape, m_block, n_block, tidx, first_column)


@cute.jit
def mask_keys_behind(
    acc_S: cute.Tensor, shape: ProblemShape, m_block: Int32, n_block: Int32, tidx: Int32, first_column: Int32
):
    """Hides keys behind the last one that a query sees, and keys beyond seqlen_k: the first columns of a row of S^T."""
    lane_idx = tidx % 32
    acc = cute.make_tensor(acc_S.iterator, cute.make_layout((2, 2, cute.size(acc_S) // 4)))
    for r in cutlass.range_constexpr(2):
        key = n_block * shape.tile_n + tidx // 32 * 16 + lane_idx // 4 + 8 * r
        # columns below `first` are masked for this key; column = 8 * v + 2 * (lane % 4) + c, the lane's part moved over
        first = Int32(0)
        if const_expr(shape.mask != "full"):
            first = key - (shape.seqlen_k - shape.seqlen_q) - m_block * shape.tile_m - 2 * (lane_idx % 4) - first_column
        if const_expr(shape.window is not None):
            first = first - shape.window.right
        if key >= shape.seqlen_k:
            first = Int32(shape.tile_m)
        for v in cutlass.range_constexpr(cute.size(acc, mode=[2])):
            for c in cutlass.range_constexpr(2):
                acc[c, r, v] = -Float32.inf if 8 * v + c < first else acc[c, r, v]


@cute.jit
def mask_keys_before(
    acc_S: cute.Tensor, shape: ProblemShape, m_block: Int32, n_block: Int32, tidx: Int32, first_column: Int32
):
    """Hides keys before the first one that a query sees: the last columns of a row of S^T."""
    lane_idx = tidx % 32
    acc = cute.make_tensor(acc_S.iterator, cute.make_layout((2, 2, cute.size(acc_S) // 4)))
    for r in cutlass.range_constexpr(2):
        key = n_block * shape.tile_n + tidx // 32 * 16 + lane_idx // 4 + 8 * r
        last = key - shape.diagonal + shape.window.left - m_block * shape.tile_m - 2 * (lane_idx % 4) - first_column
        for v in cutlass.range_constexpr(cute.size(acc, mode=[2])):
            for c in cutlass.range_constexpr(2):
                acc[c, r, v] = -Float32.inf if 8 * v + c > last else acc[c, r, v]
