"""Sequences of any lengths, one behind the other in tensors (total tokens, num_heads, head_dim): who is where (device).

`cu_seqlens` (batch + 1,) holds the starts of the sequences and the end of the last. Nobody on the host knows them, so
everything that is counted in tiles has room for the worst case, and is found without a table or a prefix sum:

* `get_first_tile` numbers the tiles of all sequences; of each sequence at most one number stays unused.
* The sequence of a tile is the last one whose first tile is not beyond it: `find_sequence`, a search by a whole warp.
* A TMA tensor ends where the memory ends, not where a sequence does. `make_ragged` gives it three strides over tokens,
  so that coordinates can be chosen (`view_ragged`) for which the bounds check of the hardware falls on the end of a
  sequence: loads bring zeros beyond it, stores leave out what is beyond it, as in tensors of equal lengths.

With its views a kernel works on one sequence as on a batch of one. The trick with the strides is that of Triton's
ragged descriptors.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_dash.ints import minimum, where
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.workspace import get_first_tile

MAX_ROWS = 2**30  # more than tokens of a sequence; where the bounds check falls
MAX_COORDINATE = 2**31 - 2**16
WRAP_STRIDE = 2**34  # times MAX_ROWS and 2 bytes it is a multiple of 2**64


class Sequence(NamedTuple):
    """One sequence of the batch, or number `batch`: the tokens behind the last sequence."""

    idx: Int32
    start_q: Int32
    start_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32


@cute.jit
def find_sequence(
    mCuSeqlens: cute.Tensor, tile_idx: Int32, num_sequences: Int32, tile: cutlass.Constexpr[int]
) -> Int32:
    """The sequence among the first `num_sequences` that a tile number belongs to. Called by a whole warp."""
    low, high = Int32(0), num_sequences
    while high - low > 1:
        stride = (high - low + 31) // 32
        probe = low + cute.arch.lane_idx() * stride
        is_before = False
        if probe < high:
            is_before = get_first_tile(mCuSeqlens[probe], probe, tile) <= tile_idx
        # those that are not beyond the tile come first, and the probe of lane 0 is one of them
        last = cute.arch.popc(cute.arch.vote_ballot_sync(is_before)) - 1
        low = cute.arch.make_warp_uniform(low + last * stride)
        high = cute.arch.make_warp_uniform(minimum(low + stride, high))
    return low


def load_sequence(extents: Extents, idx: Int32) -> Sequence:
    """Where a sequence starts and how long it is; called by a whole warp."""
    after = minimum(idx + 1, extents.batch)
    is_rest = idx == extents.batch
    start_q, start_k = extents.mCuSeqlensQ[idx], extents.mCuSeqlensK[idx]
    end_q = where(is_rest, extents.seqlen_q, extents.mCuSeqlensQ[after])
    end_k = where(is_rest, extents.seqlen_k, extents.mCuSeqlensK[after])
    uniform = cute.arch.make_warp_uniform
    return Sequence(idx, uniform(start_q), uniform(start_k), uniform(end_q - start_q), uniform(end_k - start_k))


def find_query_tile(extents: Extents, m_tile: Int32, tile_m: int) -> tuple[Sequence, Int32]:
    """The sequence of a tile number, and the tile's m_block in it, which may lie beyond its end.

    The tokens behind the last sequence are one more, without keys. Called by a whole warp.
    """
    idx = find_sequence(extents.mCuSeqlensQ, m_tile, extents.batch + 1, tile_m)
    sequence = load_sequence(extents, idx)
    sequence = sequence._replace(seqlen_k=where(idx == extents.batch, 0, sequence.seqlen_k))
    return sequence, m_tile - get_first_tile(sequence.start_q, idx, tile_m)


def make_ragged(mX: cute.Tensor) -> cute.Tensor:
    """(total tokens, head_dim, num_heads, 1) as a tensor for TMA, to be used through `view_ragged`.

    Coordinates (row, column, head, y, MAX_ROWS) lie at (row + y) * stride + MAX_ROWS * (WRAP_STRIDE - stride), in
    which the last term is -MAX_ROWS * stride, modulo 2**64 bytes.
    """
    _, head_dim, num_heads, _ = mX.shape
    stride, stride_column, stride_head, _ = mX.stride
    stride_wrap = cute.assume(Int64(WRAP_STRIDE) - stride, divby=8)
    layout = cute.make_layout(
        (MAX_ROWS, head_dim, num_heads, MAX_COORDINATE, MAX_COORDINATE),
        stride=(stride, stride_column, stride_head, stride, stride_wrap),
    )
    return cute.make_tensor(mX.iterator, layout)


def view_ragged(mX: cute.Tensor, start: Int32, length: Int32) -> cute.Tensor:
    """The tokens [start, start + length) as (length, head_dim, num_heads, 1); the hardware checks `length`."""
    rows = mX[None, None, None, None, MAX_ROWS]
    return cute.domain_offset((MAX_ROWS - length, 0, 0, start + length), rows)


def view_rows(mX: cute.Tensor, start: Int32, length: Int32) -> cute.Tensor:
    """The tokens [start, start + length) of a plain tensor whose first mode counts tokens."""
    _, *others = mX.shape
    tail = (0,) * len(others)
    iterator = cute.domain_offset((start, *tail), mX).iterator
    return cute.make_tensor(iterator, cute.make_layout((length, *others), stride=mX.stride))


def view_tiles(mX: cute.Tensor, mode: int, first: Int32) -> cute.Tensor:
    """A tensor that has a mode of tile numbers, from the first tile of a sequence on."""
    return cute.domain_offset(tuple(first if i == mode else 0 for i in range(cute.rank(mX))), mX)
