"""The DAG model of a schedule: who computes what when, and who waits for whom.

Host only. The model is that of DASH (arXiv 2601.21824): a step of a work tile computes for `compute` and then adds to
its dQ tile for `reduce`; the steps of a work tile follow each other, and so do the adds of a dQ tile, in accumulation
order. CTAs, one per SM, claim the next work tile of the tile order when they have finished one. (The paper assigns
tiles to SMs by hand; claiming gives the same assignment for its schedules.) Times are in any unit and may be ints,
floats or fractions.

Two parameters go beyond the paper. `latency`: how long after the end of an add the next one in accumulation order may
begin (release, flag, polling). `num_dq_stages`: a step computes while the adds of up to num_dq_stages - 1 earlier steps
of its tile are outstanding; 1 is the paper's model, in which the add ends before the next step begins.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cute_dash.check import DQTile, ScheduleError, TileOrder, expand
from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, SelectingSchedule, WorkTile


class Interval(NamedTuple):
    """One step on the time axis: computing in [start, compute_end), adding to dQ in [add_start, end)."""

    tile: WorkTile
    dq_tile: DQTile
    start: float
    compute_end: float
    add_start: float
    end: float

    @property
    def m_block(self) -> int:
        return self.dq_tile.m_block


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found.

    Attributes:
        ctas: per CTA its steps in the order of execution.
        stalled: time in which a CTA held a tile but neither computed nor added, because it waited for its turn; summed
            over the CTAs.
        held: time in which a CTA held a tile, summed over the CTAs.
    """

    ctas: tuple[tuple[Interval, ...], ...]
    stalled: float
    held: float

    @property
    def makespan(self) -> float:
        """When the last add ends."""
        return max(interval.end for cta in self.ctas for interval in cta)

    @property
    def stall_share(self) -> float:
        """Share of waiting for turns in the time in which CTAs hold tiles; idle CTAs without a tile do not count."""
        return self.stalled / self.held if self.held else 0.0


def simulate(
    schedule: Schedule,
    shape: ProblemShape,
    num_sms: int,
    compute: float,
    reduce: float,
    latency: float = 0,
    num_dq_stages: int = 1,
) -> Timeline:
    """List scheduling of all work tiles on `num_sms` CTAs; see the module for the model.

    An unordered schedule waits for nobody: its adds to a dQ tile may overlap.

    Args:
        schedule: a concrete schedule or a selector.
        shape: the problem.
        num_sms: CTAs that run at once, at least 1.
        compute, reduce, latency: durations, at least 0; compute + reduce > 0.
        num_dq_stages: at least 1.

    Raises:
        ValueError: a parameter out of its range.
        ScheduleError: the CTAs wait for each other forever.
    """
    _check_at_least("num_sms", num_sms, 1)
    _check_at_least("num_dq_stages", num_dq_stages, 1)
    for name, value in (("compute", compute), ("reduce", reduce), ("latency", latency)):
        _check_at_least(name, value, 0)
    if not compute + reduce > 0:
        raise ValueError(f"{compute=} and {reduce=} must not both be 0")
    orders = expand(schedule, shape)
    run = _Simulation(orders, schedule.ordered, _Times(compute, reduce, latency, num_dq_stages))
    return run.play(num_sms)


def critical_path(schedule: Schedule, shape: ProblemShape, compute: float, reduce: float) -> float:
    """Length of the critical path of the paper's DAG, in which a head of n KV tiles has n SMs.

    The DAG's edges are the steps of a work tile, the work tiles of an SM and the adds of a dQ tile. The schedule groups
    heads as it is set to; the paper runs them one after the other, in the symmetric shift two at a time.

    Raises:
        ScheduleError: the schedule needs more CTAs than a head has KV tiles.
    """
    return simulate(schedule, shape, shape.num_n_blocks, compute, reduce).makespan


def count_memory_traffic(timeline: Timeline, capacity: int) -> float:
    """How often Q, dO and dQ come from memory or are begun there, on average; 1 is the least.

    The L2 is modelled as one that keeps the `capacity` tiles that were used last. A step uses two when it begins: its Q
    and dO, together one tile, and its dQ tile, which has as many bytes in fp32 as those in 16 bits.

    An H200 has 60 MB, of which 48 explain best what was counted there (docs/performance.md). At head dim 128 and 16k
    tokens `hybrid` with 4 heads at once moves 8.2 GB; in the model (reduce 0.25, latency 0.4, 2 dQ stages) it is 22
    times the least, so 9.1 GB. With 1 head at once it is 0.7 GB, in the model 1 and 0.6. Near its edge the result
    depends on the capacity: with 46, 50 and 60 MB those 22 are 25, 16 and 5.

    Args:
        timeline: what `simulate` found.
        capacity: tiles that fit, at least 2.
    """
    _check_at_least("capacity", capacity, 2)
    steps = sorted((step.start, step.dq_tile) for cta in timeline.ctas for step in cta)
    kept: OrderedDict[tuple[bool, DQTile], None] = OrderedDict()
    num_loaded = 0
    for _, dq_tile in steps:
        for used in ((False, dq_tile), (True, dq_tile)):
            if used in kept:
                kept.move_to_end(used)
                continue
            num_loaded += 1
            kept[used] = None
            if len(kept) > capacity:
                kept.popitem(last=False)
    return num_loaded / (2 * len({dq_tile for _, dq_tile in steps})) if steps else 1.0


def table(schedule: Schedule, shape: ProblemShape, head_idx: int = 0, batch_idx: int = 0) -> str:
    """The order of one stream as text: rows = steps, columns = n_blocks, cell = m_block:lock_value.

    The last row is the tile order: the place of each n_block among the claims of this stream.
    """
    stream = [order for order in expand(schedule, shape) if order.tile[1:] == (head_idx, batch_idx)]
    claims = {order.tile.n_block: claim for claim, order in enumerate(stream)}
    columns = sorted(stream, key=lambda order: order.tile.n_block)
    rows = [["step", *(f"n={order.tile.n_block}" for order in columns)]]
    for step in range(max(len(order.m_blocks) for order in columns)):
        rows.append([str(step), *(_cell(order, step) for order in columns)])
    rows.append(["claim", *(str(claims[order.tile.n_block]) for order in columns)])
    return _align(rows)


def selection_table(selector: SelectingSchedule) -> str:
    """A selector's table as text: one row per class of shapes, in the order in which they are tried."""
    rows = [["mask", "Q x KV tile", "KV tiles", "schedule"]]
    for row in selector.table:
        tile = " x ".join("any" if extent is None else str(extent) for extent in (row.tile_m, row.tile_n))
        tiles = "any" if row.max_n_blocks is None else f"<= {row.max_n_blocks}"
        rows.append([row.mask, tile, tiles, repr(row.schedule)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(order: TileOrder, step: int) -> str:
    return f"{order.m_blocks[step]}:{order.lock_values[step]}" if step < len(order.m_blocks) else "-"


def _align(rows: list[list[str]]) -> str:
    """Right-aligned columns, two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _check_at_least(name: str, value: float, least: int) -> None:
    if not value >= least:
        raise ValueError(f"{name}={value} must be at least {least}")


_NO_DQ_TILE = DQTile(0, 0, 0)


class _Times(NamedTuple):
    compute: Any
    reduce: Any
    latency: Any
    num_dq_stages: int


@dataclass
class _Cta:
    """The tile a CTA holds and how far its computing and its adding have come."""

    order: TileOrder
    claimed_at: Any
    computing: bool = False
    adding: bool = False
    idle_since: Any = None
    starts: list[Any] = field(default_factory=list)  # per step, as the following three
    compute_ends: list[Any] = field(default_factory=list)
    add_starts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        return self.order.num_steps

    def get_intervals(self) -> list[Interval]:
        dq_tiles = map(self.order.get_dq_tile, range(self.num_steps))
        times = zip(dq_tiles, self.starts, self.compute_ends, self.add_starts, self.ends, strict=True)
        return [Interval(self.order.tile, *step) for step in times]


class _Simulation:
    """Discrete events, in the order of time, then of CTA number, then of kind: a result never depends on chance."""

    _COMPUTED, _ADDED, _TURN = range(3)  # kinds of events

    def __init__(self, orders: list[TileOrder], ordered: bool, times: _Times) -> None:
        self.orders = orders
        self.ordered = ordered
        self.times = times
        self.num_claimed = 0
        self.turns: dict[DQTile, int] = {}  # lock value that may add
        self.waiting: dict[tuple[DQTile, int], int] = {}  # dQ tile and lock value -> CTA
        self.events: list[tuple[Any, int, int, DQTile]] = []
        self.ctas: dict[int, _Cta] = {}  # those that hold a tile
        self.intervals: list[list[Interval]] = []
        self.stalled: Any = 0
        self.held: Any = 0

    def play(self, num_ctas: int) -> Timeline:
        """Run to the end.

        Raises:
            ScheduleError: no event is left, but CTAs still wait.
        """
        self.intervals = [[] for _ in range(num_ctas)]
        for cta_idx in range(num_ctas):
            self._claim(cta_idx, 0)
        while self.events:
            now, cta_idx, kind, dq_tile = heapq.heappop(self.events)
            if kind == self._COMPUTED:
                self._on_computed(cta_idx, now)
            elif kind == self._ADDED:
                self._on_added(cta_idx, now)
            else:
                self._on_turn(dq_tile, now)
        if self.waiting:
            raise ScheduleError(self._describe_deadlock(num_ctas))
        return Timeline(tuple(tuple(cta) for cta in self.intervals), self.stalled, self.held)

    def _claim(self, cta_idx: int, now: Any) -> None:
        # a tile that a window leaves no step takes no time
        while self.num_claimed < len(self.orders) and not self.orders[self.num_claimed].m_blocks:
            self.num_claimed += 1
        if self.num_claimed < len(self.orders):
            self.ctas[cta_idx] = _Cta(self.orders[self.num_claimed], now)
            self.num_claimed += 1
            self._try_compute(cta_idx, now)

    def _try_compute(self, cta_idx: int, now: Any) -> None:
        cta = self.ctas[cta_idx]
        num_outstanding = len(cta.starts) - len(cta.ends)
        if cta.computing or len(cta.starts) == cta.num_steps or num_outstanding == self.times.num_dq_stages:
            return
        cta.starts.append(now)
        self._end_idle(cta, now)
        cta.computing = True
        self._push(now + self.times.compute, cta_idx, self._COMPUTED)

    def _try_add(self, cta_idx: int, now: Any) -> None:
        cta = self.ctas[cta_idx]
        step = len(cta.add_starts)
        if cta.adding or step == len(cta.compute_ends):
            return
        dq_tile, lock_value = cta.order.get_dq_tile(step), cta.order.get_lock_value(step)
        if self.ordered and self.turns.get(dq_tile, 0) != lock_value:
            self.waiting[dq_tile, lock_value] = cta_idx
            return
        cta.add_starts.append(now)
        self._end_idle(cta, now)
        cta.adding = True
        self._push(now + self.times.reduce, cta_idx, self._ADDED)

    def _on_computed(self, cta_idx: int, now: Any) -> None:
        cta = self.ctas[cta_idx]
        cta.compute_ends.append(now)
        cta.computing = False
        self._go_on(cta_idx, now)

    def _on_added(self, cta_idx: int, now: Any) -> None:
        cta = self.ctas[cta_idx]
        dq_tile = cta.order.get_dq_tile(len(cta.ends))
        cta.ends.append(now)
        cta.adding = False
        if self.times.latency:
            self._push(now + self.times.latency, cta_idx, self._TURN, dq_tile)
        else:
            self._on_turn(dq_tile, now)
        if len(cta.ends) < cta.num_steps:
            self._go_on(cta_idx, now)
            return
        self.intervals[cta_idx] += cta.get_intervals()
        self.held += now - cta.claimed_at
        del self.ctas[cta_idx]
        self._claim(cta_idx, now)

    def _on_turn(self, dq_tile: DQTile, now: Any) -> None:
        turn = self.turns.get(dq_tile, 0) + 1
        self.turns[dq_tile] = turn
        cta_idx = self.waiting.pop((dq_tile, turn), None)
        if cta_idx is not None:
            self._try_add(cta_idx, now)

    def _go_on(self, cta_idx: int, now: Any) -> None:
        """Start what can start; note since when the CTA is idle if nothing can."""
        cta = self.ctas[cta_idx]
        self._try_add(cta_idx, now)
        self._try_compute(cta_idx, now)
        if not cta.computing and not cta.adding:
            cta.idle_since = now

    def _end_idle(self, cta: _Cta, now: Any) -> None:
        if cta.idle_since is not None:
            self.stalled += now - cta.idle_since
            cta.idle_since = None

    def _push(self, time: Any, cta_idx: int, kind: int, dq_tile: DQTile = _NO_DQ_TILE) -> None:
        heapq.heappush(self.events, (time, cta_idx, kind, dq_tile))

    def _describe_deadlock(self, num_ctas: int) -> str:
        ((batch_idx, head_idx, m_block), lock_value), cta_idx = min(self.waiting.items())
        return (
            f"deadlock with {num_ctas} CTAs: CTA {cta_idx} waits for lock value {lock_value} of m_block={m_block}, "
            f"head_idx={head_idx}, batch_idx={batch_idx}, held by n_block={self.ctas[cta_idx].order.tile.n_block}"
        )
