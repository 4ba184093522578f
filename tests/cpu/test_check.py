"""Each rule, broken on purpose, is named with the tile, the step and both values."""

import itertools
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from cute_dash.check import ScheduleError, check, find_violation
from cute_dash.ints import where, wrap
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import DenseSchedule, SelectingSchedule, SelectorRow, WorkTile
from schedules.baseline import Baseline
from schedules.hybrid import Hybrid
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst

CAUSAL = ProblemShape(1, 2, 4, 4, 1, 1, causal=True)
FULL = replace(CAUSAL, causal=False)
LOCAL = replace(FULL, window=Window(1, 0))


@dataclass(frozen=True)
class Base(DenseSchedule):
    name: ClassVar[str] = "broken"


class ClaimsTwice(Base):
    def get_work_tile(self, work_idx, shape):
        return super().get_work_tile(work_idx // 2 * 2, shape)


class ClaimsBeyond(Base):
    def get_work_tile(self, work_idx, shape):
        return WorkTile(work_idx, 0, 0)


class SkipsAStep(Base):
    def get_num_steps(self, tile, shape):
        return super().get_num_steps(tile, shape) - 1


class VisitsTwice(Base):
    def get_m_block(self, step, tile, shape):
        return shape.get_m_block_min(tile.n_block) + step // 2


class VisitsMasked(Base):
    def get_m_block(self, step, tile, shape):
        return step


class FloatBlock(Base):
    def get_m_block(self, step, tile, shape):
        return super().get_m_block(step, tile, shape) * 2 / 2


class SharesALock(Base):
    def get_lock_value(self, m_block, tile, shape):
        return tile.n_block // 2


class LockBeyond(Base):
    def get_lock_value(self, m_block, tile, shape):
        return tile.n_block + 1


class WrongCount(Base):
    def get_lock_count(self, m_block, tile, shape):
        return shape.num_n_blocks


class Raises(Base):
    def get_lock_value(self, m_block, tile, shape):
        return m_block // tile.n_block


class WaitsForLater(Base):
    """Claims ascending, adds descending."""

    def get_lock_value(self, m_block, tile, shape):
        return shape.get_n_block_max(m_block) - 1 - tile.n_block


class WaitsInARing(Base):
    """2 x 2 tiles: n_block 0 begins with m_block 0 and n_block 1 with m_block 1, and each is second there."""

    def get_m_block(self, step, tile, shape):
        return wrap(tile.n_block + step, 2)

    def get_lock_value(self, m_block, tile, shape):
        return 1 - wrap(tile.n_block + m_block, 2)

    def min_resident_ctas(self, shape):
        return 2


class NoResidents(Base):
    def min_resident_ctas(self, shape):
        return 0


@dataclass(frozen=True)
class Unhashable(Base):
    order: list = field(default_factory=list)


@dataclass(frozen=True)
class Counts(Base):
    """Answers differently every time: the loop turns around from one call to the next."""

    calls: ClassVar = itertools.count()

    def get_work_tile(self, work_idx, shape):
        return WorkTile((work_idx + next(self.calls) // 8) % 4, work_idx // 4, 0)


class NotDecorated(Base):
    """Its field is an annotation that no dataclass has seen: all its objects are equal."""

    window: int = 3


class SetsItself(Base):
    """As above, by an __init__ of its own."""

    def __init__(self, window):
        super().__init__()
        object.__setattr__(self, "window", window)


@dataclass(frozen=True)
class ComparesNot(Base):
    window: int = field(default=3, compare=False)


class RaisesAboutResidency(Base):
    def min_resident_ctas(self, shape):
        raise RuntimeError("nobody knows\nand this is a second line")


class RaisesAboutShapes(Base):
    def can_implement(self, shape):
        return {}[shape.batch]


class DependsOnHeads(Base):
    def get_m_block(self, step, tile, shape):
        return (step + tile.head_idx) % shape.num_m_blocks


class Branches(Base):
    def get_m_block(self, step, tile, shape):
        return step if step < 2 else shape.num_m_blocks + 1 - step


class NegativeRemainder(Base):
    def get_lock_value(self, m_block, tile, shape):
        return (tile.n_block - shape.num_n_blocks) % shape.num_n_blocks


class LiesOnTheDevice(Base):
    def get_lock_value(self, m_block, tile, shape):
        return tile.n_block if isinstance(m_block, int) else tile.n_block + 1


@pytest.mark.parametrize(
    ("schedule", "shape", "message"),
    [
        (
            ClaimsTwice(),
            FULL,
            r"rule 1 .*work_idx 0 and work_idx 1 both claim tile \(n_block=0, head_idx=0, batch_idx=0\)",
        ),
        (ClaimsBeyond(), FULL, r"rule 1 .*work_idx 4: get_work_tile gives n_block=4; allowed: ints in \[0, 4\)"),
        (SkipsAStep(), CAUSAL, r"rule 1 .*n_block=0, .* get_num_steps gives 3, but the mask leaves it 4 m_blocks"),
        (VisitsTwice(), CAUSAL, r"rule 1 .*n_block=0, .* get_m_block gives 0 at step 0 and at step 1"),
        (
            VisitsMasked(),
            CAUSAL,
            r"rule 1 .*n_block=1, .* get_m_block gives 0 at step 0; the mask leaves it ints in \[1, 4\)",
        ),
        (FloatBlock(), FULL, r"rule 1 .*get_m_block gives 0.0 of type float at step 0"),
        (
            SharesALock(),
            FULL,
            r"rule 1 .*n_block=1, .*m_block=0 \(step 0\): get_lock_value gives 0, as to n_block=0; "
            r"it must number the 4 n_blocks .* 0 to 3, each once",
        ),
        (LockBeyond(), FULL, r"rule 1 .*n_block=3, .*get_lock_value gives 4; allowed: ints in \[0, 4\)"),
        (WrongCount(), CAUSAL, r"rule 1 .*m_block=0 \(step 0\): get_lock_count gives 4, but 1 n_blocks add"),
        (
            Raises(),
            FULL,
            r"rule 1 .*work_idx 0: Raises.get_lock_value \(.*test_check.py, line \d+\) raised "
            r"ZeroDivisionError",
        ),
        (
            RaisesAboutResidency(),
            FULL,
            r"^RaisesAboutResidency.min_resident_ctas \(.*\) raised RuntimeError: nobody knows$",
        ),
        (
            RaisesAboutShapes(),
            FULL,
            r"^RaisesAboutShapes.can_implement \(.*test_check.py, line \d+\) raised KeyError: 1$",
        ),
        (NotDecorated(), FULL, r"rule 3 .*NotDecorated: window would not enter equality.*@dataclass\(frozen=True\)"),
        (SetsItself(5), FULL, r"rule 3 .*SetsItself: window would not enter equality"),
        (ComparesNot(), FULL, r"rule 3 .*ComparesNot: window would not enter equality.*compare=False"),
        (
            WaitsForLater(),
            CAUSAL,
            r"rule 2 .*deadlock with 1 resident CTAs: tile \(n_block=0, .*\) \(work_idx 0\) waits at step 1 for "
            r"lock value 1 of m_block=1, which stands at 0; n_block=1, whose turn it is, is claimed later "
            r"\(work_idx 2\)\. To put it right, let get_work_tile claim .* or min_resident_ctas ask for more CTAs",
        ),
        (
            WaitsInARing(),
            replace(FULL, num_heads=1, seqlen_q=2, seqlen_k=2),
            r"rule 2 .*deadlock with 2 resident CTAs: .* waits at step 0 for lock value 1 of m_block=0, which stands "
            r"at 0; n_block=1, whose turn it is, \(work_idx 1\) is itself stuck at step 0, m_block=1",
        ),
        (NoResidents(), FULL, r"rule 2 .*min_resident_ctas is 0"),
        (Unhashable(), FULL, r"rule 3 .*is not hashable"),
        (Counts(), FULL, r"rule 3 .*when asked first and tile \(n_block=\d, .*when asked again"),
        (
            DependsOnHeads(),
            FULL,
            r"rule 3 .*head_idx=1, batch_idx=0\), step 0: m_block is 1 in this batch and 0 alone, though it says",
        ),
        (Branches(), FULL, r"rule 4 .*Branches.get_m_block \(.*line \d+\) raised TypeError: .*no truth value"),
        (NegativeRemainder(), FULL, r"rule 4 .*ValueError: -4 % 4"),
        (LiesOnTheDevice(), FULL, r"rule 4 .*at step 0 give \(0, 1, 4\) on traced ints and \(0, 0, 4\) on the host"),
        (Shift(), CAUSAL, r"'shift' cannot implement ProblemShape"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_violation_is_named(schedule, shape, message):
    with pytest.raises(ScheduleError, match=message):
        check(schedule, shape)


def test_class_attributes_without_annotation_are_no_fields():
    """They belong to the class, which is part of a schedule's identity as its name is."""

    class Constant(Base):
        window = 3

    assert find_violation(Constant(), FULL) is None


def test_not_frozen():
    @dataclass
    class NotFrozen:
        name: ClassVar[str] = "not_frozen"

    with pytest.raises(ScheduleError, match="rule 3 .*NotFrozen must be a frozen dataclass"):
        check(NotFrozen(), FULL)


def test_batch_invariance_is_asked_of_those_who_promise_it():
    class Honest(DependsOnHeads):
        batch_invariant: ClassVar[bool] = False

        def get_m_block(self, step, tile, shape):
            shifted = step + tile.head_idx
            return shifted - shifted // shape.num_m_blocks * shape.num_m_blocks

        def min_resident_ctas(self, shape):
            return shape.num_work_tiles

    assert find_violation(Honest(), FULL) is None


def test_selector_that_depends_on_the_batch():
    """Its choice follows the number of heads, so a stream is ordered differently alone."""

    @dataclass(frozen=True)
    class Sizes(SelectingSchedule):
        name: ClassVar[str] = "sizes"
        version: ClassVar[int] = 1
        batch_invariant: ClassVar[bool] = True
        table: ClassVar[tuple[SelectorRow, ...]] = ()

        def select(self, shape):
            return Baseline() if shape.num_heads > 1 else ShortestFirst()

    with pytest.raises(ScheduleError, match="rule 3 .*step 1: lock value is 0 in this batch and 1 alone"):
        check(Sizes(), CAUSAL)


def test_residents():
    shape = replace(FULL, seqlen_q=8, seqlen_k=8)
    check(Shift(), shape, resident_ctas=8)
    assert find_violation(Shift(), shape, resident_ctas=7) == (
        "rule 2 (progress): 'shift' needs 8 resident CTAs for this shape, there are 7"
    )


@pytest.mark.parametrize("residents", range(2, 9))
def test_more_residents_never_hurt(residents):
    """The lemma of the docstring, on a schedule with rings of 2: every number from 2 up is checked by itself."""

    class Claims(Shift):
        def min_resident_ctas(self, shape):
            return residents

    assert find_violation(Claims(window=2), replace(FULL, num_heads=3)) is None


class CountsFromZero(Base):
    """Right for the full and the causal mask, where every dQ tile begins with n_block 0."""

    def get_lock_value(self, m_block, tile, shape):
        return tile.n_block


class EndsWithTheLastQueries(Base):
    """Right for the full and the causal mask, where every KV tile is seen by the last m_block."""

    def get_m_block(self, step, tile, shape):
        return shape.num_m_blocks - 1 - step


class ComparesWithTheWindow(Base):
    """Wide windows in another loop order: known on the host, not while the kernel is traced."""

    def get_m_block(self, step, tile, shape):
        if shape.window is not None and shape.window.left > 2:
            return shape.get_m_block_max(tile.n_block) - 1 - step
        return super().get_m_block(step, tile, shape)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            CountsFromZero(),
            r"n_block=1, .*m_block=2 \(step 1\): get_lock_count gives 2, but|"
            r"n_block=2.*get_lock_value gives 2; allowed: ints in",
        ),
        (EndsWithTheLastQueries(), r"n_block=0.* get_m_block gives 3 at step 0; the mask leaves it ints in \[0, 2\)"),
        (ComparesWithTheWindow(), r"rule 4 \(traceable\).*a traced condition has no truth value"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Base) else "",
)
def test_what_only_a_window_breaks(schedule, message):
    check(schedule, FULL)
    check(schedule, CAUSAL)
    with pytest.raises(ScheduleError, match=message):
        check(schedule, LOCAL)


def test_tiles_without_steps_and_without_contributors():
    """KV tiles that no query sees are claimed all the same; dQ tiles that see no key have no turn."""
    for seqlen_q, seqlen_k in ((3, 9), (9, 3)):
        shape = replace(LOCAL, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        for schedule in (Baseline(), Hybrid(), ShortestFirst()):
            check(schedule, shape)


class WaitsForAVisitor(Base):
    """n_block 0 needs a step of n_block 1 before it can end, n_block 1 one of n_block 2: two CTAs do if 0 ends soon."""

    def min_resident_ctas(self, shape):
        return 2

    def get_lock_value(self, m_block, tile, shape):
        first, second = where(tile.n_block == 2, 2, 1 - tile.n_block), where(tile.n_block == 0, 0, 3 - tile.n_block)
        return where(m_block == 0, first, second)


def test_progress_is_proved_for_the_whole_group_of_query_heads():
    """With a second query head n_block 0 waits for n_block 1 again, and no CTA is left to claim n_block 2."""
    shape = ProblemShape(1, 1, 2, 3, 1, 1, causal=False)
    check(WaitsForAVisitor(), shape)
    message = find_violation(WaitsForAVisitor(), replace(shape, group_size=2))
    assert message is not None and message.startswith(
        "rule 2 (progress): deadlock with 2 resident CTAs: tile (n_block=0, head_idx=0, batch_idx=0) (work_idx 0) "
        "waits at step 2 for lock value 1 of m_block=0, which stands at 0; n_block=1, whose turn it is, (work_idx 1) "
        "is itself stuck at step 1, m_block=1"
    )

    class Honest(WaitsForAVisitor):
        def min_resident_ctas(self, shape):
            return 3

    check(Honest(), replace(shape, group_size=2))


def test_is_quick():
    """8k causal, 4 streams at tile 64: about 17,000 steps. The bound leaves room for a busy machine."""
    shape = ProblemShape(1, 4, 8192, 8192, 64, 128, causal=True)
    start = time.process_time()
    check(Hybrid(), shape)
    assert time.process_time() - start < 5


class HasNoName(DenseSchedule):
    @property
    def name(self):
        raise KeyError("boom")


def test_a_name_that_raises_is_a_violation():
    assert "KeyError" in find_violation(HasNoName(), ProblemShape(1, 1, 512, 512, 64, 128, causal=True))
