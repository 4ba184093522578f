"""What every shipped schedule promises, for shapes drawn at random and for the documented ones."""

import importlib
import inspect
import itertools
import textwrap
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_dash import registry
from cute_dash.analysis import selection_table, table
from cute_dash.check import check, expand, find_violation
from cute_dash.problem import MASKS, ProblemShape, Window, normalize_mask
from cute_dash.schedule import DenseSchedule, Selector, WorkTile, get_tile_in_window
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst
from schedules.passes import Passes
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst
from schedules.symmetric_shift import SymmetricShift

SCHEDULES = list(registry.load_all()[0].values())
CONCRETE = [schedule for schedule in SCHEDULES if not isinstance(schedule, Selector)]
VARIANTS = [
    Shift(window=1),
    Shift(heads_per_group=3, window=3),
    SymmetricShift(window=1),
    SymmetricShift(heads_per_group=3, window=2),
    Hybrid(heads_per_group=2, tail_tiles=5),
    Hybrid(tail_tiles=0),
    LongestFirst(heads_per_group=3),
    ShortestFirst(heads_per_group=5),
    Passes(heads_per_group=3, num_passes=4, share=2),
]

# 4 x 4 tiles of one token; 65 heads, so that `hybrid`, whose tail is 64 heads of 4 tiles, has both kinds
DOCUMENTED_SHAPE = ProblemShape(1, 65, 4, 4, 1, 1, causal=True)


def schedule_id(schedule):
    return repr(schedule)


def with_mask(shape, mask):
    """The shape under a kind of mask; a window of half the keys."""
    window = Window(shape.seqlen_k // 2, 0) if mask == "local" else None
    return replace(shape, causal=mask == "causal", window=window)


@st.composite
def shapes(draw, mask):
    """Few tokens, odd tiles: every relation of num_m to num_n, of tile_m to tile_n and of seqlen_q to seqlen_k.

    Windows of every width and with either side unlimited; where they hide nothing they are none.
    """
    seqlen_q, seqlen_k = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    window_size = draw(st.tuples(st.integers(-1, 40), st.integers(-1, 40))) if mask == "local" else (-1, -1)
    causal, window = normalize_mask(mask == "causal", window_size, seqlen_q, seqlen_k)
    return ProblemShape(
        batch=draw(st.integers(1, 3)),
        num_heads=draw(st.integers(1, 5)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        tile_m=draw(st.integers(1, 7)),
        tile_n=draw(st.integers(1, 7)),
        causal=causal,
        window=window,
        group_size=draw(st.sampled_from([1, 1, 2, 3])),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES + VARIANTS, ids=schedule_id)
def test_keeps_the_rules_for_any_shape(schedule, mask):
    @settings(max_examples=120 if mask == "local" else 40, deadline=None, derandomize=True)
    @given(shape=shapes(mask).filter(lambda shape: shape.mask == mask))
    def keeps(shape):
        check(schedule, shape)

    if schedule.can_implement(with_mask(DOCUMENTED_SHAPE, mask)):
        keeps()
    else:
        assert "cannot implement" in find_violation(schedule, with_mask(DOCUMENTED_SHAPE, mask))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 128), (127, 129), (239, 1), (799, 3), (113, 203), (1023, 1024), (256, 64)]
)
@pytest.mark.parametrize("tile", [(64, 128), (80, 128), (128, 128), (64, 64)], ids=str)
def test_keeps_the_rules_for_the_kernel_tiles(schedule, seqlen_q, seqlen_k, tile):
    causal = schedule.name != "shift"
    check(schedule, ProblemShape(2, 3, seqlen_q, seqlen_k, *tile, causal))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("window_size", [(256, 0), (200, 100), (0, 0), (0, 300), (-1, 70), (70, -1)], ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 800), (799, 3), (1023, 1024), (300, 1300), (1300, 300), (1024, 1024)]
)
@pytest.mark.parametrize("tile", [(64, 128), (128, 128), (64, 64)], ids=str)
def test_keeps_the_rules_for_windows_in_the_kernel_tiles(schedule, seqlen_q, seqlen_k, window_size, tile):
    """Among them KV tiles that no query sees (300 x 1300) and Q tiles that see no key (1300 x 300)."""
    causal, window = normalize_mask(False, window_size, seqlen_q, seqlen_k)
    shape = ProblemShape(2, 3, seqlen_q, seqlen_k, *tile, causal, window)
    if "shift" in schedule.name:
        assert window is None or not schedule.can_implement(shape)
    else:
        check(schedule, shape)


@pytest.mark.parametrize("schedule", CONCRETE, ids=lambda schedule: schedule.name)
def test_docstring_shows_the_order(schedule):
    shape = replace(DOCUMENTED_SHAPE, causal=schedule.name != "shift")
    tables = [table(schedule, shape)]
    if schedule.name == "hybrid":
        tables.append(table(schedule, shape, head_idx=64))
    assert textwrap.indent("\n\n".join(tables), "    ", str.strip) in module_docstring(schedule)


@pytest.mark.parametrize("name", ["auto", "auto_invariant"])
def test_docstring_shows_the_selection(name):
    selector = registry.load(name)
    assert textwrap.indent(selection_table(selector), "    ") in module_docstring(selector)


def module_docstring(schedule):
    return importlib.import_module(type(schedule).__module__).__doc__


@pytest.mark.parametrize("name", ["auto", "auto_invariant"])
@pytest.mark.parametrize("mask", MASKS)
def test_selectors_choose_ordered_schedules_that_fit(name, mask):
    selector = registry.load(name)
    for seqlen in (1, 128, 512, 1024, 2048, 8192, 16384, 1 << 20):
        shape = with_mask(ProblemShape(2, 16, seqlen, seqlen, 64, 128, causal=False), mask)
        schedule = selector.select(shape)
        assert schedule.ordered and schedule.can_implement(shape)
        assert schedule.min_resident_ctas(shape) <= 64
        if selector.batch_invariant:
            assert schedule.batch_invariant
            assert selector.select(replace(shape, batch=1, num_heads=1)) == schedule


def test_only_unordered_does_not_wait():
    assert [schedule.name for schedule in SCHEDULES if not schedule.ordered] == ["unordered"]


@pytest.mark.parametrize("schedule", CONCRETE, ids=lambda schedule: schedule.name)
def test_grouping_changes_no_bits(schedule):
    shape = ProblemShape(2, 5, 9, 11, 2, 3, causal=schedule.name != "shift")
    if "shift" not in schedule.name:
        shape = with_mask(shape, "local")
    orders = [
        {order.tile: order[1:] for order in expand(replace(schedule, heads_per_group=size), shape)}
        for size in (1, 2, 4, 10, 99)
    ]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10])
def test_a_group_shares_a_stretch_of_the_tile_order(size):
    """Streams s*size .. s*size + size - 1 are claimed before any later stream, and take turns within."""
    shape = ProblemShape(2, 5, 8, 8, 2, 2, causal=False)
    tiles = [LongestFirst(heads_per_group=size).get_work_tile(i, shape) for i in range(shape.num_work_tiles)]
    streams = [tile.batch_idx * 5 + tile.head_idx for tile in tiles]
    expected = []
    for first in range(0, 10, size):
        expected += list(range(first, min(first + size, 10))) * shape.num_n_blocks
    assert streams == expected


def test_a_window_is_claimed_in_a_row():
    """5 tiles of 2 streams in windows of 2: (tile, stream)."""
    places = [get_tile_in_window(place, 2, 5, window=2) for place in range(10)]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (4, 0), (4, 1)]


def test_measured_group_sizes():
    """Heads that share the L2, as measured on an H200."""
    schedule = DenseSchedule()

    def size(seqlen, causal):
        return schedule.get_heads_per_group(ProblemShape(1, 64, seqlen, seqlen, 128, 128, causal))

    assert [size(seqlen, True) for seqlen in (512, 2048, 8192, 16384)] == [4, 4, 4, 2]
    assert [size(seqlen, False) for seqlen in (2048, 8192, 16384, 1 << 20)] == [8, 4, 2, 1]
    local = ProblemShape(1, 64, 8192, 8192, 128, 128, False, Window(1024, 0))
    assert schedule.get_heads_per_group(local) == size(8192, True)  # not measured: as causal


def test_negative_group_size_is_refused():
    with pytest.raises(ValueError, match="heads_per_group=-1"):
        LongestFirst(heads_per_group=-1)


def test_shift_never_meets_itself():
    """At any step the n_blocks of a window are on different m_blocks, and add in the order in which they arrive."""
    shape = ProblemShape(1, 1, 9, 7, 1, 1, causal=False)
    schedule = Shift(window=7)
    orders = expand(schedule, shape)
    for step in range(9):
        assert len({order.m_blocks[step] for order in orders}) == 7
    arrivals = defaultdict(list)
    for order in orders:
        for step, (m_block, value) in enumerate(zip(order.m_blocks, order.lock_values, strict=True)):
            arrivals[m_block].append((value, step))
    assert all([step for _, step in sorted(pairs)] == sorted(step for _, step in pairs) for pairs in arrivals.values())


@pytest.mark.parametrize("window", [Window(6, 0), Window(4, 4), Window(0, 0), Window(17, 3)], ids=str)
def test_shortest_first_reaches_an_m_block_of_a_window_in_the_order_of_its_adds(window):
    """KV tiles claimed right to left: by the number of steps done, each is on an m_block after those to its right.

    With a right side several of the last tiles begin with m_block 0: those are there at the same step.
    """
    shape = ProblemShape(1, 1, 40, 40, 1, 2, False, window)
    arrivals = defaultdict(list)
    for claim, order in enumerate(expand(ShortestFirst(), shape)):
        assert order.tile.n_block == shape.num_n_blocks - 1 - claim
        for step, (m_block, value) in enumerate(zip(order.m_blocks, order.lock_values, strict=True)):
            arrivals[m_block].append((value, step))
    for pairs in arrivals.values():
        assert [value for value, _ in pairs] == list(range(len(pairs)))
        for (_, step), (_, later) in itertools.pairwise(pairs):
            assert step < later if window.right == 0 else step <= later


@pytest.mark.parametrize("num_blocks", [2, 4, 6, 10])
def test_symmetric_pairs_have_equal_length_and_never_meet(num_blocks):
    """With one CTA per pair and no stall, at any time all CTAs are on different m_blocks."""
    shape = ProblemShape(1, 1, num_blocks, num_blocks, 1, 1, causal=True)
    loops = {order.tile.n_block: order.m_blocks for order in expand(SymmetricShift(), shape)}
    pairs = [loops[j] + loops[num_blocks - 1 - j] for j in range(num_blocks // 2)]
    assert {len(pair) for pair in pairs} == {num_blocks + 1}
    for now in range(num_blocks + 1):
        assert len({pair[now] for pair in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("schedule", "causal", "needed"), [(Shift(window=5), False, 5), (SymmetricShift(window=3), True, 3)], ids=repr
)
def test_windows_need_exactly_their_residents(schedule, causal, needed):
    """One CTA less than promised hangs: the promise is not only enough but also necessary."""

    class Optimist(type(schedule)):
        def min_resident_ctas(self, shape):
            return needed - 1

    shape = ProblemShape(2, 3, 24, 24, 2, 2, causal)
    assert schedule.min_resident_ctas(shape) == needed
    assert find_violation(schedule, shape) is None
    assert "deadlock with" in find_violation(Optimist(window=schedule.window), shape)


def test_hybrid_splits_streams():
    """10 tiles of tail at 4 KV tiles: the last 3 of 5 streams run longest first."""
    shape = ProblemShape(1, 5, 4, 4, 1, 1, causal=True)
    schedule = Hybrid(tail_tiles=10)
    firsts = [schedule.get_m_block(0, WorkTile(0, head, 0), shape) for head in range(5)]
    assert firsts == [0, 0, 3, 3, 3]
    tail = [schedule.get_work_tile(i, shape) for i in range(8, 20)]
    assert tail == [WorkTile(n_block, head, 0) for n_block in range(4) for head in (2, 3, 4)]


def test_one_pass_is_shortest_first():
    shape = ProblemShape(2, 5, 24, 20, 1, 2, causal=True)
    assert expand(Passes(num_passes=1), shape) == expand(ShortestFirst(), shape)


def test_passes_part_the_tiles():
    """Ten tiles: the left five, half of the others, half of what is left, the rest."""
    assert Passes(num_passes=4, share=2).list_passes(ProblemShape(1, 1, 10, 10, 1, 1, causal=True)) == [
        (0, 5),
        (5, 8),
        (8, 9),
        (9, 10),
    ]
    shape = ProblemShape(1, 2, 5, 5, 1, 1, causal=True)
    schedule = Passes(num_passes=2, share=2, heads_per_group=1)
    claims = [schedule.get_work_tile(i, shape)[:2] for i in range(10)]
    assert claims == [(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 1), (4, 0), (3, 0), (4, 1), (3, 1)]
    locks = [schedule.get_lock_value(4, WorkTile(n_block, 0, 0), shape) for n_block in range(5)]
    assert locks == [2, 1, 0, 4, 3]


@pytest.mark.parametrize("field", ["num_passes", "share"])
def test_passes_refuse_other_numbers(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        Passes(**{field: 0})


def test_schedule_files_import_the_contract_only():
    allowed = ("cute_dash.schedule", "cute_dash.problem", "cute_dash.ints", "dataclasses", "typing")
    for schedule in SCHEDULES:
        source = inspect.getsource(importlib.import_module(type(schedule).__module__))
        for line in source.splitlines():
            if line.startswith(("import ", "from ")):
                module = line.split()[1]
                assert module in allowed or (isinstance(schedule, Selector) and module.startswith("schedules.")), line
