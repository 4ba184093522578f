"""What of the launch can be tested without a GPU."""

import contextlib

import pytest
import torch

from cute_dash import launch, registry
from cute_dash.config import get_config
from cute_dash.kernels.workspace import ALIGNMENT, WorkspaceLayout
from cute_dash.testing import random_inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_outputs_are_contiguous_and_own_their_memory(dtype):
    x = launch._empty((2, 3, 5), dtype, torch.device("cpu"))
    assert x.shape == (2, 3, 5) and x.dtype == dtype and x.is_contiguous() and x.storage_offset() == 0
    assert x.untyped_storage().nbytes() == 30 * dtype.itemsize


def test_outputs_are_not_filled_in_deterministic_mode():
    """torch fills what `torch.empty` returns; the kernels write all of it anyway."""
    torch.use_deterministic_algorithms(True)
    try:
        x = launch._empty((1 << 12,), torch.float32, torch.device("cpu"))
        y = torch.empty(1 << 12)
    finally:
        torch.use_deterministic_algorithms(False)
    assert y.isnan().all()
    assert not x.isnan().all()


@pytest.mark.parametrize("extents", [(1, 1, 64, 128), (3, 5, 80, 128), (512, 7, 128, 64)], ids=str)
def test_workspace_parts_are_aligned_and_do_not_overlap(extents):
    num_streams, num_m_blocks, tile_m, head_dim = extents
    layout = WorkspaceLayout(*extents)
    rows = num_streams * num_m_blocks * tile_m
    starts = [0, layout.LSE_log2, layout.dPsum, layout.semaphore, layout.counter, layout.size]
    sizes = [rows * head_dim, rows, rows, num_streams * num_m_blocks, 1]
    for start, end, size in zip(starts[:-1], starts[1:], sizes, strict=True):
        assert start % ALIGNMENT == 0
        assert start + size <= end < start + size + 2 * ALIGNMENT


@pytest.fixture
def launches(monkeypatch):
    """Every launch as (key, arguments of the compiled function), on a device of 10 SMs that is not there."""
    launched = []

    def get_backward(key):
        return lambda *arguments: launched.append((key, arguments))

    monkeypatch.setattr(launch, "get_backward", get_backward)
    monkeypatch.setattr(launch, "num_sms", lambda device_index: 10)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    launch._plan.cache_clear()
    yield launched
    launch._plan.cache_clear()


@pytest.mark.parametrize(
    ("name", "seqlen", "causal", "cooperative", "num_ctas"),
    [("shortest_first", 1024, True, False, 10), ("shift", 512, False, True, 10), ("baseline", 100, False, False, 6)],
)
def test_launch_arguments(name, seqlen, causal, cooperative, num_ctas, launches):
    x = random_inputs(2, seqlen, seqlen, 3, 128, dtype=torch.float16)
    out, lse = x.q.clone(), torch.zeros(2, 3, seqlen)
    schedule, config = registry.load(name), get_config(128, causal)
    for _ in range(2):
        dq, dk, dv = launch.backward(x.dout, x.q, x.k, x.v, out, lse, 0.5, causal, schedule)
        assert dq.shape == x.q.shape and dk.shape == dv.shape == x.k.shape and dq.dtype == torch.float16
        key, arguments = launches.pop()
        assert not launches
        assert (key.config, key.schedule, key.dtype, key.debug) == (config, schedule, "float16", False)
        assert key.cooperative == cooperative
        tensors, workspace, rest = arguments[:9], arguments[9], arguments[10:]
        expected = (x.dout, x.q, x.k, x.v, out, lse, dq, dk, dv)
        assert all(a is b for a, b in zip(tensors, expected, strict=True))
        num_m_blocks = -(-seqlen // config.tile_m)
        assert workspace.numel() == WorkspaceLayout(6, num_m_blocks, config.tile_m, 128).size
        assert rest == (None, None, None, None, 0.5, num_ctas)


@pytest.mark.parametrize(("num_heads_kv", "grouped", "num_ctas"), [(4, False, 8), (2, True, 4), (1, True, 2)])
def test_grouped_heads_have_a_kernel_of_their_own(num_heads_kv, grouped, num_ctas, launches):
    x = random_inputs(1, 200, 256, 4, 64, num_heads_kv=num_heads_kv)
    schedule, config = registry.load("baseline"), get_config(64, False)
    _, dk, dv = launch.backward(x.dout, x.q, x.k, x.v, x.q, torch.zeros(1, 4, 200), 0.5, False, schedule)
    assert dk.shape == dv.shape == x.k.shape
    key, arguments = launches.pop()
    assert key.grouped == grouped
    assert arguments[9].numel() == WorkspaceLayout(4, 2, config.tile_m, 64).size  # of the query heads
    assert arguments[-1] == num_ctas  # of the KV heads


def test_another_shape_or_configuration_is_another_plan(launches):
    schedule = registry.load("shortest_first")
    keys, sizes = [], []
    for seqlen, config in ((256, None), (512, None), (512, get_config(128, False)), (512, None)):
        x = random_inputs(1, seqlen, seqlen, 1, 128, dtype=torch.bfloat16)
        launch.backward(x.dout, x.q, x.k, x.v, x.q, torch.zeros(1, 1, seqlen), 0.5, True, schedule, config)
        key, arguments = launches.pop()
        keys.append(key.config.tile_m)
        sizes.append(arguments[9].numel())
    assert keys == [64, 64, 80, 64]
    assert len(set(sizes)) == 3 and sizes[1] == sizes[3]
