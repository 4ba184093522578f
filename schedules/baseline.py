"""Serial order: every work tile loops over ascending m_blocks and the dQ adds go in ascending n_block.

The deterministic mode that FlashAttention-3 began with, and the baseline of DASH (arXiv 2601.21824). CTAs start on the
same m_block and queue up for it: CTA j stalls j adds once, and keeps that distance to the ones before it: n SMs need
m * n * (compute + reduce) + (n - 1) * reduce for m heads of n x n tiles.

Order of 4 x 4 causal tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  0:0  1:1  2:2  3:3
        1  1:0  2:1  3:2    -
        2  2:0  3:1    -    -
        3  3:0    -    -    -
    claim    0    1    2    3
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import DenseSchedule


@dataclass(frozen=True)
class Baseline(DenseSchedule):
    """Ascending loop, ascending accumulation, tiles claimed in ascending n_block, one head at a time."""

    heads_per_group: int = 1

    name: ClassVar[str] = "baseline"


SCHEDULE = Baseline()
