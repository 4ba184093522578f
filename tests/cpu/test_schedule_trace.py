"""The schedule as the DSL traces it equals the schedule in Python: a host `@cute.jit` writes the table, on the CPU."""

import dataclasses

import numpy as np
import pytest

from cute_dash import registry
from cute_dash.check import expand
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import Selector, WorkTile

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

SCHEDULES = list(registry.load_all()[0].values())
CONCRETE = [schedule for schedule in SCHEDULES if not isinstance(schedule, Selector)]

# small and odd: 7 x 5 tiles of 2 x 3 tokens, the last ones partial, seqlen_q < seqlen_k, groups that do not divide
EXTENTS = {"batch": 2, "num_heads": 3, "seqlen_q": 13, "seqlen_k": 15}
TILES = {"tile_m": 2, "tile_n": 3}


@cute.jit
def write_tables(
    tiles: cute.Tensor,  # (num_work_tiles, 4): n_block, head_idx, batch_idx, num_steps
    steps: cute.Tensor,  # (num_work_tiles, num_m_blocks, 3): m_block, lock value, lock count
    batch: cutlass.Int32,
    num_heads: cutlass.Int32,
    seqlen_q: cutlass.Int32,
    seqlen_k: cutlass.Int32,
    window_left: cutlass.Int32,
    window_right: cutlass.Int32,
    static: cutlass.Constexpr,  # schedule, tile_m, tile_n, mask
):
    schedule, tile_m, tile_n, mask = static
    window = Window(window_left, window_right) if mask == "local" else None
    shape = ProblemShape(batch, num_heads, seqlen_q, seqlen_k, tile_m, tile_n, mask == "causal", window)
    for work_idx in range(shape.num_work_tiles):
        tile = schedule.get_work_tile(work_idx, shape)
        num_steps = schedule.get_num_steps(tile, shape)
        tiles[work_idx, 0] = tile.n_block
        tiles[work_idx, 1] = tile.head_idx
        tiles[work_idx, 2] = tile.batch_idx
        tiles[work_idx, 3] = num_steps
        for step in range(num_steps):
            m_block = schedule.get_m_block(step, tile, shape)
            steps[work_idx, step, 0] = m_block
            steps[work_idx, step, 1] = schedule.get_lock_value(m_block, tile, shape)
            steps[work_idx, step, 2] = schedule.get_lock_count(m_block, tile, shape)


# the last one leaves the first KV tile no step, and the one before the first Q tiles no KV tile
CASES = [
    ("full", None, {}),
    ("causal", None, {}),
    ("local", Window(4, 1), {}),
    ("local", Window(14, 3), {"seqlen_q": 15, "seqlen_k": 6}),
    ("local", Window(1, 0), {"seqlen_q": 7, "seqlen_k": 13}),
]


@pytest.mark.parametrize(("mask", "window", "lengths"), CASES, ids=str)
@pytest.mark.parametrize("schedule", CONCRETE, ids=lambda schedule: schedule.name)
def test_traced_equals_python(schedule, mask, window, lengths):
    extents = EXTENTS | lengths
    shape = ProblemShape(**extents, **TILES, causal=mask == "causal", window=window)
    if not schedule.can_implement(shape):
        pytest.skip(f"{schedule.name} does not order this mask")
    # groups, windows and tails small enough to matter at this size
    small = {"heads_per_group": 4, "window": 2, "tail_tiles": 9}
    fields = {field.name for field in dataclasses.fields(schedule)}
    schedule = dataclasses.replace(schedule, **{name: small[name] for name in fields & set(small)})
    tiles = np.full((shape.num_work_tiles, 4), -1, dtype=np.int32)
    steps = np.full((shape.num_work_tiles, shape.num_m_blocks, 3), -1, dtype=np.int32)
    sides = window or (0, 0)
    write_tables(from_dlpack(tiles), from_dlpack(steps), *extents.values(), *sides, (schedule, 2, 3, mask))
    for work_idx, order in enumerate(expand(schedule, shape)):
        assert WorkTile(*tiles[work_idx, :3].tolist()) == order.tile
        assert tiles[work_idx, 3] == len(order.m_blocks)
        expected = list(zip(order.m_blocks, order.lock_values, order.lock_counts, strict=True))
        assert steps[work_idx, : len(expected)].tolist() == [list(row) for row in expected]
        assert (steps[work_idx, len(expected) :] == -1).all()
