"""Gradients of the kernel against fp64, for every schedule, mask, head dim, dtype and awkward length.

A budget is a multiple of what another implementation with the same 16-bit inputs loses: torch's own flash backward
where it has the contract's mask, else (causal with unequal lengths) fp64 with the unavoidable roundings.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_dash import attention_backward, flash_attn_func, registry
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
)
from tests.gpu.ratios import ERROR_RATIOS

BUDGET = 2.0  # times the comparator's error
# the last has three KV tiles: there a CTA that claimed with a turn outstanding could wait for itself (symmetric_shift)
LENGTHS = [(1, 1), (1, 128), (127, 129), (239, 1), (799, 3), (113, 203), (1023, 1024), (1024, 1023), (300, 300)]
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128], ids=lambda head_dim: f"hd{head_dim}")
EVERY_SCHEDULE = pytest.mark.parametrize("name", registry.available())


def torch_flash_backward(problem):
    """dq, dk, dv of torch's FlashAttention-2 in the input dtype."""
    assert not problem.causal or problem.inputs.q.shape[1] == problem.inputs.k.shape[1]
    q, k, v, dout = (x.transpose(1, 2) for x in problem.inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=problem.causal, scale=problem.softmax_scale
        )
        return [grad.transpose(1, 2) for grad in torch.autograd.grad(out, leaves, dout)]


def assert_gradients_accurate(problem, grads, comparators):
    x = problem.inputs
    options = (problem.softmax_scale, problem.causal, problem.window_size)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, *options)
    for name, grad, ref, comparator in zip(("dq", "dk", "dv"), grads, refs, comparators, strict=True):
        assert grad.dtype == x.q.dtype and grad.is_contiguous()
        ERROR_RATIOS.append(assert_accurate(grad, ref, comparator, name, BUDGET))


@EVERY_SCHEDULE
@MASKS
@HEAD_DIMS
def test_bf16_error_is_within_twice_torchs(name, head_dim, causal, make_problem, poison):
    problem = make_problem(2, 1024, 1024, 4, head_dim, causal)
    schedule = problem.resolve(name)
    poison()
    assert_gradients_accurate(problem, problem.backward(schedule), torch_flash_backward(problem))


@pytest.mark.parametrize(
    ("name", "head_dim", "causal"), [("shortest_first", 128, True), ("baseline", 64, False)], ids=str
)
def test_fp16_error_is_within_twice_torchs(name, head_dim, causal, make_problem):
    problem = make_problem(2, 1024, 1024, 4, head_dim, causal, dtype=torch.float16)
    assert_gradients_accurate(problem, problem.backward(name), torch_flash_backward(problem))


@EVERY_SCHEDULE
@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_awkward_lengths(name, lengths, head_dim, causal, make_problem, poison):
    problem = make_problem(3, *lengths, 3, head_dim, causal)
    schedule = problem.resolve(name)
    x = problem.inputs
    poison()
    grads = problem.backward(schedule)
    comparators = attention_backward_rounded(x.dout, x.q, x.k, x.v, problem.softmax_scale, causal)
    assert_gradients_accurate(problem, grads, comparators)


@EVERY_SCHEDULE
@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("window_size", [(-1, -1), (100, 30)], ids=["", "window"])
@pytest.mark.parametrize("num_heads_kv", [4, 2, 1], ids=lambda n: f"{8 // n} to 1")
def test_grouped_heads(name, num_heads_kv, window_size, head_dim, causal, make_problem, poison):
    """No query sees the first KV tile through the window: 100 back from 300 keys ahead."""
    problem = make_problem(2, 700, 1000, 8, head_dim, causal, window_size, num_heads_kv=num_heads_kv)
    schedule = problem.resolve(name)
    x = problem.inputs
    poison()
    grads = problem.backward(schedule)
    assert grads[1].shape == grads[2].shape == (2, 1000, num_heads_kv, head_dim)
    if window_size != (-1, -1):
        assert (grads[1][:, :128] == 0).all() and (grads[2][:, :128] == 0).all()
    comparators = attention_backward_rounded(x.dout, x.q, x.k, x.v, problem.softmax_scale, causal, window_size)
    assert_gradients_accurate(problem, grads, comparators)


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (129, 65)], ids=str)
def test_grouped_heads_of_awkward_lengths(lengths, head_dim, causal, make_problem, poison):
    problem = make_problem(3, *lengths, 6, head_dim, causal, num_heads_kv=2)
    x = problem.inputs
    poison()
    grads = problem.backward("auto")
    comparators = attention_backward_rounded(x.dout, x.q, x.k, x.v, problem.softmax_scale, causal)
    assert_gradients_accurate(problem, grads, comparators)


@EVERY_SCHEDULE
@HEAD_DIMS
def test_queries_without_keys_get_exactly_zero(name, head_dim, make_problem, poison):
    problem = make_problem(2, 256, 64, 3, head_dim, causal=True)
    schedule = problem.resolve(name)
    x = problem.inputs
    poison()
    grads = problem.backward(schedule)
    assert (grads[0][:, : 256 - 64] == 0).all()
    comparators = attention_backward_rounded(x.dout, x.q, x.k, x.v, problem.softmax_scale, True)
    assert_gradients_accurate(problem, grads, comparators)


# one query or key beside its neighbours, narrower than a tile, across tiles, wider than the sequence on one side
WINDOWS = [(0, 0), (50, 0), (0, 60), (70, 70), (200, 10), (129, 300), (-1, 30), (130, -1), (2000, 0)]


@HEAD_DIMS
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [*LENGTHS, (300, 1300), (1300, 300)], ids=str)
def test_windows(lengths, window_size, head_dim, make_problem, poison):
    """Among them KV tiles that no query sees (300 x 1300), whose dK and dV must be written as zeros all the same."""
    assert_window_accurate("auto", lengths, window_size, head_dim, make_problem, poison)


@EVERY_SCHEDULE
@HEAD_DIMS
@pytest.mark.parametrize("window_size", [(200, 10), (70, 70)], ids=str)
@pytest.mark.parametrize("lengths", [(1023, 1024), (300, 1300), (1300, 300)], ids=str)
def test_windows_in_every_order(name, lengths, window_size, head_dim, make_problem, poison):
    assert_window_accurate(name, lengths, window_size, head_dim, make_problem, poison)


def assert_window_accurate(name, lengths, window_size, head_dim, make_problem, poison):
    problem = make_problem(2, *lengths, 3, head_dim, False, window_size)
    schedule = problem.resolve(name)
    x = problem.inputs
    poison()
    grads = problem.backward(schedule)
    comparators = attention_backward_rounded(
        x.dout, x.q, x.k, x.v, problem.softmax_scale, problem.causal, problem.window_size
    )
    assert_gradients_accurate(problem, grads, comparators)


@HEAD_DIMS
def test_keys_and_queries_beyond_a_window_get_exactly_zero(head_dim, make_problem, poison):
    problem = make_problem(2, 100, 1500, 3, head_dim, False, (30, 0))
    poison()
    _, dk, dv = problem.backward("auto")
    assert (dk[:, :1370] == 0).all() and (dv[:, :1370] == 0).all() and (dv[:, 1370:] != 0).any(dim=-1).all()
    problem = make_problem(2, 1500, 100, 3, head_dim, False, (30, 30))
    poison()
    dq, _, _ = problem.backward("auto")
    assert (dq[:, :1370] == 0).all() and torch.isfinite(dq).all()


def test_many_tiles_without_steps(make_problem, poison):
    """More claims in a row than the ring of work indices has places: of a stream's 1024 KV tiles one has steps."""
    problem = make_problem(1, 64, 128 * 1024, 4, 64, False, (10, 0))
    assert problem.shape().num_work_tiles == 4096
    poison()
    for schedule in ("shortest_first", "longest_first", "baseline", "hybrid"):
        dq, dk, dv = problem.backward(schedule)
        assert (dk[:, :-74] == 0).all() and (dv[:, :-74] == 0).all() and (dv[:, -74:] != 0).any(dim=-1).all()
        last = problem_of_the_last_keys(problem, 256)
        for name, grad, expected in zip(("dq", "dk", "dv"), (dq, dk[:, -256:], dv[:, -256:]), last, strict=True):
            assert_bitwise_equal(grad.contiguous(), expected, name)


def problem_of_the_last_keys(problem, num_keys):
    """Gradients with the keys that the window leaves alone: the same tiles, so the same bits."""
    x = problem.inputs
    k, v = (t[:, -num_keys:].contiguous() for t in (x.k, x.v))
    return attention_backward(
        x.dout,
        x.q,
        k,
        v,
        problem.out,
        problem.lse,
        problem.softmax_scale,
        window_size=problem.window_size,
        schedule="shortest_first",
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_window_that_hides_nothing_has_the_bits_of_none(causal, make_problem):
    expected = make_problem(2, 1000, 900, 4, 128, causal).backward("auto")
    for window_size in ((899, 999), (2000, 2000), (-1, 1000)):
        grads = make_problem(2, 1000, 900, 4, 128, causal, window_size).backward("auto")
        for name, grad, wanted in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert_bitwise_equal(grad, wanted, name)


def test_softmax_scale(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, causal=True)
    q, k, v, dout = problem.inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*leaves, softmax_scale=0.03, causal=True, schedule="shortest_first").backward(dout)
    refs = attention_backward_ref(dout, q, k, v, 0.03, True)
    comparators = attention_backward_rounded(dout, q, k, v, 0.03, True)
    for name, leaf, ref, comparator in zip(("dq", "dk", "dv"), leaves, refs, comparators, strict=True):
        assert_accurate(leaf.grad, ref, comparator, name, BUDGET)
