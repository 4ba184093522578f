"""Symmetric shift of DASH (arXiv 2601.21824), causal masks: long n_block j and short n_block n - 1 - j make a pair.

The long tiles (left half) first visit the m_blocks that all of their window see, shifted against each other, then their
own triangle upwards from the diagonal; the short tiles follow in the order in which the long ones end, with a
descending loop. A pair has n + 1 steps whatever j, and with n SMs for two heads of n KV tiles nobody stalls. As in
`shift`, the long tiles of a window wait for each other and must be resident.

Order of 4 x 4 causal tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  1:0  2:0  3:2  3:3
        1  2:1  3:0  2:2    -
        2  3:1  1:1    -    -
        3  0:0    -    -    -
    claim    0    1    2    3
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.ints import ceil_div, maximum, minimum, where, wrap
from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile, check_int_field, get_stream_tile, get_tile_in_window


@dataclass(frozen=True)
class SymmetricShift(DenseSchedule):
    """Shifted long tiles, then descending short ones. `window`: most n_blocks of a ring; part of the order."""

    window: int = 64

    name: ClassVar[str] = "symmetric_shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int_field(self, "window", least=1)

    def can_implement(self, shape: ProblemShape) -> bool:
        """Host only: causal masks."""
        return shape.mask == "causal"

    def get_heads_per_group(self, shape: ProblemShape) -> int:
        """Streams of a group: the field, or so many that their long tiles fill a wave of 128 CTAs.

        Short tiles claimed while long ones still wait for a CTA would stall: in the DAG model 25% at 2k tokens.
        """
        return self.heads_per_group or maximum(128 // self.get_num_long(shape), 1)

    def get_num_long(self, shape: ProblemShape) -> int:
        """Long tiles of a stream: the left half, with the middle one."""
        return ceil_div(shape.num_n_blocks, 2)

    def get_window(self, shape: ProblemShape) -> int:
        """Tiles of a ring: no more than m_blocks that all of them see."""
        num_long = self.get_num_long(shape)
        return minimum(minimum(self.window, num_long), shape.num_m_blocks - shape.get_m_block_min(num_long - 1))

    def get_ring(self, n_block: int, shape: ProblemShape) -> tuple[int, int, int]:
        """Of a long tile's window: the tile's place, the tiles, and the first m_block that all of them see."""
        place = n_block % self.get_window(shape)
        size = minimum(self.get_window(shape), self.get_num_long(shape) - n_block + place)
        return place, size, shape.get_m_block_min(n_block - place + size - 1)

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: of a group the long tiles, window by window, then the short ones, ascending."""
        place, first_stream, size = self.get_group(work_idx, shape.num_streams, shape)
        num_long = self.get_num_long(shape)
        is_long = place < num_long * size
        long = get_tile_in_window(minimum(place, num_long * size - 1), size, num_long, self.get_window(shape))
        short = get_tile_in_window(place, size, shape.num_n_blocks, window=1)
        return get_stream_tile(
            where(is_long, long[0], short[0]), first_stream + where(is_long, long[1], short[1]), shape
        )

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: long tiles cyclic, then up their triangle; short tiles descending."""
        place, _, top = self.get_ring(tile.n_block, shape)
        num_shared = shape.num_m_blocks - top
        shared = top + wrap(place + step, num_shared)
        long = where(step < num_shared, shared, shape.get_m_block_min(tile.n_block) + step - num_shared)
        return where(tile.n_block < self.get_num_long(shape), long, shape.num_m_blocks - 1 - step)

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: windows ascending, in a window as the tiles arrive; then the short tiles, ascending."""
        place, size, top = self.get_ring(tile.n_block, shape)
        shared = tile.n_block - place + wrap(minimum(m_block - top, size - 1) - place, size)
        triangle = tile.n_block - place + shape.get_n_block_max(m_block) - 1 - tile.n_block
        long = where(m_block < top, triangle, shared)
        return where(tile.n_block < self.get_num_long(shape), long, tile.n_block)


SCHEDULE = SymmetricShift()
