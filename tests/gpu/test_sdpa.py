"""`scaled_dot_product_attention` of torch on this package's kernels."""

import pytest
import torch
import torch.nn.attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cute_dash import flash_attn_func, register_sdpa
from cute_dash.interface import last_schedule
from cute_dash.testing import assert_bitwise_equal, random_inputs

MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture
def active():
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip(f"torch {torch.__version__} has no registry of flash implementations")
    register_sdpa()
    torch.nn.attention.activate_flash_attention_impl("cute-dash")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def attention(q, k, v, causal):
    """(batch, seqlen, num_heads, head_dim) in and out, through torch's function."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)


def step(function, x, causal):
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = function(*leaves, causal)
    return out.detach(), *torch.autograd.grad(out, leaves, x.dout)


def ours(q, k, v, causal):
    return flash_attn_func(q, k, v, causal=causal)


def assert_same_bits(actual, expected):
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_bitwise_equal(a, b, name)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_bits_are_those_of_this_package(head_dim, causal, active):
    x = random_inputs(2, 1024, 1024, 4, head_dim, device="cuda")
    expected = step(ours, x, causal)
    flash_attn_func(*(t.clone().requires_grad_() for t in x[:3]), schedule="baseline").sum().backward()
    for _ in range(20):
        assert_same_bits(step(attention, x, causal), expected)
    assert last_schedule().requested == "auto"


@MASKS
def test_torch_compile_keeps_the_bits(causal, active):
    pytest.importorskip("triton")
    x = random_inputs(2, 1000, 1000, 4, 128, device="cuda")
    assert_same_bits(step(torch.compile(attention), x, causal), step(ours, x, causal))


def test_restored_is_torchs_own_again(active):
    x = random_inputs(2, 1024, 1024, 4, 128, device="cuda")
    step(ours, x, True)
    torch.nn.attention.restore_flash_attention_impl()
    before = last_schedule()
    step(attention, x, True)
    assert last_schedule() is before
    torch.nn.attention.activate_flash_attention_impl("cute-dash")
    step(attention, x, True)
    assert last_schedule().requested == "auto"


def test_what_cannot_be_had_raises_in_the_forward(active):
    x = random_inputs(1, 256, 256, 2, 64, device="cuda")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        with pytest.raises(ValueError, match="dropout_p=0.5"):
            scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        with pytest.raises(ValueError, match="head_dim 24"):
            scaled_dot_product_attention(q[..., :24], k[..., :24], v[..., :24])
