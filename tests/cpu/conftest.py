"""Shared by the CPU tests: processes that form a gloo group, started by the first test that needs them."""

import pytest
import torch.distributed as dist

from tests.process_group import ProcessGroup


@pytest.fixture(scope="session")
def gloo():
    """Four ranks; a mesh of fewer is a part of theirs."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch is built without gloo")
    with ProcessGroup(4, "gloo") as group:
        yield group
