"""What a claimed work index becomes, run on the host with Python ints: each work tile once, then the end.

A schedule is asked about indices and lengths that it has promised to answer only. Claims go beyond the last tile, and
sequences of different lengths may be empty; there a schedule may divide by zero, of which a GPU says nothing.
"""

from dataclasses import dataclass

import pytest
from cutlass import BFloat16

from cute_dash.config import get_config
from cute_dash.kernels.extents import Extents
from cute_dash.kernels.flash_bwd_sm90 import FlashAttentionBackwardSm90, is_tile
from cute_dash.kernels.varlen import Sequence
from cute_dash.kernels.workspace import get_first_tile
from schedules.hybrid import Hybrid

CONFIG = get_config(64, causal=False)
NUM_HEADS = 3


@dataclass(frozen=True)
class Watched(Hybrid):
    """Refuses what it has not promised."""

    def get_work_tile(self, work_idx, shape):
        assert 0 <= work_idx < shape.num_work_tiles and min(shape.seqlen_q, shape.seqlen_k) >= 1
        return super().get_work_tile(work_idx, shape)


class HostExtents(Extents):
    def make_sequence(self, seqlen_q, seqlen_k):
        return self._replace(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


class PackedKernel(FlashAttentionBackwardSm90):
    """With the lengths of the sequences at hand, where the kernel searches in cu_seqlens."""

    def __init__(self, lengths):
        super().__init__(CONFIG, BFloat16, Watched())
        starts = [(sum(q for q, _ in lengths[:i]), sum(k for _, k in lengths[:i])) for i in range(len(lengths) + 1)]
        self.sequences = [Sequence(i, *starts[i], *pair) for i, pair in enumerate(lengths)]
        self.end = starts[-1][1]

    def first_work(self, sequence):
        return get_first_tile(sequence.start_k, sequence.idx, CONFIG.tile_n) * NUM_HEADS

    def find_work(self, extents, work_idx):
        sequence = max((s for s in self.sequences if self.first_work(s) <= work_idx), key=lambda s: s.idx)
        return sequence, work_idx - self.first_work(sequence)

    def get_num_work(self, extents):
        return get_first_tile(self.end, len(self.sequences), CONFIG.tile_n) * NUM_HEADS


def claim_all(kernel, extents, num_claims):
    """The (n_block, head_idx, batch_idx) that a lone CTA gets, before and after the first `NO_TILE`."""
    located = [kernel.locate_work(extents, work_idx) for work_idx in range(num_claims)]
    tiles = [tile for tile, is_void in located if not is_void]
    is_last = [not bool(is_tile(tile)) for tile in tiles]
    end = is_last.index(True)
    assert all(is_last[end:])
    return [tuple(x.value for x in tile) for tile in tiles[:end]]


@pytest.mark.parametrize("batch, seqlen_k", [(1, 1), (2, 700), (200, 300)])
def test_equal_lengths(batch, seqlen_k):
    kernel = FlashAttentionBackwardSm90(CONFIG, BFloat16, Watched())
    extents = Extents(batch, NUM_HEADS, 300, seqlen_k)
    shape = extents.make_shape(CONFIG)
    tiles = claim_all(kernel, extents, shape.num_work_tiles + 5)
    assert len(tiles) == shape.num_work_tiles == len(set(tiles))


@pytest.mark.parametrize(
    "lengths",
    [
        [(300, 300)],
        [(0, 0), (300, 700), (5, 0), (0, 5), (1, 1)],
        [(128, 128), (0, 0), (0, 0), (400, 128)],
        [(7, 0), (0, 9)],
    ],
)
def test_sequences_of_different_lengths(lengths):
    total_q, total_k = (sum(pair[i] for pair in lengths) for i in (0, 1))
    kernel = PackedKernel(lengths)
    extents = HostExtents(len(lengths), NUM_HEADS, total_q, total_k, mCuSeqlensQ=object(), mCuSeqlensK=object())
    expected = {
        (n_block, head_idx, idx)
        for idx, (seqlen_q, seqlen_k) in enumerate(lengths)
        for head_idx in range(NUM_HEADS)
        for n_block in range(-(-seqlen_k // CONFIG.tile_n))
        if seqlen_q
    }
    tiles = claim_all(kernel, extents, kernel.get_num_work(extents) + 5)
    assert len(tiles) == len(expected) and set(tiles) == expected
