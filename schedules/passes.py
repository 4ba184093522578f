"""`shortest_first` in passes: all streams' long KV tiles come first, their short ones later, batch invariant.

Under a causal mask shortest first waits for nobody, but must end on the longest tile of a stream, of which half is lost
when the SMs run dry. So the tiles are parted: a pass over all streams takes the longest two thirds of each, the next
one two thirds of what is left, and so on (`share`, `num_passes`). Within a pass the order is that of `shortest_first`;
the launch ends on short tiles, as in `hybrid`, but every stream has the same order. A tile waits for those of earlier
passes, which were claimed long before where there are many streams. Where there are few, or under other masks,
`shortest_first` is as good, and with sequences of different lengths, whose passes follow each other at once, better.
What it costs: Q, dO and dQ of the last rows come from memory once more in each pass.

Order of 4 x 4 causal tiles (cell = m_block:lock_value):

     step  n=0  n=1  n=2  n=3
        0  0:0  1:0  2:0  3:3
        1  1:1  2:1  3:0    -
        2  2:2  3:1    -    -
        3  3:2    -    -    -
    claim    2    1    0    3
"""

from dataclasses import dataclass
from typing import ClassVar

from cute_dash.ints import maximum, minimum, where
from cute_dash.problem import ProblemShape
from cute_dash.schedule import DenseSchedule, WorkTile, check_int_field, get_stream_tile, get_tile_in_window


@dataclass(frozen=True)
class Passes(DenseSchedule):
    """Ascending loop; passes over the KV tiles from left to right, in each descending accumulation and claims.

    Attributes:
        num_passes: at least 1, which is `shortest_first`.
        share: each pass but the last leaves one in so many of its tiles to the next, the shortest ones; at least 2.
    """

    num_passes: int = 3
    share: int = 3

    name: ClassVar[str] = "passes"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int_field(self, "num_passes", least=1)
        check_int_field(self, "share", least=2)

    def list_passes(self, shape: ProblemShape) -> list[tuple[int, int]]:
        """The KV tiles [begin, end) of each pass; none, where there are few."""
        num_n = shape.num_n_blocks
        ends = [num_n - num_n // min(self.share**i, 2**31 - 1) for i in range(1, self.num_passes)]
        return list(zip([0, *ends], [*ends, num_n], strict=True))

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: pass by pass, in a pass groups of streams from right to left."""
        begin, end = self.find_pass(work_idx, shape.num_streams, shape)
        num_n = maximum(end - begin, 1)
        place, first_stream, size = self.get_group(
            work_idx - begin * shape.num_streams, shape.num_streams, shape, num_n
        )
        n_block, stream = get_tile_in_window(place, size, num_n, window=1)
        return get_stream_tile(end - 1 - n_block, first_stream + stream, shape)

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: those of earlier passes, then descending n_block."""
        begin, end = self.find_pass(tile.n_block, 1, shape)
        num_before = maximum(begin - shape.get_n_block_min(m_block), 0)
        return num_before + minimum(end, shape.get_n_block_max(m_block)) - 1 - tile.n_block

    def find_pass(self, number: int, num_streams: int, shape: ProblemShape) -> tuple[int, int]:
        """The pass of tile number `number` where the passes of `num_streams` streams follow each other."""
        (begin, end), *others = self.list_passes(shape)
        for other_begin, other_end in others:
            is_later = number >= other_begin * num_streams
            begin, end = where(is_later, other_begin, begin), where(is_later, other_end, end)
        return begin, end


SCHEDULE = Passes()
