"""The DAG model: the paper's closed forms, a brute-force longest path, small cases by hand, and its parameters."""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_dash import registry
from cute_dash.analysis import count_memory_traffic, critical_path, simulate, table
from cute_dash.check import ScheduleError, expand
from cute_dash.problem import ProblemShape, Window
from schedules.baseline import Baseline
from schedules.descending import Descending
from schedules.hybrid import Hybrid
from schedules.longest_first import LongestFirst
from schedules.passes import Passes
from schedules.shift import Shift
from schedules.shortest_first import ShortestFirst
from schedules.symmetric_shift import SymmetricShift
from schedules.unordered import Unordered

durations = st.fractions(min_value=Fraction(1, 10), max_value=10, max_denominator=10)
ORDERED = [schedule for schedule in registry.load_all()[0].values() if schedule.ordered]


def square(num_heads, num_blocks, causal):
    """Heads of num_blocks x num_blocks tiles."""
    return ProblemShape(1, num_heads, num_blocks, num_blocks, 1, 1, causal)


# The paper's closed forms (arXiv 2601.21824): m heads, n KV tiles on n SMs, compute c, reduce r


@given(m=st.integers(1, 5), n=st.integers(1, 9), c=durations, r=durations)
def test_baseline_full(m, n, c, r):
    assert critical_path(Baseline(), square(m, n, causal=False), c, r) == m * n * (c + r) + (n - 1) * r


@given(m=st.sampled_from([2, 4, 6]), n=st.integers(1, 9), c=durations, r=durations)
def test_descending_causal(m, n, c, r):
    """Two heads fill the SMs, so m is even; an add must not take longer than a compute.

    Otherwise the last CTA of one pair of heads is not the first of the next, and the form is a lower bound: the
    stagger of the second pair starts after that of the first has been paid.
    """
    published = Fraction(m * (n + 1), 2) * (c + r) + (n - 1) * r
    path = critical_path(Descending(), square(m, n, causal=True), c, r)
    assert path == published if r <= c or m == 2 else path >= published


@given(m=st.integers(1, 5), n=st.integers(1, 9), c=durations, r=durations)
def test_shift_full(m, n, c, r):
    assert critical_path(Shift(heads_per_group=1), square(m, n, causal=False), c, r) == m * n * (c + r)


@given(m=st.sampled_from([2, 4, 6]), n=st.sampled_from([2, 4, 6, 8]), c=durations, r=durations)
def test_symmetric_shift_causal(m, n, c, r):
    """Pairs of KV tiles and pairs of heads: both even."""
    schedule = SymmetricShift(heads_per_group=2)
    assert critical_path(schedule, square(m, n, causal=True), c, r) == Fraction(m * (n + 1), 2) * (c + r)


@pytest.mark.parametrize("schedule", [Shift(heads_per_group=1), SymmetricShift(heads_per_group=2)], ids=repr)
def test_shifts_never_stall(schedule):
    shape = square(4, 8, causal=schedule.name == "symmetric_shift")
    assert simulate(schedule, shape, 8, 3, 2).stall_share == 0


@pytest.mark.parametrize("schedule", [Shift(heads_per_group=1), Baseline(heads_per_group=1)], ids=repr)
def test_query_heads_of_a_group_follow_each_other_without_a_gap(schedule):
    """A tile walks its steps once for each: as many heads one after the other, but no SM starts a tile anew."""
    shape = square(1, 8, causal=False)
    one, three = (simulate(schedule, replace(shape, group_size=size), 8, 3, 2) for size in (1, 3))
    assert three.makespan == one.makespan + 2 * 8 * (3 + 2)
    steps = [step.m_block for step in three.ctas[2]]
    assert steps == 3 * steps[:8]


# Independent of the simulation


@pytest.mark.parametrize("schedule", ORDERED, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("latency", [0, 2])
def test_unlimited_sms_give_the_longest_path(schedule, latency):
    """With a CTA per work tile no claim matters: relax the DAG's edges until nothing changes."""
    shape = ProblemShape(1, 2, 9, 13, 2, 3, causal=schedule.name != "shift")
    orders = expand(schedule, shape)
    ends = defaultdict(int)  # (stream, n_block, m_block) -> end of the add
    adders = {
        (o.tile[1:], m, v): o.tile.n_block for o in orders for m, v in zip(o.m_blocks, o.lock_values, strict=True)
    }
    changed = True
    while changed:
        changed = False
        for tile, m_blocks, lock_values, *_ in orders:
            previous = 0
            for m_block, value in zip(m_blocks, lock_values, strict=True):
                turn = ends[tile[1:], adders[tile[1:], m_block, value - 1], m_block] + latency if value else 0
                end = max(previous + 5, turn) + 3
                changed |= end != ends[tile[1:], tile.n_block, m_block]
                ends[tile[1:], tile.n_block, m_block] = previous = end
    timeline = simulate(schedule, shape, shape.num_work_tiles, 5, 3, latency)
    assert timeline.makespan == max(ends.values())
    assert {(step.tile[1:], step.tile.n_block, step.m_block): step.end for cta in timeline.ctas for step in cta} == ends


@pytest.mark.parametrize("schedule", ORDERED, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("num_sms", [8, 13, 100])
@pytest.mark.parametrize("num_dq_stages", [1, 2, 3])
def test_timeline_is_legal(schedule, num_sms, num_dq_stages):
    """Every step once, durations kept, CTAs do one thing at a time, adds in order with the latency between them."""
    shape = ProblemShape(2, 3, 9, 13, 2, 3, causal=schedule.name != "shift")
    timeline = simulate(schedule, shape, num_sms, compute=5, reduce=3, latency=1, num_dq_stages=num_dq_stages)
    steps = [step for cta in timeline.ctas for step in cta]
    orders = {o.tile: o for o in expand(schedule, shape)}
    assert sorted((s.tile, s.m_block) for s in steps) == sorted((t, m) for t, o in orders.items() for m in o.m_blocks)
    assert all(
        s.compute_end - s.start == 5 and s.end - s.add_start == 3 and s.add_start >= s.compute_end for s in steps
    )
    for cta in timeline.ctas:
        for before, after in zip(cta, cta[1:], strict=False):
            assert after.start >= before.compute_end and after.add_start >= before.end
            assert after.tile == before.tile or after.start >= before.end
        for before, after in zip(cta, cta[num_dq_stages:], strict=False):
            assert after.start >= before.end
    adds = defaultdict(list)
    for step in steps:
        order = orders[step.tile]
        adds[step.tile[1:], step.m_block].append((order.lock_values[order.m_blocks.index(step.m_block)], step))
    for contributions in adds.values():
        contributions.sort()
        for (_, before), (_, after) in zip(contributions, contributions[1:], strict=False):
            assert after.add_start >= before.end + 1


def test_two_tiles_by_hand():
    """n_block 1 computes until 5, waits for n_block 0's add until 8, adds until 11, computes until 16 and adds.

    It waits 3 of its 19; the other one never in its 16.
    """
    timeline = simulate(Baseline(), square(1, 2, causal=False), 2, 5, 3)
    assert [[step[2:] for step in cta] for cta in timeline.ctas] == [
        [(0, 5, 5, 8), (8, 13, 13, 16)],
        [(0, 5, 8, 11), (11, 16, 16, 19)],
    ]
    assert (timeline.makespan, timeline.stalled, timeline.held) == (19, 3, 35)
    assert timeline.stall_share == 3 / 35


def test_second_stage_hides_the_add_by_hand():
    """One CTA, three steps: computes end at 5, 10 and 15, each add runs under the next compute, the last ends at 18."""
    shape = ProblemShape(1, 1, 3, 1, 1, 1, causal=False)
    assert simulate(Baseline(), shape, 1, 5, 3).makespan == 3 * (5 + 3)
    timeline = simulate(Baseline(), shape, 1, 5, 3, num_dq_stages=2)
    assert timeline.makespan == 3 * 5 + 3
    assert timeline.stalled == 0


def test_latency_by_hand():
    """Each of the n - 1 hand-overs of the first m_block costs the latency once."""
    shape = square(1, 4, causal=False)
    assert simulate(Baseline(), shape, 4, 5, 3, latency=2).makespan == 4 * 8 + 3 * (3 + 2)


def test_memory_traffic_of_one_cta():
    """Two KV tiles of three Q tiles, one after the other: 3 x 2 tiles are used in turn, and once more."""
    timeline = simulate(Baseline(), ProblemShape(1, 1, 3, 2, 1, 1, causal=False), 1, 1, 0)
    assert count_memory_traffic(timeline, 6) == 1
    assert count_memory_traffic(timeline, 5) == count_memory_traffic(timeline, 2) == 2
    with pytest.raises(ValueError, match="capacity=1 must be at least 2"):
        count_memory_traffic(timeline, 1)


def test_memory_traffic_with_grouped_heads_counts_each_query_head():
    """Two query heads with tiles of their own, which never share."""
    shape = ProblemShape(1, 1, 3, 2, 1, 1, causal=False, group_size=2)
    timeline = simulate(Baseline(), shape, 1, 1, 0)
    assert count_memory_traffic(timeline, 12) == 1 and count_memory_traffic(timeline, 6) == 2


def test_heads_at_once_share_the_memory():
    shape = ProblemShape(1, 8, 32, 16, 1, 2, causal=True)
    few, many = (simulate(LongestFirst(heads_per_group=n), shape, 16, 1, 0) for n in (1, 8))
    assert count_memory_traffic(few, 64) < 1.2 < 2 < count_memory_traffic(many, 64)


def test_passes_end_on_short_tiles():
    """Nearly as early as `hybrid`, and far before `shortest_first`, with one order for all streams."""
    shape = ProblemShape(8, 16, 32, 32, 1, 2, causal=True)
    passes, hybrid, shortest = (
        simulate(schedule, shape, 132, 1, 0.25, latency=0.4, num_dq_stages=2).makespan
        for schedule in (Passes(), Hybrid(), ShortestFirst())
    )
    assert passes < 1.01 * hybrid and passes < 0.96 * shortest


@pytest.mark.parametrize("window", [Window(6, 0), Window(31, 0), Window(0, 0)], ids=str)
@pytest.mark.parametrize("num_sms", [8, 13, 132])
def test_shortest_first_never_stalls_under_a_causal_window(window, num_sms):
    shape = ProblemShape(2, 8, 96, 96, 1, 2, False, window)
    assert simulate(ShortestFirst(), shape, num_sms, 4, 1).stalled == 0
    assert simulate(ShortestFirst(), shape, num_sms, 4, 1, latency=1, num_dq_stages=2).stalled == 0
    if window.left:
        assert simulate(Baseline(), shape, num_sms, 4, 1).stall_share > 0.05


@pytest.mark.parametrize("sides", [(8, 8), (16, 4), (0, 8), (8, -1), (-1, 8)], ids=str)
def test_shortest_first_hardly_stalls_under_any_window(sides):
    """In the kernel's tiles, 4k tokens: below 1% of the time, and within 8% of the work that there is."""
    left, right = (128 * side if side >= 0 else 4095 for side in sides)
    shape = ProblemShape(4, 16, 4096, 4096, 64, 128, False, Window(left, right))
    timeline = simulate(ShortestFirst(), shape, 132, 4, 1)
    num_steps = sum(len(order.m_blocks) for order in expand(ShortestFirst(), shape))
    assert timeline.stall_share < 0.01
    assert timeline.makespan < 1.08 * num_steps * 5 / 132


def test_tiles_without_steps_take_no_time():
    """4 queries see the last keys of 12 only: KV tiles 0 and 1 of 6 have no step, and the CTA goes on at once."""
    shape = ProblemShape(1, 2, 4, 12, 1, 2, False, Window(3, 0))
    orders = expand(Baseline(), shape)
    assert [len(order.m_blocks) for order in orders[:6]] == [0, 0, 1, 3, 4, 2]
    timeline = simulate(Baseline(), shape, 1, 5, 3)
    assert timeline.makespan == 2 * 10 * 8 and timeline.stalled == 0
    assert simulate(ShortestFirst(), shape, 20, 5, 3).makespan == 4 * 8
    assert table(Baseline(), shape).splitlines()[1].split() == ["0", "-", "-", "0:0", "0:1", "0:2", "2:2"]


def test_unordered_never_stalls():
    shape = square(3, 5, causal=True)
    timeline = simulate(Unordered(), shape, 15, 2, 7)
    assert timeline.stall_share == 0
    assert timeline.makespan == 5 * (2 + 7)


def test_one_sm_does_all_the_work():
    """3 heads of 1 + 2 + 3 + 4 steps."""
    assert simulate(ShortestFirst(), square(3, 4, causal=True), 1, 5, 3).makespan == 3 * 10 * 8


def test_idle_ctas_do_not_count():
    timeline = simulate(Baseline(), square(1, 1, causal=True), 5, 5, 3)
    assert timeline.held == 8
    assert [len(cta) for cta in timeline.ctas] == [1, 0, 0, 0, 0]


def test_deadlock_is_named():
    with pytest.raises(ScheduleError, match=r"deadlock with 2 CTAs: CTA \d waits for lock value \d of m_block=\d"):
        simulate(Shift(), square(1, 4, causal=False), 2, 5, 3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_sms", 0), ("compute", -1), ("reduce", -1), ("latency", -1), ("num_dq_stages", 0), ("compute", float("nan"))],
)
def test_bad_parameter(name, value):
    parameters = {"num_sms": 2, "compute": 1, "reduce": 1, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        simulate(Baseline(), square(1, 2, causal=False), **parameters)


def test_no_duration_at_all():
    with pytest.raises(ValueError, match="compute=0 and reduce=0 must not both be 0"):
        simulate(Baseline(), square(1, 2, causal=False), 2, 0, 0)


def test_table():
    """Two streams claimed in turns from right to left; 5 queries see 3 keys bottom-right: the first two see none."""
    shape = ProblemShape(1, 2, 5, 3, 1, 1, causal=True)
    assert table(ShortestFirst(), shape, head_idx=1) == (
        " step  n=0  n=1  n=2\n    0  2:0  3:0  4:0\n    1  3:1  4:1    -\n    2  4:2    -    -\nclaim    2    1    0"
    )
    assert table(ShortestFirst(), replace(shape, num_heads=1)) == table(ShortestFirst(), shape)
