"""The kernel that keeps SMs from the backward (`cute-dash verify-bits`): no CTA fits beside it; it ends by itself."""

from cute_dash.config import SUPPORTED_HEAD_DIMS, get_config
from cute_dash.kernels.hold_sms import HELD_SMEM_BYTES, compile_hold_sms
from tests.compile.sass import disassemble_build

SM_BYTES = 228 * 1024
CTA_BYTES = 227 * 1024


def test_no_cta_of_the_backward_fits_beside_it():
    configs = [
        get_config(head_dim, *mask)
        for head_dim in SUPPORTED_HEAD_DIMS
        for mask in ((False, False), (True, False), (False, True))
    ]
    assert HELD_SMEM_BYTES <= CTA_BYTES
    assert all(HELD_SMEM_BYTES + config.smem_bytes > SM_BYTES for config in configs)


def test_the_launch_asks_for_that_much():
    assert f"constant({HELD_SMEM_BYTES} : i64)" in str(compile_hold_sms().ir_module)


def test_it_watches_the_clock_and_nothing_else():
    (kernel,) = disassemble_build(compile_hold_sms).values()
    assert kernel.count("CS2R") >= 2 and kernel.count("EXIT") >= 1  # the clock, before the loop and in it
    assert kernel.count("STG") == 1 and kernel.count("LDG") == 0 and kernel.frame_bytes == 0
