"""Offsets beyond 2**31 elements and 2**32 bytes, as the kernels' own code computes them: traced, and run on the CPU.

Nothing is read or written there: a host `@cute.jit` returns the addresses.
"""

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack

from cute_dash import registry
from cute_dash.config import get_config
from cute_dash.kernels import varlen
from cute_dash.kernels.backward import AttentionBackward
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.workspace import WorkspaceLayout, get_num_tiles

HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 72, 128])
# seqlen or tokens, heads, batch and strides of a tensor, the row that is asked for
TENSORS = {
    "batch": ((729, 16, 1600), (16 * 72, 72, 729 * 16 * 72), (700, 15, 1599)),
    "packed tokens": ((1_100_000, 16, 1), (16 * 128, 128, 1_100_000 * 16 * 128), (1_099_999, 15, 0)),
    "long sequences": ((200_000, 66, 2), (66 * 128, 128, 200_000 * 66 * 128), (199_999, 65, 1)),
    "far heads": ((8, 4, 1), (64, 2**32 + 64, 64), (7, 3, 0)),
}


def call(function, *arguments):
    """What `function` writes into its first argument, int64 values."""
    found = np.zeros(8, dtype=np.int64)
    function(from_dlpack(found), *arguments)
    return found.tolist()


@cute.jit
def find_rows(found: cute.Tensor, shape, strides, place):
    """Where the preprocess kernel reads a row: in the whole tensor, and in the view of a sequence starting 5 before."""
    (seqlen, num_heads, batch), (stride, stride_head, stride_batch) = shape, strides
    layout = cute.make_layout((seqlen, 64, num_heads, batch), stride=(stride, 1, stride_head, stride_batch))
    base = cute.recast_ptr(found.iterator, dtype=cutlass.BFloat16)
    mX = cute.make_tensor(base, layout)
    row, head_idx, batch_idx = place
    found[0] = Int64(mX[row, None, head_idx, batch_idx].iterator.toint()) - Int64(base.toint())
    view = varlen.view_rows(mX, row - 5, Int32(6))
    found[1] = Int64(view[5, None, head_idx, batch_idx].iterator.toint()) - Int64(base.toint())


@pytest.mark.parametrize(("shape", "strides", "place"), TENSORS.values(), ids=TENSORS.keys())
def test_rows_of_the_inputs(shape, strides, place):
    wanted = 2 * sum(index * stride for index, stride in zip(place, strides, strict=True))
    assert wanted > 2**32 or shape[-1] == 1600
    traced = tuple(map(Int32, shape)), tuple(map(Int64, strides)), tuple(map(Int32, place))
    assert call(find_rows, *traced)[:2] == [wanted, wanted]


@cute.jit
def find_tile(found: cute.Tensor, extents, place, static: cutlass.Constexpr):
    backward, with_cu_seqlens = static
    batch, num_heads, seqlen_q, seqlen_k = extents
    cu_seqlens = cute.recast_tensor(found, Int32) if cutlass.const_expr(with_cu_seqlens) else None
    extents = Extents(batch, num_heads, seqlen_q, seqlen_k, mCuSeqlensQ=cu_seqlens)
    base = cute.recast_ptr(found.iterator, dtype=Float32)
    mWorkspace = cute.make_tensor(base.align(16), cute.make_layout(1))
    mStats, mdQaccum, mSemaphore, *_, mCounter = backward.split_workspace(mWorkspace, extents)
    m_tile, stream = place
    start = Int64(base.toint())
    found[0] = Int64(mStats[None, m_tile, stream].iterator.toint()) - start
    found[1] = Int64(mdQaccum[None, 1, m_tile, stream].iterator.toint()) - start
    found[2] = Int64((mSemaphore.iterator + (stream * mSemaphore.shape[0] + m_tile)).toint()) - start
    found[3] = Int64(mCounter.iterator.toint()) - start
    # with sequences of different lengths: as the tile number 3 of a sequence
    found[4] = Int64(varlen.view_tiles(mStats, 1, m_tile - 3)[None, 3, stream].iterator.toint()) - start
    found[5] = Int64(varlen.view_tiles(mdQaccum, 2, m_tile - 3)[None, 1, 3, stream].iterator.toint()) - start
    mSemaphore = varlen.view_tiles(mSemaphore, 0, m_tile - 3)
    found[6] = Int64((mSemaphore.iterator + (stream * mSemaphore.shape[0] + 3)).toint()) - start


@pytest.mark.parametrize("with_cu_seqlens", [False, True], ids=["dense", "varlen"])
@HEAD_DIMS
def test_tiles_of_the_workspace(head_dim, with_cu_seqlens):
    config = get_config(head_dim, True)
    backward = AttentionBackward(config, cutlass.BFloat16, registry.load("shortest_first"), cooperative=False)
    # 64 heads of 2M tokens; the last tile of the last one
    batch, num_heads, seqlen = 100 if with_cu_seqlens else 2, 64, 2_000_000
    num_streams = num_heads * (1 if with_cu_seqlens else batch)
    num_tiles = get_num_tiles(seqlen, batch, config.tile_m) if with_cu_seqlens else -(-seqlen // config.tile_m)
    m_tile, stream = num_tiles - 1, num_streams - 1
    layout = WorkspaceLayout(num_streams, num_tiles, config)
    number = stream * num_tiles + m_tile
    tile = config.tile_m * config.head_dim_padded
    wanted = [
        4 * (layout.stats + number * config.stats_size),
        4 * (number * tile + tile // 2),
        4 * (layout.semaphore + number),
        4 * layout.counter,
    ]
    assert min(wanted) > 2**32 and wanted[1] > 2**34
    extents = tuple(map(Int32, (batch, num_heads, seqlen, seqlen)))
    found = call(find_tile, extents, (Int32(m_tile), Int32(stream)), (backward, with_cu_seqlens))
    assert found[:4] == wanted
    assert found[4:7] == wanted[:3]
