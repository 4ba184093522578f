"""Layout of the one scratch buffer of a backward call. Host and device; all offsets in 4-byte elements.

dQaccum    fp32   (tile_m * head_dim_padded, num_m_blocks, num_streams)   partial sums of dQ, in register order
stats      fp32   (stats_size, num_m_blocks, num_streams)          LSE and dPsum, see `stats`
semaphore  int32  (num_m_blocks, num_streams)                      the turnstile of each dQ tile
counter    int32  (1)                                              work tiles claimed so far
"""

from dataclasses import dataclass

from cute_dash.config import BwdConfig

ALIGNMENT = 32  # elements: every part starts on a 128-byte line


@dataclass(frozen=True)
class WorkspaceLayout:
    """Offsets of the parts; the extents are ints of either kind (traced ones must be 64 bits wide)."""

    num_streams: int
    num_m_blocks: int
    config: BwdConfig

    @property
    def num_tiles(self) -> int:
        return self.num_streams * self.num_m_blocks

    @property
    def stats(self) -> int:
        return self.num_tiles * self.config.tile_m * self.config.head_dim_padded

    @property
    def semaphore(self) -> int:
        return self.stats + _align(self.num_tiles * self.config.stats_size)

    @property
    def counter(self) -> int:
        return self.semaphore + _align(self.num_tiles)

    @property
    def size(self) -> int:
        return self.counter + ALIGNMENT


def get_first_tile(start: int, sequence_idx: int, tile: int) -> int:
    """The number of the first tile of `tile` tokens of the sequence that starts at token `start`.

    Without a prefix sum over the sequences before it: their tiles fit below, because
    floor(x + y) + 1 >= floor(x) + ceil(y).
    """
    return sequence_idx + start // tile


def get_num_tiles(num_tokens: int, num_sequences: int, tile: int) -> int:
    """Room for all tiles of `tile` tokens of sequences of different lengths, and of the tokens behind the last."""
    return num_sequences + 1 + num_tokens // tile


def _align(num_elements: int) -> int:
    return (num_elements + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
