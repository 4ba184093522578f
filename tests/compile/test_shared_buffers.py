"""The buffers that `tests.sanitizer_output` names by address are where the machine code has them; no GPU."""

from collections import Counter

import pytest

from cute_dash import registry
from cute_dash.compile import CompileKey
from cute_dash.config import NUM_WORK_STAGES, get_config
from tests.compile.sass import build_and_disassemble
from tests.sanitizer_output import SHARED_BASE, list_buffers, name_buffer

CONFIGS = [
    get_config(64, False),
    get_config(128, True),
    get_config(128, False, True),
    get_config(192, False, False, 128),
]


@pytest.fixture(params=CONFIGS, ids=lambda config: f"{config.head_dims} {config.mask}")
def config(request):
    return request.param


def name_accesses(config, opcode):
    """The buffers at the constant parts of the addresses; a thread's own part leads further into a buffer."""
    main = build_and_disassemble(CompileKey(config, registry.load("shortest_first"), "bfloat16"))["main"]
    buffers = list_buffers(config, "bfloat16")
    offsets = [offset for found, offset in main.shared_accesses if found == opcode]
    return Counter(name_buffer(SHARED_BASE + offset, buffers) for offset in offsets)


def test_every_mbarrier_is_initialised_where_its_ring_is(config):
    num_full = 1 if config.local else 0  # of K and V alone, see `open_KV`
    assert name_accesses(config, "SYNCS.EXCH") == {
        "ring_Q": 2 * config.num_stages,
        "ring_dO": 2 * config.num_stages,
        "ring_KV": 1 + num_full,
        "ring_work": 2 * NUM_WORK_STAGES,
        "sums": 2,
    }


def test_claims_and_the_duty_are_stored_and_loaded_where_they_are(config):
    stores, loads = name_accesses(config, "STS"), name_accesses(config, "LDS")
    assert stores["sDuty"] == 1 <= loads["sDuty"]
    assert min(stores["sWork"], loads["sWork"]) >= 3
