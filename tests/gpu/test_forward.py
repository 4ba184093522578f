"""The libraries' forward on the GPU, in the contract's semantics: bottom-right mask, blind queries, LSE, repeatable."""

import math

import pytest
import torch

from cute_dash import flash_attn_func
from cute_dash.testing import assert_bitwise_equal, attention_forward_ref, random_inputs, relative_error

LSE_TOLERANCE = 1e-3  # absolute; the libraries exponentiate approximately
LENGTHS = [(1, 1), (1, 128), (127, 129), (239, 1), (799, 3), (113, 203), (1023, 1024), (1024, 1023), (512, 512)]
WINDOWS = pytest.mark.parametrize("window_size", [(-1, -1), (200, 50)], ids=["", "window"])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@MASKS
@pytest.mark.parametrize("lengths", [*LENGTHS, (256, 64)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_equals_fp64(dtype, head_dim, lengths, causal):
    seqlen_q, seqlen_k = lengths
    x = random_inputs(2, seqlen_q, seqlen_k, 3, head_dim, dtype=dtype, device="cuda")
    out, lse = flash_attn_func(x.q, x.k, x.v, 0.1, causal, return_lse=True)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, 0.1, causal)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert torch.isfinite(out).all()
    assert relative_error(out, ref_out) < torch.finfo(dtype).eps
    blind = max(seqlen_q - seqlen_k, 0) if causal else 0
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all()
    torch.testing.assert_close(lse[:, :, blind:].double(), ref_lse[:, :, blind:], rtol=0, atol=LSE_TOLERANCE)


# with a side above seqlen_k and more queries than keys (799 x 3, 256 x 64, 1024 x 300) it runs in parts
@pytest.mark.parametrize("window_size", [(0, 0), (100, 0), (64, 200), (-1, 70), (30, -1), (50, 500)], ids=str)
@pytest.mark.parametrize("lengths", [*LENGTHS, (256, 64), (64, 256), (1024, 300)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_of_a_window_equals_fp64(head_dim, lengths, window_size, poison):
    seqlen_q, seqlen_k = lengths
    x = random_inputs(2, seqlen_q, seqlen_k, 3, head_dim, device="cuda")
    poison()
    out, lse = flash_attn_func(x.q, x.k, x.v, 0.1, window_size=window_size, return_lse=True)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, 0.1, False, window_size)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert torch.isfinite(out).all()
    assert relative_error(out, ref_out) < torch.finfo(out.dtype).eps
    blind = ref_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind) and (out[blind.transpose(1, 2)] == 0).all()
    torch.testing.assert_close(lse[~blind].double(), ref_lse[~blind], rtol=0, atol=LSE_TOLERANCE)


@MASKS
@WINDOWS
@pytest.mark.parametrize("num_heads_kv", [4, 1])
@pytest.mark.parametrize("lengths", [*LENGTHS, (256, 64)], ids=str)
def test_forward_of_grouped_heads_equals_fp64(lengths, num_heads_kv, window_size, causal):
    seqlen_q, seqlen_k = lengths
    x = random_inputs(2, seqlen_q, seqlen_k, 8, 128, num_heads_kv=num_heads_kv, device="cuda")
    out, lse = flash_attn_func(x.q, x.k, x.v, 0.1, causal, window_size, return_lse=True)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, 0.1, causal, window_size)
    assert out.is_contiguous() and lse.is_contiguous() and lse.shape == (2, 8, seqlen_q)
    assert relative_error(out, ref_out) < torch.finfo(torch.bfloat16).eps
    blind = ref_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind) and (out[blind.transpose(1, 2)] == 0).all()
    torch.testing.assert_close(lse[~blind].double(), ref_lse[~blind], rtol=0, atol=LSE_TOLERANCE)


@MASKS
@WINDOWS
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 1024)], ids=str)
def test_forward_repeats_its_bits(lengths, window_size, causal, noise, poison):
    x = random_inputs(4, *lengths, 8, 128, device="cuda")
    options = dict(causal=causal, window_size=window_size, return_lse=True)
    expected = flash_attn_func(x.q, x.k, x.v, **options)
    for _ in range(50):
        noise(2)
        poison()
        out, lse = flash_attn_func(x.q, x.k, x.v, **options)
        assert_bitwise_equal(out, expected[0], "out")
        assert_bitwise_equal(lse, expected[1], "lse")


@MASKS
@WINDOWS
@pytest.mark.parametrize("num_heads_kv", [16, 2])
@pytest.mark.parametrize("lengths", [(512, 640), (1000, 1000), (640, 512), (1, 640)], ids=str)
def test_a_sequence_alone_has_the_bits_that_it_has_in_a_batch(lengths, num_heads_kv, window_size, causal):
    """Few blocks or many: no kernel may split the keys by how full the device is."""
    x = random_inputs(8, *lengths, 16, 64, num_heads_kv=num_heads_kv, device="cuda")
    options = dict(causal=causal, window_size=window_size, return_lse=True)
    out, lse = flash_attn_func(x.q, x.k, x.v, **options)
    for batch in (1, 2, 5):
        part = flash_attn_func(x.q[:batch], x.k[:batch], x.v[:batch], **options)
        assert_bitwise_equal(part[0], out[:batch], f"out of a batch of {batch}")
        assert_bitwise_equal(part[1], lse[:batch], f"lse of a batch of {batch}")
