"""Gradients of the kernel against fp64, for every schedule, mask, head dim, dtype and awkward length.

A budget is a multiple of what another implementation with the same 16-bit inputs loses: torch's own flash backward
where it has the contract's mask, else (causal with unequal lengths) fp64 with the unavoidable roundings.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_dash import flash_attn_func, registry
from cute_dash.testing import assert_accurate, attention_backward_ref, attention_backward_rounded
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
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, problem.softmax_scale, problem.causal)
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
@pytest.mark.parametrize("num_heads_kv", [4, 2, 1], ids=lambda n: f"{8 // n} to 1")
def test_grouped_heads(name, num_heads_kv, head_dim, causal, make_problem, poison):
    problem = make_problem(2, 700, 900, 8, head_dim, causal, num_heads_kv=num_heads_kv)
    schedule = problem.resolve(name)
    x = problem.inputs
    poison()
    grads = problem.backward(schedule)
    assert grads[1].shape == grads[2].shape == (2, 900, num_heads_kv, head_dim)
    comparators = attention_backward_rounded(x.dout, x.q, x.k, x.v, problem.softmax_scale, causal)
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


def test_softmax_scale(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, causal=True)
    q, k, v, dout = problem.inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*leaves, softmax_scale=0.03, causal=True, schedule="shortest_first").backward(dout)
    refs = attention_backward_ref(dout, q, k, v, 0.03, True)
    comparators = attention_backward_rounded(dout, q, k, v, 0.03, True)
    for name, leaf, ref, comparator in zip(("dq", "dk", "dv"), leaves, refs, comparators, strict=True):
        assert_accurate(leaf.grad, ref, comparator, name, BUDGET)
