"""The fastest batch-invariant schedule for a shape, from a table: `auto` for sequences whose batch changes around them.

The mask, the tiles and the number of KV tiles of one stream choose the row, never batch or heads: a sequence keeps the
bits of its gradients whatever it is batched with, in a batch of one length. `shortest_first` is level with `auto` on
full masks; on causal ones it ends on the longest tiles, which cost up to 9% (H200). `longest_first` does not, but its
tiles wait for each other where there are few: with 32 heads at once it is faster from 4k tokens on at head dim 128 (2
to 4% behind `auto`) and at 16k at 64 (1%). Not measured beyond head dim 128, where it has 16 heads as before.

Sequences of different lengths (`cu_seqlens`) run under `shortest_first` whatever they are packed with: the longest of
them must not choose the order of the others. So where causal sequences of one length run under `longest_first`, a
sequence has other bits in a packed tensor than in such a batch.

The table (first row that fits; KV tiles of one stream):

    mask    Q x KV tile  KV tiles  schedule
    causal  64 x 128     <= 16     ShortestFirst(heads_per_group=0)
    causal  64 x 128     any       LongestFirst(heads_per_group=32)
    causal  any x any    <= 64     ShortestFirst(heads_per_group=0)
    causal  64 x any     any       LongestFirst(heads_per_group=16)
    causal  any x any    any       LongestFirst(heads_per_group=32)
    full    any x any    any       ShortestFirst(heads_per_group=0)
    local   any x any    any       ShortestFirst(heads_per_group=0)
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
    version: ClassVar[int] = 10
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow("causal", 16, ShortestFirst(), tile_m=64, tile_n=128),
        SelectorRow("causal", None, LongestFirst(heads_per_group=32), tile_m=64, tile_n=128),
        SelectorRow("causal", 64, ShortestFirst()),
        SelectorRow("causal", None, LongestFirst(heads_per_group=16), tile_m=64),
        SelectorRow("causal", None, LongestFirst(heads_per_group=32)),
        SelectorRow("full", None, ShortestFirst()),
        SelectorRow("local", None, ShortestFirst()),
    )

    def select_varlen(self, shape: ProblemShape) -> Schedule:
        """For sequences of different lengths one schedule: the longest of them is part of the batch."""
        return ShortestFirst()


SCHEDULE = AutoInvariant()
