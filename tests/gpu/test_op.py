"""The op on CUDA tensors: errors before any launch, opcheck, autograd, the tensors' device."""

import pytest
import torch

from cute_dash import attention_backward, flash_attn_func
from cute_dash.interface import last_schedule
from cute_dash.testing import assert_bitwise_equal, random_inputs
from schedules.shift import Shift

NAMES = ("dq", "dk", "dv")


def bad_call(**changes):
    """A forward call on good tensors but for the changes."""
    x = random_inputs(1, 256, 256, 2, 64, device="cuda")
    return flash_attn_func(**{**dict(q=x.q, k=x.k, v=x.v), **changes})


def zeros(*shape, dtype=torch.bfloat16, device="cuda"):
    return torch.zeros(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("make_changes", "error", "message"),
    [
        (
            lambda: dict(q=zeros(1, 256, 2, 64, dtype=torch.float32)),
            TypeError,
            "q has dtype torch.float32; allowed on cuda",
        ),
        (lambda: dict(k=zeros(1, 256, 2, 64, dtype=torch.float16)), TypeError, "k has dtype torch.float16"),
        (lambda: dict(k=zeros(1, 256, 2, 64, device="cpu")), ValueError, "k is on cpu; allowed: the device of q"),
        (lambda: dict(k=zeros(1, 256, 3, 64), v=zeros(1, 256, 3, 64)), ValueError, "allowed: a divisor of 2"),
        (
            lambda: {name: zeros(1, 256, 2, 264) for name in "qkv"},
            ValueError,
            "head_dim 264; allowed: multiples of 8 from 32 to 256",
        ),
        (lambda: dict(schedule="shfit"), ValueError, "did you mean 'shift'"),
        (lambda: dict(schedule="shift", causal=True), ValueError, "schedule='shift' cannot implement"),
        (
            lambda: {name: zeros(1, 32768, 1, 64) for name in "qkv"} | dict(schedule=Shift(window=256)),
            ValueError,
            "schedule='shift' needs 256 resident CTAs .* at most",
        ),
    ],
    ids=["fp32", "mixed dtypes", "mixed devices", "KV heads", "head dim", "schedule", "mask", "residency"],
)
def test_bad_input_raises(make_changes, error, message):
    with pytest.raises(error, match=message):
        bad_call(**make_changes())


@pytest.mark.parametrize("window", [(-1, -1), (100, 20)], ids=["", "window"])
@pytest.mark.parametrize("num_heads_kv", [4, 2])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_opcheck(causal, num_heads_kv, window):
    name = "shortest_first" if causal else "baseline"
    x = random_inputs(2, 256, 384, 4, 128, num_heads_kv=num_heads_kv, device="cuda")
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    torch.library.opcheck(torch.ops.cute_dash.attention_forward.default, (*leaves, 0.1, causal, *window, name))
    out, lse = flash_attn_func(x.q, x.k, x.v, 0.1, causal, window, return_lse=True)
    arguments = (x.dout, x.q, x.k, x.v, out, lse, 0.1, causal, *window, name)
    torch.library.opcheck(torch.ops.cute_dash.attention_backward.default, arguments)


def test_autograd_runs_the_backward_op_and_records_its_schedule(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, True)
    q, k, v, dout = problem.inputs
    expected = problem.backward("shortest_first")
    problem.backward("baseline")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    flash_attn_func(*leaves, problem.softmax_scale, True, schedule="shortest_first").backward(dout)
    assert last_schedule().name == "shortest_first"
    for name, leaf, wanted in zip(NAMES, leaves, expected, strict=True):
        assert_bitwise_equal(leaf.grad, wanted, name)


def test_torch_compile_keeps_the_bits(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, True)
    q, k, v, dout = problem.inputs
    expected = problem.backward("shortest_first")

    def attention(q, k, v):
        return flash_attn_func(q, k, v, problem.softmax_scale, True, schedule="shortest_first")

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.compile(attention, fullgraph=True, backend="aot_eager")(*leaves).backward(dout)
    for name, leaf, wanted in zip(NAMES, leaves, expected, strict=True):
        assert_bitwise_equal(leaf.grad, wanted, name)


@pytest.mark.parametrize("deterministic_mode", [False, True], ids=["", "deterministic mode"])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True), (128, False)], ids=str)
def test_a_call_allocates_outputs_and_a_workspace_and_waits_for_nothing(
    head_dim, causal, deterministic_mode, make_problem
):
    problem = make_problem(2, 1024, 1024, 4, head_dim, causal)
    arguments = problem.arguments()
    attention_backward(*arguments)  # compiled
    torch.cuda.synchronize()

    def count_allocations():
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    torch.use_deterministic_algorithms(deterministic_mode)
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = count_allocations()
        grads = attention_backward(*arguments)
        assert count_allocations() - before == 4
        flash_attn_func(*problem.inputs[:3], problem.softmax_scale, causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert all(grad.is_contiguous() for grad in grads)


def test_a_backward_of_autograd_allocates_nothing_for_the_lse(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, True)
    leaves = [x.clone().requires_grad_() for x in problem.inputs[:3]]
    out = flash_attn_func(*leaves, problem.softmax_scale, True)
    torch.autograd.grad(out, leaves, problem.inputs.dout, retain_graph=True)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.autograd.grad(out, leaves, problem.inputs.dout)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 4


def test_inputs_are_not_written(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, True)
    before = [x.clone() for x in (*problem.inputs, problem.out, problem.lse)]
    problem.backward("shortest_first")
    for name, x, y in zip(
        ("q", "k", "v", "dout", "out", "lse"), (*problem.inputs, problem.out, problem.lse), before, strict=True
    ):
        assert_bitwise_equal(x, y, name)


def test_the_device_of_the_tensors_is_used(make_problem, current_device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = make_problem(2, 1024, 1024, 4, 128, True)
    expected = problem.backward("shortest_first")
    arguments = [x.to("cuda:1") if isinstance(x, torch.Tensor) else x for x in problem.arguments()]
    with current_device(0):
        grads = attention_backward(*arguments, schedule="shortest_first")
        assert torch.cuda.current_device() == 0
    for name, grad, wanted in zip(NAMES, grads, expected, strict=True):
        assert grad.device == torch.device("cuda:1")
        assert_bitwise_equal(grad.to("cuda:0"), wanted, name)
