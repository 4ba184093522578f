"""Order and visibility of the turnstile: a fold that is not commutative equals the host's, for real schedules.

"Twice the same bits" would also hold for a wrong order that happens to repeat; here the result tells the order.
"""

from functools import cache

import pytest
import torch

from cute_dash import registry
from cute_dash.config import get_config
from cute_dash.problem import Window
from cute_dash.schedule import Selector
from tests.gpu.turnstile_kernel import TurnstileFold, compile_fold, fold_on_host

# batch, num_heads, seqlen_q, seqlen_k
EXTENTS = [(1, 1, 1, 1), (2, 3, 1000, 1400), (3, 5, 1400, 1000), (1, 16, 4096, 4096), (1, 2, 16385, 16383)]
# CTAs of one warp, many to an SM; the least number that the schedule needs comes on top
GRIDS = (1, 5, 132, 528)
NUM_RUNS = 10
CONFIGS = [
    get_config(head_dim, *mask)
    for head_dim in (64, 128, 256)  # the tiles that there are
    for mask in ((False, False), (True, False), (False, True))
]
# of a local configuration, for each of EXTENTS: among them KV tiles without steps and dQ tiles without turns
WINDOWS = [(0, 0), (100, 20), (300, 50), (700, 0), (200, 300)]
SCHEDULES = list(registry.load_all()[0].values())
ORDERED = [schedule for schedule in SCHEDULES if schedule.ordered and not isinstance(schedule, Selector)]

every_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.tile_m}x{config.tile_n}-{config.mask}"
)


def run_fold(schedule, config, shape, num_ctas):
    """Folds on the GPU, [stream][m_block]."""
    kernel = _compile(schedule, config)
    fold, counters = torch.zeros(2, shape.num_streams, shape.num_m_blocks, dtype=torch.int32, device="cuda")
    claims = torch.zeros(1, dtype=torch.int32, device="cuda")
    extents = (shape.batch, shape.num_heads, shape.seqlen_q, shape.seqlen_k)
    kernel(fold, counters, claims, *extents, *(shape.window or (0, 0)), num_ctas)
    return fold


@cache
def _compile(schedule, config):
    return compile_fold(TurnstileFold(schedule, config))


def make_shape(config, extents, sides):
    return config.make_shape(*extents, Window(*sides) if config.local else None)


@every_config
@pytest.mark.parametrize("schedule", ORDERED, ids=lambda schedule: schedule.name)
def test_fold_equals_the_host(schedule, config, noise):
    for extents, sides in zip(EXTENTS, WINDOWS, strict=True):
        shape = make_shape(config, extents, sides)
        if not schedule.can_implement(shape):
            pytest.skip(f"{schedule.name} does not order this mask")
        expected = torch.tensor(fold_on_host(schedule, shape), dtype=torch.int32)
        least = schedule.min_resident_ctas(shape)
        for num_ctas in sorted({least, *(grid for grid in GRIDS if grid > least)}):
            for run in range(NUM_RUNS):
                noise(run % 3)
                fold = run_fold(schedule, config, shape, num_ctas).cpu()
                assert torch.equal(fold, expected), f"{extents}, {num_ctas} CTAs, run {run}"


@every_config
def test_without_a_turnstile_the_fold_differs(config):
    """The negative control: same kernel, no waiting."""
    schedule = registry.load("unordered")
    shape = make_shape(config, (1, 2, 16385, 16383), (4000, 4000))
    expected = torch.tensor(fold_on_host(schedule, shape), dtype=torch.int32)
    assert not torch.equal(run_fold(schedule, config, shape, 132).cpu(), expected)
