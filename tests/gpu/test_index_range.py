"""Tensors of more than 2**31 elements and offsets beyond 2**32 bytes: parts of them have the bits that they have alone.

Every schedule here is batch-invariant. No reference of the whole is needed: what a wrapped offset reads or writes is
elsewhere, and the parts at the far ends show it.
"""

import gc

import pytest
import torch

from cute_dash import attention_backward, attention_varlen_backward, flash_attn_func, flash_attn_varlen_func
from cute_dash.testing import assert_bitwise_equal, random_inputs, relative_error

NAMES = ("dq", "dk", "dv")
GIB = 2**30
OUT_TOLERANCE = 1e-2


@pytest.fixture
def needs_memory():
    """Skips where the GPU has not so many GiB free; gives the memory back afterwards."""

    def check(gib):
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < gib * GIB:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free / GIB:.0f} are free")

    yield check
    gc.collect()
    torch.cuda.empty_cache()


def normal(*size, seed):
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator(seed))


def generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


def assert_parts(grads, parts, alone):
    """The same bits of the gradients `alone` as of the `parts` of the whole's."""
    for name, grad, part, other in zip(NAMES, grads, parts, alone, strict=True):
        assert_bitwise_equal(grad[part], other, name)


def test_a_large_batch_of_images(needs_memory):
    """1.3 G elements, 2.5 GiB a tensor; 2.5 G elements of partial sums."""
    needs_memory(48)
    options = dict(softmax_scale=72**-0.5, schedule="shortest_first")
    q, k, v, dout = (normal(1600, 729, 16, 72, seed=i) for i in range(4))
    out, lse = flash_attn_func(q, k, v, **options, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    for i in (0, 800, 1599):
        one = slice(i, i + 1)
        assert relative_error(out[one], flash_attn_func(q[one], k[one], v[one], **options)) < OUT_TOLERANCE
        alone = attention_backward(*(x[one].clone() for x in (dout, q, k, v, out, lse)), **options)
        assert_parts(grads, 3 * [one], alone)


def test_more_than_a_million_packed_tokens(needs_memory):
    """2.3 G elements, 4.2 GiB a tensor; sequences of 1 to 7,333 tokens, and some tokens behind them."""
    needs_memory(72)
    lengths = [1 + 7332 * i // 299 for i in range(300)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    assert 1_099_000 < starts[-1] < 1_100_000
    cu_seqlens = starts.int().cuda()
    options = dict(causal=True, schedule="shortest_first")
    q, k, v, dout = (normal(1_100_000, 16, 128, seed=i) for i in range(4))
    packed = cu_seqlens, cu_seqlens, max(lengths), max(lengths)
    out, lse = flash_attn_varlen_func(q, k, v, *packed, **options, return_lse=True)
    grads = attention_varlen_backward(dout, q, k, v, out, lse, *packed, **options)
    for i in (0, 150, 299):
        part = slice(starts[i], starts[i + 1])
        own = torch.tensor([0, lengths[i]], dtype=torch.int32, device="cuda")
        own_lengths = own, own, lengths[i], lengths[i]
        expected = flash_attn_varlen_func(q[part], k[part], v[part], *own_lengths, **options)
        assert relative_error(out[part], expected) < OUT_TOLERANCE
        tensors = *(x[part].clone() for x in (dout, q, k, v, out)), lse[:, part].clone()
        assert_parts(grads, 3 * [part], attention_varlen_backward(*tensors, *own_lengths, **options))
    assert all((grad[starts[-1] :] == 0).all() for grad in grads)


def test_long_sequences(needs_memory):
    """2.2 G elements, 4.1 GiB a tensor: offsets of tokens and of the second sequence's heads beyond 2**31 elements."""
    needs_memory(72)
    options = dict(causal=True, window_size=(255, 0), schedule="shortest_first")
    q, k, v, dout = (normal(2, 130_000, 66, 128, seed=i) for i in range(4))
    out, lse = flash_attn_func(q, k, v, **options, return_lse=True)
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    for batch_idx, head_idx in ((0, 0), (1, 33), (1, 65)):
        part = slice(batch_idx, batch_idx + 1), slice(None), slice(head_idx, head_idx + 1)
        expected = flash_attn_func(*(x[part].contiguous() for x in (q, k, v)), **options)
        assert relative_error(out[part], expected) < OUT_TOLERANCE
        tensors = *(x[part].contiguous() for x in (dout, q, k, v, out)), lse[part[0], part[2]].contiguous()
        assert_parts(grads, 3 * [part], attention_backward(*tensors, **options))


def test_parts_of_projections(needs_memory):
    """Strides of 3 * 8 * 128: tokens of a tensor of 1 G elements lie up to 3 G elements apart."""
    needs_memory(56)
    options = dict(causal=True, window_size=(127, 0), schedule="shortest_first")
    qkv = normal(1, 1_000_000, 3, 8, 128, seed=0)
    q, k, v = qkv.unbind(2)
    assert q.stride(1) * q.shape[1] > 2**31
    wide = normal(1, 1_000_000, 3, 8, 128, seed=1)
    out, lse = flash_attn_func(q, k, v, **options, return_lse=True)
    wide[:, :, 1] = out
    dout, out = wide[:, :, 2], wide[:, :, 1]
    grads = attention_backward(dout, q, k, v, out, lse, **options)
    plain = [x.contiguous() for x in (dout, q, k, v, out)]
    for a, b, name in zip(grads, attention_backward(*plain, lse, **options), NAMES, strict=True):
        assert_bitwise_equal(a, b, name)
    expected = flash_attn_func(*plain[1:4], **options)
    assert relative_error(out[:, -1000:], expected[:, -1000:]) < OUT_TOLERANCE


@pytest.mark.parametrize("with_dlse", [False, True], ids=["", "dlse"])
def test_views_far_into_their_storage(with_dlse, needs_memory):
    """Offsets of 2**31 elements, of the LSE and its gradient too."""
    needs_memory(24)
    options = dict(causal=True, schedule="shortest_first")
    x = random_inputs(2, 500, 500, 4, 64, device="cuda")
    out, lse = flash_attn_func(*x[:3], **options, return_lse=True)
    tensors, rows = (x.dout, x.q, x.k, x.v, out), (lse, lse.sin())

    def move(tensors):
        buffer = tensors[0].new_empty(2**31 + sum(t.numel() for t in tensors))
        views = buffer[2**31 :].split([t.numel() for t in tensors])
        return [view.view(t.shape).copy_(t) for view, t in zip(views, tensors, strict=True)]

    moved, moved_rows = move(tensors), move(rows)
    assert moved[0].storage_offset() == moved_rows[0].storage_offset() == 2**31
    results = [
        attention_backward(*t, row[0], **options, dlse=row[1] if with_dlse else None)
        for t, row in ((tensors, rows), (moved, moved_rows))
    ]
    for a, b, name in zip(*results, NAMES, strict=True):
        assert_bitwise_equal(a, b, name)
    assert relative_error(flash_attn_func(*moved[1:4], **options), out) < OUT_TOLERANCE
