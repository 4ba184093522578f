"""A gradient of the LSE, and learnable sinks, on the GPU: accuracy, bits, rows without keys, autograd and graphs."""

import math

import pytest
import torch

from cute_dash import attention_backward, attention_varlen_backward, flash_attn_func, flash_attn_varlen_func
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    random_inputs,
    relative_error,
    sink_gradient_ref,
)
from tests.gpu.ratios import ERROR_RATIOS
from tests.sink_gradient import check_sink_gradient

BUDGET = 2.0
LSE_TOLERANCE = 1e-3
OUT_TOLERANCE = 1e-2
NAMES = ("dq", "dk", "dv", "dsink")
# head dim, dtype, KV heads of 4, mask, schedule: a build with dLSE and one without for each
KINDS = {
    "hd64": (64, torch.bfloat16, 4, True, (-1, -1), "shortest_first"),
    "hd128 grouped": (128, torch.bfloat16, 2, False, (-1, -1), "baseline"),
    "hd128 window": (128, torch.bfloat16, 4, True, (100, 0), "shortest_first"),
    "hd72 fp16": (72, torch.float16, 4, True, (-1, -1), "hybrid"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = pytest.mark.parametrize("lengths", [(333, 500), (500, 333)], ids=str)
SINKS = pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])


class Problem:
    def __init__(self, kind, lengths, with_sink=False, batch=2):
        head_dim, dtype, num_heads_kv, causal, window, self.schedule = KINDS[kind]
        options = dict(num_heads_kv=num_heads_kv, dtype=dtype, device="cuda")
        self.inputs = random_inputs(batch, *lengths, 4, head_dim, **options)
        self.options = head_dim**-0.5, causal, window
        self.dlse = normal(batch, 4, lengths[0], seed=1)
        self.sink = 4 * normal(4, seed=2) if with_sink else None
        self.out, self.lse = self.forward(*self.inputs[:3], self.sink)

    def forward(self, q, k, v, sink):
        return flash_attn_func(q, k, v, *self.options, schedule=self.schedule, learnable_sink=sink, return_lse=True)

    def backward(self, dout, dlse):
        tensors = *self.inputs[:3], self.out, self.lse
        return attention_backward(dout, *tensors, *self.options, schedule=self.schedule, dlse=dlse)

    def leaves(self):
        tensors = self.inputs[:3] if self.sink is None else (*self.inputs[:3], self.sink)
        return [t.clone().requires_grad_() for t in tensors]


def normal(*size, seed):
    return torch.randn(size, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@every_kind
@LENGTHS
@SINKS
@pytest.mark.parametrize("parts", ["both", "lse"])
def test_accuracy(parts, with_sink, lengths, kind, poison):
    problem = Problem(kind, lengths, with_sink)
    q, k, v, dout = problem.inputs
    dlse = problem.dlse.masked_fill(problem.lse == -math.inf, math.nan)  # nobody reads it there
    poison()
    grads = problem.backward(dout if parts == "both" else None, dlse)
    tensors = (dout if parts == "both" else torch.zeros_like(dout)), q, k, v
    options = dict(dlse=dlse.nan_to_num(), learnable_sink=problem.sink)
    refs = attention_backward_ref(*tensors, *problem.options, **options)
    comparators = attention_backward_rounded(*tensors, *problem.options, **options)
    for name, grad, ref, comparator in zip(NAMES, grads, refs, comparators, strict=False):
        if ref.count_nonzero():
            ERROR_RATIOS.append(assert_accurate(grad, ref, comparator, name, BUDGET))
        else:
            assert name == "dv" and parts == "lse" and (grad == 0).all()
    hidden = attention_forward_ref(q, k, v, *problem.options)[1] == -math.inf
    assert (grads[0].transpose(1, 2)[hidden] == 0).all()


@every_kind
@SINKS
def test_bits_are_equal_over_runs_and_those_of_no_dlse_where_it_is_0(with_sink, kind, noise, poison):
    problem = Problem(kind, (700, 900), with_sink)
    dout = problem.inputs.dout
    without, expected = problem.backward(dout, None), problem.backward(dout, problem.dlse)
    for _ in range(10):
        noise(5)
        poison()
        for wanted, dlse in ((expected, problem.dlse), (without, torch.zeros_like(problem.dlse))):
            for name, a, b in zip(NAMES, problem.backward(dout, dlse), wanted, strict=False):
                assert_bitwise_equal(a, b, name)
    assert not torch.equal(without[0], expected[0])


@every_kind
@SINKS
def test_autograd(with_sink, kind):
    """The same bits as by hand, for both outputs, for the LSE alone and for its sum, whose gradient is expanded."""
    problem = Problem(kind, (500, 333), with_sink)
    leaves = problem.leaves()
    sink = leaves[3] if with_sink else None
    out, lse = problem.forward(*leaves[:3], sink)
    assert_bitwise_equal(out, problem.out, "out")
    ones = torch.ones_like(problem.lse)
    for dout, dlse, dlse_by_hand in (
        (problem.inputs.dout, problem.dlse, problem.dlse),
        (None, problem.dlse, problem.dlse),
        (None, torch.ones((), device="cuda").expand_as(lse), ones),
        (problem.inputs.dout, None, None),
    ):
        given = [(tensor, grad) for tensor, grad in ((out, dout), (lse, dlse)) if grad is not None]
        grads = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given], retain_graph=True)
        for name, a, b in zip(NAMES, grads, problem.backward(dout, dlse_by_hand), strict=False):
            assert_bitwise_equal(a, b, name)
        if with_sink:
            dout_ref = torch.zeros_like(out) if dout is None else dout
            ref = sink_gradient_ref(dout_ref, *problem.inputs[:3], *problem.options, problem.sink, dlse_by_hand)
            check_sink_gradient(grads[3], ref, dout_ref, problem.out, problem.lse, problem.sink, dlse_by_hand)


@every_kind
@LENGTHS
def test_out_and_lse_of_a_sink(lengths, kind):
    problem = Problem(kind, lengths, with_sink=True)
    ref_out, ref_lse = attention_forward_ref(*problem.inputs[:3], *problem.options, problem.sink)
    assert relative_error(problem.out, ref_out) < OUT_TOLERANCE
    torch.testing.assert_close(problem.lse.double(), ref_lse, rtol=0, atol=LSE_TOLERANCE)
    hidden = attention_forward_ref(*problem.inputs[:3], *problem.options)[1] == -math.inf
    assert torch.equal(problem.lse[hidden], problem.sink[None, :, None].expand_as(hidden)[hidden])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_dsink_are_equal_over_runs(dtype, noise, poison):
    problem = Problem("hd64", (700, 900), with_sink=True, batch=5)
    sink = problem.sink.to(dtype)
    arguments = problem.inputs.dout, problem.out, problem.lse, sink, problem.dlse
    expected = torch.ops.cute_dash.attention_sink_backward(*arguments)
    assert expected.dtype == dtype
    for _ in range(50):
        noise(2)
        poison()
        assert_bitwise_equal(torch.ops.cute_dash.attention_sink_backward(*arguments), expected, "dsink")


@SINKS
def test_torch_compile_keeps_the_bits(with_sink):
    problem = Problem("hd64", (700, 900), with_sink)

    def attention(q, k, v, sink=None):
        return problem.forward(q, k, v, sink)

    eager, compiled = problem.leaves(), problem.leaves()
    grads_of = problem.inputs.dout, problem.dlse
    torch.autograd.backward(attention(*eager), grads_of)
    torch.autograd.backward(torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled), grads_of)
    for name, a, b in zip(NAMES, compiled, eager, strict=False):
        assert_bitwise_equal(a.grad, b.grad, name)


@SINKS
def test_forward_and_backward_do_not_wait_for_the_device(with_sink):
    problem = Problem("hd64", (700, 900), with_sink)
    leaves = problem.leaves()
    grads_of = problem.inputs.dout, problem.dlse

    def step():
        torch.autograd.backward(problem.forward(*leaves[:3], leaves[3] if with_sink else None), grads_of)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


SEQUENCES = [(0, 0), (512, 512), (1, 300), (0, 140), (129, 1), (140, 0), (700, 333), (64, 900)]
BEHIND = 33


@SINKS
@pytest.mark.parametrize("parts", ["both", "lse"])
def test_sequences_of_different_lengths(parts, with_sink, poison):
    """hd64 causal under shortest_first; what is behind the last sequence is NaN."""
    totals = [sum(side) + BEHIND for side in zip(*SEQUENCES, strict=True)]
    inputs = random_inputs(1, *totals, 4, 64, device="cuda")
    q, k, v, dout = (x[0] for x in inputs)
    dlse, sink = normal(4, totals[0], seed=1), 4 * normal(4, seed=2) if with_sink else None
    for x in (q, k, v, dout):
        x[-BEHIND:] = math.nan
    starts = [torch.tensor([0, *side]).cumsum(0) for side in zip(*SEQUENCES, strict=True)]
    lengths = *(cu.int().cuda() for cu in starts), *(max(side) for side in zip(*SEQUENCES, strict=True))
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *([sink] if with_sink else []))]
    options = dict(softmax_scale=0.125, causal=True, schedule="shortest_first")
    sink_leaf = leaves[3] if with_sink else None
    out, lse = flash_attn_varlen_func(*leaves[:3], *lengths, **options, learnable_sink=sink_leaf, return_lse=True)
    dlse = dlse.masked_fill(lse == -math.inf, math.nan)
    given = [(out, dout), (lse, dlse)][parts == "lse" :]
    poison()
    grads = torch.autograd.grad([t for t, _ in given], leaves, [g for _, g in given])
    by_hand = attention_varlen_backward(
        dout if parts == "both" else None, q, k, v, out.detach(), lse.detach(), *lengths, **options, dlse=dlse
    )
    for name, a, b in zip(NAMES, grads, by_hand, strict=False):
        assert_bitwise_equal(a, b, name)
    dsink = 0
    places = [cu.tolist() for cu in starts]
    for q0, q1, k0, k1 in zip(places[0], places[0][1:], places[1], places[1][1:], strict=False):
        rows, keys = slice(q0, q1), slice(k0, k1)
        if q0 == q1 or k0 == k1:
            assert all((grad[place] == 0).all() for grad, place in zip(grads, (rows, keys, keys), strict=False))
            if with_sink and q0 < q1:
                dsink = dsink + dlse[:, rows].double().sum(1)
            continue
        dout_b = dout[None, rows] if parts == "both" else torch.zeros_like(dout[None, rows])
        tensors = dout_b, q[None, rows], k[None, keys], v[None, keys], 0.125, True
        dlse_b = dlse[None, :, rows].nan_to_num()
        refs = attention_backward_ref(*tensors, dlse=dlse_b, learnable_sink=sink)
        comparators = attention_backward_rounded(*tensors, dlse=dlse_b, learnable_sink=sink)
        for name, grad, place, ref, comparator in zip(
            NAMES, grads, (rows, keys, keys), refs, comparators, strict=False
        ):
            if ref.count_nonzero():
                ERROR_RATIOS.append(assert_accurate(grad[None, place], ref, comparator, name, BUDGET))
            else:
                assert (grad[place] == 0).all()
        if with_sink:
            dsink = dsink + sink_gradient_ref(*tensors, (-1, -1), sink, dlse_b)
    if with_sink:
        dout_ref = dout if parts == "both" else torch.zeros_like(dout)
        check_sink_gradient(grads[3], dsink, dout_ref, out.detach(), lse.detach(), sink, dlse)
        assert (out[-BEHIND:] == 0).all() and (lse[:, -BEHIND:] == -math.inf).all()
