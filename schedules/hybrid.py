"""`shortest_first` for most streams, `longest_first` for the last ones, whose short tiles fill the end of the launch.

Shortest first keeps waiting low but ends on the longest tiles, when the SMs run dry. The last 256 work tiles, about two
waves of a Hopper GPU, therefore run longest first with a descending loop. Which streams are last depends on batch and
heads: not batch invariant.

Order of 4 x 4 causal tiles (cell = m_block:lock_value), first and last stream of many:

     step  n=0  n=1  n=2  n=3
        0  0:0  1:0  2:0  3:0
        1  1:1  2:1  3:1    -
        2  2:2  3:2    -    -
        3  3:3    -    -    -
    claim    3    2    1    0

     step  n=0  n=1  n=2  n=3
        0  3:0  3:1  3:2  3:3
        1  2:0  2:1  2:2    -
        2  1:0  1:1    -    -
        3  0:0    -    -    -
    claim    0    1    2    3
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.ints import ceil_div, minimum, where
from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile, check_int_field, get_stream_tile, get_tile_in_window


@dataclass(frozen=True)
class Hybrid(DenseSchedule):
    """Two orders by stream. `tail_tiles`: work tiles that run longest first, rounded up to whole streams."""

    tail_tiles: int = 256

    name: ClassVar[str] = "hybrid"
    batch_invariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int_field(self, "tail_tiles", least=0)

    def get_num_main_streams(self, shape: ProblemShape) -> int:
        """How many streams run shortest first; the others are the tail."""
        return shape.num_streams - minimum(ceil_div(self.tail_tiles, shape.num_n_blocks), shape.num_streams)

    def is_tail(self, tile: WorkTile, shape: ProblemShape) -> bool:
        """Whether the tile's stream runs longest first."""
        return tile.batch_idx * shape.num_heads + tile.head_idx >= self.get_num_main_streams(shape)

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: groups of main streams from right to left, then the tail as one group from left to right."""
        num_main, num_n = self.get_num_main_streams(shape), shape.num_n_blocks
        place, first_stream, size = self.get_group(work_idx, num_main, shape)
        in_tail = work_idx >= num_main * num_n
        place = where(in_tail, work_idx - num_main * num_n, place)
        size = where(in_tail, shape.num_streams - num_main, size)
        n_block, stream = get_tile_in_window(place, size, num_n, window=1)
        n_block = where(in_tail, n_block, num_n - 1 - n_block)
        return get_stream_tile(n_block, where(in_tail, num_main, first_stream) + stream, shape)

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: ascending, in the tail descending."""
        ascending = shape.get_m_block_min(tile.n_block) + step
        return where(self.is_tail(tile, shape), shape.get_m_block_max(tile.n_block) - 1 - step, ascending)

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: descending n_block, in the tail ascending."""
        descending = shape.get_n_block_max(m_block) - 1 - tile.n_block
        return where(self.is_tail(tile, shape), tile.n_block - shape.get_n_block_min(m_block), descending)


SCHEDULE = Hybrid()
