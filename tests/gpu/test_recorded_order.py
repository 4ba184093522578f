"""The order in which the kernel really added to dQ, from its debug build, against the order the schedule promises."""

from dataclasses import dataclass

import pytest
import torch

from cute_dash import launch, registry
from cute_dash.schedule import DenseSchedule
from cute_dash.testing import assert_bitwise_equal
from tests.gpu.orders import promised_order


@pytest.mark.parametrize("window_size", [(-1, -1), (300, 70), (500, 0)], ids=str)
@pytest.mark.parametrize("seqlen_k", [2000, 3000])
@pytest.mark.parametrize("num_heads_kv", [16, 4, 1])
@pytest.mark.parametrize("name", registry.available())
def test_additions_happen_in_the_promised_order(name, num_heads_kv, seqlen_k, window_size, make_problem, noise):
    causal = name != "shift"
    problem = make_problem(1, 2048, seqlen_k, 16, 128, causal, window_size, num_heads_kv=num_heads_kv)
    schedule = problem.resolve(name)
    if not schedule.ordered:
        pytest.skip(f"{name} promises no order")
    promised = promised_order(schedule, problem.shape())
    expected = problem.backward(schedule)
    for _ in range(5):
        noise(4)
        grads, recorded = launch.record_order(*problem.arguments(), schedule, window_size=window_size)
        assert torch.equal(recorded[0].cpu(), promised)
        for gradient, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert_bitwise_equal(a, b, gradient)


def test_the_unordered_comparator_adds_in_another_order(make_problem, noise):
    """The negative control: the record shows what happened, not what was promised; each tile once all the same."""
    problem = make_problem(1, 2048, 2048, 16, 128, False)
    schedule = problem.resolve("unordered")
    noise(4)
    _, first = launch.record_order(*problem.arguments(), schedule)
    assert torch.equal(first.sort(dim=-1).values[0, 0, 0].cpu(), torch.arange(16, dtype=torch.int32))
    assert (first.sort(dim=-1).values == first.sort(dim=-1).values[0, 0, 0]).all()
    others = [launch.record_order(*problem.arguments(), schedule)[1] for _ in range(20)]
    assert any(not torch.equal(first, other) for other in others)


@dataclass(frozen=True)
class NobodyStores(DenseSchedule):
    """Lock values from 1: the first turn never comes."""

    name = "nobody_stores"

    def get_lock_value(self, m_block, tile, shape):
        """One too many."""
        return tile.n_block + 1


def test_a_wait_that_never_ends_names_the_tile(make_problem):
    problem = make_problem(1, 64, 128, 1, 128, False)
    with pytest.raises(launch.StuckError, match=r"'nobody_stores'.*n_block=0.*m_block=0.*lock_value=1"):
        launch.record_order(*problem.arguments(), NobodyStores())
