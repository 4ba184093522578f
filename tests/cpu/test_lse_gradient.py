"""A gradient of the LSE: through autograd, given to the backward functions, and of rows that see no key."""

import contextlib
import math

import pytest
import torch

from cute_dash import (
    attention_backward,
    attention_varlen_backward,
    emulator,
    flash_attn_func,
    flash_attn_interface,
    flash_attn_varlen_func,
    launch,
    ops,
    registry,
)
from cute_dash.testing import (
    assert_bitwise_equal,
    attention_backward_ref,
    random_inputs,
    relative_error,
)
from tests.reference import attend

FP32_TOLERANCE = 2e-6
NAMES = ("dq", "dk", "dv")
MASKS = pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (20, 5))], ids=["full", "causal", "window"]
)
LENGTHS = pytest.mark.parametrize("lengths", [(130, 130), (40, 150), (150, 40)], ids=str)
PARTS = pytest.mark.parametrize("parts", ["both", "lse"])
SCALE = 1 / 8


def inputs(seqlen_q=130, seqlen_k=130, *, num_heads_kv=2, dtype=torch.float32, batch=2):
    x = random_inputs(batch, seqlen_q, seqlen_k, 4, 64, num_heads_kv=num_heads_kv, dtype=dtype)
    dlse = torch.randn(batch, 4, seqlen_q, generator=torch.Generator().manual_seed(7))
    return x, dlse


def leaves(x):
    return [t.clone().requires_grad_() for t in x[:3]]


def gradients(qkv, out, lse, dout, dlse, parts):
    """What autograd says of out and LSE together, or of the LSE alone. Of a constant -inf nobody takes a gradient."""
    seen = lse.detach() != -math.inf
    if parts == "lse":
        return torch.autograd.grad(lse[seen], qkv, dlse.to(lse.dtype)[seen], allow_unused=True)
    return torch.autograd.grad((out, lse[seen]), qkv, (dout.to(out.dtype), dlse.to(lse.dtype)[seen]))


@MASKS
@LENGTHS
@PARTS
def test_gradients_are_those_of_fp64_autograd(parts, lengths, causal, window):
    x, dlse = inputs(*lengths)
    qkv, qkv64 = leaves(x), [t.double().requires_grad_() for t in x[:3]]
    grads = gradients(qkv, *flash_attn_func(*qkv, SCALE, causal, window, return_lse=True), x.dout, dlse, parts)
    refs = gradients(qkv64, *attend(*qkv64, SCALE, causal, window), x.dout, dlse, parts)
    for name, grad, ref in zip(NAMES, grads, refs, strict=True):
        if ref is None:  # V does not reach the LSE
            assert name == "dv" and parts == "lse" and (grad == 0).all()
        else:
            assert relative_error(grad, ref) < FP32_TOLERANCE, name


@MASKS
@LENGTHS
def test_the_formula_of_the_reference_is_that_of_autograd(lengths, causal, window):
    x, dlse = inputs(*lengths)
    qkv64 = [t.double().requires_grad_() for t in x[:3]]
    refs = gradients(qkv64, *attend(*qkv64, SCALE, causal, window), x.dout, dlse, "both")
    formula = attention_backward_ref(x.dout, *x[:3], SCALE, causal, window, dlse=dlse)
    for name, grad, ref in zip(NAMES, formula, refs, strict=True):
        assert relative_error(grad, ref) < 1e-12, name


@MASKS
def test_autograd_passes_on_what_the_backward_function_takes(causal, window):
    x, dlse = inputs(150, 40, dtype=torch.bfloat16)
    qkv = leaves(x)
    out, lse = flash_attn_func(*qkv, SCALE, causal, window, return_lse=True)
    for dout in (x.dout, None):
        given = [(tensor, grad) for tensor, grad in ((out, dout), (lse, dlse)) if grad is not None]
        grads = torch.autograd.grad([t for t, _ in given], qkv, [g for _, g in given], retain_graph=True)
        tensors = dout, *x[:3], out.detach(), lse.detach()
        expected = attention_backward(*tensors, SCALE, causal, window, dlse=dlse)
        for name, grad, wanted in zip(NAMES, grads, expected, strict=True):
            assert_bitwise_equal(grad, wanted, name)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (20, 0)], ids=str)
def test_what_a_row_without_keys_gets_for_its_lse_is_not_read(window, junk):
    x, dlse = inputs(150, 40)
    out, lse = flash_attn_func(*x[:3], SCALE, True, window, return_lse=True)
    blind = lse == -math.inf
    assert blind.sum() == 2 * 4 * 110
    expected = attention_backward(x.dout, *x[:3], out, lse, SCALE, True, window, dlse=dlse.masked_fill(blind, 0.0))
    grads = attention_backward(x.dout, *x[:3], out, lse, SCALE, True, window, dlse=dlse.masked_fill(blind, junk))
    for name, grad, wanted in zip(NAMES, grads, expected, strict=True):
        assert_bitwise_equal(grad, wanted, name)
    assert (grads[0][:, :110] == 0).all()


def test_a_dlse_of_zeros_changes_no_bit():
    """What torch.compile passes where nobody uses the LSE that was asked for."""
    x, dlse = inputs(dtype=torch.bfloat16)
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    expected = attention_backward(x.dout, *x[:3], out, lse)
    grads = attention_backward(x.dout, *x[:3], out, lse, dlse=torch.zeros_like(dlse))
    for name, grad, wanted in zip(NAMES, grads, expected, strict=True):
        assert_bitwise_equal(grad, wanted, name)


def test_one_of_the_two_gradients_must_be_there():
    x, _ = inputs(8, 8)
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    with pytest.raises(ValueError, match="dout and dlse are None; allowed: at least one of them"):
        attention_backward(None, *x[:3], out, lse)
    with pytest.raises(TypeError, match="dlse is a list; allowed: a torch.Tensor"):
        attention_backward(x.dout, *x[:3], out, lse, dlse=[0.0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda out: out[:, :3], ValueError, r"out has shape \(2, 3, .* allowed: \(2, 8,"),
        (lambda out: out.half(), TypeError, "out has dtype torch.float16; allowed: the dtype of q"),
    ],
    ids=["shape", "dtype"],
)
def test_without_a_dout_a_bad_out_is_named(change, error, message):
    x, dlse = inputs(8, 8)
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    with pytest.raises(error, match=f"^{message}"):
        attention_backward(None, *x[:3], change(out), lse, dlse=dlse)


def test_strides_of_dlse_do_not_change_the_bits():
    x, dlse = inputs()
    out, lse = flash_attn_func(*x[:3], return_lse=True)
    expected = attention_backward(x.dout, *x[:3], out, lse, dlse=dlse)
    permuted = dlse.transpose(0, 2).contiguous().transpose(0, 2)
    for name, grad, wanted in zip(
        NAMES, attention_backward(x.dout, *x[:3], out, lse, dlse=permuted), expected, strict=True
    ):
        assert_bitwise_equal(grad, wanted, name)
    summed = attention_backward(x.dout, *x[:3], out, lse, dlse=torch.ones(()).expand_as(lse))
    expected = attention_backward(x.dout, *x[:3], out, lse, dlse=torch.ones_like(lse))
    for name, grad, wanted in zip(NAMES, summed, expected, strict=True):
        assert_bitwise_equal(grad, wanted, name)


def test_every_interleaving_has_the_same_bits():
    x, dlse = inputs(300, 300, dtype=torch.bfloat16, batch=1)
    out, lse = flash_attn_func(*x[:3], causal=True, return_lse=True)
    runs = [
        emulator.backward(x.dout, *x[:3], out, lse, SCALE, True, "hybrid", dlse=dlse, interleaving=seed)
        for seed in (None, 1, 2)
    ]
    for run in runs[1:]:
        for name, grad, wanted in zip(NAMES, run, runs[0], strict=True):
            assert_bitwise_equal(grad, wanted, name)


def test_double_backward_raises():
    x, _ = inputs(8, 8)
    qkv = leaves(x)
    _, lse = flash_attn_func(*qkv, return_lse=True)
    (dq,) = torch.autograd.grad(lse.sum(), qkv[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def test_flash_attns_lse_is_differentiable_too():
    """flash-attn returns it attached to the graph, but its backward ignores what comes back."""
    x, dlse = inputs(dtype=torch.bfloat16)
    qkv, other = leaves(x), leaves(x)
    _, lse, _ = flash_attn_interface.flash_attn_func(*qkv, return_attn_probs=True)
    lse.backward(dlse)
    flash_attn_func(*other, return_lse=True)[1].backward(dlse)
    for name, a, b in zip(NAMES, qkv, other, strict=True):
        assert_bitwise_equal(a.grad, b.grad, name)
    assert flash_attn_interface.flash_attn_func(*qkv).grad_fn is not None


@pytest.mark.parametrize("uses", ["both", "lse", "out"])
def test_torch_compile_keeps_the_bits(uses):
    x, dlse = inputs(dtype=torch.bfloat16)

    def attention(q, k, v):
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        return {"both": (out, lse), "lse": (lse,), "out": (out,)}[uses]

    grads_of = {"both": (x.dout, dlse), "lse": (dlse,), "out": (x.dout,)}[uses]
    eager, compiled = leaves(x), leaves(x)
    torch.autograd.backward(attention(*eager), grads_of)
    torch.autograd.backward(torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled), grads_of)
    for name, a, b in zip(NAMES, compiled, eager, strict=True):
        assert_bitwise_equal(a.grad, b.grad, name)


def test_torch_compile_with_an_lse_that_nobody_differentiates():
    x, _ = inputs(dtype=torch.bfloat16)

    def attention(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_lse=True)

    eager, compiled = leaves(x), leaves(x)
    attention(*eager)[0].backward(x.dout)
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*compiled)[0].backward(x.dout)
    for name, a, b in zip(NAMES, compiled, eager, strict=True):
        assert_bitwise_equal(a.grad, b.grad, name)


@MASKS
def test_opcheck(causal, window):
    x, dlse = inputs(40, 150, dtype=torch.bfloat16)
    out, lse = flash_attn_func(*x[:3], None, causal, window, return_lse=True)
    arguments = (x.dout, *x[:3], out, lse, None, causal, *window, "baseline", dlse)
    torch.library.opcheck(torch.ops.cute_dash.attention_backward.default, arguments)


# Sequences of different lengths

LENGTHS_OF_SEQUENCES = [(0, 0), (70, 200), (130, 0), (150, 40), (0, 30), (64, 64)]
BEHIND = 9


def pack(dtype=torch.float32):
    """As tensors with some tokens more, the starts of the sequences, and what goes into lse's gradient."""
    totals = [sum(side) + BEHIND for side in zip(*LENGTHS_OF_SEQUENCES, strict=True)]
    x, dlse = inputs(*totals, dtype=dtype, batch=1)
    starts = [torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in zip(*LENGTHS_OF_SEQUENCES, strict=True)]
    longest = [max(side) for side in zip(*LENGTHS_OF_SEQUENCES, strict=True)]
    return [t[0] for t in x], dlse[0], (*starts, *longest)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@PARTS
def test_sequences_of_different_lengths(parts, causal):
    (q, k, v, dout), dlse, lengths = pack()
    qkv = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = flash_attn_varlen_func(*qkv, *lengths, SCALE, causal, return_lse=True)
    # of what sees no key the gradient is not read
    dlse = dlse.masked_fill(lse.detach() == -math.inf, math.nan)
    given = [(out, dout), (lse, dlse)][parts == "lse" :]
    grads = torch.autograd.grad([t for t, _ in given], qkv, [g for _, g in given])
    refs = [torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v)]
    starts = [cu.tolist() for cu in lengths[:2]]
    for q0, q1, k0, k1 in zip(starts[0], starts[0][1:], starts[1], starts[1][1:], strict=False):
        if q0 == q1 or k0 == k1:
            continue
        rows, keys = slice(q0, q1), slice(k0, k1)
        dout_b = dout[None, rows] if parts == "both" else torch.zeros_like(dout[None, rows])
        tensors = dout_b, q[None, rows], k[None, keys], v[None, keys]
        grads_b = attention_backward_ref(*tensors, SCALE, causal, dlse=dlse[None, :, rows].nan_to_num())
        for ref, place, grad in zip(refs, (rows, keys, keys), grads_b, strict=True):
            ref[place] = grad[0]
    for name, grad, ref in zip(NAMES, grads, refs, strict=True):
        assert relative_error(grad, ref) < FP32_TOLERANCE, name
    wanted = attention_varlen_backward(
        dout if parts == "both" else None, q, k, v, out.detach(), lse.detach(), *lengths, SCALE, causal, dlse=dlse
    )
    for name, grad, other in zip(NAMES, grads, wanted, strict=True):
        assert_bitwise_equal(grad, other, name)


def test_varlen_opcheck():
    (q, k, v, dout), dlse, lengths = pack(torch.bfloat16)
    out, lse = flash_attn_varlen_func(q, k, v, *lengths, return_lse=True)
    arguments = (dout, q, k, v, out, lse, *lengths, None, True, -1, -1, "baseline", dlse)
    torch.library.opcheck(torch.ops.cute_dash.attention_varlen_backward.default, arguments)


# The launch


def test_a_build_of_its_own_where_there_is_a_gradient_of_the_lse(monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "get_backward", lambda key: lambda *arguments: launched.append((key, arguments)))
    monkeypatch.setattr(launch, "num_sms", lambda device_index: 10)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(ops, "run_op", lambda op, *arguments: ops._backward_cuda(*arguments))
    monkeypatch.setattr(ops, "_checked", {})
    launch._plan.cache_clear()
    x, dlse = inputs(num_heads_kv=4, dtype=torch.bfloat16)
    lse = torch.zeros(2, 4, 130)
    attention_backward(x.dout, *x[:3], x.q, lse, schedule="baseline")
    attention_backward(x.dout, *x[:3], x.q, lse, schedule="baseline", dlse=dlse)
    launch._plan.cache_clear()
    (without, arguments), (with_dlse, arguments_with) = launched
    assert without.schedule == with_dlse.schedule == registry.load("baseline")
    assert (without.dlse, with_dlse.dlse) == (False, True)
    assert arguments[14] is None and arguments_with[14] is dlse
