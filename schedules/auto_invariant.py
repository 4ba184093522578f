"""The fastest batch-invariant schedule for a shape, from a table: `auto` for sequences whose batch changes around them.

The mask and the number of KV tiles of one stream choose the row, never batch or heads: a sequence keeps the bits of its
gradients whatever it is batched with. A schedule that needs more than one resident CTA must gain over 2% (`shift` on an
H200: 8% at 4 KV tiles, 1% from 16 on).

The table (first row that fits; KV tiles of one stream):

    mask    KV tiles  schedule
    causal  any       ShortestFirst(heads_per_group=0)
    full    <= 8      Shift(heads_per_group=0, window=64)
    full    any       Baseline(heads_per_group=0)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.baseline import Baseline
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst


@dataclass(frozen=True)
class AutoInvariant(SelectingSchedule):
    """Selects among the batch-invariant schedules."""

    name: ClassVar[str] = "auto_invariant"
    version: ClassVar[int] = 1
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow(causal=True, max_n_blocks=None, schedule=ShortestFirst()),
        SelectorRow(causal=False, max_n_blocks=8, schedule=Shift()),
        SelectorRow(causal=False, max_n_blocks=None, schedule=Baseline(heads_per_group=0)),
    )


SCHEDULE = AutoInvariant()
