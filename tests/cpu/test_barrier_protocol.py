"""The kernel's barriers and shared memory, in random interleavings of a model of its warps, `cta_model`.

`sm_model` has the barriers, in which a waiting warp sees the parity of a phase only, and buffers that know how many
reads of what they hold are due: what is overwritten or read too early is an error, and so is a standstill. `BUGS`
breaks one rule each, and the model has to notice. `test_claim_protocol` looks closer at the order of additions.
"""

import random
from dataclasses import replace

import pytest

from cute_dash import registry
from cute_dash.config import get_config
from cute_dash.problem import MASKS, Window
from cute_dash.schedule import needs_one_cta
from cute_dash.validation import TESTED_SCHEDULES
from tests.cta_model import Kernel
from tests.sm_model import ProtocolError

CONFIGS = {
    "hd64": dict(head_dim=64),
    "hd64_one_stage": dict(head_dim=64, num_stages=1),
    "hd64_no_prefetch": dict(head_dim=64, prefetch_KV=False),
    "hd128": dict(head_dim=128),  # passes hidden keys by
    "hd96": dict(head_dim=96),  # the same with K in registers
    "hd192": dict(head_dim=192),  # shared out by columns, operands swapped: one stage of P and dS, and one of dO
    "hd192_128": dict(head_dim=192, head_dim_v=128),  # the same with two of dO
    "hd256": dict(head_dim=256),  # shared out by columns: one stage of Q and dO, two of P and dS
}


def make_config(name, mask):
    fields = dict(CONFIGS[name])
    return replace(get_config(fields.pop("head_dim"), mask == "causal", mask == "local"), **fields)


def make_shape(config, num_m_blocks, num_n_blocks, group_size=1):
    """Two KV heads. With a window of one KV tile, the first KV tiles have no step where there are many."""
    window = Window(config.tile_n, 20) if config.local else None
    seqlen_q, seqlen_k = num_m_blocks * config.tile_m, num_n_blocks * config.tile_n
    return config.make_shape(1, 2, seqlen_q, seqlen_k, window, group_size)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_no_interleaving_breaks_a_rule(name, mask):
    rng, config = random.Random(name + mask), make_config(name, mask)
    for schedule in map(registry.load, sorted(TESTED_SCHEDULES)):
        for num_m_blocks, num_n_blocks, group_size in ((3, 3, 1), (1, 6, 1), (2, 3, 2)):
            shape = make_shape(config, num_m_blocks, num_n_blocks, group_size)
            if not schedule.can_implement(shape):
                continue
            residents = schedule.min_resident_ctas(shape)
            for num_ctas in {residents, max(residents, 3)}:
                Kernel(config, schedule, [shape], num_ctas, rng).run()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_of_different_lengths(name, mask):
    rng, config = random.Random(name + mask), make_config(name, mask)
    for schedule in map(registry.load, sorted(TESTED_SCHEDULES)):
        if needs_one_cta(schedule):
            shapes = [make_shape(config, rng.randint(1, 3), rng.randint(1, 4)) for _ in range(4)]
            Kernel(config, schedule, shapes, rng.randint(1, 3), rng).run()


# the rule that is broken: configuration, mask, and what the model says of it
BUGS = {
    "MMA runs ahead of LOAD": ("hd64", "local", "standstill"),
    "a tile without steps does not wait for dK and dV": ("hd64", "local", "sdS: .'dKV', .* overwritten by .'dKV'"),
    "dK and dV are not awaited": ("hd64", "full", "sdS: .'dKV', .* overwritten by .'dS'"),
    "dQ is written while others read the sum": ("hd64", "full", "sdQ: .'sum', .* overwritten by .'dQ'"),
    "the staging buffer is not awaited": ("hd64", "full", "sDuty: .* overwritten|sdQ: .* overwritten"),
    "the work slot is released before it is read again": ("hd64", "local", "sWork: .* overwritten"),
    "K is not announced": ("hd64", "full", "sK: .'K', 0. is read|standstill"),
    "K and V are released before all have read them": ("hd64", "full", "s[KV]: .'[KV]', .* overwritten by .'[KV]'"),
    "K and V are loaded over dK and dV": ("hd192", "full", "s[KV]: .'dKV', .* overwritten by .'[KV]'"),
    "a CTA exits while dK and dV are being read": ("hd64", "full", "exits"),
    "P and dS are written over those of the step before": (
        "hd192_128",
        "full",
        "s(dS|P): .'dS', .* overwritten by .'dS'",
    ),
}


def run_often(config, schedule, shape, num_ctas, **options):
    for seed in range(300):
        Kernel(config, schedule, [shape], num_ctas, random.Random(seed), **options).run()


@pytest.mark.parametrize("bug", BUGS)
def test_the_model_notices(bug):
    name, mask, message = BUGS[bug]
    config = make_config(name, mask)
    shape = make_shape(config, 1, 6) if config.local else make_shape(config, 3, 3)
    with pytest.raises(ProtocolError, match=message):
        run_often(config, registry.load("shortest_first"), shape, 1, bug=bug)


def test_the_model_notices_early_claims_where_tiles_wait_for_later_ones():
    config, schedule = make_config("hd64", "causal"), registry.load("symmetric_shift")
    shape = make_shape(config, 2, 4)
    assert schedule.min_resident_ctas(shape) == 2
    with pytest.raises(ProtocolError, match="standstill"):
        run_often(config, schedule, shape, 2, bug="claims are early where tiles wait for later ones")


def test_tiles_without_steps_are_among_those_tested():
    config = make_config("hd64", "local")
    turns = Kernel(config, registry.load("hybrid"), [make_shape(config, 1, 6)], 1, random.Random(0)).work
    assert sorted(map(len, turns)) == [0] * 8 + [1] * 4
