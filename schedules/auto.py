"""The fastest deterministic schedule for a shape, from a table: never from a timing at run time, nor from the device.

A timing would change the bits from one machine to the next. A schedule that needs more than one resident CTA must gain
over 2%, and need few of them: on an H200, at head dim 64 (Q tiles of 128 tokens), `shift` gains 1 to 10% over the best
of the others at 4 to 16 KV tiles, where it needs at most 16. `hybrid` is ahead under the causal mask at all lengths,
and depends on batch and heads: for gradients that must not change with the batch around a sequence take
`auto_invariant`.

Of a sliding window (mask "local") all KV tiles are about equally long, so there is no tail to fill: `shortest_first`,
in which nobody waits. Measured at 8k tokens with windows of 1,024: 3% ahead of `longest_first`.

The table (first row that fits; KV tiles of one stream):

    mask    Q tile  KV tiles  schedule
    causal  any     any       Hybrid(heads_per_group=0, tail_tiles=256)
    full    128     <= 16     Shift(heads_per_group=0, window=64)
    full    64      <= 32     LongestFirst(heads_per_group=8)
    full    any     any       ShortestFirst(heads_per_group=0)
    local   any     any       ShortestFirst(heads_per_group=0)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst


@dataclass(frozen=True)
class Auto(SelectingSchedule):
    """Selects among all ordered schedules."""

    name: ClassVar[str] = "auto"
    version: ClassVar[int] = 8
    batch_invariant: ClassVar[bool] = False
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow("causal", None, Hybrid()),
        SelectorRow("full", 16, Shift(), tile_m=128),
        SelectorRow("full", 32, LongestFirst(heads_per_group=8), tile_m=64),
        SelectorRow("full", None, ShortestFirst()),
        SelectorRow("local", None, ShortestFirst()),
    )


SCHEDULE = Auto()
