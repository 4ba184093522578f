"""Configurations: which head dims there are, and which tiles they are computed in."""

from dataclasses import replace

import pytest

from cute_dash.config import (
    SMEM_CAPACITY_BYTES,
    SUPPORTED_HEAD_DIMS,
    TILE_HEAD_DIMS,
    UNEQUAL_HEAD_DIMS,
    BwdConfig,
    get_config,
)
from cute_dash.kernels.workspace import WorkspaceLayout

MASKS = pytest.mark.parametrize("mask", [(False, False), (True, False), (False, True)], ids=["full", "causal", "local"])


@MASKS
@pytest.mark.parametrize("head_dim", SUPPORTED_HEAD_DIMS)
def test_a_head_dim_is_computed_in_the_next_tiles(head_dim, mask):
    config = get_config(head_dim, *mask)
    tiles = get_config(min(d for d in (64, 96, 128, 192, 256) if d >= head_dim), *mask)
    assert config.head_dim == config.head_dim_v == head_dim
    assert config.head_dim_padded == config.head_dim_v_padded == tiles.head_dim
    assert replace(config, head_dim=tiles.head_dim, head_dim_v=0) == tiles
    assert config.smem_bytes == tiles.smem_bytes <= SMEM_CAPACITY_BYTES
    assert WorkspaceLayout(6, 5, config).size == WorkspaceLayout(6, 5, tiles).size


@MASKS
def test_v_may_have_a_smaller_head_dim(mask):
    config, equal = get_config(192, *mask, 128), get_config(192, *mask)
    assert (config.head_dim, config.head_dim_v) == UNEQUAL_HEAD_DIMS == (192, 128)
    assert (config.head_dim_padded, config.head_dim_v_padded) == (192, 128)
    assert config.head_dims == "192/128" and equal.head_dims == "192" and config != equal
    assert replace(config, head_dim_v=0) == equal == get_config(192, *mask, 192)
    # 64 columns less of V and of a stage of dO, and so there is room for a second stage
    less = 64 * 2 * (config.tile_n + config.tile_m) - 128 * 2 * config.tile_m
    assert equal.smem_bytes - config.smem_bytes == less > 0
    assert WorkspaceLayout(6, 5, config).size == WorkspaceLayout(6, 5, equal).size


@pytest.mark.parametrize("pair", [(192, 64), (128, 192), (256, 128), (136, 128)], ids=str)
def test_other_pairs_of_head_dims_are_refused(pair):
    head_dim, head_dim_v = pair
    message = (
        f"head_dim_v={head_dim_v} is not supported with head_dim={head_dim}; allowed: {head_dim}, or head_dim=192 with "
        "head_dim_v=128"
    )
    with pytest.raises(ValueError, match=message):
        get_config(head_dim, False, head_dim_v=head_dim_v)


def test_tiles_are_not_padded():
    for head_dim in TILE_HEAD_DIMS:
        assert get_config(head_dim, False).head_dim_padded == head_dim


@pytest.mark.parametrize("head_dims", [*((d, d) for d in TILE_HEAD_DIMS), (192, 128)], ids=str)
def test_accumulators_leave_registers_for_the_rest(head_dims):
    """dK, dV and the largest of what lives beside them, in registers per thread, below what there are."""
    config = get_config(head_dims[0], False, head_dim_v=head_dims[1])
    threads = 128 * config.num_mma_warpgroups
    dKV = config.tile_n * (config.head_dim_padded + config.head_dim_v_padded) // threads
    scores = 2 * config.tile_m * config.tile_n // threads
    dQ = config.tile_m * config.head_dim_padded // threads
    assert dKV + max(scores, dQ) < config.num_mma_regs - 24


@MASKS
@pytest.mark.parametrize("head_dims", [(192, 192), (192, 128), (184, 184), (136, 136)], ids=str)
def test_head_dims_up_to_192_have_96_keys(head_dims, mask):
    config = get_config(head_dims[0], *mask, head_dims[1])
    assert (config.tile_m, config.tile_n) == (64, 96)
    assert config.split_columns and config.swap_operands and not get_config(256, *mask).swap_operands
    # one stage of P and dS, and of dO of 192 columns: either would take that much more
    num_bytes = 2 * 64 * 192
    assert (config.num_dS_stages, config.num_stages_dO) == (1, 2 if head_dims[1] == 128 else 1)
    assert config.smem_bytes <= SMEM_CAPACITY_BYTES < config.smem_bytes + num_bytes
    assert config.add_dV_first == (config.num_stages_dO == 1)


def test_other_tile_widths_are_refused():
    with pytest.raises(ValueError, match="tile_n=192 must be 128 or 64"):
        BwdConfig(64, False, 64, 192)
    with pytest.raises(ValueError, match="prefetch_KV=True.* bytes of shared memory"):
        replace(get_config(192, False), prefetch_KV=True)
    with pytest.raises(ValueError, match="skip_hidden_keys=True .*not for mask='full', tile_n=128"):
        replace(get_config(128, False), skip_hidden_keys=True)
    with pytest.raises(ValueError, match="skip_hidden_keys=True .*not for mask='causal', tile_n=64"):
        replace(get_config(256, True), skip_hidden_keys=True)
    with pytest.raises(ValueError, match="K_in_regs=True is for tile_n=128, not for tile_n=96"):
        replace(get_config(192, True), K_in_regs=True)
    with pytest.raises(ValueError, match="tile_n=128 must be 64 or 96 where head_dim_v differs"):
        BwdConfig(192, False, 64, 128, num_stages=1, head_dim_v=128)
    for head_dim, changes in ((128, {}), (256, {}), (192, dict(tile_m=128)), (192, dict(stats_by_gemm=True))):
        with pytest.raises(ValueError, match="tile_n=96 is for head dims from 136 to 192, tile_m=64 and stats_by_gemm"):
            replace(get_config(head_dim, False), tile_n=96, **changes)
    with pytest.raises(ValueError, match="skip_hidden_keys=True .*not for mask='causal', tile_n=96"):
        replace(get_config(192, True), skip_hidden_keys=True)


@pytest.mark.parametrize("head_dim", [0, 8, 24, 36, 63, 65, 100, 260, 264, 512])
def test_other_head_dims_are_refused(head_dim):
    message = f"head_dim={head_dim} is not supported; allowed: multiples of 8 from 32 to 256"
    with pytest.raises(ValueError, match=message):
        get_config(head_dim, False)
    with pytest.raises(ValueError, match=message):
        BwdConfig(head_dim, False, 64, 128)
