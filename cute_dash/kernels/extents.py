"""Run-time extents of a problem, as they travel into the kernels."""

from typing import NamedTuple

from cutlass import Int32

from cute_dash.config import BwdConfig
from cute_dash.problem import ProblemShape


class Extents(NamedTuple):
    batch: Int32
    num_heads: Int32  # KV heads
    seqlen_q: Int32
    seqlen_k: Int32
    group_size: Int32 | None  # query heads per KV head; None: 1, and no loop over them is compiled in

    def make_shape(self, config: BwdConfig) -> ProblemShape:
        """The problem as schedules and masks see it, in traced ints."""
        *extents, group_size = self
        return config.make_shape(*extents, 1 if group_size is None else group_size)

    @property
    def num_query_heads(self) -> Int32:
        return self.num_heads if self.group_size is None else self.num_heads * self.group_size
