"""Shift of DASH (arXiv 2601.21824), full masks: each KV tile starts at its own m_block, goes up and wraps around.

No two of the n_blocks that run together are ever on the same m_block, and each reaches it in the order of the adds:
with n SMs for n KV tiles nobody stalls. The price: KV tiles wait for each other in a ring, so all must be resident. The
rings are therefore windows of at most `window` n_blocks, added one window after the other: a constant, never the SM
count, on which the bits would depend.

Order of 4 x 4 full tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  0:0  1:0  2:0  3:0
        1  1:1  2:1  3:1  0:1
        2  2:2  3:2  0:2  1:2
        3  3:3  0:3  1:3  2:3
    claim    0    1    2    3
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.ints import minimum, wrap
from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile, check_int_field


@dataclass(frozen=True)
class Shift(DenseSchedule):
    """Cyclic loop in windows of n_blocks. `window`: most n_blocks of a ring; part of the accumulation order."""

    window: int = 64

    name: ClassVar[str] = "shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int_field(self, "window", least=1)

    def can_implement(self, shape: ProblemShape) -> bool:
        """Host only: full masks."""
        return shape.mask == "full"

    def get_window(self, shape: ProblemShape) -> int:
        """Tiles of a ring: no more than m_blocks, or two tiles would start on the same one."""
        return minimum(minimum(self.window, shape.num_m_blocks), shape.num_n_blocks)

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: from the tile's place in its window, wrapping around."""
        return wrap(tile.n_block % self.get_window(shape) + step, shape.num_m_blocks)

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: windows ascending; in a window as the tiles arrive, from m_block's own n_block down."""
        place = tile.n_block % self.get_window(shape)
        first = tile.n_block - place
        size = minimum(self.get_window(shape), shape.num_n_blocks - first)
        return first + wrap(minimum(m_block, size - 1) - place, size)


SCHEDULE = Shift()
