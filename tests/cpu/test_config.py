"""Configurations: which head dims there are, and which tiles they are computed in."""

from dataclasses import replace

import pytest

from cute_dash.config import SMEM_CAPACITY_BYTES, SUPPORTED_HEAD_DIMS, TUNED_HEAD_DIMS, BwdConfig, get_config
from cute_dash.kernels.workspace import WorkspaceLayout

MASKS = pytest.mark.parametrize("mask", [(False, False), (True, False), (False, True)], ids=["full", "causal", "local"])


@MASKS
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_a_head_dim_is_computed_in_the_next_tuned_tiles(head_dim, mask):
    config = get_config(head_dim, *mask)
    tuned = get_config(64 if head_dim <= 64 else 128, *mask)
    assert config.head_dim == head_dim and config.head_dim_padded == tuned.head_dim
    assert replace(config, head_dim=tuned.head_dim) == tuned
    assert config.smem_bytes == tuned.smem_bytes <= SMEM_CAPACITY_BYTES
    assert WorkspaceLayout(6, 5, config).size == WorkspaceLayout(6, 5, tuned).size


def test_tuned_head_dims_are_not_padded():
    for head_dim in TUNED_HEAD_DIMS:
        assert get_config(head_dim, False).head_dim_padded == head_dim


@pytest.mark.parametrize("head_dim", [0, 8, 24, 36, 63, 65, 100, 136, 256])
def test_other_head_dims_are_refused(head_dim):
    message = f"head_dim={head_dim} is not supported; allowed: multiples of 8 from 32 to 128"
    with pytest.raises(ValueError, match=message):
        get_config(head_dim, False)
    with pytest.raises(ValueError, match=message):
        BwdConfig(head_dim, False, 64, 128)
