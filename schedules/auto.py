"""The fastest deterministic schedule for a shape, from a table: never from a timing at run time, nor from the device.

A timing would change the bits from one machine to the next. A schedule that needs more than one resident CTA must gain
over 2%, and need few of them: on an H200 `shift` gains up to 9% and `symmetric_shift` up to 7% over the best of the others
at 4 to 16 KV tiles, where they need at most 16. `hybrid` depends on batch and heads: for gradients that must not change
with the batch around a sequence take `auto_invariant`.

Of a sliding window (mask "local") all KV tiles are about equally long, so there is no tail to fill: `shortest_first`, in
which nobody waits. That row rests on the DAG model, the others on measurements.

The table (first row that fits; KV tiles of one stream):

    mask    KV tiles  schedule
    causal  <= 16     SymmetricShift(heads_per_group=0, window=64)
    causal  any       Hybrid(heads_per_group=0, tail_tiles=256)
    full    <= 16     Shift(heads_per_group=0, window=64)
    full    any       LongestFirst(heads_per_group=8)
    local   any       ShortestFirst(heads_per_group=0)
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
    version: ClassVar[int] = 5
    batch_invariant: ClassVar[bool] = False
    table: ClassVar[tuple[SelectorRow, ...]] = (
        SelectorRow(mask="causal", max_n_blocks=16, schedule=SymmetricShift()),
        SelectorRow(mask="causal", max_n_blocks=None, schedule=Hybrid()),
        SelectorRow(mask="full", max_n_blocks=16, schedule=Shift()),
        SelectorRow(mask="full", max_n_blocks=None, schedule=LongestFirst(heads_per_group=8)),
        SelectorRow(mask="local", max_n_blocks=None, schedule=ShortestFirst()),
    )


SCHEDULE = Auto()
