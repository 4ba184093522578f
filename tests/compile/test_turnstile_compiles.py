"""The kernel of `tests/gpu/test_turnstile.py` compiles for Hopper and holds the turnstile it is to test; no GPU."""

import pytest

from cute_dash import registry
from cute_dash.config import get_config
from tests.compile.sass import disassemble_build
from tests.gpu.turnstile_kernel import TurnstileFold, compile_fold

MEMORY_OPERATIONS = ("LDG", "STG", "REDG", "MEMBAR", "FENCE")


def memory_operations(name, causal, local=False):
    """Opcodes that touch or order global memory, in order; the claims of work tiles are not among them."""
    fold = TurnstileFold(registry.load(name), get_config(64, causal, local))
    (kernel,) = disassemble_build(lambda options: compile_fold(fold, options)).values()
    return [opcode for opcode in kernel.opcodes if opcode.split(".")[0] in MEMORY_OPERATIONS]


@pytest.mark.parametrize(
    "name, causal, local",
    [
        ("shift", False, False),
        ("symmetric_shift", True, False),
        ("hybrid", True, False),
        ("shortest_first", False, True),
    ],
)
def test_update_lies_between_acquire_and_release(name, causal, local):
    """The update itself is a plain load and store, read after the turn has come."""
    wait = ["LDG.E.STRONG.GPU", "LDG.E.STRONG.GPU", "FENCE.VIEW.ASYNC.G"]  # the first look, the loop, the proxy fence
    release = ["FENCE.VIEW.ASYNC.G", "MEMBAR.ALL.GPU", "REDG.E.ADD.S32.STRONG.GPU"]
    assert memory_operations(name, causal, local) == [*wait, "LDG.E", "STG.E", *release]


def test_comparator_has_no_turnstile():
    assert memory_operations("unordered", False) == ["LDG.E", "STG.E"]
