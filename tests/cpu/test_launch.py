"""What of the launch can be tested without a GPU."""

import pytest
import torch

from cute_dash import launch
from cute_dash.kernels.workspace import ALIGNMENT, WorkspaceLayout


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
