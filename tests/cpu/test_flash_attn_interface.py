"""flash-attn's interface on CPU tensors: its signatures and return values, fp64 results, refusals."""

import inspect
import math

import pytest
import torch

import cute_dash
from cute_dash import flash_attn_interface as ours
from cute_dash.interface import last_schedule
from cute_dash.testing import (
    assert_bitwise_equal,
    attention_backward_ref,
    attention_forward_ref,
    random_inputs,
    relative_error,
)

FP32_TOLERANCE = 2e-6
# of flash_attn 2, after the tensors
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
TENSORS = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_qkvpacked_func": ["qkv"],
}
EVERY_FUNCTION = pytest.mark.parametrize("name", TENSORS)
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def pack(name, q, k, v):
    """The tensor arguments of a function."""
    if name == "flash_attn_func":
        return [q, k, v]
    if name == "flash_attn_kvpacked_func":
        return [q, torch.stack([k, v], dim=2)]
    return [torch.stack([q, k, v], dim=2)]


def unpack(tensors):
    """q, k, v of such arguments or of their gradients."""
    return [x for t in tensors for x in (t.unbind(2) if t.ndim == 5 else [t])]


def inputs(seqlen_q=130, seqlen_k=130, dtype=torch.float32):
    return random_inputs(2, seqlen_q, seqlen_k, num_heads=2, head_dim=64, dtype=dtype)


@EVERY_FUNCTION
def test_signatures_are_those_of_flash_attn(name):
    parameters = inspect.signature(getattr(ours, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*TENSORS[name], *OPTIONS]
    assert {p.name: p.default for p in positional if p.default is not p.empty} == OPTIONS
    assert all(p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY)


@EVERY_FUNCTION
@MASKS
def test_out_lse_and_gradients_are_those_of_attention(name, causal):
    x = inputs()
    leaves = [t.requires_grad_() for t in pack(name, x.q, x.k, x.v)]
    out, lse, probs = getattr(ours, name)(*leaves, softmax_scale=0.1, causal=causal, return_attn_probs=True)
    grads = unpack(torch.autograd.grad(out, leaves, x.dout))
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, 0.1, causal)
    assert relative_error(out, ref_out) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)
    assert probs.numel() == 0
    for grad, ref in zip(grads, attention_backward_ref(x.dout, x.q, x.k, x.v, 0.1, causal), strict=True):
        assert relative_error(grad, ref) < FP32_TOLERANCE


@EVERY_FUNCTION
def test_any_head_dim(name):
    x = random_inputs(2, 130, 130, num_heads=2, head_dim=72, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in pack(name, x.q, x.k, x.v)]
    out = getattr(ours, name)(*leaves, causal=True)
    grads = unpack(torch.autograd.grad(out, leaves, x.dout))
    for grad, ref in zip(grads, attention_backward_ref(x.dout, x.q, x.k, x.v, 72**-0.5, True), strict=True):
        assert relative_error(grad, ref) < FP32_TOLERANCE


@pytest.mark.parametrize("lengths", [(40, 150), (150, 40)], ids=str)
def test_queries_and_keys_of_other_lengths(lengths):
    x = inputs(*lengths)
    ref, _ = attention_forward_ref(x.q, x.k, x.v, 1 / 8, True)
    assert relative_error(ours.flash_attn_func(x.q, x.k, x.v, causal=True), ref) < FP32_TOLERANCE
    packed = pack("flash_attn_kvpacked_func", x.q, x.k, x.v)
    assert relative_error(ours.flash_attn_kvpacked_func(*packed, causal=True), ref) < FP32_TOLERANCE


@EVERY_FUNCTION
def test_bits_are_those_of_cute_dash(name):
    x = inputs(dtype=torch.bfloat16)
    q, k, v = (t.clone().requires_grad_() for t in (x.q, x.k, x.v))
    cute_dash.flash_attn_func(q, k, v, causal=True, schedule="descending").backward(x.dout)
    leaves = [t.requires_grad_() for t in pack(name, x.q, x.k, x.v)]
    out = getattr(ours, name)(*leaves, causal=True, schedule="descending")
    assert isinstance(out, torch.Tensor)
    out.backward(x.dout)
    assert last_schedule().name == "descending"
    for actual, leaf in zip(unpack([leaf.grad for leaf in leaves]), (q, k, v), strict=True):
        assert_bitwise_equal(actual, leaf.grad, "grad")


@EVERY_FUNCTION
def test_positional_arguments_and_either_deterministic(name):
    """As a caller of flash-attn writes them: dropout off in evaluation, every option by position."""
    x = inputs()
    tensors = pack(name, x.q, x.k, x.v)
    expected = getattr(ours, name)(*tensors, causal=True)
    for deterministic in (False, True):
        assert torch.equal(getattr(ours, name)(*tensors, 0.0, None, True, (-1, -1), 0.0, None, deterministic), expected)


@EVERY_FUNCTION
@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"dropout_p": torch.zeros(2)}, TypeError, r"dropout_p=.* is a Tensor; allowed: 0.0"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p=0.1: dropout is not supported"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes is a Tensor: ALiBi is not supported"),
        ({"deterministic": 1}, TypeError, "deterministic=1 is a int"),
        ({"return_attn_probs": None}, TypeError, "return_attn_probs=None is a NoneType"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale=-1.0"),
        ({"softcap": "x"}, TypeError, "softcap='x'"),
        ({"window_size": 3}, TypeError, "window_size=3"),
        ({"schedule": "shfit"}, ValueError, "did you mean 'shift'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_had_is_refused(name, option, error, message):
    x = inputs(8, 8)
    with pytest.raises(error, match=message):
        getattr(ours, name)(*pack(name, x.q, x.k, x.v), **option)


@pytest.mark.parametrize("dropout_p", [math.nan, -0.5, 1])
def test_only_dropout_0_passes(dropout_p):
    x = inputs(8, 8)
    with pytest.raises(ValueError, match="dropout"):
        ours.flash_attn_func(x.q, x.k, x.v, dropout_p)


def test_packed_tensors_of_a_wrong_shape_are_named():
    x = inputs(8, 8)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 8, 2, 64\); allowed: 5-D \(batch, seqlen, 3,"):
        ours.flash_attn_qkvpacked_func(x.q)
    with pytest.raises(ValueError, match=r"kv has shape \(2, 8, 3, 2, 64\); allowed: 5-D \(batch, seqlen, 2,"):
        ours.flash_attn_kvpacked_func(x.q, torch.stack([x.q, x.k, x.v], dim=2))
    with pytest.raises(TypeError, match="qkv is a list"):
        ours.flash_attn_qkvpacked_func([x.q])


# Sequences of different lengths

VARLEN = {
    "flash_attn_varlen_func": ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_kvpacked_func": ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
}
EVERY_VARLEN = pytest.mark.parametrize("name", VARLEN)
LENGTHS = (40, 1, 89)


def varlen_inputs(name, dtype=torch.float32):
    """The tensors of a function, whose gradients are asked for; its lengths; dout; and q, k, v by sequence."""
    x = random_inputs(1, sum(LENGTHS), sum(LENGTHS), num_heads=2, head_dim=64, dtype=dtype)
    q, k, v, dout = (t[0] for t in (x.q, x.k, x.v, x.dout))
    cu_seqlens = torch.tensor([0, 40, 41, 130], dtype=torch.int32)
    stacked = {"q": q, "k": k, "v": v, "kv": torch.stack([k, v], dim=1), "qkv": torch.stack([q, k, v], dim=1)}
    leaves = [stacked[p].clone().requires_grad_() for p in VARLEN[name] if p in stacked]
    lengths = [cu_seqlens if p.startswith("cu") else max(LENGTHS) for p in VARLEN[name] if p not in stacked]
    return leaves, lengths, dout, [t.split(LENGTHS) for t in (q, k, v, dout)]


def unpack_varlen(tensors):
    return [x for t in tensors for x in (t.unbind(1) if t.ndim == 4 else [t])]


@EVERY_VARLEN
def test_varlen_signatures_are_those_of_flash_attn(name):
    options = {**OPTIONS, "block_table": None} if name == "flash_attn_varlen_func" else OPTIONS
    parameters = inspect.signature(getattr(ours, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*VARLEN[name], *options]
    assert {p.name: p.default for p in positional if p.default is not p.empty} == options


@EVERY_VARLEN
@pytest.mark.parametrize("window_size", [(-1, -1), (20, 5)], ids=str)
@MASKS
def test_varlen_out_lse_and_gradients_are_those_of_attention(name, causal, window_size):
    leaves, lengths, dout, sequences = varlen_inputs(name)
    out, lse, probs = getattr(ours, name)(
        *leaves, *lengths, softmax_scale=0.1, causal=causal, window_size=window_size, return_attn_probs=True
    )
    assert out.shape == dout.shape and lse.shape == (2, len(dout)) and probs.numel() == 0
    grads = unpack_varlen(torch.autograd.grad(out, leaves, dout))
    parts = zip(out.split(LENGTHS), lse.split(LENGTHS, dim=1), *(g.split(LENGTHS) for g in grads), strict=True)
    for (out_b, lse_b, *grads_b), one in zip(parts, zip(*sequences, strict=True), strict=True):
        q, k, v, dout_b = (t[None] for t in one)
        ref_out, ref_lse = attention_forward_ref(q, k, v, 0.1, causal, window_size)
        assert relative_error(out_b[None], ref_out) < FP32_TOLERANCE
        torch.testing.assert_close(lse_b[None].double(), ref_lse, rtol=1e-5, atol=1e-5)
        refs = attention_backward_ref(dout_b, q, k, v, 0.1, causal, window_size)
        scale = max(ref.norm().item() for ref in refs)  # of a single token dq and dk are 0
        for grad, ref in zip(grads_b, refs, strict=True):
            assert (grad[None].double() - ref).norm().item() < FP32_TOLERANCE * scale


@EVERY_VARLEN
def test_varlen_bits_are_those_of_cute_dash(name):
    leaves, lengths, dout, _ = varlen_inputs(name, dtype=torch.bfloat16)
    q, k, v = (t.detach().clone().requires_grad_() for t in unpack_varlen(leaves))
    every_length = lengths if len(lengths) == 4 else [lengths[0], lengths[0], lengths[1], lengths[1]]
    cute_dash.flash_attn_varlen_func(q, k, v, *every_length, causal=True, schedule="descending").backward(dout)
    out = getattr(ours, name)(*leaves, *lengths, 0.0, None, True, (-1, -1), 0.0, None, True, schedule="descending")
    out.backward(dout)
    assert last_schedule().name == "descending"
    for actual, expected in zip(unpack_varlen([leaf.grad for leaf in leaves]), (q, k, v), strict=True):
        assert_bitwise_equal(actual, expected.grad, "grad")


@EVERY_VARLEN
@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"dropout_p": 0.1}, ValueError, "dropout_p=0.1: dropout is not supported"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes is a Tensor: ALiBi is not supported"),
        ({"return_attn_probs": None}, TypeError, "return_attn_probs=None is a NoneType"),
        ({"window_size": 3}, TypeError, "window_size=3"),
        ({"schedule": "shift"}, ValueError, "schedule='shift' may need several resident CTAs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_varlen_refuses_what_cannot_be_had(name, option, error, message):
    leaves, lengths, *_ = varlen_inputs(name)
    with pytest.raises(error, match=message):
        getattr(ours, name)(*leaves, *lengths, **option)


def test_varlen_refuses_paged_keys_and_wrong_shapes():
    leaves, lengths, *_ = varlen_inputs("flash_attn_varlen_func")
    with pytest.raises(ValueError, match="block_table is a Tensor: paged keys are not supported"):
        ours.flash_attn_varlen_func(*leaves, *lengths, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"qkv has shape \(130, 2, 64\); allowed: 4-D \(total, 3,"):
        ours.flash_attn_varlen_qkvpacked_func(leaves[0], lengths[0], lengths[2])
    with pytest.raises(ValueError, match=r"kv has shape .* allowed: 4-D \(total_k, 2,"):
        ours.flash_attn_varlen_kvpacked_func(leaves[0], leaves[1], *lengths)
