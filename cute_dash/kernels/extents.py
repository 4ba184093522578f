"""Run-time extents of a problem, as they travel into the kernels."""

from typing import NamedTuple

from cutlass import Int32

from cute_dash.config import BwdConfig
from cute_dash.problem import ProblemShape


class Extents(NamedTuple):
    batch: Int32
    num_heads: Int32
    seqlen_q: Int32
    seqlen_k: Int32

    def make_shape(self, config: BwdConfig) -> ProblemShape:
        """The problem as schedules and masks see it, in traced ints."""
        return config.make_shape(*self)
