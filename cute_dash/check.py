"""Proves by enumeration that a schedule keeps the rules of the contract for one shape, or names the first violation.

Host only, Python ints. The rules:

1. coverage: every work tile is claimed once, visits each m_block that the mask leaves it once, and the lock values of a
   dQ tile are a permutation of 0 .. count - 1, with `get_lock_count` = count.
2. progress: with any number of resident CTAs from `min_resident_ctas` up, each claiming the next tile of the tile
   order when it is done with one, no set of CTAs waits forever.
   With several query heads per KV head a tile walks its steps once for each, and all that is run here.
3. purity: a frozen, hashable dataclass whose answers depend on the arguments alone; for a batch-invariant schedule, on
   the stream alone: every stream is ordered like the only stream of its own problem, and of sequences of different
   lengths whatever the longest one is, as far as a selector can be asked. (The number of SMs and the timing are no
   arguments, so nothing can depend on them.)
4. traceable: the methods run on `TracedInt`, with the same results, so that the kernel can be compiled.

Why one number of CTAs is enough for rule 2. Call a step open if it has not been added yet, and suppose that R CTAs
finish in one execution, while R' >= R CTAs get stuck in some execution, holding R' open tiles. Take the first step of
the finishing execution that is still open in the stuck one. Everything before it in its loop and in its accumulation
order is done in both, so in the stuck execution it does not wait: its tile t has not been claimed there, and the R'
stuck tiles all precede t. But when the finishing execution held t, at most R - 1 tiles before t were open, and
whatever was done then is done in the stuck one: R' <= R - 1, a contradiction. With R' = R it follows that timing does
not matter; with R' > R, that more CTAs never hurt. One run with `min_resident_ctas` CTAs, in any timing, proves both.
"""

import dataclasses
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from cute_dash.ints import NO_COMPARISON
from cute_dash.naming import name_type
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import DenseSchedule, Schedule, SelectingSchedule, Selector, WorkTile, get_stream_tile
from cute_dash.traced_int import TracedInt

_T = TypeVar("_T")
_Places = dict[tuple[int, int, int, int], int]  # (batch_idx, head_idx, m_block, lock value) -> n_block
_TRACED_TILES = 64  # rule 4 traces so many work tiles, evenly spread, and so many steps of each
_TRACED_STEPS = 8
_SAMPLED_CLAIMS = 8192  # `check_sample` asks for about so many work tiles
_SAMPLED_TILES = 512  # of at most so many it asks for all steps, and of so many dQ tiles for all additions:
_SAMPLED_STEPS = 2**14  # for about so many steps and so many additions in all
MAX_STEPS = 20_000_000  # about a minute, and 2 GB
_LONGEST = tuple(2**k for k in range(6, 21))  # tokens of the longest sequences that a selector is asked about
_COMPARED_TILES = 32  # most tiles of a sequence that is compared under two schedules
METHOD_ERRORS = (Exception, SystemExit)  # what a user's methods can raise, `exit()` among it


class ScheduleError(ValueError):
    """A schedule breaks a rule of the contract."""


class TooManyStepsError(ValueError):
    """A shape has more steps than can be enumerated in a reasonable time."""


class DQTile(NamedTuple):
    """What work tiles add to in turn: one Q tile of one (batch, query head)."""

    batch_idx: int
    head_idx: int
    m_block: int


class TileOrder(NamedTuple):
    """What a schedule says of one work tile: per step the m_block, its lock value and its lock count.

    The tile takes these steps for each of the `group_size` query heads of its KV head, one after the other: `num_steps`
    in all.
    """

    tile: WorkTile
    m_blocks: list[int]
    lock_values: list[int]
    lock_counts: list[int]
    group_size: int = 1

    @property
    def num_steps(self) -> int:
        """Steps for all query heads together."""
        return self.group_size * len(self.m_blocks)

    def get_dq_tile(self, step: int) -> DQTile:
        """The dQ tile that the step adds to, 0 <= step < num_steps."""
        member, step = divmod(step, len(self.m_blocks))
        return DQTile(self.tile.batch_idx, self.tile.head_idx * self.group_size + member, self.m_blocks[step])

    def get_lock_value(self, step: int) -> int:
        """The place of the step's addition among those to its dQ tile, 0 <= step < num_steps."""
        return self.lock_values[step % len(self.m_blocks)]


def check(schedule: Schedule, shape: ProblemShape, resident_ctas: int | None = None) -> None:
    """Prove rules 1 to 4 for a shape.

    Args:
        schedule: the schedule; of a selector such as `auto`, the selected one is checked, and that a selector which
            says batch_invariant selects by neither the batch nor, for sequences of different lengths, the longest.
        shape: the problem, with Python ints.
        resident_ctas: CTAs that the device runs at once, if it is known. Rule 2 is proved for
            `schedule.min_resident_ctas(shape)` and all larger numbers in any case.

    Raises:
        ScheduleError: the first violation: rule, tile, m_block, step and both values.
        TooManyStepsError: the shape has more than MAX_STEPS steps.
    """
    _check_size(shape)
    with _as_schedule_error(schedule):
        check_value_object(schedule)
    selected = select(schedule, shape)
    with _as_schedule_error(selected):
        orders = _check_rules(selected, shape, resident_ctas)
        _check_promises((selected, schedule), shape, orders)


@contextmanager
def _as_schedule_error(schedule: Schedule, where: str = "") -> Iterator[None]:
    """Whatever a user's methods raise becomes a ScheduleError; `where`: what its message begins with."""
    try:
        yield
    except ScheduleError:
        raise
    except METHOD_ERRORS as error:
        failure = describe_failure(error, schedule)
        raise ScheduleError(failure if failure.startswith("rule ") else where + failure) from error


def _check_size(shape: ProblemShape) -> None:
    num_steps = shape.num_n_blocks * shape.num_streams  # at least one step of each, to begin with
    if num_steps <= MAX_STEPS:
        steps = (shape.get_m_block_max(n) - shape.get_m_block_min(n) for n in range(shape.num_n_blocks))
        num_steps = sum(steps) * shape.num_streams * shape.group_size
    if num_steps > MAX_STEPS:
        raise TooManyStepsError(
            f"{shape} has {num_steps:,} steps or more; at most {MAX_STEPS:,} are enumerated: fewer sequences, heads or "
            f"tokens show the same order"
        )


def _check_rules(schedule: Schedule, shape: ProblemShape, resident_ctas: int | None) -> list[TileOrder]:
    """All rules but what a claim of batch invariance adds; returns the orders."""
    check_value_object(schedule)
    if not schedule.can_implement(shape):
        raise ScheduleError(f"{schedule.name!r} cannot implement {shape}")
    _check_group(schedule, shape)
    orders = _check_coverage(schedule, shape)
    if schedule.ordered:
        _check_progress(orders, _check_residency(schedule, shape, resident_ctas))
    _check_repeatable(schedule, shape, orders)
    _check_traceable(schedule, shape, dict(enumerate(orders)))
    return orders


def find_violation(schedule: Schedule, shape: ProblemShape, resident_ctas: int | None = None) -> str | None:
    """The message of the first violation that `check` finds, or None.

    Raises:
        TooManyStepsError: as `check`.
    """
    try:
        check(schedule, shape, resident_ctas)
    except ScheduleError as error:
        return str(error)
    return None


def describe_failure(error: BaseException, schedule: Schedule | None = None) -> str:
    """One line about what a schedule raised: its method with file and line, if the traceback knows it, and the error.

    Of an error of several lines, perhaps coloured for a terminal, the first line is taken. What the CuTe DSL says of a
    traced value that is used like a Python one, or the other way round, is said in the words of rule 4.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n")[0].strip()
    method = find_method(error, schedule)
    for mark, advice in _TRACING_ERRORS.items():
        if method and mark in text:
            return f"rule 4 (traceable): {method} {advice}"
    return f"{method + ' raised ' if method else ''}{type(error).__name__}{': ' + text if text else ''}"


_NO_CONDITION = (
    "gives cute_dash.ints.where a condition that is no comparison: write x % 2 == 1 instead of x % 2, and a >= b "
    "instead of ~(a < b)"
)
_TRACING_ERRORS = {
    NO_COMPARISON: _NO_CONDITION,
    "PHASE_CONDITIONAL_NOT_DYNAMIC": _NO_CONDITION,
    "PHASE_DYNAMIC_TO_STATIC_BOOL": "asks for the truth value of a traced value; instead of if, and, or, min and max "
    "use cute_dash.ints.where, minimum and maximum",
    "PHASE_DYNAMIC_INDEX": "takes a traced value for an index, a range bound, an int or a float, which it cannot be",
}


def find_method(error: BaseException, schedule: Schedule | None) -> str | None:
    """The innermost method of a schedule of this class that the error passed through, with file and line."""
    found, traceback = None, error.__traceback__
    while traceback:
        code, owner = traceback.tb_frame.f_code, traceback.tb_frame.f_locals.get("self")
        if schedule is not None and owner is not None and type(owner) is type(schedule):
            path = show_path(code.co_filename)
            found = f"{type(schedule).__name__}.{code.co_name} ({path}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return found


def show_path(path: str) -> str:
    """`path` for a message: relative where it is below the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def expand(schedule: Schedule, shape: ProblemShape) -> list[TileOrder]:
    """All work tiles in tile order, each with its loop and accumulation order; the schedule is trusted."""
    return [_expand_tile(schedule, schedule.get_work_tile(i, shape), shape) for i in range(shape.num_work_tiles)]


def _expand_tile(schedule: Schedule, tile: WorkTile, shape: ProblemShape) -> TileOrder:
    m_blocks = [schedule.get_m_block(step, tile, shape) for step in range(schedule.get_num_steps(tile, shape))]
    return _expand_loop(schedule, tile, m_blocks, shape)


def _expand_loop(schedule: Schedule, tile: WorkTile, m_blocks: list[int], shape: ProblemShape) -> TileOrder:
    """The order of a tile whose loop order is known."""
    lock_values = [schedule.get_lock_value(m_block, tile, shape) for m_block in m_blocks]
    lock_counts = [schedule.get_lock_count(m_block, tile, shape) for m_block in m_blocks]
    return TileOrder(tile, m_blocks, lock_values, lock_counts, shape.group_size)


def select(given: Schedule, shape: ProblemShape, varlen: bool = False) -> Schedule:
    """The schedule itself, or what it selects for a shape.

    Args:
        varlen: for sequences of different lengths, the longest of which `shape` has.

    Raises:
        ScheduleError: its method raises, or gives no schedule.
    """
    if not isinstance(given, Selector):
        return given
    method = "select_varlen" if varlen and isinstance(given, SelectingSchedule) else "select"
    with _as_schedule_error(given):
        selected = getattr(given, method)(shape)
    if not isinstance(selected, Schedule) or isinstance(selected, Selector):
        allowed = "a Schedule that is no selector"
        raise ScheduleError(f"{type(given).__name__}.{method} gives {_show(selected)}; allowed: {allowed}")
    return selected


def _describe(tile: WorkTile) -> str:
    return f"tile (n_block={tile.n_block}, head_idx={tile.head_idx}, batch_idx={tile.batch_idx})"


# Rule 1


def _check_group(schedule: Schedule, shape: ProblemShape) -> None:
    """What the tile order of `DenseSchedule` divides by."""
    if not isinstance(schedule, DenseSchedule):
        return
    for name in ("get_window", "get_heads_per_group"):
        value = getattr(schedule, name)(shape)
        if type(value) is not int or value < 1:
            raise ScheduleError(f"rule 1 (coverage): {name} gives {_show(value)}; allowed: ints of at least 1")


def _check_coverage(schedule: Schedule, shape: ProblemShape) -> list[TileOrder]:
    """Expand the schedule tile by tile, checking each before it is trusted with the next call."""
    orders: list[TileOrder] = []
    claims: dict[WorkTile, int] = {}
    places: _Places = {}
    for work_idx in range(shape.num_work_tiles):
        with _as_schedule_error(schedule, f"rule 1 (coverage): work_idx {work_idx}: "):
            tile = schedule.get_work_tile(work_idx, shape)
            _check_tile(work_idx, tile, claims, shape)
            orders.append(_check_steps(schedule, tile, places, shape))
    return orders


def _check_steps(schedule: Schedule, tile: WorkTile, places: _Places, shape: ProblemShape) -> TileOrder:
    """The tile with its orders, which are right; `places`: what has been seen so far."""
    num_steps = schedule.get_num_steps(tile, shape)
    _check_num_steps(num_steps, tile, shape)
    m_blocks = [schedule.get_m_block(step, tile, shape) for step in range(num_steps)]
    _check_loop_order(tile, m_blocks, shape)  # before other methods get them
    order = _expand_loop(schedule, tile, m_blocks, shape)
    for step, m_block in enumerate(order.m_blocks):
        where = f"{_describe(tile)}, m_block={m_block} (step {step})"
        _check_place(where, tile, m_block, order.lock_values[step], order.lock_counts[step], places, shape)
    return order


def _check_tile(work_idx: int, tile: WorkTile, claims: dict[WorkTile, int], shape: ProblemShape) -> None:
    if not isinstance(tile, WorkTile):
        raise ScheduleError(
            f"rule 1 (coverage): work_idx {work_idx}: get_work_tile gives {_show(tile)}; allowed: a WorkTile"
        )
    extents = {"n_block": shape.num_n_blocks, "head_idx": shape.num_heads, "batch_idx": shape.batch}
    for field, extent in extents.items():
        value = getattr(tile, field)
        if not _is_index(value, extent):
            raise ScheduleError(
                f"rule 1 (coverage): work_idx {work_idx}: get_work_tile gives {field}={_show(value)}; allowed: ints in "
                f"[0, {extent})"
            )
    first = claims.setdefault(tile, work_idx)
    if first != work_idx:
        raise ScheduleError(f"rule 1 (coverage): work_idx {first} and work_idx {work_idx} both claim {_describe(tile)}")


def _check_num_steps(num_steps: int, tile: WorkTile, shape: ProblemShape) -> None:
    expected = shape.get_m_block_max(tile.n_block) - shape.get_m_block_min(tile.n_block)
    if type(num_steps) is not int or num_steps != expected:
        raise ScheduleError(
            f"rule 1 (coverage): {_describe(tile)}: get_num_steps gives {_show(num_steps)}, "
            f"but the mask leaves it {expected} m_blocks"
        )


def _check_loop_order(tile: WorkTile, m_blocks: Sequence[int], shape: ProblemShape) -> None:
    low, high = shape.get_m_block_min(tile.n_block), shape.get_m_block_max(tile.n_block)
    steps: dict[int, int] = {}
    for step, m_block in enumerate(m_blocks):
        if type(m_block) is not int or not low <= m_block < high:
            raise ScheduleError(
                f"rule 1 (coverage): {_describe(tile)}: get_m_block gives {_show(m_block)} at step {step}; "
                f"the mask leaves it ints in [{low}, {high})"
            )
        first = steps.setdefault(m_block, step)
        if first != step:
            raise ScheduleError(
                f"rule 1 (coverage): {_describe(tile)}: get_m_block gives {m_block} at step {first} and at step {step}"
            )


def _check_place(
    where: str,
    tile: WorkTile,
    m_block: int,
    value: int,
    count: int,
    places: _Places,
    shape: ProblemShape,
) -> None:
    """Lock value and count of one addition, at `where` for a message."""
    expected = shape.get_n_block_max(m_block) - shape.get_n_block_min(m_block)
    if type(count) is not int or count != expected:
        raise ScheduleError(
            f"rule 1 (coverage): {where}: get_lock_count gives {_show(count)}, but {expected} n_blocks add to this "
            "dQ tile"
        )
    if not _is_index(value, count):
        raise ScheduleError(
            f"rule 1 (coverage): {where}: get_lock_value gives {_show(value)}; allowed: ints in [0, {count}), one "
            f"for each n_block that the mask leaves this m_block"
        )
    other = places.setdefault((tile.batch_idx, tile.head_idx, m_block, value), tile.n_block)
    if other != tile.n_block:
        raise ScheduleError(
            f"rule 1 (coverage): {where}: get_lock_value gives {value}, as to n_block={other}; "
            f"it must number the {count} n_blocks that add to a dQ tile 0 to {count - 1}, each once"
        )


def _show(value: object) -> str:
    """For a message; of what is no int also its type, which its repr may not tell."""
    return repr(value) if type(value) is int or value is None else f"{value!r} of type {name_type(value)}"


def _is_index(value: object, extent: int) -> bool:
    return type(value) is int and 0 <= value < extent


# Rule 2


def _check_residency(schedule: Schedule, shape: ProblemShape, resident_ctas: int | None) -> int:
    """The number of resident CTAs to prove rule 2 for."""
    needed = schedule.min_resident_ctas(shape)
    if type(needed) is not int or needed < 1:
        raise ScheduleError(f"rule 2 (progress): min_resident_ctas is {needed!r}; it must be an int of at least 1")
    if resident_ctas is not None and resident_ctas < needed:
        raise ScheduleError(
            f"rule 2 (progress): {schedule.name!r} needs {needed} resident CTAs for this shape, "
            f"there are {resident_ctas}"
        )
    return needed


_PROGRESS_ADVICE = (
    "To put it right, let get_work_tile claim tiles in the order in which get_lock_value lets them add, or "
    "min_resident_ctas ask for more CTAs"
)


class _Run:
    """The tiles that `num_ctas` CTAs hold, advanced in claim order as far as the lock values allow."""

    def __init__(self, orders: list[TileOrder]) -> None:
        self.orders = orders
        self.steps = [0] * len(orders)  # next step of each tile
        self.turns: dict[DQTile, int] = {}  # lock value that may add
        self.waiting: dict[tuple[DQTile, int], int] = {}  # dQ tile and lock value -> work_idx

    def play(self, num_ctas: int) -> int:
        """Run until all is done or nothing moves; returns how many tiles were claimed."""
        num_claimed = num_held = 0
        runnable: list[int] = []
        while True:
            if not runnable:
                if num_held == num_ctas or num_claimed == len(self.orders):
                    return num_claimed
                runnable.append(num_claimed)
                num_claimed, num_held = num_claimed + 1, num_held + 1
            num_held -= self._advance(runnable.pop(), runnable)

    def _advance(self, work_idx: int, runnable: list[int]) -> bool:
        """Take steps of one tile until it waits or is done (True); the tiles it lets go on become runnable."""
        order = self.orders[work_idx]
        for step in range(self.steps[work_idx], order.num_steps):
            dq_tile, lock_value = order.get_dq_tile(step), order.get_lock_value(step)
            turn = self.turns.get(dq_tile, 0)
            if lock_value != turn:
                self.waiting[dq_tile, lock_value] = work_idx
                return False
            self.turns[dq_tile] = turn + 1
            self.steps[work_idx] = step + 1
            woken = self.waiting.pop((dq_tile, turn + 1), None)
            if woken is not None:
                runnable.append(woken)
        return True


def _check_progress(orders: list[TileOrder], num_ctas: int) -> None:
    run = _Run(orders)
    num_claimed = run.play(num_ctas)
    if not run.waiting:
        return
    stuck = min(run.waiting.values())
    tile, step = orders[stuck].tile, run.steps[stuck]
    dq_tile, value = orders[stuck].get_dq_tile(step), orders[stuck].get_lock_value(step)
    m_block, turn = dq_tile.m_block, run.turns.get(dq_tile, 0)
    blocker = _find_contributor(orders, tile, m_block, turn)
    if blocker >= num_claimed:
        state = f"is claimed later (work_idx {blocker})"
    else:
        held = run.steps[blocker]
        held_m_block = orders[blocker].get_dq_tile(held).m_block
        state = f"(work_idx {blocker}) is itself stuck at step {held}, m_block={held_m_block}"
    raise ScheduleError(
        f"rule 2 (progress): deadlock with {num_ctas} resident CTAs: {_describe(tile)} (work_idx {stuck}) waits "
        f"at step {step} for lock value {value} of m_block={m_block}, which stands at {turn}; "
        f"n_block={orders[blocker].tile.n_block}, whose turn it is, {state}. {_PROGRESS_ADVICE}"
    )


def _find_contributor(orders: list[TileOrder], like: WorkTile, m_block: int, lock_value: int) -> int:
    """work_idx of the tile of `like`'s stream that adds to `m_block` at `lock_value`."""
    for work_idx, order in enumerate(orders):
        same_stream, m_blocks = order.tile[1:] == like[1:], order.m_blocks
        if same_stream and m_block in m_blocks and order.lock_values[m_blocks.index(m_block)] == lock_value:
            return work_idx
    raise AssertionError("rule 1 guarantees a contributor for every lock value")


# Rule 3


def check_value_object(schedule: Schedule) -> None:
    """Rule 3 as far as the class says: equal schedules must be the same order, because kernels are kept by them.

    Raises:
        ScheduleError: not a frozen dataclass, not hashable, or with fields that equality and hash leave out; a name,
            version or flag of another type than the protocol's.
    """
    parameters = getattr(type(schedule), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise ScheduleError(
            f"rule 3 (purity): {type(schedule).__name__} must be a frozen dataclass: "
            f"its fields are part of the kernel's key"
        )
    if left_out := _find_fields_without_equality(schedule):
        raise ScheduleError(
            f"rule 3 (purity): {type(schedule).__name__}: {', '.join(left_out)} would not enter equality and hash, so "
            "different orders would share a kernel; write @dataclass(frozen=True) above the class, and no "
            "compare=False"
        )
    try:
        hash(schedule)
    except TypeError as error:
        raise ScheduleError(f"rule 3 (purity): {schedule!r} is not hashable: {error}") from error
    for name, kind in (("name", str), ("version", int), ("ordered", bool), ("batch_invariant", bool)):
        if type(value := getattr(schedule, name)) is not kind:
            raise ScheduleError(
                f"rule 3 (purity): {type(schedule).__name__}.{name} is {_show(value)}; allowed: {kind.__name__}"
            )
    if schedule.version < 1:
        raise ScheduleError(
            f"rule 3 (purity): {type(schedule).__name__}.version is {schedule.version}; allowed: an int of at least 1"
        )


def _find_fields_without_equality(schedule: Any) -> list[str]:
    """Names that look like fields, in the class or in the object, but are none of those that are compared."""
    cls = type(schedule)
    compared = {field.name for field in dataclasses.fields(schedule) if field.compare}
    names = [
        name
        for base in reversed(cls.__mro__)
        for name, annotation in inspect.get_annotations(base).items()
        if not re.match(r"(typing\.)?(ClassVar|InitVar)\b", _show_annotation(annotation))
    ]
    if "__dataclass_params__" not in vars(cls):  # what an __init__ of its own has set
        names += getattr(schedule, "__dict__", {})
    return sorted(set(names) - compared)


def _show_annotation(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else repr(annotation).replace("dataclasses.", "")


def _check_repeatable(schedule: Schedule, shape: ProblemShape, orders: list[TileOrder]) -> None:
    """Ask everything a second time, last tile first."""
    for work_idx in reversed(range(len(orders))):
        tile = schedule.get_work_tile(work_idx, shape)
        if tile != orders[work_idx].tile:
            raise ScheduleError(
                f"rule 3 (purity): work_idx {work_idx} claims {_describe(orders[work_idx].tile)} when asked first and "
                f"{_describe(tile)} when asked again"
            )
        again = _expand_tile(schedule, tile, shape)
        _check_same_order(orders[work_idx], again, "when asked first", "when asked again")


def _check_promises(schedules: Sequence[Schedule], shape: ProblemShape, orders: Sequence[TileOrder]) -> None:
    """Of a selected schedule and its selector each may say that it is batch invariant; they may be one."""
    longest = dataclasses.replace(shape, batch=1)
    for schedule in dict.fromkeys(schedules):
        if not schedule.batch_invariant:
            continue
        _check_batch_invariant(schedule, shape, orders)
        if isinstance(schedule, SelectingSchedule) and _selects_varlen(schedule, longest):
            check_selection_by_length(schedule, longest)


def _selects_varlen(schedule: Schedule, longest: ProblemShape) -> bool:
    """Whether a selector is for sequences of different lengths, too; where not, who asks for them is told why."""
    try:
        return select(schedule, longest, varlen=True) is not None
    except ScheduleError:
        return False


def _check_batch_invariant(given: Schedule, shape: ProblemShape, orders: Sequence[TileOrder]) -> None:
    """Compare every stream with the only stream of its own problem, for which a selector may select anew."""
    shape = dataclasses.replace(shape, batch=1, num_heads=1)
    schedule = select(given, shape)
    if not schedule.can_implement(shape):
        raise ScheduleError(f"rule 3 (purity): {schedule.name!r} says batch_invariant, but cannot implement {shape}")
    n_blocks = {order.tile.n_block for order in orders}
    alone = {n_block: _expand_tile(schedule, WorkTile(n_block, 0, 0), shape) for n_block in n_blocks}
    for order in orders:
        who = f"{given.name!r}, which selects its schedule," if isinstance(given, Selector) else "it"
        there = f"alone, though {who} says batch_invariant"
        _check_same_order(order, alone[order.tile.n_block], "in this batch", there)


def check_selection_by_length(given: Schedule, longest: ProblemShape) -> None:
    """Rule 3 for sequences of different lengths, whose longest is part of the batch around the others.

    A batch-invariant selector is asked about ever longer ones: whatever it selects must order a sequence as what it
    selects for `longest`.

    Raises:
        ScheduleError: it does not; or as `select`.
    """
    if not (isinstance(given, Selector) and given.batch_invariant):
        return
    chosen = select(given, longest, varlen=True)
    for length in _LONGEST:
        try:
            other = select(given, dataclasses.replace(longest, seqlen_q=length, seqlen_k=length), varlen=True)
        except ScheduleError:
            continue  # a length that it refuses
        if other != chosen:
            _check_same_selection(given, (chosen, other), longest, length)


def _check_same_selection(
    given: Schedule, schedules: tuple[Schedule, Schedule], longest: ProblemShape, length: int
) -> None:
    """Compare a sequence under what is selected beside `longest` and beside one of `length` tokens."""
    seqlen_q, seqlen_k = (
        min(seqlen, length, _COMPARED_TILES * tile)
        for seqlen, tile in ((longest.seqlen_q, longest.tile_m), (longest.seqlen_k, longest.tile_n))
    )
    sequence = dataclasses.replace(longest, batch=1, num_heads=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    with _as_schedule_error(schedules[0]), _as_schedule_error(schedules[1]):
        for n_block in range(sequence.num_n_blocks):
            chosen, other = (_expand_tile(schedule, WorkTile(n_block, 0, 0), sequence) for schedule in schedules)
            here = f"where the longest sequence has {longest.seqlen_q} x {longest.seqlen_k} tokens"
            there = f"where it has {length}, by which {given.name!r} selects, though it says batch_invariant"
            _check_same_order(chosen, other, here, there)


def _check_same_order(order: TileOrder, other: TileOrder, here: str, there: str) -> None:
    if order.m_blocks == other.m_blocks and order.lock_values == other.lock_values:
        return
    for step, pairs in enumerate(_step_pairs(order, other)):
        for what, (value, other_value) in pairs.items():
            if value != other_value:
                raise ScheduleError(
                    f"rule 3 (purity): {_describe(order.tile)}, step {step}: "
                    f"{what} is {value} {here} and {other_value} {there}"
                )
    raise ScheduleError(
        f"rule 3 (purity): {_describe(order.tile)} has {len(order.m_blocks)} steps {here} "
        f"and {len(other.m_blocks)} {there}"
    )


def _step_pairs(order: TileOrder, other: TileOrder) -> Iterator[dict[str, tuple[int, int]]]:
    """Per step that both have: m_block and lock value of both."""
    both = zip(order.m_blocks, other.m_blocks, order.lock_values, other.lock_values, strict=False)
    for m_block, other_m_block, value, other_value in both:
        yield {"m_block": (m_block, other_m_block), "lock value": (value, other_value)}


# Rule 4


def _check_traceable(schedule: Schedule, shape: ProblemShape, orders: Mapping[int, TileOrder]) -> None:
    """Run a sample of the orders, by work_idx, on traced ints.

    The methods are branch-free, so every line of them runs at the first tile.
    """
    names = ("batch", "num_heads", "seqlen_q", "seqlen_k", "group_size")
    extents: Any = {name: TracedInt(getattr(shape, name)) for name in names}
    if shape.window is not None:
        extents["window"] = Window(*map(_trace, shape.window))
    traced_shape = dataclasses.replace(shape, **extents)
    for work_idx, order in _take(list(orders.items()), _TRACED_TILES):
        with _as_schedule_error(schedule, f"rule 4 (traceable): {_describe(order.tile)}: "):
            _check_traced_tile(schedule, traced_shape, work_idx, order)


def _check_traced_tile(schedule: Schedule, traced_shape: ProblemShape, work_idx: int, order: TileOrder) -> None:
    claimed = schedule.get_work_tile(_trace(work_idx), traced_shape)
    _check_traced("get_work_tile", order.tile, claimed, order.tile)
    tile = WorkTile(*map(_trace, order.tile))
    num_steps = schedule.get_num_steps(tile, traced_shape)
    _check_traced("get_num_steps", (len(order.m_blocks),), (num_steps,), order.tile)
    for step in _spread(len(order.m_blocks), _TRACED_STEPS):
        m_block = order.m_blocks[step]
        results = (
            schedule.get_m_block(_trace(step), tile, traced_shape),
            schedule.get_lock_value(_trace(m_block), tile, traced_shape),
            schedule.get_lock_count(_trace(m_block), tile, traced_shape),
        )
        expected = (m_block, order.lock_values[step], order.lock_counts[step])
        _check_traced(f"get_m_block, get_lock_value, get_lock_count at step {step}", expected, results, order.tile)


def _trace(value: int) -> Any:
    """`value` as a traced int; Any, because schedules are typed for the ints they stand for."""
    return TracedInt(value)


def _check_traced(what: str, expected: tuple[int, ...], results: tuple[object, ...], tile: WorkTile) -> None:
    values = tuple(result.value if isinstance(result, TracedInt) else result for result in results)
    if values != tuple(expected):
        raise ScheduleError(
            f"rule 4 (traceable): {_describe(tile)}: {what} give {values} "
            f"on traced ints and {tuple(expected)} on the host"
        )


def _spread(count: int, most: int) -> list[int]:
    """At most `most` indices below `count`, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // (most - 1) for i in range(most)]


def _take(items: Sequence[_T], most: int) -> list[_T]:
    """At most `most` items, spread likewise."""
    return [items[i] for i in _spread(len(items), most)]


# A sample of a shape that is too large to be enumerated


def check_sample(schedule: Schedule, shape: ProblemShape) -> None:
    """Looks for violations in a sample of a shape of any size, in about half a second.

    Of claims, of work tiles with all their steps and of dQ tiles with all that add to them, spread evenly from the
    first to the last, of which the last batch_idx, head_idx and block are part:

    * rule 1. Lock values of a dQ tile are a permutation; two claims of a tile are found if both are in the sample.
    * rule 2 where one resident CTA is to be enough: what adds to a dQ tile is claimed in the order of the lock values.
    * rule 3 for a schedule that says batch_invariant.
    * rule 4, that all fits 32 bits included.

    A tile of more than 16,384 steps or additions, which a million tokens make, is left out.

    Raises:
        ScheduleError: as `check`.
    """
    selected = select(schedule, shape)
    with _as_schedule_error(selected):
        orders = _check_sampled_rules(selected, shape)
        _check_promises((selected, schedule), shape, orders)


def _check_sampled_rules(schedule: Schedule, shape: ProblemShape) -> list[TileOrder]:
    places: _Places = {}
    _check_group(schedule, shape)
    claims = _check_sampled_claims(schedule, shape)
    orders = _check_sampled_tiles(schedule, shape, claims, places)
    needs_one_cta = schedule.ordered and _check_residency(schedule, shape, None) == 1
    _check_sampled_dq_tiles(schedule, shape, claims if needs_one_cta else {}, places)
    _check_traceable(schedule, shape, {claims[tile]: order for tile, order in orders.items() if tile in claims})
    return list(orders.values())


def _check_sampled_claims(schedule: Schedule, shape: ProblemShape) -> dict[WorkTile, int]:
    """Work tiles with their work_idx: the first and the last ones in a row, and some spread over all."""
    total, third = shape.num_work_tiles, _SAMPLED_CLAIMS // 3
    claims: dict[WorkTile, int] = {}
    for work_idx in sorted({*range(min(third, total)), *range(max(total - third, 0), total), *_spread(total, third)}):
        with _as_schedule_error(schedule, f"rule 1 (coverage): work_idx {work_idx}: "):
            _check_tile(work_idx, schedule.get_work_tile(work_idx, shape), claims, shape)
    return claims


def _check_sampled_tiles(
    schedule: Schedule, shape: ProblemShape, claims: Mapping[WorkTile, int], places: _Places
) -> dict[WorkTile, TileOrder]:
    """Loop and accumulation order of some tiles spread over the claims, and of some spread over the streams."""

    def count_steps(tile: WorkTile) -> int:
        return shape.get_m_block_max(tile.n_block) - shape.get_m_block_min(tile.n_block)

    indices = _spread(shape.num_work_tiles, _SAMPLED_TILES)
    in_streams = [get_stream_tile(i % shape.num_n_blocks, i // shape.num_n_blocks, shape) for i in indices]
    orders = {}
    for tiles in (_take(list(claims), _SAMPLED_TILES), in_streams):
        for tile in _afford(tiles, count_steps, _SAMPLED_STEPS // 2):
            with _as_schedule_error(schedule, f"rule 1 (coverage): {_describe(tile)}: "):
                orders[tile] = _check_steps(schedule, tile, places, shape)
    return orders


def _check_sampled_dq_tiles(
    schedule: Schedule, shape: ProblemShape, claims: Mapping[WorkTile, int], places: _Places
) -> None:
    """All that add to some dQ tiles; `claims`, by work_idx, must be in the order of the lock values."""

    def count_additions(index: int) -> int:
        m_block = index % shape.num_m_blocks
        return shape.get_n_block_max(m_block) - shape.get_n_block_min(m_block)

    indices = _spread(shape.num_streams * shape.num_m_blocks, _SAMPLED_TILES)
    for index in _afford(indices, count_additions, _SAMPLED_STEPS):
        stream, m_block = divmod(index, shape.num_m_blocks)
        with _as_schedule_error(schedule, f"rule 1 (coverage): m_block={m_block} of stream {stream}: "):
            in_turn = _check_additions(schedule, stream, m_block, places, shape)
        _check_claimed_in_turn([tile for tile in in_turn if tile in claims], m_block, claims)


def _check_additions(
    schedule: Schedule, stream: int, m_block: int, places: _Places, shape: ProblemShape
) -> list[WorkTile]:
    """All tiles that add to a dQ tile, in the order of their lock values, which are right."""
    tiles = {}
    for n_block in range(shape.get_n_block_min(m_block), shape.get_n_block_max(m_block)):
        tile = get_stream_tile(n_block, stream, shape)
        value = schedule.get_lock_value(m_block, tile, shape)
        count = schedule.get_lock_count(m_block, tile, shape)
        _check_place(f"{_describe(tile)}, m_block={m_block}", tile, m_block, value, count, places, shape)
        tiles[value] = tile
    return [tiles[value] for value in range(len(tiles))]


def _check_claimed_in_turn(in_turn: Sequence[WorkTile], m_block: int, claims: Mapping[WorkTile, int]) -> None:
    """One CTA alone must be done with a tile before it claims the next."""
    for first, second in itertools.pairwise(in_turn):
        if claims[first] > claims[second]:
            raise ScheduleError(
                f"rule 2 (progress): deadlock with 1 resident CTAs: {_describe(second)} (work_idx {claims[second]}) "
                f"waits at m_block={m_block} for {_describe(first)}, which is claimed later (work_idx {claims[first]}) "
                f"and adds before it. {_PROGRESS_ADVICE}"
            )


def _afford(items: Sequence[_T], cost: Callable[[_T], int], budget: int) -> list[_T]:
    """As many of the items, spread likewise, as the budget pays for; at least the first and the last.

    Items that alone cost more than _SAMPLED_STEPS are left out in any case.
    """
    chosen = list(items)
    while len(chosen) > 2 and sum(map(cost, chosen)) > budget:
        chosen = _take(chosen, max(len(chosen) * 3 // 4, 2))
    return [item for item in chosen if cost(item) <= _SAMPLED_STEPS]
