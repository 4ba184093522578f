"""The yardsticks themselves: references against autograd, comparisons against hand-made cases, TracedInt."""

import math

import pytest
import torch

from cute_dash.ints import maximum, minimum, where, wrap
from cute_dash.testing import (
    TracedInt,
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    random_inputs,
    relative_error,
)

LENGTHS = [(1, 1), (1, 7), (5, 5), (4, 9), (9, 4)]
FP64_TOLERANCE = 1e-13


def visible_by_definition(seqlen_q: int, seqlen_k: int, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """The bottom-right mask element by element: query i is in line with key i + seqlen_k - seqlen_q."""
    left, right = window_size

    def sees(offset: int) -> bool:
        return not ((causal and offset > 0) or -1 < left < -offset or -1 < right < offset)

    return torch.tensor([[sees(j - i - seqlen_k + seqlen_q) for j in range(seqlen_k)] for i in range(seqlen_q)])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window_size", [(-1, -1), (2, 1), (0, -1), (-1, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_references_equal_autograd_through_torch_sdpa(lengths, window_size, causal):
    x = random_inputs(2, *lengths, num_heads=3, head_dim=8, dtype=torch.float64)
    visible = visible_by_definition(*lengths, causal, window_size)
    sees_a_key = visible.any(dim=1)
    leaves = [t.transpose(1, 2).clone().requires_grad_() for t in (x.q, x.k, x.v)]
    # a query without keys is cut off: its gradient is 0 by the contract and NaN in autograd
    out = torch.nn.functional.scaled_dot_product_attention(
        leaves[0][:, :, sees_a_key], leaves[1], leaves[2], attn_mask=visible[sees_a_key], scale=0.3
    )
    expected = torch.autograd.grad(out, leaves, x.dout.transpose(1, 2)[:, :, sees_a_key])
    actual_out, lse = attention_forward_ref(x.q, x.k, x.v, 0.3, causal, window_size)
    assert relative_error(actual_out[:, sees_a_key], out.transpose(1, 2)) < FP64_TOLERANCE
    assert (actual_out[:, ~sees_a_key] == 0).all()
    assert (lse[:, :, ~sees_a_key] == -math.inf).all()
    scores = (x.q.transpose(1, 2) @ x.k.transpose(1, 2).mT * 0.3).masked_fill(~visible, -math.inf)
    assert torch.allclose(lse, scores.exp().sum(dim=-1).log(), rtol=FP64_TOLERANCE, atol=FP64_TOLERANCE)
    actual = attention_backward_ref(x.dout, x.q, x.k, x.v, 0.3, causal, window_size)
    for grad, grad_expected in zip(actual, expected, strict=True):
        # one key: dq and dk are exactly 0, autograd leaves rounding noise
        assert (grad - grad_expected.transpose(1, 2)).abs().max() < 20 * FP64_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_backward_costs_about_the_unit_roundoff(dtype):
    x = random_inputs(1, 96, 96, num_heads=2, head_dim=64, dtype=dtype)
    args = (x.dout, x.q, x.k, x.v, 0.125, True)
    for rounded, ref in zip(attention_backward_rounded(*args), attention_backward_ref(*args), strict=True):
        assert rounded.dtype == dtype
        assert 0.1 < relative_error(rounded, ref) / (torch.finfo(dtype).eps / 2) < 2


def test_rounded_backward_is_exact_in_fp64():
    x = random_inputs(1, 20, 30, num_heads=2, head_dim=16, dtype=torch.float64)
    args = (x.dout, x.q, x.k, x.v, 0.25, True)
    for rounded, ref in zip(attention_backward_rounded(*args), attention_backward_ref(*args), strict=True):
        assert relative_error(rounded, ref) < FP64_TOLERANCE


def test_relative_error_of_hand_made_tensors():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == 0.1
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.ones(1)))


def test_assert_accurate_returns_the_ratio_and_refuses_more():
    ref, comparator = torch.full((4,), 1.0), torch.full((4,), 1.01)
    assert assert_accurate(torch.full((4,), 1.015), ref, comparator, "dq") == pytest.approx(1.5, rel=1e-4)
    with pytest.raises(AssertionError, match="dq: relative error 3.0"):
        assert_accurate(torch.full((4,), 1.03), ref, comparator, "dq")
    with pytest.raises(AssertionError, match="dq holds 1 NaN"):
        assert_accurate(torch.tensor([1.0, math.nan, 1.0, 1.0]), ref, comparator, "dq")


def test_assert_bitwise_equal_names_count_place_and_values():
    a = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    b = a.clone()
    assert_bitwise_equal(a, b, "dq")
    b[0, 2, 1], b[1, 0, 0] = 0.5, 1.0
    with pytest.raises(AssertionError, match=r"dq: 2 of 24 elements differ, first at \(0, 2, 1\): 0.0 against 0.5"):
        assert_bitwise_equal(a, b, "dq")


def test_assert_bitwise_equal_compares_bits_not_values():
    nan = torch.tensor([math.nan])
    assert_bitwise_equal(nan, nan.clone(), "dq")
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]), "dq")
    with pytest.raises(AssertionError, match="float16"):
        assert_bitwise_equal(torch.zeros(1), torch.zeros(1, dtype=torch.float16), "dq")


@pytest.mark.parametrize("a", [-7, -3, 0, 4, 9])
@pytest.mark.parametrize("b", [-2, 3, 5])
def test_traced_int_computes_like_python(a, b):
    x, y = TracedInt(a), TracedInt(b)
    assert [(x + y).value, (x - y).value, (x * y).value, (x // y).value] == [a + b, a - b, a * b, a // b]
    assert [(a + y).value, (a - y).value, (a * y).value, (a // y).value] == [a + b, a - b, a * b, a // b]
    assert [(x < y).value, (x <= y).value, (x == y).value, (x != y).value] == [a < b, a <= b, a == b, a != b]
    assert [minimum(x, y).value, maximum(x, b).value] == [min(a, b), max(a, b)]


def test_traced_int_goes_through_the_integer_helpers():
    assert [wrap(TracedInt(x), 5).value for x in (-5, -1, 0, 4, 5, 9)] == [0, 4, 0, 4, 0, 4]
    assert where((TracedInt(3) > 2) & (TracedInt(3) > 4), 1, 2).value == 2
    assert where((TracedInt(3) > 2) | False, 1, TracedInt(2)).value == 1
    assert where(~(TracedInt(3) > 2), 1, 2).value == 2
    for number in (1, 0, ~True, 1.0, TracedInt(1)):
        with pytest.raises(TypeError, match=r"the condition of cute_dash.ints.where is .*; allowed: a comparison"):
            where(number, 1, 2)


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda x: 1 if x > 0 else 2, TypeError),
        (lambda x: not x, TypeError),
        (lambda x: min(x, 3), TypeError),
        (lambda x: 0 < x < 3, TypeError),
        (range, TypeError),
        (int, TypeError),
        (lambda x: [0, 1][x], TypeError),
        (lambda x: x / 2, TypeError),
        (lambda x: x + 0.5, TypeError),
        (lambda x: {x: 0}, TypeError),
        (lambda x: (x - 2) % 3, ValueError),
        (lambda x: x % (x - 2), ValueError),
        (lambda x: x * 2**31, OverflowError),
        (lambda x: -x - 2**31, OverflowError),
    ],
)
def test_traced_int_refuses_what_the_kernel_cannot_do(use, error):
    with pytest.raises(error):
        use(TracedInt(1))
