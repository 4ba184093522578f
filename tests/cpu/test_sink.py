"""A learnable sink: out, LSE and gradients against fp64 autograd, rows and tokens without keys, graphs, refusals."""

import math

import pytest
import torch

from cute_dash import flash_attn_func, flash_attn_varlen_func, ops
from cute_dash.sink import add_sink
from cute_dash.testing import (
    assert_bitwise_equal,
    attention_backward_ref,
    attention_forward_ref,
    random_inputs,
    relative_error,
    sink_gradient_ref,
)
from tests.reference import attend
from tests.sink_gradient import check_sink_gradient

FP32_TOLERANCE = 2e-6
NAMES = ("dq", "dk", "dv", "dsink")
SCALE = 1 / 8
MASKS = pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (20, 5))], ids=["full", "causal", "window"]
)
LENGTHS = pytest.mark.parametrize("lengths", [(130, 130), (40, 150), (150, 40)], ids=str)
USES = pytest.mark.parametrize("uses", ["out", "both", "lse"])


def inputs(
    seqlen_q=130, seqlen_k=130, *, num_heads_kv=2, dtype=torch.float32, sink_dtype=torch.float32, batch=2, seed=0
):
    x = random_inputs(batch, seqlen_q, seqlen_k, 4, 64, num_heads_kv=num_heads_kv, dtype=dtype, seed=seed)
    generator = torch.Generator().manual_seed(7 + seed)
    dlse = torch.randn(batch, 4, seqlen_q, generator=generator)
    sink = 4 * torch.randn(4, generator=generator)  # of the size of an LSE
    return x, dlse, sink.to(sink_dtype)


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


def gradients(inputs, out, lse, dout, dlse, uses):
    given = {"out": [(out, dout)], "both": [(out, dout), (lse, dlse)], "lse": [(lse, dlse)]}[uses]
    outputs, grads = zip(*((tensor, grad.to(tensor.dtype)) for tensor, grad in given), strict=True)
    return torch.autograd.grad(outputs, inputs, grads, allow_unused=True)


def check_dsink(dsink, ref, out, lse, dout, dlse, sink, uses):
    dout, dlse = (torch.zeros_like(out) if uses == "lse" else dout), (None if uses == "out" else dlse)
    check_sink_gradient(dsink, ref, dout, out.detach(), lse.detach(), sink, dlse)


@MASKS
@LENGTHS
@USES
def test_equals_fp64_autograd(uses, lengths, causal, window):
    x, dlse, sink = inputs(*lengths)
    own = leaves(*x[:3], sink)
    out, lse = flash_attn_func(*own[:3], SCALE, causal, window, learnable_sink=own[3], return_lse=True)
    own64 = [t.double().requires_grad_() for t in (*x[:3], sink)]
    out64, lse64 = attend(*own64[:3], SCALE, causal, window, own64[3])
    assert relative_error(out, out64) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-6, atol=1e-5)
    grads = gradients(own, out, lse, x.dout, dlse, uses)
    refs = gradients(own64, out64, lse64, x.dout, dlse, uses)
    for name, grad, ref in zip(NAMES[:3], grads, refs, strict=False):
        if ref is None:
            assert (name, uses) == ("dv", "lse") and (grad == 0).all()
        else:
            assert relative_error(grad, ref) < FP32_TOLERANCE, name
    check_dsink(grads[3], refs[3], out, lse, x.dout, dlse, sink, uses)


@MASKS
@LENGTHS
def test_the_formulas_of_the_reference_are_those_of_autograd(lengths, causal, window):
    x, dlse, sink = inputs(*lengths)
    own64 = [t.double().requires_grad_() for t in (*x[:3], sink)]
    out64, lse64 = attend(*own64[:3], SCALE, causal, window, own64[3])
    for actual, wanted in zip(attention_forward_ref(*x[:3], SCALE, causal, window, sink), (out64, lse64), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    refs = gradients(own64, out64, lse64, x.dout, dlse, "both")
    options = SCALE, causal, window
    formulas = (
        *attention_backward_ref(x.dout, *x[:3], *options, dlse=dlse, learnable_sink=sink),
        sink_gradient_ref(x.dout, *x[:3], *options, sink, dlse),
    )
    for name, formula, ref in zip(NAMES, formulas, refs, strict=True):
        assert relative_error(formula, ref) < 1e-12, name


@pytest.mark.parametrize("sink_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype, sink_dtype):
    """The sink is read in fp32, whatever it is in, and its gradient is in the sink's own dtype."""
    x, _, sink = inputs(dtype=dtype, sink_dtype=sink_dtype)
    own, wide = leaves(*x[:3], sink), leaves(*x[:3], sink.float())
    out = flash_attn_func(*own[:3], learnable_sink=own[3])
    assert out.dtype == dtype
    assert_bitwise_equal(out, flash_attn_func(*wide[:3], learnable_sink=wide[3]), "out")
    grads = torch.autograd.grad(out, own, x.dout)
    wanted = torch.autograd.grad(flash_attn_func(*wide[:3], learnable_sink=wide[3]), wide, x.dout)
    for name, grad, other in zip(NAMES, grads, wanted, strict=True):
        assert_bitwise_equal(grad, other.to(grad.dtype), name)
    assert grads[3].dtype == sink_dtype


def test_a_sink_of_minus_infinity_is_none():
    x, _, sink = inputs(150, 40)
    sink = torch.full_like(sink, -math.inf)
    own, other = leaves(*x[:3], sink), leaves(*x[:3])
    out, lse = flash_attn_func(*own[:3], causal=True, learnable_sink=own[3], return_lse=True)
    expected, expected_lse = flash_attn_func(*other, causal=True, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    *grads, dsink = torch.autograd.grad(out, own, x.dout)
    for name, grad, wanted in zip(NAMES, grads, torch.autograd.grad(expected, other, x.dout), strict=False):
        assert torch.equal(grad, wanted), name
    assert (dsink == 0).all()


def test_rows_without_keys_have_the_sink_for_an_lse():
    x, _, sink = inputs(150, 40)
    out, lse = flash_attn_func(*x[:3], causal=True, learnable_sink=sink, return_lse=True)
    assert (out[:, :110] == 0).all() and torch.equal(lse[:, :, :110], sink[:, None].expand(2, 4, 110))


@pytest.mark.parametrize("wanted", [(0,), (3,), (1, 3), (0, 1, 2)], ids=str)
def test_inputs_without_requires_grad(wanted):
    x, dlse, sink = inputs()
    tensors = (*x[:3], sink)

    def run(wanted):
        own = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        out, lse = flash_attn_func(*own[:3], learnable_sink=own[3], return_lse=True)
        torch.autograd.backward((out, lse), (x.dout, dlse))
        return [t.grad for t in own]

    for i, (name, grad, other) in enumerate(zip(NAMES, run(wanted), run(range(4)), strict=True)):
        if i in wanted:
            assert_bitwise_equal(grad, other, name)
        else:
            assert grad is None


def test_the_sink_alone_asks_for_no_kernel(monkeypatch):
    x, _, sink = inputs()
    (sink,) = leaves(sink)
    out = flash_attn_func(*x[:3], learnable_sink=sink)
    called = []
    run_op = ops.run_op
    monkeypatch.setattr(ops, "run_op", lambda op, *arguments: (called.append(op), run_op(op, *arguments))[1])
    out.backward(x.dout)
    assert called == [ops.attention_sink_backward]


def test_out_is_not_written_after_it_was_returned():
    """The sink is added in place, to what the forward pass has just made."""
    x, _, sink = inputs()
    before = [t.clone() for t in (*x, sink)]
    out = flash_attn_func(*x[:3])
    kept = out.clone()
    flash_attn_func(*x[:3], learnable_sink=sink)
    assert torch.equal(out, kept) and all(map(torch.equal, before, (*x, sink)))


@pytest.mark.parametrize(("batch", "seqlen_q"), [(0, 8), (2, 0)])
def test_the_gradient_of_nothing_is_a_positive_zero(batch, seqlen_q):
    out, lse, sink = torch.zeros(batch, seqlen_q, 4, 64), torch.zeros(batch, 4, seqlen_q), torch.ones(4)
    dsink = ops.attention_sink_backward(out, out, lse, sink)
    assert_bitwise_equal(dsink, torch.zeros(4), "dsink")


def test_the_gradient_does_not_depend_on_strides():
    x, dlse, sink = inputs(dtype=torch.bfloat16)
    out, lse = flash_attn_func(*x[:3], learnable_sink=sink, return_lse=True)
    backward = torch.ops.cute_dash.attention_sink_backward
    expected = backward(x.dout, out, lse, sink, dlse)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.dout, out)]
    rows = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (lse, dlse)]
    spread = torch.stack([sink, sink], dim=1)[:, 0]
    assert_bitwise_equal(backward(*heads_first, rows[0], spread, rows[1]), expected, "dsink")
    assert_bitwise_equal(flash_attn_func(*x[:3], learnable_sink=spread), out, "out")


def test_double_backward_raises():
    x, _, sink = inputs(8, 8)
    own = leaves(*x[:3], sink)
    out = flash_attn_func(*own[:3], learnable_sink=own[3])
    (dsink,) = torch.autograd.grad(out, own[3:], x.dout.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dsink.sum().backward()


@pytest.mark.parametrize(
    ("uses", "backend"), [("out", "aot_eager"), ("lse", "aot_eager"), ("both", "aot_eager"), ("both", "inductor")]
)
def test_torch_compile_keeps_the_bits(uses, backend):
    x, dlse, sink = inputs(dtype=torch.bfloat16, sink_dtype=torch.bfloat16)

    def attention(q, k, v, sink):
        out, lse = flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True)
        return {"both": (out, lse), "lse": (lse,), "out": (out,)}[uses]

    grads_of = {"both": (x.dout, dlse), "lse": (dlse,), "out": (x.dout,)}[uses]
    eager, compiled = leaves(*x[:3], sink), leaves(*x[:3], sink)
    torch.autograd.backward(attention(*eager), grads_of)
    torch.autograd.backward(torch.compile(attention, fullgraph=True, backend=backend)(*compiled), grads_of)
    for name, a, b in zip(NAMES, compiled, eager, strict=True):
        assert_bitwise_equal(a.grad, b.grad, name)


@MASKS
def test_opcheck(causal, window):
    x, dlse, sink = inputs(40, 150, dtype=torch.bfloat16)
    own = leaves(*x[:3], sink)
    arguments = (*own[:3], 0.1, causal, *window, "baseline", own[3])
    torch.library.opcheck(torch.ops.cute_dash.attention_forward.default, arguments)
    out, lse = flash_attn_func(*x[:3], 0.1, causal, window, learnable_sink=sink, return_lse=True)
    for given in ((), (dlse,)):
        torch.library.opcheck(torch.ops.cute_dash.attention_sink_backward.default, (x.dout, out, lse, sink, *given))


BAD = {
    "shape": (torch.zeros(3), ValueError, r"learnable_sink has shape \(3,\); allowed: \(4,\)"),
    "2-D": (torch.zeros(4, 1), ValueError, r"learnable_sink has shape \(4, 1\); allowed: \(4,\)"),
    "dtype": (torch.zeros(4, dtype=torch.int32), TypeError, "learnable_sink has dtype torch.int32; allowed: torch.bf"),
    "device": (
        torch.zeros(4, device="meta"),
        ValueError,
        r"learnable_sink is on meta; allowed: the device of q \(cpu\)",
    ),
    "kind": (0.5, TypeError, "learnable_sink is a float; allowed: a torch.Tensor"),
}


@pytest.mark.parametrize(("sink", "error", "message"), BAD.values(), ids=BAD.keys())
def test_refused(sink, error, message):
    x, _, _ = inputs(8, 8)
    with pytest.raises(error, match=message):
        flash_attn_func(*x[:3], learnable_sink=sink)
    q, k, v = (t[0] for t in x[:3])
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 8, 8, learnable_sink=sink)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_the_raw_backward_op_refuses_other_dtypes(dtype):
    x, _, sink = inputs(8, 8)
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    with pytest.raises(TypeError, match=f"out has dtype {dtype}; allowed on cpu: "):
        torch.ops.cute_dash.attention_sink_backward(x.dout.to(dtype), out.to(dtype), lse, sink)


# Sequences of different lengths

LENGTHS_OF_SEQUENCES = [(0, 0), (70, 200), (130, 0), (150, 40), (0, 30), (64, 64)]
BEHIND = 9


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@USES
def test_sequences_of_different_lengths(uses, causal):
    totals = [sum(side) + BEHIND for side in zip(*LENGTHS_OF_SEQUENCES, strict=True)]
    x, dlse, sink = inputs(*totals, batch=1)
    starts = [torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in zip(*LENGTHS_OF_SEQUENCES, strict=True)]
    longest = [max(side) for side in zip(*LENGTHS_OF_SEQUENCES, strict=True)]
    q, k, v, dout = (t[0] for t in x)
    dlse = dlse[0]
    # nobody reads what comes for tokens behind the last sequence
    dout, dlse = dout.clone(), dlse.clone()
    dout[-BEHIND:], dlse[:, -BEHIND:] = math.nan, math.nan
    own = leaves(q, k, v, sink)
    out, lse = flash_attn_varlen_func(
        *own[:3], *starts, *longest, SCALE, causal, learnable_sink=own[3], return_lse=True
    )
    assert (out[-BEHIND:] == 0).all() and (lse[:, -BEHIND:] == -math.inf).all()
    own64 = [t.double().requires_grad_() for t in (q, k, v, sink)]
    outputs, grads_of = [], []
    places = [cu.tolist() for cu in starts]
    for q0, q1, k0, k1 in zip(places[0], places[0][1:], places[1], places[1][1:], strict=False):
        rows, keys = slice(q0, q1), slice(k0, k1)
        if q0 < q1:
            q64, k64, v64, sink64 = own64
            out_b, lse_b = attend(
                q64[None, rows], k64[None, keys], v64[None, keys], SCALE, causal, learnable_sink=sink64
            )
            assert relative_error(out[None, rows], out_b) < FP32_TOLERANCE
            torch.testing.assert_close(lse[None, :, rows].double(), lse_b, rtol=1e-6, atol=1e-5)
            outputs += [out_b, lse_b]
            share = {"out": (1, 0), "both": (1, 1), "lse": (0, 1)}[uses]
            grads_of += [share[0] * dout[None, rows].double(), share[1] * dlse[None, :, rows].double()]
    refs = torch.autograd.grad(outputs, own64, grads_of)
    grads = gradients(own, out, lse, dout, dlse, uses)
    for name, grad, ref in zip(NAMES[:3], grads, refs, strict=False):
        assert relative_error(grad, ref) < FP32_TOLERANCE, name
    check_dsink(grads[3], refs[3], out, lse, dout, dlse, sink, uses)


def test_varlen_opcheck_and_compile():
    x, _, sink = inputs(70, 80, dtype=torch.bfloat16, batch=1)
    starts = [torch.tensor(s, dtype=torch.int32) for s in ([0, 30, 60], [0, 50, 80])]
    arguments = (*leaves(*(t[0] for t in x[:3])), *starts, 30, 50, None, True, -1, -1, "baseline", *leaves(sink))
    torch.library.opcheck(torch.ops.cute_dash.attention_varlen_forward.default, arguments)

    def attention(q, k, v, sink):
        return flash_attn_varlen_func(q, k, v, *starts, 30, 50, causal=True, learnable_sink=sink)

    eager, compiled = (leaves(*(t[0] for t in x[:3]), sink) for _ in range(2))
    attention(*eager).backward(x.dout[0])
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled).backward(x.dout[0])
    for name, a, b in zip(NAMES, compiled, eager, strict=True):
        assert_bitwise_equal(a.grad, b.grad, name)


def test_neither_a_key_nor_a_sink():
    out, lse = torch.zeros(1, 3, 2, 32), torch.full((1, 2, 3), -math.inf)
    out, lse = add_sink(out, lse, torch.tensor([-math.inf, 1.0]))
    assert (out == 0).all() and lse.tolist() == [[[-math.inf] * 3, [1.0] * 3]]


# What is held against a dsink


def forward(x, sink, causal=True):
    return flash_attn_func(*x[:3], SCALE, causal, learnable_sink=sink, return_lse=True)


def forget_share(x, sink):
    """The out of attention without the sink."""
    return flash_attn_func(*x[:3], SCALE, True), forward(x, sink)[1]


def get_dsink(x, dlse, sink, out, lse):
    return torch.ops.cute_dash.attention_sink_backward(x.dout, out, lse, sink, dlse)


def get_dsink_without_a_row(x, dlse, sink, out, lse):
    lse = lse.clone()
    lse[0, :, -1] = -math.inf
    return get_dsink(x, dlse, sink, out, lse)


def check_against_ref(x, dlse, sink, forward=forward, get_dsink=get_dsink):
    sink = 5 + sink / 4  # near every LSE
    out, lse = forward(x, sink)
    ref = sink_gradient_ref(x.dout, *x[:3], SCALE, True, (-1, -1), sink, dlse)
    check_sink_gradient(get_dsink(x, dlse, sink, out, lse), ref, x.dout, out, lse, sink, dlse)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_roundings_of_out_are_allowed(dtype, seed):
    check_against_ref(*inputs(200, 230, dtype=dtype, seed=seed))


WRONG = {
    "1% more": ("out and LSE", dict(get_dsink=lambda *arguments: 1.01 * get_dsink(*arguments))),
    "no dlse": ("out and LSE", dict(get_dsink=lambda x, dlse, *rest: get_dsink(x, None, *rest))),
    "no last row": ("out and LSE", dict(get_dsink=get_dsink_without_a_row)),
    "NaN": ("out and LSE", dict(get_dsink=lambda *arguments: math.nan * get_dsink(*arguments))),
    "another mask": ("q, k and v", dict(forward=lambda x, sink: forward(x, sink, causal=False))),
    "no share": ("q, k and v", dict(forward=forget_share)),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("source", "mistake"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_dsink_is_seen(source, mistake, seed):
    with pytest.raises(AssertionError, match=f"^dsink from {source}: errors"):
        check_against_ref(*inputs(200, 230, dtype=torch.bfloat16, seed=seed), **mistake)
