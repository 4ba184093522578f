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
