"""Run-time extents of a problem, as they travel into the kernels."""

from typing import NamedTuple

from cutlass import Int32

from cute_dash.config import BwdConfig
from cute_dash.problem import ProblemShape, Window


class Extents(NamedTuple):
    batch: Int32
    num_heads: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32 | None = None  # of a local configuration
    window_right: Int32 | None = None

    def make_shape(self, config: BwdConfig) -> ProblemShape:
        """The problem as schedules and masks see it, in traced ints."""
        window = Window(self.window_left, self.window_right) if config.local else None
        return config.make_shape(self.batch, self.num_heads, self.seqlen_q, self.seqlen_k, window)
