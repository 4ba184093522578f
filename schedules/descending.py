"""Descending Q-tile iteration of DASH (arXiv 2601.21824): m_blocks from last to first, adds in ascending n_block.

Under a causal mask every work tile has the last m_block in common. Starting there, the short tiles on the right are
done first and their CTAs take the long tiles of the next head, so that two heads fill a rectangle: n SMs need
m * (n + 1) * (compute + reduce) / 2 + (n - 1) * reduce for an even number m of heads of n KV tiles.
The heads run one after the other, as in the paper; `longest_first` is the same order with heads interleaved.

Order of 4 x 4 causal tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  3:0  3:1  3:2  3:3
        1  2:0  2:1  2:2    -
        2  1:0  1:1    -    -
        3  0:0    -    -    -
    claim    0    1    2    3
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile


@dataclass(frozen=True)
class Descending(DenseSchedule):
    """Descending loop, ascending accumulation, tiles claimed in ascending n_block, one head at a time."""

    heads_per_group: int = 1

    name: ClassVar[str] = "descending"

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: descending."""
        return shape.get_m_block_max(tile.n_block) - 1 - step


SCHEDULE = Descending()
