"""The schedule contract: what the kernel, the emulator, the checker and the plots ask of a schedule.

A schedule orders work and nothing else: in which order CTAs claim work tiles (tile order), in which order a work tile
visits its m_blocks (loop order), and in which order the n_blocks of a dQ tile add to it (accumulation order). It is a
frozen dataclass of branch-free integer arithmetic (`cute_dash.ints`), executed with Python ints on the host and traced
into the kernel. `cute_dash.check` proves the rules stated here for a given shape.
"""

from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from cute_dash.ints import maximum, minimum
from cute_dash.naming import name_type
from cute_dash.problem import ProblemShape


class WorkTile(NamedTuple):
    """One KV tile of one (batch, KV head): what a CTA works on between two epilogues.

    With several query heads per KV head the CTA walks the tile's steps once for each of them, one after the other.
    """

    n_block: int
    head_idx: int
    batch_idx: int


@runtime_checkable
class Schedule(Protocol):
    """Orders of work and of accumulation. Frozen, hashable; its fields are part of the compiled kernel's key."""

    @property
    def name(self) -> str:
        """Registry key, equal to the module's name."""

    @property
    def version(self) -> int:
        """Grows whenever the loop or the accumulation order changes: part of the determinism contract."""

    @property
    def ordered(self) -> bool:
        """True if CTAs wait for their turn. False only for `unordered`, the non-deterministic comparator."""

    @property
    def batch_invariant(self) -> bool:
        """True if loop and accumulation order depend on the stream's own tiles and mask only."""

    def can_implement(self, shape: ProblemShape) -> bool:
        """Host only: whether this schedule can order `shape` at all."""

    def min_resident_ctas(self, shape: ProblemShape) -> int:
        """Host only: 1 if every wait is on a tile claimed earlier, else how many CTAs must be resident at once."""

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: the work tile claimed as number `work_idx`, 0 <= work_idx < shape.num_work_tiles."""

    def get_num_steps(self, tile: WorkTile, shape: ProblemShape) -> int:
        """How many m_blocks the work tile visits, for each query head of its KV head.

        0 where no query sees its keys, which only a window can do.
        """

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: the m_block visited at `step`; a bijection from steps onto the work tile's m_blocks."""

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: the place of `tile` among those that add to dQ tile `m_block`; 0 stores, others add."""

    def get_lock_count(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """How many work tiles add to dQ tile `m_block` of this tile's stream."""


@runtime_checkable
class Selector(Protocol):
    """A schedule that stands for others: `select` names the concrete one for a shape. Host only."""

    def select(self, shape: ProblemShape) -> Schedule:
        """The schedule to compile for `shape`: a function of the shape alone, never of the device or of a timing."""


class CompileTimeHandle:
    """Base of the schedules here: an object of it can be given to the ops under torch.compile with any torch.

    Of the methods of any object torch.compile can be told to call them while it traces and to take the result for a
    constant; as arguments of such a function torch 2.11, for one, takes no dataclasses.
    """

    def _get_handle(self) -> str:
        from cute_dash.ops import make_handle  # which needs torch

        handle: str = make_handle(self)
        return handle

    # what torch.compiler.assume_constant_result does
    _get_handle._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Streams whose Q, dO and fp32 dQ share the L2 at once, in query tokens, and how many streams at most. Measured on an
# H200 at 2,048 = heads x head dim: causal 4 streams up to 8k tokens and 2 at 16k; full 8 at 2k, 4 at 8k and 2 at 16k.
# Windows, not measured yet, go with causal: there too the tiles in flight are in order along the diagonal.
_FULL_GROUP = (32768, 8)
_CAUSAL_GROUP = (32768, 4)


def get_tile_in_window(place: int, num_streams: int, num_tiles: int, window: int) -> tuple[int, int]:
    """Tile order inside a group of streams: window by window, in a window stream by stream, in a stream ascending.

    A window of 1 interleaves the streams tile by tile. With more, the `window` tiles of a stream are claimed one after
    the other, so that `window` resident CTAs hold all of them at once, however many streams are in the group.

    Args:
        place: claim number inside the group, 0 <= place < num_streams * num_tiles.
        num_streams, num_tiles: streams of the group and work tiles of each.
        window: tiles of one stream that are claimed in a row.

    Returns:
        (tile, stream): indices inside the stream and inside the group.
    """
    window_idx = place // (window * num_streams)
    first_tile = window_idx * window
    num_in_window = maximum(minimum(window, num_tiles - first_tile), 1)
    place_in_window = place - first_tile * num_streams
    stream = place_in_window // num_in_window
    return first_tile + place_in_window - stream * num_in_window, stream


def get_stream_tile(n_block: int, stream: int, shape: ProblemShape) -> WorkTile:
    """The work tile of stream number `stream` = batch_idx * num_heads + head_idx."""
    batch_idx = stream // shape.num_heads
    return WorkTile(n_block, stream - batch_idx * shape.num_heads, batch_idx)


def check_int_field(schedule: object, name: str, least: int | None = None, allowed: str = "") -> None:
    """Raises TypeError or ValueError unless a field of a schedule is an int, `least` or more.

    No bool and none of numpy's: fields are part of the compiled kernel's key, with their types.

    Args:
        allowed: for the message; default: an int, of at least `least`.
    """
    value = getattr(schedule, name)
    allowed = allowed or ("an int" if least is None else f"an int of at least {least}")
    if type(value) is not int:
        message = f"{type(schedule).__name__}: {name}={value!r} is a {name_type(value)}; allowed: {allowed}"
        raise TypeError(message)
    if least is not None and value < least:
        raise ValueError(f"{type(schedule).__name__}: {name}={value}; allowed: {allowed}")


@dataclass(frozen=True)
class DenseSchedule(CompileTimeHandle):
    """Defaults of an ordered, batch-invariant schedule: ascending loop, ascending accumulation.

    For masks that leave a KV tile a range of m_blocks, a Q tile a range of n_blocks: full, causal, sliding windows.

    A subclass sets `name` and overrides the orders it changes; its fields that are said to be ints must be ints. With
    these defaults every wait is on a tile claimed earlier, so one resident CTA is enough.

    Attributes:
        heads_per_group: streams interleaved in the tile order, so that their Q, dO and dQ share the L2; the last group
            may be smaller. 0: by shape. It touches neither the loop order nor the accumulation order, hence no bits.
    """

    heads_per_group: int = 0

    name: ClassVar[str]
    version: ClassVar[int] = 1
    ordered: ClassVar[bool] = True
    batch_invariant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type in (int, "int"):
                check_int_field(self, field.name)
        check_int_field(self, "heads_per_group", 0, "an int of at least 1, or 0 for a choice by shape")

    def can_implement(self, shape: ProblemShape) -> bool:
        """Host only: every shape."""
        return True

    def min_resident_ctas(self, shape: ProblemShape) -> int:
        """Host only: the tiles of a window, which are claimed in a row and may wait for each other."""
        return self.get_window(shape)

    def get_window(self, shape: ProblemShape) -> int:
        """Tiles of a stream that are claimed in a row before the next stream's turn."""
        return 1

    def get_heads_per_group(self, shape: ProblemShape) -> int:
        """Streams of a full group: the field, or by shape what fits the L2 budget."""
        if self.heads_per_group:
            return self.heads_per_group
        tokens, most = _FULL_GROUP if shape.mask == "full" else _CAUSAL_GROUP
        return maximum(minimum(tokens // shape.seqlen_q, most), 1)

    def get_group(
        self, work_idx: int, num_streams: int, shape: ProblemShape, num_n_blocks: int | None = None
    ) -> tuple[int, int, int]:
        """The group that claim number `work_idx` falls into, if the first `num_streams` streams are grouped.

        Args:
            num_n_blocks: KV tiles that each stream has in these claims; default: all of them.

        Returns:
            (place, first_stream, num_streams): claim number inside the group, its first stream and its size.
        """
        num_n_blocks = shape.num_n_blocks if num_n_blocks is None else num_n_blocks
        heads_per_group = self.get_heads_per_group(shape)
        group = work_idx // (heads_per_group * num_n_blocks)
        first_stream = group * heads_per_group
        size = maximum(minimum(heads_per_group, num_streams - first_stream), 1)
        return work_idx - first_stream * num_n_blocks, first_stream, size

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order: group by group; in a group ascending n_block, the streams taking turns window by window."""
        place, first_stream, size = self.get_group(work_idx, shape.num_streams, shape)
        n_block, stream = get_tile_in_window(place, size, shape.num_n_blocks, self.get_window(shape))
        return get_stream_tile(n_block, first_stream + stream, shape)

    def get_num_steps(self, tile: WorkTile, shape: ProblemShape) -> int:
        """Every m_block that the mask leaves this KV tile."""
        return shape.get_m_block_max(tile.n_block) - shape.get_m_block_min(tile.n_block)

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order: ascending."""
        return shape.get_m_block_min(tile.n_block) + step

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order: ascending n_block."""
        return tile.n_block - shape.get_n_block_min(m_block)

    def get_lock_count(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Every KV tile that the mask leaves this Q tile."""
        return shape.get_n_block_max(m_block) - shape.get_n_block_min(m_block)


def needs_one_cta(schedule: Schedule) -> bool:
    """Whether one resident CTA is enough for every shape: true of what inherits its residency from `DenseSchedule`."""
    inherited = (DenseSchedule.min_resident_ctas, DenseSchedule.get_window)
    return (
        isinstance(schedule, DenseSchedule)
        and (type(schedule).min_resident_ctas, type(schedule).get_window) == inherited
    )


class SelectorRow(NamedTuple):
    """A row of a selector's table: the schedule of one class of shapes."""

    mask: str  # one of problem.MASKS
    max_n_blocks: int | None  # most KV tiles of a stream; None: any number
    schedule: Schedule
    tile_m: int | None = None  # tokens of a Q tile and of a KV tile, which tell the head dims apart; None: any
    tile_n: int | None = None

    def fits(self, shape: ProblemShape) -> bool:
        """Whether the row is for this shape."""
        return (
            self.mask == shape.mask
            and self.tile_m in (None, shape.tile_m)
            and self.tile_n in (None, shape.tile_n)
            and (self.max_n_blocks is None or shape.num_n_blocks <= self.max_n_blocks)
        )


class SelectingSchedule(CompileTimeHandle):
    """Base of `auto` and its kin: implements the protocol by asking the schedule that `select` names.

    Host only, because `select` compares extents: the kernel is compiled for the selected schedule, never for this one.
    A subclass sets `name`, `version` (which grows with every change of the table) and `table`.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    ordered: ClassVar[bool] = True
    batch_invariant: ClassVar[bool]
    table: ClassVar[tuple[SelectorRow, ...]]

    def select(self, shape: ProblemShape) -> Schedule:
        """The schedule of the first row of the table that fits.

        Mask, tile and KV tiles of one stream decide, never batch or heads: a selector among batch-invariant schedules
        is batch invariant.
        """
        for row in self.table:
            if row.fits(shape):
                return row.schedule
        raise ValueError(f"no row of {self.name!r}'s table fits {shape}")

    def select_varlen(self, shape: ProblemShape) -> Schedule:
        """For sequences of different lengths, the longest of which `shape` has.

        The first row that fits and needs one resident CTA whatever the length; nobody on the host knows the lengths. A
        batch-invariant selector takes rows for any number of KV tiles only: the longest sequence is part of the batch
        around the others, so it must not choose the order of their sums.
        """
        for row in self.table:
            if self.batch_invariant and row.max_n_blocks is not None:
                continue
            if row.fits(shape) and needs_one_cta(row.schedule):
                return row.schedule
        raise ValueError(f"no row of {self.name!r}'s table fits sequences of different lengths of {shape}")

    def can_implement(self, shape: ProblemShape) -> bool:
        """Whether the selected schedule can."""
        return self.select(shape).can_implement(shape)

    def min_resident_ctas(self, shape: ProblemShape) -> int:
        """That of the selected schedule."""
        return self.select(shape).min_resident_ctas(shape)

    def get_work_tile(self, work_idx: int, shape: ProblemShape) -> WorkTile:
        """Tile order of the selected schedule."""
        return self.select(shape).get_work_tile(work_idx, shape)

    def get_num_steps(self, tile: WorkTile, shape: ProblemShape) -> int:
        """Steps under the selected schedule."""
        return self.select(shape).get_num_steps(tile, shape)

    def get_m_block(self, step: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Loop order of the selected schedule."""
        return self.select(shape).get_m_block(step, tile, shape)

    def get_lock_value(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Accumulation order of the selected schedule."""
        return self.select(shape).get_lock_value(m_block, tile, shape)

    def get_lock_count(self, m_block: int, tile: WorkTile, shape: ProblemShape) -> int:
        """Contributors under the selected schedule."""
        return self.select(shape).get_lock_count(m_block, tile, shape)
