"""The faults of the controls of `tests.sanitize` are in the machine code; no GPU."""

import pytest

from tests.compile.sass import disassemble_build
from tests.gpu.sanitizer_control import compile_faulty
from tests.sanitize import KERNELS


@pytest.mark.parametrize("past_the_end", [True, False], ids=["past the end", "race"])
def test_fault_is_compiled_in(past_the_end):
    ((name, kernel),) = disassemble_build(lambda options: compile_faulty(past_the_end, options)).items()
    assert KERNELS.removeprefix("kns=") in name  # it is picked by the same name as the package's kernels
    assert kernel.count("STG") == 1 and kernel.count("BAR") == 0
    assert kernel.count("STS") == kernel.count("LDS") == (0 if past_the_end else 1)
