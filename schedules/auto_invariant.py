"""The fastest batch-invariant schedule for a shape, from a table: `auto` for sequences whose batch changes around them.

The mask and the number of KV tiles of one stream choose the row, never batch or heads: a sequence keeps the bits of its
gradients whatever it is batched with. What needs more than one resident CTA must gain over 2%, as in `auto`.
Sliding windows (mask "local") run as there.

The table (first row that fits; KV tiles of one stream):

    mask    KV tiles  schedule
    causal  <= 64     SymmetricShift(heads_per_group=0, window=64)
    causal  any       LongestFirst(heads_per_group=16)
    full    <= 16     Shift(heads_per_group=0, window=64)
    full    any       LongestFirst(heads_per_group=8)
    local   any       ShortestFirst(heads_per_group=0)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.longest_first import LongestFirst
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst
from schedules.symmetric_shift import SymmetricShift


@dataclass(frozen=True)
class AutoInvariant(SelectingSchedule):
    """Selects among the batch-invariant schedules."""

    name: ClassVar[str] = "auto_invariant"
    version: ClassVar[int] = 5
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow(mask="causal", max_n_blocks=64, schedule=SymmetricShift()),
        SelectorRow(mask="causal", max_n_blocks=None, schedule=LongestFirst(heads_per_group=16)),
        SelectorRow(mask="full", max_n_blocks=16, schedule=Shift()),
        SelectorRow(mask="full", max_n_blocks=None, schedule=LongestFirst(heads_per_group=8)),
        SelectorRow(mask="local", max_n_blocks=None, schedule=ShortestFirst()),
    )


SCHEDULE = AutoInvariant()
