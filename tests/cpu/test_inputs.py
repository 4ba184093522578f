"""What callers may hand in: layouts, gradients of some inputs only, nothing at all, head dims in turns."""

import contextlib
import itertools
import math

import pytest
import torch

from cute_dash import (
    attention_backward,
    attention_varlen_backward,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    launch,
    ops,
)
from cute_dash.interface import last_schedule
from cute_dash.testing import assert_bitwise_equal, random_inputs
from tests.layouts import KEPT, LAYOUTS

NAMES = ("dq", "dk", "dv")
TENSORS = ("dout", "q", "k", "v", "out")
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_tensor = pytest.mark.parametrize("name", TENSORS)
VARLEN = pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
CU_SEQLENS = torch.tensor([0, 30, 60], dtype=torch.int32)


def make_tensors(batch=2, num_heads=2, varlen=False):
    """dout, q, k, v, out, LSE and the lengths of two sequences, if they are packed."""
    x = random_inputs(1 if varlen else batch, 60, 60, num_heads, 64)
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    tensors = dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=out, lse=lse)
    if varlen:
        tensors = {name: t[0] for name, t in tensors.items()}
    return tensors, (CU_SEQLENS, CU_SEQLENS, 30, 30) if varlen else ()


@VARLEN
@every_layout
@every_tensor
def test_the_layout_changes_no_bit(name, layout, varlen):
    tensors, lengths = make_tensors(batch=1, varlen=varlen)
    backward = attention_varlen_backward if varlen else attention_backward
    tensors[name] = LAYOUTS[layout](tensors[name])
    plain = tensors | {name: tensors[name].contiguous().clone()}
    for a, b, gradient in zip(
        backward(*tensors.values(), *lengths), backward(*plain.values(), *lengths), NAMES, strict=True
    ):
        assert a.is_contiguous()
        assert_bitwise_equal(a, b, gradient)
    forward = flash_attn_varlen_func if varlen else flash_attn_func
    out, expected = (forward(*(t[x] for x in "qkv"), *lengths) for t in (tensors, plain))
    assert_bitwise_equal(out, expected, "out")


@VARLEN
@every_layout
@every_tensor
def test_tma_gets_what_it_can_read(name, layout, varlen, monkeypatch):
    """Copies are made of nothing else."""
    tensors, lengths = make_tensors(batch=1, varlen=varlen)
    launched = []
    monkeypatch.setattr(launch, "get_backward", lambda key: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(launch, "num_sms", lambda device_index: 10)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    run = ops._varlen_backward_cuda if varlen else ops._backward_cuda
    monkeypatch.setattr(ops, "run_op", lambda op, *arguments: run(*arguments))
    monkeypatch.setattr(ops, "_checked", {})
    launch._plan.cache_clear()
    tensors[name] = x = LAYOUTS[layout](tensors[name])
    (attention_varlen_backward if varlen else attention_backward)(*tensors.values(), *lengths)
    launch._plan.cache_clear()
    for other, sent in zip(TENSORS, launched[0], strict=False):
        given = tensors[other]
        sent = sent[0] if varlen else sent
        assert torch.equal(sent, given) and sent.data_ptr() % 16 == 0 and sent.stride(-1) == 1
        assert all(stride > 0 and stride % 8 == 0 for stride in sent.stride()[:-1])
        kept = sent.data_ptr() == given.data_ptr() and sent.stride() == given.stride()
        unchanged = x.stride() == torch.empty(x.shape).stride() and x.data_ptr() % 16 == 0
        assert kept == (other != name or layout in KEPT or unchanged)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "num_heads"), [(62, 1, 4), (1, 117, 4), (62, 117, 1)])
@every_tensor
def test_the_address_of_fp32_tensors_changes_no_bit(name, seqlen_q, seqlen_k, num_heads):
    """With heads first these are contiguous already, and matmuls of unaligned memory have other bits on some CPUs."""
    x = random_inputs(2, seqlen_q, seqlen_k, num_heads, 256, dtype=torch.float32)
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    tensors = dict(dout=x.dout, q=x.q, k=x.k, v=x.v, out=out, lse=lse)
    moved = tensors | {name: LAYOUTS["one element off"](tensors[name])}
    for a, b, gradient in zip(attention_backward(**moved), attention_backward(**tensors), NAMES, strict=True):
        assert_bitwise_equal(a, b, gradient)
    assert_bitwise_equal(flash_attn_func(*(moved[x] for x in "qkv")), out, "out")


def test_out_and_dout_may_differ_in_their_layouts():
    tensors, _ = make_tensors()
    expected = attention_backward(**tensors)
    tensors |= dict(dout=LAYOUTS["heads first"](tensors["dout"]), out=LAYOUTS["a projection's part"](tensors["out"]))
    for a, b, name in zip(attention_backward(**tensors), expected, NAMES, strict=True):
        assert_bitwise_equal(a, b, name)


@VARLEN
@pytest.mark.parametrize("wanted", [w for n in (1, 2, 3) for w in itertools.combinations(range(3), n)], ids=str)
def test_gradients_of_some_inputs(wanted, varlen):
    tensors, lengths = make_tensors(varlen=varlen)
    forward = flash_attn_varlen_func if varlen else flash_attn_func
    leaves = [tensors[x].clone().requires_grad_(i in wanted) for i, x in enumerate("qkv")]
    out, lse = forward(*leaves, *lengths, return_lse=True)
    out.backward(tensors["dout"])
    backward = attention_varlen_backward if varlen else attention_backward
    expected = backward(tensors["dout"], *(x.detach() for x in (*leaves, out, lse)), *lengths)
    for i, (leaf, grad, name) in enumerate(zip(leaves, expected, NAMES, strict=True)):
        if i in wanted:
            assert_bitwise_equal(leaf.grad, grad, name)
        else:
            assert leaf.grad is None


def test_double_backward_of_sequences_raises():
    tensors, lengths = make_tensors(varlen=True)
    leaves = [tensors[x].clone().requires_grad_() for x in "qkv"]
    out = flash_attn_varlen_func(*leaves, *lengths)
    (dq,) = torch.autograd.grad(out, leaves[:1], tensors["dout"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def test_head_dims_in_turns():
    """What is remembered of a call is of its head dim alone."""

    def run(head_dim):
        x = random_inputs(2, 40, 50, 2, head_dim)
        leaves = [t.requires_grad_() for t in x[:3]]
        flash_attn_func(*leaves, causal=True).backward(x.dout)
        return [t.grad for t in leaves]

    head_dims = (64, 128, 72, 32)
    first = {head_dim: run(head_dim) for head_dim in head_dims}
    for head_dim in (*head_dims, *reversed(head_dims)):
        for a, b, name in zip(run(head_dim), first[head_dim], NAMES, strict=True):
            assert_bitwise_equal(a, b, name)


# Nothing to compute

EMPTY = [(0, 40, 50), (2, 0, 50), (2, 40, 0), (0, 0, 0), (2, 0, 0)]
every_empty = pytest.mark.parametrize("extents", EMPTY, ids=str)


@every_empty
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (3, 0))], ids=str)
def test_nothing_gives_zeros(causal, window, dtype, extents):
    batch, seqlen_q, seqlen_k = extents
    x = random_inputs(batch, seqlen_q, seqlen_k, 4, 64, num_heads_kv=2, dtype=dtype)
    sink = torch.arange(4.0).requires_grad_()
    leaves = [t.requires_grad_() for t in x[:3]]
    out, lse = flash_attn_func(*leaves, None, causal, window, return_lse=True)
    assert out.shape == x.q.shape and out.dtype == dtype and (out == 0).all()
    assert lse.shape == (batch, 4, seqlen_q) and (lse == -math.inf).all()
    torch.autograd.backward((out, lse), (x.dout, torch.ones_like(lse)))
    for t in leaves:
        assert t.grad.shape == t.shape and (t.grad == 0).all()
    for grad, t in zip(attention_backward(x.dout, *x[:3], out, lse, None, causal, window), x[:3], strict=True):
        assert grad.shape == t.shape and grad.dtype == dtype and (grad == 0).all()
    out, lse = flash_attn_func(*leaves, None, causal, window, learnable_sink=sink, return_lse=True)
    assert (out == 0).all() and torch.equal(lse, sink.detach()[:, None].expand(lse.shape))
    torch.autograd.backward((out, lse), (x.dout, torch.ones_like(lse)))
    assert torch.equal(
        sink.grad, torch.full((4,), float(batch * seqlen_q))
    )  # each query gives its whole dlse to the sink


@every_empty
def test_nothing_through_compile_and_opcheck(extents):
    x = random_inputs(*extents, 2, 64)
    leaves = [t.requires_grad_() for t in x[:3]]
    torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")(*leaves).backward(x.dout)
    assert all((t.grad == 0).all() for t in leaves)
    if not any(extents):
        return  # opcheck's own copies of such tensors fail
    arguments = (*leaves, 0.1, True, -1, -1, "auto")
    torch.library.opcheck(torch.ops.cute_dash.attention_forward.default, arguments)


@every_empty
def test_nothing_launches_nothing(extents, monkeypatch):
    """On a GPU, whose implementations take these tensors for those of one."""
    monkeypatch.setattr(launch, "get_backward", lambda key: pytest.fail("a kernel was asked for"))
    x = random_inputs(*extents, 2, 64)
    out, lse = ops._forward_cuda(*x[:3], None, True, -1, -1, "shortest_first")
    assert (out == 0).all() and (lse == -math.inf).all()
    grads = ops._backward_cuda(x.dout, *x[:3], out, lse, None, True, -1, -1, "shortest_first")
    assert [grad.shape for grad in grads] == [t.shape for t in x[:3]]
    assert last_schedule().requested == "shortest_first"


def test_nothing_is_checked_like_something():
    x = random_inputs(0, 40, 50, 2, 64)
    with pytest.raises(ValueError, match="unknown schedule 'shfit'"):
        flash_attn_func(*x[:3], schedule="shfit")
    with pytest.raises(ValueError, match="v has shape"):
        flash_attn_func(x.q, x.k, x.v[:, 1:])
    with pytest.raises(ValueError, match="softmax_scale=-1.0"):
        flash_attn_func(*x[:3], softmax_scale=-1.0)


def test_nothing_in_flash_attns_functions():
    qkv = torch.zeros(0, 40, 3, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    out, lse, _ = flash_attn_interface.flash_attn_qkvpacked_func(qkv, return_attn_probs=True)
    out.sum().backward()
    assert out.shape == (0, 40, 2, 64) and lse.shape == (0, 2, 40) and qkv.grad.shape == qkv.shape
