"""The fastest batch-invariant schedule for a shape, from a table: `auto` for sequences whose batch changes around them.

The mask, the Q tile and the number of KV tiles of one stream choose the row, never batch or heads: a sequence keeps the
bits of its gradients whatever it is batched with, in a batch of one length. What needs more than one resident CTA must
gain over 2%, as in `auto`. Sliding windows (mask "local") run as there.

Sequences of different lengths (`cu_seqlens`) run under `shortest_first` whatever they are packed with: the longest of
them must not choose the order of the others. Of the batch-invariant schedules that need one resident CTA it is the
fastest at causal lengths of up to 4k, and within 3% of it at full ones (H200, sequences of one length, b48a618); at 8k
and 16k of head dim 128, causal, `longest_first` is 5 to 7% faster. So a sequence may have other bits in a packed tensor
than in a batch of one length.

The table (first row that fits; KV tiles of one stream):

    mask    Q tile  KV tiles  schedule
    causal  64      <= 8      ShortestFirst(heads_per_group=0)
    causal  64      <= 32     SymmetricShift(heads_per_group=0, window=64)
    causal  64      any       LongestFirst(heads_per_group=16)
    causal  any     any       ShortestFirst(heads_per_group=0)
    full    128     <= 16     Shift(heads_per_group=0, window=64)
    full    64      <= 32     LongestFirst(heads_per_group=8)
    full    any     any       ShortestFirst(heads_per_group=0)
    local   any     any       ShortestFirst(heads_per_group=0)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, SelectingSchedule, SelectorRow
from schedules.longest_first import LongestFirst
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst
from schedules.symmetric_shift import SymmetricShift


@dataclass(frozen=True)
class AutoInvariant(SelectingSchedule):
    """Selects among the batch-invariant schedules."""

    name: ClassVar[str] = "auto_invariant"
    version: ClassVar[int] = 9
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow("causal", 8, ShortestFirst(), tile_m=64),
        SelectorRow("causal", 32, SymmetricShift(), tile_m=64),
        SelectorRow("causal", None, LongestFirst(heads_per_group=16), tile_m=64),
        SelectorRow("causal", None, ShortestFirst()),
        SelectorRow("full", 16, Shift(), tile_m=128),
        SelectorRow("full", 32, LongestFirst(heads_per_group=8), tile_m=64),
        SelectorRow("full", None, ShortestFirst()),
        SelectorRow("local", None, ShortestFirst()),
    )

    def select_varlen(self, shape: ProblemShape) -> Schedule:
        """For sequences of different lengths one schedule: the longest of them is part of the batch."""
        return ShortestFirst()


SCHEDULE = AutoInvariant()
