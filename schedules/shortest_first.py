"""Shortest processing time first: KV tiles from right to left, adding to dQ in that order, ascending loop.

What FlashAttention-3 and -4 do today for causal masks; also the natural order of a sliding window, where every tile
meets an m_block after the tiles on its right. The rightmost KV tile meets its few m_blocks at once and alone;
each further tile starts one diagonal earlier and reaches an m_block after the tiles on its right have left it. On a
full mask, where all tiles are equally long, this is `baseline` mirrored.

Order of 4 x 4 causal tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  0:0  1:0  2:0  3:0
        1  1:1  2:1  3:1    -
        2  2:2  3:2    -    -
        3  3:3    -    -    -
    claim    3    2    1    0
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile


@dataclass(frozen=True)
class ShortestFirst(DenseSchedule):
    """Ascending loop, descending accumulation, tiles claimed in descending n_block, heads grouped by shape."""

    name: ClassVar[str] = "shortest_first"

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: as by default, from right to left."""
        tile = super().get_work_tile(work_idx, shape)
        return tile._replace(n_block=shape.num_n_blocks - 1 - tile.n_block)

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: descending n_block."""
        return shape.get_n_block_max(m_block) - 1 - tile.n_block


SCHEDULE = ShortestFirst()
