"""What the tests of torch.compile on the CPU and on the GPU share."""

from contextlib import contextmanager

import torch
import torch._inductor.config

from cute_dash.testing import assert_bitwise_equal


@contextmanager
def fresh_compiler():
    """Also without Inductor's cache on disk, which does not see that an op's schema has changed."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def run(function, leaves, dout):
    """out and the gradients."""
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, dout)


def assert_same_bits(actual, expected):
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_bitwise_equal(a, b, name)
