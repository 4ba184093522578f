"""The fastest deterministic schedule for a shape, from a table: never from a timing at run time, nor from the device.

A timing would change the bits from one machine to the next. A schedule that needs more than one resident CTA must gain
over 2%, and need few of them: on an H200, at head dim 64 (Q tiles of 128 tokens), `shift` gains 4 to 10% over the best of the
others at 4 to 16 KV tiles, and `symmetric_shift` 4 to 7% at 16 and 32, where they need at most 16. `hybrid` depends on batch and
heads: for gradients that must not change with the batch around a sequence take `auto_invariant`.

Of a sliding window (mask "local") all KV tiles are about equally long, so there is no tail to fill: `shortest_first`, in
which nobody waits. Measured at 8k tokens with windows of 1,024: 3% ahead of `longest_first`.

The table (first row that fits; KV tiles of one stream):

    mask    Q tile  KV tiles  schedule
    causal  128     <= 8      ShortestFirst(heads_per_group=0)
    causal  128     <= 32     SymmetricShift(heads_per_group=0, window=64)
    causal  64      <= 64     Hybrid(heads_per_group=0, tail_tiles=256)
    causal  64      any       LongestFirst(heads_per_group=16)
    causal  any     any       Hybrid(heads_per_group=0, tail_tiles=256)
    full    128     <= 16     Shift(heads_per_group=0, window=64)
    full    128     any       Hybrid(heads_per_group=0, tail_tiles=256)
    full    any     any       LongestFirst(heads_per_group=8)
    local   any     any       ShortestFirst(heads_per_group=0)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst
from schedules.symmetric_shift import SymmetricShift


@dataclass(frozen=True)
class Auto(SelectingSchedule):
    """Selects among all ordered schedules."""

    name: ClassVar[str] = "auto"
    version: ClassVar[int] = 7
    batch_invariant: ClassVar[bool] = False
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow("causal", 8, ShortestFirst(), tile_m=128),
        SelectorRow("causal", 32, SymmetricShift(), tile_m=128),
        SelectorRow("causal", 64, Hybrid(), tile_m=64),
        SelectorRow("causal", None, LongestFirst(heads_per_group=16), tile_m=64),
        SelectorRow("causal", None, Hybrid()),
        SelectorRow("full", 16, Shift(), tile_m=128),
        SelectorRow("full", None, Hybrid(), tile_m=128),
        SelectorRow("full", None, LongestFirst(heads_per_group=8)),
        SelectorRow("local", None, ShortestFirst()),
    )


SCHEDULE = Auto()
