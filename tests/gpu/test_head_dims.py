"""Head dims other than 64 and 128, in tiles of their own or padded.

Gradients against fp64, bits over runs, and what lies beside a head in memory.
"""

import math
from dataclasses import replace

import pytest
import torch

from cute_dash import attention_backward, flash_attn_func, flash_attn_varlen_func, launch, registry
from cute_dash.config import UNEQUAL_HEAD_DIMS, describe_head_dims, get_config
from cute_dash.testing import (
    AttentionInputs,
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    random_inputs,
    relative_error,
)
from tests.gpu.orders import promised_order
from tests.gpu.ratios import ERROR_RATIOS

BUDGET = 2.0  # times the comparator's error
LSE_TOLERANCE = 1e-3
NUM_RUNS = 10
NAMES = ("dq", "dk", "dv")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
# of Q and K, and of V
HEAD_DIMS = pytest.mark.parametrize(
    "head_dims",
    [(d, d) for d in (32, 40, 72, 80, 96, 112, 120, 136, 192, 200, 256)] + [UNEQUAL_HEAD_DIMS],
    ids=lambda head_dims: f"hd{describe_head_dims(*head_dims)}",
)


def assert_problem_accurate(problem, schedule):
    x = problem.inputs
    grads = problem.backward(schedule)
    assert_gradients_accurate(x, grads, problem.softmax_scale, problem.causal, problem.window_size)


def assert_gradients_accurate(x, grads, *options):
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, *options)
    comparators = attention_backward_rounded(x.dout, x.q, x.k, x.v, *options)
    for name, grad, ref, comparator in zip(NAMES, grads, refs, comparators, strict=True):
        assert grad.dtype == x.q.dtype and grad.shape == ref.shape and grad.is_contiguous()
        ERROR_RATIOS.append(assert_accurate(grad, ref, comparator, name, BUDGET))


def assert_same_bits(grads, expected):
    for name, grad, wanted in zip(NAMES, grads, expected, strict=True):
        assert_bitwise_equal(grad, wanted, name)


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("lengths", [(1, 1), (300, 300), (1024, 1023), (256, 64)], ids=str)
def test_forward_equals_fp64(lengths, head_dims, causal):
    head_dim, head_dim_v = head_dims
    x = random_inputs(2, *lengths, 3, head_dim, head_dim_v=head_dim_v, device="cuda")
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=causal, return_lse=True)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, head_dim**-0.5, causal)
    assert out.shape == x.dout.shape and out.is_contiguous() and torch.isfinite(out).all()
    assert relative_error(out, ref_out) < torch.finfo(out.dtype).eps
    blind = ref_lse == -math.inf
    assert torch.equal(lse == -math.inf, blind)
    torch.testing.assert_close(lse[~blind].double(), ref_lse[~blind], rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("name", ["hybrid", "unordered"])
@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("lengths", [(1, 1), (300, 300), (1023, 1024), (256, 64)], ids=str)
def test_gradients(lengths, head_dims, causal, name, make_problem, poison):
    """Neighbouring heads lie less than a tile's columns apart: zeros beyond a head's own must not reach the next."""
    problem = make_problem(2, *lengths, 4, head_dims[0], causal, head_dim_v=head_dims[1])
    schedule = problem.resolve(name)
    poison()
    assert_problem_accurate(problem, schedule)


@MASKS
@pytest.mark.parametrize("head_dim", [48, 56, 88, 104, 144, 184, 216, 248])
def test_gradients_of_the_other_head_dims(head_dim, causal, make_problem, poison):
    problem = make_problem(2, 500, 500, 3, head_dim, causal)
    poison()
    assert_problem_accurate(problem, "hybrid")


@MASKS
@pytest.mark.parametrize("head_dims", [(40, 40), (96, 96), (256, 256), UNEQUAL_HEAD_DIMS], ids=str)
def test_gradients_in_fp16(head_dims, causal, make_problem, poison):
    problem = make_problem(2, 500, 500, 3, head_dims[0], causal, dtype=torch.float16, head_dim_v=head_dims[1])
    poison()
    assert_problem_accurate(problem, "hybrid")


@HEAD_DIMS
@pytest.mark.parametrize("lengths", [(700, 700), (300, 1300), (1300, 300)], ids=str)
def test_gradients_of_a_window(lengths, head_dims, make_problem, poison):
    """With keys that no query sees and queries that see no key: both are written as zeros by code of its own."""
    problem = make_problem(2, *lengths, 3, head_dims[0], False, (100, 30), head_dim_v=head_dims[1])
    poison()
    assert_problem_accurate(problem, "auto")


@MASKS
@HEAD_DIMS
def test_gradients_of_grouped_heads(head_dims, causal, make_problem, poison):
    problem = make_problem(2, 700, 1000, 8, head_dims[0], causal, num_heads_kv=2, head_dim_v=head_dims[1])
    poison()
    assert_problem_accurate(problem, "auto")


# queries and keys of each sequence; some have none of either
LENGTHS = [(512, 512), (1, 300), (0, 140), (129, 1), (140, 0), (700, 333), (64, 900)]


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("name", ["auto", "unordered"])
def test_gradients_of_sequences_of_different_lengths(name, head_dims, causal, poison):
    """With NaN behind the last sequence; what belongs to no pair of queries and keys is 0."""
    starts = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*LENGTHS, strict=True)]
    head_dim, head_dim_v = head_dims
    options = dict(num_heads_kv=2, head_dim_v=head_dim_v, device="cuda")
    x = random_inputs(1, starts[0][-1] + 50, starts[1][-1] + 90, 4, head_dim, **options)
    x = AttentionInputs(*(t[0] for t in x))
    for t, end in zip(x, (starts[0][-1], starts[1][-1], starts[1][-1], starts[0][-1]), strict=True):
        t[end:] = math.nan
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    cu_seqlens = [torch.tensor(side, dtype=torch.int32, device="cuda") for side in starts]
    max_seqlens = [max(side) for side in zip(*LENGTHS, strict=True)]
    out = flash_attn_varlen_func(*leaves, *cu_seqlens, *max_seqlens, causal=causal, schedule=name)
    poison()
    grads = torch.autograd.grad(out, leaves, x.dout)
    is_zero = [torch.ones(len(grad), dtype=torch.bool, device="cuda") for grad in grads]
    for i, (num_queries, num_keys) in enumerate(LENGTHS):
        if not (num_queries and num_keys):
            continue
        rows, keys = (slice(side[i], side[i + 1]) for side in starts)
        one = AttentionInputs(x.q[None, rows], x.k[None, keys], x.v[None, keys], x.dout[None, rows])
        parts = [grad[None, tokens] for grad, tokens in zip(grads, (rows, keys, keys), strict=True)]
        assert_gradients_accurate(one, parts, head_dim**-0.5, causal)
        for zero, tokens in zip(is_zero, (rows, keys, keys), strict=True):
            zero[tokens] = False
    for grad, zero in zip(grads, is_zero, strict=True):
        assert (grad[zero] == 0).all()


@MASKS
@HEAD_DIMS
def test_bits_are_equal_over_runs(head_dims, causal, make_problem, noise, poison):
    problem = make_problem(4, 600, 600, 8, head_dims[0], causal, head_dim_v=head_dims[1])
    schedule = problem.resolve("auto")
    expected = problem.backward(schedule)
    for run in range(NUM_RUNS):
        noise(run % 4)
        poison()
        assert_same_bits(problem.backward(schedule), expected)


def test_bits_are_equal_when_head_dims_take_turns(make_problem):
    """Kernels with the same tiles and different head dims are different builds; so are their launch plans."""
    pairs = [(64, 64), (40, 40), (128, 128), (192, 128), (96, 96), (192, 192), (256, 256), (72, 72)]
    problems = [make_problem(2, 500, 500, 4, qk, True, head_dim_v=v) for qk, v in pairs]
    expected = [problem.backward("hybrid") for problem in problems]
    for _ in range(3):
        for problem, wanted in zip(problems, expected, strict=True):
            assert_same_bits(problem.backward("hybrid"), wanted)


@MASKS
@pytest.mark.parametrize("head_dim", [32, 40, 72, 80, 112, 120, 136, 200])
def test_zeros_behind_a_head_change_nothing_but_the_rounding_of_sums(head_dim, causal, make_problem):
    """The same tiles and the same additions as with the tensors padded: what a tile holds beyond head_dim is zero."""
    problem = make_problem(2, 500, 500, 4, head_dim, causal)
    padded = get_config(head_dim, causal).head_dim_padded
    tensors = [torch.nn.functional.pad(t, (0, padded - head_dim)) for t in problem.arguments()[:5]]
    expected = attention_backward(*tensors, problem.lse, problem.softmax_scale, causal, schedule="hybrid")
    assert all((grad[..., head_dim:] == 0).all() for grad in expected)
    assert_same_bits(problem.backward("hybrid"), [grad[..., :head_dim].contiguous() for grad in expected])


@MASKS
@HEAD_DIMS
def test_slices_of_wider_tensors(head_dims, causal, make_problem, poison):
    """NaN on both sides of each head: nothing beside a head may be read. The launch takes the strides as they are."""
    problem = make_problem(2, 300, 300, 4, head_dims[0], causal, head_dim_v=head_dims[1])
    expected = problem.backward("hybrid")

    def widen(x):
        head_dim = x.shape[-1]
        wide = x.new_full((*x.shape[:-1], head_dim + 144), math.nan)
        wide[..., 8 : 8 + head_dim] = x
        return wide[..., 8 : 8 + head_dim]

    tensors = [widen(t) for t in problem.arguments()[:5]]
    poison()
    schedule = registry.load("hybrid")
    grads = launch.backward(*tensors, problem.lse, problem.softmax_scale, causal, schedule)
    assert_same_bits(grads, expected)


@pytest.mark.parametrize("head_dim", [32, 72, 96, 136, 192, 256])
def test_gradients_of_a_fused_projection(head_dim):
    """q, k and v as neighbours in one tensor, as models have them."""
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(2, 400, 3, 4, head_dim, generator=generator, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn(2, 400, 4, head_dim, generator=generator, device="cuda").bfloat16()
    q, k, v = qkv.unbind(dim=2)
    flash_attn_func(q, k, v, causal=True).backward(dout)
    x = AttentionInputs(q.detach(), k.detach(), v.detach(), dout)
    grads = [grad.contiguous() for grad in qkv.grad.unbind(dim=2)]
    assert_gradients_accurate(x, grads, head_dim**-0.5, True)


@MASKS
@pytest.mark.parametrize("head_dims", [(96, 96), (192, 192), (256, 256), UNEQUAL_HEAD_DIMS], ids=str)
@pytest.mark.parametrize("name", ["hybrid", "shortest_first", "longest_first"])
def test_additions_happen_in_the_promised_order(name, head_dims, causal, make_problem, noise):
    """The debug build records them; its gradients have the bits of the build without."""
    problem = make_problem(1, 1000, 1100, 4, head_dims[0], causal, num_heads_kv=2, head_dim_v=head_dims[1])
    schedule = problem.resolve(name)
    promised = promised_order(schedule, problem.shape())
    expected = problem.backward(schedule)
    for _ in range(3):
        noise(4)
        grads, recorded = launch.record_order(*problem.arguments(), schedule)
        assert torch.equal(recorded[0].cpu(), promised)
        assert_same_bits(grads, expected)


@MASKS
def test_K_in_registers_changes_no_bit(causal, make_problem, poison):
    """Where S^T = K Q^T has K as an operand from registers, the products are the same."""
    problem = make_problem(2, 700, 900, 4, 96, causal, num_heads_kv=2)
    shipped = get_config(96, causal)
    assert shipped.K_in_regs
    schedule = problem.resolve("auto")
    poison()
    expected = problem.backward(schedule)
    poison()
    config = replace(shipped, K_in_regs=False)
    assert_same_bits(launch.backward(*problem.arguments(), schedule, config), expected)
