"""The fastest deterministic schedule for a shape, from a table: never from a timing at run time, nor from the device.

A timing would change the bits from one machine to the next. A schedule that needs more than one resident CTA must gain
over 2% (`shift` on an H200: 2 to 7% at 4 and 8 KV tiles, nothing above). `hybrid` depends on batch and heads: for gradients that must not change with the
batch around a sequence take `auto_invariant`.

The table (first row that fits; KV tiles of one stream):

    mask    KV tiles  schedule
    causal  any       Hybrid(heads_per_group=0, tail_tiles=256)
    full    <= 8      Shift(heads_per_group=0, window=64)
    full    any       LongestFirst(heads_per_group=8)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst
from schedules.shift import Shift


@dataclass(frozen=True)
class Auto(SelectingSchedule):
    """Selects among all ordered schedules."""

    name: ClassVar[str] = "auto"
    version: ClassVar[int] = 3
    batch_invariant: ClassVar[bool] = False
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow(causal=True, max_n_blocks=None, schedule=Hybrid()),
        SelectorRow(causal=False, max_n_blocks=8, schedule=Shift()),
        SelectorRow(causal=False, max_n_blocks=None, schedule=LongestFirst(heads_per_group=8)),
    )


SCHEDULE = Auto()
