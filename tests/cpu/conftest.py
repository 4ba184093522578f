"""Shared by the CPU tests: processes that form a gloo group, started by the first test that needs them."""

import pytest
import torch
import torch.distributed as dist

from cute_dash import flash_attn_func
from tests.process_group import ProcessGroup


@pytest.fixture(scope="session")
def gloo():
    """Four ranks; a mesh of fewer is a part of theirs."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch is built without gloo")
    with ProcessGroup(4, "gloo") as group:
        yield group


@pytest.fixture(scope="session")
def grouped_queries():
    """Skips where the op wants as many KV heads as query heads."""
    _skip_if_refused(torch.zeros(1, 2, 2, 64), torch.zeros(1, 2, 1, 64))


@pytest.fixture(scope="session")
def windows():
    """Skips where the op has no sliding windows."""
    q = torch.zeros(1, 3, 1, 64)
    _skip_if_refused(q, q, causal=True, window_size=(1, 0))


def _skip_if_refused(q, k, **options):
    try:
        flash_attn_func(q, k, k, **options)
    except ValueError as error:
        pytest.skip(str(error))
