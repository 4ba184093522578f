"""What callers may hand in, on the GPU: layouts, gradients of some inputs only, nothing at all.

At head dim 64, causal, with `shortest_first`.
"""

import itertools
import math

import pytest
import torch

from cute_dash import (
    attention_backward,
    attention_varlen_backward,
    flash_attn_func,
    flash_attn_varlen_func,
)
from cute_dash.testing import assert_bitwise_equal, random_inputs, relative_error
from tests.layouts import LAYOUTS

NAMES = ("dq", "dk", "dv")
OPTIONS = dict(causal=True, schedule="shortest_first")
VARLEN = pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
OUT_TOLERANCE = 1e-2


def make_tensors(varlen, num_heads=2):
    x = random_inputs(1, 300, 300, num_heads, 64, device="cuda")
    out, lse = flash_attn_func(*x[:3], **OPTIONS, return_lse=True)
    tensors = dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=out, lse=lse)
    if not varlen:
        return tensors, ()
    cu_seqlens = torch.tensor([0, 170, 290], dtype=torch.int32, device="cuda")
    return {name: t[0] for name, t in tensors.items()}, (cu_seqlens, cu_seqlens, 170, 170)


@VARLEN
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse"])
def test_the_layout_changes_no_bit(name, layout, varlen, poison):
    tensors, lengths = make_tensors(varlen)
    backward = attention_varlen_backward if varlen else attention_backward
    tensors["dlse"] = tensors["lse"].sin()
    # the layouts are of tensors with heads before their last dim: the LSE's queries take that place
    rows = ("lse", "dlse") if name == "lse" else (name,)
    laid_out = {x: LAYOUTS[layout](tensors[x][None] if varlen and name == "lse" else tensors[x]) for x in rows}
    if varlen and name == "lse":
        laid_out = {x: t[0] for x, t in laid_out.items()}
    plain = {x: t.contiguous().clone(memory_format=torch.contiguous_format) for x, t in laid_out.items()}
    for dlse in (True, False) if name == "lse" else (False,):
        results = []
        for changes in (laid_out, plain):
            arguments = tensors | changes
            last = arguments.pop("dlse")
            poison()
            results.append(backward(*arguments.values(), *lengths, **OPTIONS, dlse=last if dlse else None))
        for a, b, gradient in zip(*results, NAMES, strict=True):
            assert_bitwise_equal(a, b, gradient)


@VARLEN
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_forward_of_a_layout(name, layout, varlen):
    tensors, lengths = make_tensors(varlen)
    forward = flash_attn_varlen_func if varlen else flash_attn_func
    tensors[name] = LAYOUTS[layout](tensors[name])
    out = forward(*(tensors[x] for x in "qkv"), *lengths, **OPTIONS)
    tensors[name] = tensors[name].clone(memory_format=torch.contiguous_format)
    assert relative_error(out, forward(*(tensors[x] for x in "qkv"), *lengths, **OPTIONS)) < OUT_TOLERANCE


def test_out_and_dout_may_differ_in_their_layouts():
    tensors, _ = make_tensors(False)
    expected = attention_backward(**tensors, **OPTIONS)
    tensors |= dict(dout=LAYOUTS["heads first"](tensors["dout"]), out=LAYOUTS["a projection's part"](tensors["out"]))
    for a, b, name in zip(attention_backward(**tensors, **OPTIONS), expected, NAMES, strict=True):
        assert_bitwise_equal(a, b, name)


@VARLEN
@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(range(3), n)], ids=str)
def test_gradients_of_some_inputs(wanted, varlen):
    tensors, lengths = make_tensors(varlen)
    forward = flash_attn_varlen_func if varlen else flash_attn_func
    leaves = [tensors[x].clone().requires_grad_(i in wanted) for i, x in enumerate("qkv")]
    out, lse = forward(*leaves, *lengths, **OPTIONS, return_lse=True)
    out.backward(tensors["dout"])
    backward = attention_varlen_backward if varlen else attention_backward
    expected = backward(tensors["dout"], *(x.detach() for x in (*leaves, out, lse)), *lengths, **OPTIONS)
    for i, (leaf, grad, name) in enumerate(zip(leaves, expected, NAMES, strict=True)):
        if i in wanted:
            assert_bitwise_equal(leaf.grad, grad, name)
        else:
            assert leaf.grad is None


def test_double_backward_raises():
    tensors, _ = make_tensors(False)
    leaves = [tensors[x].clone().requires_grad_() for x in "qkv"]
    out, lse = flash_attn_func(*leaves, **OPTIONS, return_lse=True)
    for output in (out, lse):
        (dq,) = torch.autograd.grad(output.sum(), leaves[:1], create_graph=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            dq.sum().backward(retain_graph=True)


@pytest.mark.parametrize("extents", [(0, 40, 50), (2, 0, 50), (2, 40, 0), (0, 0, 0)], ids=str)
def test_nothing_gives_zeros(extents, poison):
    x = random_inputs(*extents, 4, 64, num_heads_kv=2, device="cuda")
    leaves = [t.requires_grad_() for t in x[:3]]
    sink = torch.arange(4.0, device="cuda").requires_grad_()
    poison()
    out, lse = flash_attn_func(*leaves, **OPTIONS, return_lse=True)
    assert out.shape == x.q.shape and (out == 0).all() and (lse == -math.inf).all()
    torch.autograd.backward((out, lse), (x.dout, torch.ones_like(lse)))
    assert all(t.grad.shape == t.shape and (t.grad == 0).all() for t in leaves)
    out, lse = flash_attn_func(*leaves, **OPTIONS, learnable_sink=sink, return_lse=True)
    assert (out == 0).all() and torch.equal(lse, sink.detach()[:, None].expand(lse.shape))
    lse.sum().backward()
    assert torch.equal(sink.grad, torch.full_like(sink, float(extents[0] * extents[1])))
