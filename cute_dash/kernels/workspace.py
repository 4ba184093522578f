"""Layout of the one scratch buffer of a backward call. Host and device; all offsets in 4-byte elements.

dQaccum    fp32   (tile_m * head_dim, num_m_blocks, num_streams)   partial sums of dQ, in register order
LSE_log2   fp32   (tile_m, num_m_blocks, num_streams)              LSE * log2(e), +inf beyond seqlen_q
dPsum      fp32   (tile_m, num_m_blocks, num_streams)              rowsum(dO * O), 0 beyond seqlen_q
semaphore  int32  (num_m_blocks, num_streams)                      the turnstile of each dQ tile
counter    int32  (1)                                              work tiles claimed so far
"""

from dataclasses import dataclass

ALIGNMENT = 32  # elements: every part starts on a 128-byte line


@dataclass(frozen=True)
class WorkspaceLayout:
    """Offsets of the parts; the extents are ints of either kind (traced ones must be 64 bits wide)."""

    num_streams: int
    num_m_blocks: int
    tile_m: int
    head_dim: int

    @property
    def num_rows(self) -> int:
        return self.num_streams * self.num_m_blocks * self.tile_m

    @property
    def LSE_log2(self) -> int:
        return self.num_rows * self.head_dim

    @property
    def dPsum(self) -> int:
        return self.LSE_log2 + _align(self.num_rows)

    @property
    def semaphore(self) -> int:
        return self.dPsum + _align(self.num_rows)

    @property
    def counter(self) -> int:
        return self.semaphore + _align(self.num_streams * self.num_m_blocks)

    @property
    def size(self) -> int:
        return self.counter + ALIGNMENT


def get_first_tile(start: int, sequence_idx: int, tile: int) -> int:
    """The number of the first tile of `tile` tokens of the sequence that starts at token `start`.

    Without a prefix sum over the sequences before it: their tiles fit below, because floor(x + y) + 1 >= floor(x) + ceil(y).
    """
    return sequence_idx + start // tile


def get_num_tiles(num_tokens: int, num_sequences: int, tile: int) -> int:
    """Room for all tiles of `tile` tokens of sequences of different lengths, and of the tokens behind the last."""
    return num_sequences + 1 + num_tokens // tile


def _align(num_elements: int) -> int:
    return (num_elements + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
