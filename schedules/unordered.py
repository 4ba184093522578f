"""NOT deterministic: dQ adds land whenever a CTA gets there, so the bits of dQ change from run to run.

A comparator that shows what an order costs: the same kernel, loop and tile order as `shortest_first` (causal and
windows) and `baseline` (full), without waiting. No selector ever chooses it. Its lock values only name the
contributors.

Loop of 4 x 4 causal tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  0:0  1:1  2:2  3:3
        1  1:0  2:1  3:2    -
        2  2:0  3:1    -    -
        3  3:0    -    -    -
    claim    3    2    1    0
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile


@dataclass(frozen=True)
class Unordered(DenseSchedule):
    """Ascending loop, no accumulation order."""

    name: ClassVar[str] = "unordered"
    ordered: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: as by default; under a causal mask or a window from right to left."""
        tile = super().get_work_tile(work_idx, shape)
        return tile if shape.mask == "full" else tile._replace(n_block=shape.num_n_blocks - 1 - tile.n_block)


SCHEDULE = Unordered()
