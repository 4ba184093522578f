"""Run-time extents of a problem, as they travel into the kernels."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_dash.config import BwdConfig
from cute_dash.problem import ProblemShape, Window


class Extents(NamedTuple):
    """Of the whole problem or, where sequences have lengths of their own, as `make_sequence` says of one sequence."""

    batch: Int32
    num_heads: Int32  # KV heads
    seqlen_q: Int32  # with cu_seqlens: tokens of all sequences and behind the last
    seqlen_k: Int32
    group_size: Int32 | None = None  # query heads per KV head; None: 1, and no loop over them is compiled in
    window_left: Int32 | None = None  # of a local configuration
    window_right: Int32 | None = None
    mCuSeqlensQ: cute.Tensor | None = None  # (batch + 1,), None: all sequences have seqlen_q and seqlen_k tokens
    mCuSeqlensK: cute.Tensor | None = None

    @property
    def varlen(self) -> bool:
        """Whether sequences have lengths of their own (trace time)."""
        return self.mCuSeqlensQ is not None

    def make_sequence(self, seqlen_q: Int32, seqlen_k: Int32) -> "Extents":
        """The extents of a batch of one sequence."""
        return self._replace(batch=Int32(1), seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    def make_shape(self, config: BwdConfig) -> ProblemShape:
        """The problem as schedules and masks see it, in traced ints."""
        window = Window(self.window_left, self.window_right) if config.local else None
        group_size = 1 if self.group_size is None else self.group_size
        return config.make_shape(self.batch, self.num_heads, self.seqlen_q, self.seqlen_k, window, group_size)

    @property
    def num_query_heads(self) -> Int32:
        return self.num_heads if self.group_size is None else self.num_heads * self.group_size
