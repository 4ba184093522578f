"""Shared by the GPU tests: they need a Hopper, and say why where there is none."""

import contextlib
import os
from dataclasses import dataclass, replace

import pytest
import torch

from cute_dash import attention_backward, flash_attn_func, registry
from cute_dash.testing import AttentionInputs, random_inputs, why_no_hopper
from cute_dash.validation import get_shape
from tests.gpu.ratios import ERROR_RATIOS

# Without it torch's strict deterministic mode refuses matrix products. It is read once, when cuBLAS starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_sessionfinish(session):
    """A process of pytest-xdist hands its error ratios to the one that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["error_ratios"] = ERROR_RATIOS


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    ERROR_RATIOS.extend(getattr(node, "workeroutput", {}).get("error_ratios", []))


def pytest_terminal_summary(terminalreporter):
    if ERROR_RATIOS:
        worst, checked = max(ERROR_RATIOS), len(ERROR_RATIOS)
        terminalreporter.write_line(f"worst error ratio to the comparator: {worst:.2f} of {checked} gradients")


@pytest.fixture(scope="session", autouse=True)
def hopper():
    if (reason := why_no_hopper()) is not None:
        pytest.skip(reason)


@dataclass(frozen=True)
class Problem:
    """Inputs of one backward call on the GPU, with the forward's results."""

    inputs: AttentionInputs
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    causal: bool
    window_size: tuple[int, int] = (-1, -1)

    def shape(self):
        return get_shape(self.inputs.q, self.inputs.k, self.causal, self.window_size)

    def resolve(self, schedule):
        """The concrete schedule; skips the test if it cannot order this problem."""
        try:
            return registry.resolve(schedule, self.shape())
        except ValueError as error:
            pytest.skip(str(error))

    def arguments(self):
        q, k, v, dout = self.inputs
        return dout, q, k, v, self.out, self.lse, self.softmax_scale, self.causal

    def backward(self, schedule):
        return attention_backward(*self.arguments(), window_size=self.window_size, schedule=schedule)

    def select(self, sequences):
        """The problem of some of the sequences, in the given order."""
        inputs = AttentionInputs(*(x[sequences] for x in self.inputs))
        return replace(self, inputs=inputs, out=self.out[sequences], lse=self.lse[sequences])


@pytest.fixture
def make_problem():
    def make(batch, seqlen_q, seqlen_k, num_heads, head_dim, causal, window_size=(-1, -1), **options):
        inputs = random_inputs(batch, seqlen_q, seqlen_k, num_heads, head_dim, device="cuda", **options)
        scale = head_dim**-0.5
        out, lse = flash_attn_func(inputs.q, inputs.k, inputs.v, scale, causal, window_size, return_lse=True)
        return Problem(inputs, out, lse, scale, causal, window_size)

    return make


@pytest.fixture
def poison():
    """A function that fills the caching allocator's free blocks with NaN (all bits set, in every float dtype)."""

    def fill():
        small = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in 8 * [512, 4096, 65536, 1 << 20]]
        large = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (2, 4, 8, 16, 32, 64)]
        for block in small + large:
            block.fill_(255)

    return fill


@pytest.fixture
def noise():
    """A function that queues matmuls on another stream: they take SMs and L2 from whatever runs beside them."""
    stream = torch.cuda.Stream()
    a = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda")
    products = torch.empty_like(a)
    stream.wait_stream(torch.cuda.current_stream())

    def queue(count):
        with torch.cuda.stream(stream):
            for _ in range(count):
                torch.mm(a, a, out=products)

    yield queue
    stream.synchronize()


@pytest.fixture
def current_device():
    """A context manager factory that restores the current device."""

    @contextlib.contextmanager
    def use(index):
        before = torch.cuda.current_device()
        torch.cuda.set_device(index)
        try:
            yield
        finally:
            torch.cuda.set_device(before)

    return use
