"""Longest processing time first: under a causal mask n_block 0 sees the most queries, so it is claimed first.

Descending loop and ascending accumulation as in `descending`, hence the same bits; the heads of a group take turns, so
that a group's long tiles start together and its short ones fill the gaps at its end.

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
class LongestFirst(DenseSchedule):
    """Descending loop, ascending accumulation, tiles claimed in ascending n_block, heads grouped by shape."""

    name: ClassVar[str] = "longest_first"

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: descending."""
        return shape.get_m_block_max(tile.n_block) - 1 - step


SCHEDULE = LongestFirst()
