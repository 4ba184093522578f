"""Masking of score tiles (device).

A score tile is S^T, whose rows are keys and whose columns are queries, or S with `BwdConfig.swap_operands`. Either way
a mask hides the first columns of a row or its last ones. See `wgmma` for which (row, column) a register holds.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cute_dash.ints import minimum
from cute_dash.problem import ProblemShape


@cute.jit
def apply_mask(
    acc_S: cute.Tensor,
    shape: ProblemShape,
    m_block: Int32,
    n_block: Int32,
    tidx: Int32,
    first_column: Int32,
    transposed: cutlass.Constexpr[bool],
):
    """Sets scores of masked pairs and of keys beyond seqlen_k to -inf.

    Args:
        acc_S: fp32 accumulator of this warpgroup's part of S^T or, if not `transposed`, of S.
        tidx: thread, counted so that warp w holds rows 16 * w .. 16 * w + 15 of the tile.
        first_column: the column of the tile that the part begins with.
    """
    if const_expr(shape.window is None):
        mask_keys_behind(acc_S, shape, m_block, n_block, tidx, first_column, transposed)
    else:
        # most tiles at the ends of a window have one end only
        if shape.needs_right_mask(m_block, n_block):
            mask_keys_behind(acc_S, shape, m_block, n_block, tidx, first_column, transposed)
        if shape.needs_left_mask(m_block, n_block):
            mask_keys_before(acc_S, shape, m_block, n_block, tidx, first_column, transposed)


@cute.jit
def mask_keys_behind(
    acc_S: cute.Tensor,
    shape: ProblemShape,
    m_block: Int32,
    n_block: Int32,
    tidx: Int32,
    first_column: Int32,
    transposed: cutlass.Constexpr[bool],
):
    """Hides keys behind the last one that a query sees, and keys beyond seqlen_k.

    The first columns of a row of S^T, the last ones of a row of S.
    """
    lane_idx = tidx % 32
    for r in cutlass.range_constexpr(2):
        if const_expr(transposed):
            key = n_block * shape.tile_n + tidx // 32 * 16 + lane_idx // 4 + 8 * r
            first = Int32(0)
            if const_expr(shape.mask != "full"):
                first = key - shape.diagonal - m_block * shape.tile_m - 2 * (lane_idx % 4) - first_column
            if const_expr(shape.window is not None):
                first = first - shape.window.right
            if key >= shape.seqlen_k:
                first = Int32(shape.tile_m)
            hide_columns_before(acc_S, r, first)
        else:
            query = m_block * shape.tile_m + tidx // 32 * 16 + lane_idx // 4 + 8 * r
            last = shape.seqlen_k - 1
            if const_expr(shape.window is not None):
                last = minimum(last, query + shape.diagonal + shape.window.right)
            elif const_expr(shape.mask != "full"):
                last = minimum(last, query + shape.diagonal)
            hide_columns_behind(acc_S, r, last - n_block * shape.tile_n - 2 * (lane_idx % 4) - first_column)


@cute.jit
def mask_keys_before(
    acc_S: cute.Tensor,
    shape: ProblemShape,
    m_block: Int32,
    n_block: Int32,
    tidx: Int32,
    first_column: Int32,
    transposed: cutlass.Constexpr[bool],
):
    """Hides keys before the first one that a query sees: the last columns of a row of S^T, the first of one of S."""
    lane_idx = tidx % 32
    for r in cutlass.range_constexpr(2):
        if const_expr(transposed):
            key = n_block * shape.tile_n + tidx // 32 * 16 + lane_idx // 4 + 8 * r
            last = key - shape.diagonal + shape.window.left - m_block * shape.tile_m - 2 * (lane_idx % 4) - first_column
            hide_columns_behind(acc_S, r, last)
        else:
            query = m_block * shape.tile_m + tidx // 32 * 16 + lane_idx // 4 + 8 * r
            first = query + shape.diagonal - shape.window.left
            hide_columns_before(acc_S, r, first - n_block * shape.tile_n - 2 * (lane_idx % 4) - first_column)


@cute.jit
def hide_columns_before(acc_S: cute.Tensor, r: cutlass.Constexpr[int], first: Int32):
    """Hides the columns of row `r` below `first`; column = 8 * v + c, the lane's part moved over."""
    acc = cute.make_tensor(acc_S.iterator, cute.make_layout((2, 2, cute.size(acc_S) // 4)))
    for v in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for c in cutlass.range_constexpr(2):
            acc[c, r, v] = -Float32.inf if 8 * v + c < first else acc[c, r, v]


@cute.jit
def hide_columns_behind(acc_S: cute.Tensor, r: cutlass.Constexpr[int], last: Int32):
    """Hides the columns of row `r` above `last`, likewise."""
    acc = cute.make_tensor(acc_S.iterator, cute.make_layout((2, 2, cute.size(acc_S) // 4)))
    for v in cutlass.range_constexpr(cute.size(acc, mode=[2])):
        for c in cutlass.range_constexpr(2):
            acc[c, r, v] = -Float32.inf if 8 * v + c > last else acc[c, r, v]
