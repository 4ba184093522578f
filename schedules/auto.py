"""The fastest deterministic schedule for a shape, from a table: never from a timing at run time, nor from the device.

A timing would change the bits from one machine to the next. No row needs more than one resident CTA: on an H200 `shift`
gained under 2% over the rows below. `hybrid` depends on batch and heads: for gradients that must not change with the
batch around a sequence take `auto_invariant`.

The table (first row that fits; KV tiles of one stream):

    mask    KV tiles  schedule
    causal  <= 64     Hybrid(heads_per_group=0, tail_tiles=256)
    causal  any       LongestFirst(heads_per_group=16)
    full    <= 8      Hybrid(heads_per_group=0, tail_tiles=256)
    full    any       LongestFirst(heads_per_group=8)
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst


@dataclass(frozen=True)
class Auto(SelectingSchedule):
    """Selects among all ordered schedules."""

    name: ClassVar[str] = "auto"
    version: ClassVar[int] = 2
    batch_invariant: ClassVar[bool] = False
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow(causal=True, max_n_blocks=64, schedule=Hybrid()),
        SelectorRow(causal=True, max_n_blocks=None, schedule=LongestFirst(heads_per_group=16)),
        SelectorRow(causal=False, max_n_blocks=8, schedule=Hybrid()),
        SelectorRow(causal=False, max_n_blocks=None, schedule=LongestFirst(heads_per_group=8)),
    )


SCHEDULE = Auto()
