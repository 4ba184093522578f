"""The controls of `tests.sanitize` have in the machine code what is said of them; no GPU."""

import pytest

from tests.compile.sass import disassemble_build
from tests.gpu.sanitizer_control import Chain, Faulty, compile_control
from tests.sanitize import CHAINS, KERNELS


def disassemble(kernel):
    ((name, code),) = disassemble_build(lambda options: compile_control(kernel, options)).items()
    assert KERNELS.removeprefix("kns=") in name  # it is picked by the same name as the package's kernels
    return code


@pytest.mark.parametrize("past_the_end", [True, False], ids=["past the end", "race"])
def test_fault_is_compiled_in(past_the_end):
    kernel = disassemble(Faulty(past_the_end))
    assert kernel.count("STG") == 1 and kernel.count("BAR") == 0
    assert kernel.count("STS") == kernel.count("LDS") == (0 if past_the_end else 1)


# named barriers, each arrived at and waited for at one place, besides sync_threads()
ARRIVALS = {"whole": 3, "direct": 2, "broken": 2}  # at EMPTY and FULL, and at FREE
WAITS = {"sDuty": ARRIVALS, "sdQ": ARRIVALS, "sStats": {"whole": 1, "direct": 0, "broken": 0, "sync_warp": 0}}


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_chain_has_its_accesses_and_barriers(chain):
    kernel = disassemble(Chain(*chain))
    assert kernel.count("BAR.SYNC") - 1 == WAITS[chain.buffer][chain.form]
    assert kernel.count("BAR.ARV") == (0 if chain.buffer == "sStats" else ARRIVALS[chain.form])
    assert kernel.count("UBLKCP") == (chain.buffer != "sDuty")
    assert (kernel.count("LDS"), kernel.count("STS")) == {"sDuty": (1, 4), "sdQ": (1, 1), "sStats": (1, 0)}[
        chain.buffer
    ]
    assert kernel.frame_bytes == 0
