"""The fastest batch-invariant schedule for a shape, from a table: `auto` for sequences whose batch changes around them.

The mask, the Q tile and the number of KV tiles of one stream choose the row, never batch or heads: a sequence keeps the
bits of its gradients whatever it is batched with, in a batch of one length. Nearly all is `shortest_first`, which on an
H200 (733a4d0) is 0 to 10% behind `auto` on causal masks, most at 16k, where it ends on the longest tiles, and level
with it on full ones; at head dim 128 and 16k `longest_first` with 16 heads at once is 4% faster.

Sequences of different lengths (`cu_seqlens`) run under `shortest_first` whatever they are packed with: the longest of
them must not choose the order of the others. So beyond 64 KV tiles, causal, a sequence may have other bits in a packed
tensor than in a batch of one length.

The table (first row that fits; KV tiles of one stream):

    mask    Q tile  KV tiles  schedule
    causal  64      <= 64     ShortestFirst(heads_per_group=0)
    causal  64      any       LongestFirst(heads_per_group=16)
    causal  any     any       ShortestFirst(heads_per_group=0)
    full    any     any       ShortestFirst(heads_per_group=0)
    local   any     any       ShortestFirst(heads_per_group=0)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, SelectingSchedule, SelectorRow
from schedules.longest_first import LongestFirst
from schedules.shortest_first import ShortestFirst


@dataclass(frozen=True)
class AutoInvariant(SelectingSchedule):
    """Selects among the batch-invariant schedules."""

    name: ClassVar[str] = "auto_invariant"
    version: ClassVar[int] = 9
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow("causal", 64, ShortestFirst(), tile_m=64),
        SelectorRow("causal", None, LongestFirst(heads_per_group=16), tile_m=64),
        SelectorRow("causal", None, ShortestFirst()),
        SelectorRow("full", None, ShortestFirst()),
        SelectorRow("local", None, ShortestFirst()),
    )

    def select_varlen(self, shape: ProblemShape) -> Schedule:
        """For sequences of different lengths one schedule: the longest of them is part of the batch."""
        return ShortestFirst()


SCHEDULE = AutoInvariant()
