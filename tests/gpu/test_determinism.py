"""The determinism contract on the GPU, bit for bit: runs, contention, memory, streams, graphs, processes, batches."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cute_dash import flash_attn_func, launch, registry
from cute_dash.config import get_config
from cute_dash.testing import assert_bitwise_equal, random_inputs

NUM_RUNS = 100
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128], ids=lambda head_dim: f"hd{head_dim}")
EVERY_SCHEDULE = pytest.mark.parametrize("name", registry.available())


def assert_same_bits(grads, expected):
    for name, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert_bitwise_equal(a, b, name)


def ordered_or_skip(problem, name):
    schedule = problem.resolve(name)
    if not schedule.ordered:
        pytest.skip(f"{name} promises no bits")
    return schedule


@EVERY_SCHEDULE
@MASKS
@HEAD_DIMS
def test_bits_are_equal_over_runs(name, head_dim, causal, make_problem, noise, poison):
    problem = make_problem(8, 512, 512, 16, head_dim, causal)
    schedule = ordered_or_skip(problem, name)
    expected = problem.backward(schedule)
    for run in range(NUM_RUNS):
        noise(run % 4)
        poison()
        assert_same_bits(problem.backward(schedule), expected)


@EVERY_SCHEDULE
@HEAD_DIMS
@pytest.mark.parametrize("window_size", [(128, 0), (60, 60)], ids=str)
def test_bits_of_a_window_are_equal_over_runs(name, window_size, head_dim, make_problem, noise, poison):
    problem = make_problem(8, 512, 600, 16, head_dim, False, window_size)
    schedule = ordered_or_skip(problem, name)
    expected = problem.backward(schedule)
    for run in range(NUM_RUNS):
        noise(run % 4)
        poison()
        assert_same_bits(problem.backward(schedule), expected)


@EVERY_SCHEDULE
@pytest.mark.parametrize("window_size", [(1024, 0), (512, 512)], ids=str)
def test_bits_of_a_window_do_not_depend_on_the_batch(name, window_size, make_problem):
    problem = make_problem(5, 3000, 3000, 8, 128, False, window_size)
    schedule = ordered_or_skip(problem, name)
    if not schedule.batch_invariant:
        pytest.skip(f"{name} is not batch invariant")
    whole = problem.backward(schedule)
    for sequences in ([3, 0, 4, 1, 2], [2]):
        assert_same_bits(problem.select(sequences).backward(schedule), [grad[sequences] for grad in whole])


@EVERY_SCHEDULE
def test_bits_are_equal_over_runs_with_long_and_partial_tiles(name, make_problem, noise, poison):
    causal = name == "symmetric_shift"
    problem = make_problem(1, 4000, 4000, 8, 128, causal)
    schedule = ordered_or_skip(problem, name)
    expected = problem.backward(schedule)
    for run in range(NUM_RUNS // 5):
        noise(run % 4)
        poison()
        assert_same_bits(problem.backward(schedule), expected)


@EVERY_SCHEDULE
@MASKS
@pytest.mark.parametrize("window_size", [(-1, -1), (128, 60)], ids=["", "window"])
@pytest.mark.parametrize("num_heads_kv", [8, 1], ids=lambda n: f"{16 // n} to 1")
def test_bits_of_grouped_heads_are_equal_over_runs(
    name, num_heads_kv, window_size, causal, make_problem, noise, poison
):
    problem = make_problem(8, 512, 512, 16, 128, causal, window_size, num_heads_kv=num_heads_kv)
    schedule = ordered_or_skip(problem, name)
    expected = problem.backward(schedule)
    for run in range(NUM_RUNS // 2):
        noise(run % 4)
        poison()
        assert_same_bits(problem.backward(schedule), expected)


@MASKS
def test_the_unordered_comparator_changes_its_bits(causal, make_problem, noise):
    """The negative control: the tests above could see a difference, on the same kernel."""
    problem = make_problem(4, 2048, 2048, 16, 128, causal)
    dq, dk, dv = problem.backward("unordered")
    num_different = 0
    for run in range(NUM_RUNS):
        noise(run % 4)
        other = problem.backward("unordered")
        num_different += not torch.equal(other[0], dq)
        assert_bitwise_equal(other[1], dk, "dk")
        assert_bitwise_equal(other[2], dv, "dv")
    assert num_different > 0


@EVERY_SCHEDULE
@MASKS
def test_batch_invariant_schedules_permute_their_bits_with_the_batch(name, causal, make_problem):
    problem = make_problem(5, 512, 512, 16, 128, causal)
    schedule = ordered_or_skip(problem, name)
    if not schedule.batch_invariant:
        pytest.skip(f"{name} is not batch invariant")
    whole = problem.backward(schedule)
    for sequences in ([3, 0, 4, 1, 2], [2], [4, 4, 1]):
        assert_same_bits(problem.select(sequences).backward(schedule), [grad[sequences] for grad in whole])


def test_two_streams_at_once(make_problem):
    problems = [make_problem(4, 1024, 1024, 8, 128, True), make_problem(4, 1024, 1024, 8, 64, False)]
    names = ["shortest_first", "baseline"]
    expected = [problem.backward(name) for problem, name in zip(problems, names, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = [[], []]
    for _ in range(20):
        for problem, name, stream, result in zip(problems, names, streams, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(problem.backward(name))
    torch.cuda.synchronize()
    for result, wanted in zip(results, expected, strict=True):
        for grads in result:
            assert_same_bits(grads, wanted)


def test_the_current_stream_orders_the_work(make_problem):
    """Inputs that are written late on a side stream: a launch on any other stream would read the zeros."""
    problem = make_problem(4, 1024, 1024, 8, 128, True)
    expected = problem.backward("shortest_first")
    late = problem.select([0, 1, 2, 3])
    for x in (*late.inputs, late.out, late.lse):
        x.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, source in zip(
            (*late.inputs, late.out, late.lse), (*problem.inputs, problem.out, problem.lse), strict=True
        ):
            x.copy_(source)
        grads = late.backward("shortest_first")
    stream.synchronize()
    assert_same_bits(grads, expected)


@pytest.mark.parametrize(("name", "causal"), [("shortest_first", True), ("shift", False)], ids=str)
def test_cuda_graph_replay(name, causal, make_problem, poison):
    problem = make_problem(4, 1024, 1024, 8, 128, causal)
    expected = problem.backward(name)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = problem.backward(name)
    for _ in range(20):
        for grad in grads:
            grad.fill_(float("nan"))
        poison()
        graph.replay()
        assert_same_bits(grads, expected)


@pytest.mark.parametrize("schedule", ["auto", "shortest_first", "baseline"])
@MASKS
def test_cuda_graph_of_forward_and_backward_replays_on_new_data(schedule, causal, make_problem, poison):
    """A captured training step: every replay has the bits of eager mode on what was copied into its inputs, and
    allocates nothing."""
    problem = make_problem(2, 1024, 1024, 8, 128, causal)
    q, k, v, dout = (x.clone() for x in problem.inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step():
        out = flash_attn_func(*leaves, problem.softmax_scale, causal, schedule=schedule)
        return out, *torch.autograd.grad(out, leaves, dout)

    side = torch.cuda.Stream()  # torch wants autograd warmed up beside the stream that captures
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    static = [x.detach() for x in (*leaves, dout)]
    for replay in range(NUM_RUNS):
        new = random_inputs(2, 1024, 1024, 8, 128, device="cuda", seed=replay + 1)
        for x, source in zip(static, (new.q, new.k, new.v, new.dout), strict=True):
            x.copy_(source)
        for x in captured:
            x.detach().fill_(float("nan"))
        if replay % 10 == 0:
            poison()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        replayed = [x.detach().clone() for x in captured]
        expected = [x.detach() for x in step()]
        assert_bitwise_equal(replayed[0], expected[0], "out")
        assert_same_bits(replayed[1:], expected[1:])


@MASKS
def test_cuda_graph_trees_of_torch_compile(causal, make_problem):
    """mode="reduce-overhead" captures the compiled forward and backward on its own."""
    pytest.importorskip("triton")
    problem = make_problem(2, 1024, 1024, 8, 128, causal)

    def attention(q, k, v):
        return flash_attn_func(q, k, v, problem.softmax_scale, causal)

    compiled = torch.compile(attention, fullgraph=True, mode="reduce-overhead")
    for seed in range(8):  # warm-up, capture, replays
        x = random_inputs(2, 1024, 1024, 8, 128, device="cuda", seed=seed)
        leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        torch.compiler.cudagraph_mark_step_begin()
        grads = [g.clone() for g in torch.autograd.grad(compiled(*leaves), leaves, x.dout)]
        assert_same_bits(grads, torch.autograd.grad(attention(*leaves), leaves, x.dout))


@pytest.mark.parametrize("warn_only", [False, True], ids=["strict", "warn only"])
@pytest.mark.parametrize("seqlen_q", [1000, 1024])
def test_torchs_deterministic_mode_changes_no_bit(seqlen_q, warn_only, make_problem, recwarn):
    problem = make_problem(2, seqlen_q, 1024, 4, 128, True)
    leaves = [x.clone().requires_grad_() for x in problem.inputs[:3]]
    dout = problem.inputs[3]

    def step():
        out = flash_attn_func(*leaves, problem.softmax_scale, True)
        return torch.autograd.grad(out, leaves, dout)

    expected = step()
    recwarn.clear()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        for _ in range(10):
            assert_same_bits(step(), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not recwarn.list


IN_ANOTHER_PROCESS = """
import hashlib, torch
from cute_dash import attention_backward, flash_attn_func
from cute_dash.testing import random_inputs
q, k, v, dout = random_inputs(2, 1024, 1024, 4, 128, device="cuda")
out, lse = flash_attn_func(q, k, v, 128**-0.5, True, return_lse=True)
grads = attention_backward(dout, q, k, v, out, lse, 128**-0.5, True, schedule="shortest_first")
print(hashlib.sha256(b"".join(grad.view(torch.int16).cpu().numpy().tobytes() for grad in grads)).hexdigest())
"""


def test_another_process_gets_the_same_bits(make_problem, pytestconfig):
    grads = make_problem(2, 1024, 1024, 4, 128, True).backward("shortest_first")
    digest = hashlib.sha256(b"".join(grad.view(torch.int16).cpu().numpy().tobytes() for grad in grads)).hexdigest()
    path = os.pathsep.join([str(pytestconfig.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])])
    other = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert other.returncode == 0, other.stderr
    assert other.stdout.split()[-1] == digest


@pytest.mark.parametrize(
    "change",
    [
        dict(fuse_dQ=False),
        dict(prefetch_KV=False),
        dict(skip_hidden_keys=False),
        dict(fuse_dQ=False, prefetch_KV=False, skip_hidden_keys=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["hybrid", "shortest_first"])
@MASKS
@pytest.mark.parametrize("head_dim", [64, 96, 128], ids=lambda head_dim: f"hd{head_dim}")
def test_how_a_cta_goes_from_tile_to_tile_changes_no_bit(head_dim, causal, name, change, make_problem, poison):
    """Who scales and rounds dQ, through which shared memory dK and dV leave, and whether masked halves are computed."""
    problem = make_problem(4, 1000, 1100, 8, head_dim, causal, num_heads_kv=4)
    schedule = problem.resolve(name)
    expected = problem.backward(schedule)
    config = replace(get_config(head_dim, causal), **change)
    for _ in range(10):
        poison()
        assert_same_bits(launch.backward(*problem.arguments(), schedule, config), expected)


def test_strides_do_not_change_the_bits(make_problem):
    problem = make_problem(2, 1024, 1024, 4, 128, True)
    expected = problem.backward("shortest_first")
    layouts = {
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "fused": lambda x: torch.stack([x, torch.full_like(x, float("nan"))], dim=2).flatten(1, 2)[:, ::2],
        "last dim strided": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "4 bytes off": lambda x: torch.cat([x.new_zeros(2), x.flatten()])[2:].view(x.shape),
    }
    for layout in layouts.values():
        changed = type(problem)(
            type(problem.inputs)(*(layout(x) for x in problem.inputs)),
            layout(problem.out),
            problem.lse.transpose(1, 2).contiguous().transpose(1, 2),
            problem.softmax_scale,
            problem.causal,
        )
        assert_same_bits(changed.backward("shortest_first"), expected)
