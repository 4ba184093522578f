"""torch.compile on the GPU, with Inductor: one graph, few compilations, the bits of eager mode, checkpointing.

What is compiled beside the op are factors of two, which every compiler rounds alike.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cute_dash import flash_attn_func, flash_attn_varlen_func, forward, launch
from cute_dash.interface import last_schedule
from cute_dash.testing import random_inputs
from schedules.longest_first import LongestFirst
from tests.compiled import assert_same_bits, fresh_compiler, run

HEADS, HEADS_KV, HEAD_DIM = 4, 2, 64
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
FORWARD = torch.ops.cute_dash.attention_forward.default


@pytest.fixture(autouse=True)
def without_caches():
    pytest.importorskip("triton")
    with fresh_compiler():
        yield


def block(q, k, v, **options):
    return flash_attn_func(q * 2, k, v * 0.5, **options) * 4


def inputs(seqlen_q, seqlen_k=None, seed=0):
    options = dict(num_heads_kv=HEADS_KV, device="cuda", seed=seed)
    x = random_inputs(2, seqlen_q, seqlen_k or seqlen_q, HEADS, HEAD_DIM, **options)
    return [t.requires_grad_() for t in (x.q, x.k, x.v)], x.dout


@MASKS
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_graph_with_the_bits_of_eager_mode(dynamic, causal):
    attention = partial(block, causal=causal)
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic)
    for lengths in ((1024, 1024), (1000, 1500)):
        x = inputs(*lengths)
        expected = run(attention, *x)
        for _ in range(5):
            assert_same_bits(run(compiled, *x), expected)


def test_lengths_that_change_on_every_call_compile_twice():
    """Once for the first lengths, once for all others, found dynamic."""
    counter = CompileCounterWithBackend("inductor")
    attention = partial(block, causal=True)
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for lengths in ((512, 640), (640, 768), (1000, 800), (700, 1300), (1300, 700), (2048, 2048)):
            x = inputs(*lengths)
            assert_same_bits(run(compiled, *x), run(attention, *x))
    assert counter.frame_count == 2


def test_marked_lengths_compile_once():
    counter = CompileCounterWithBackend("inductor")
    attention = partial(block, causal=True)
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for seqlen in (512, 640, 1000, 1300, 2048):
        leaves, dout = inputs(seqlen)
        for leaf in leaves:
            torch._dynamo.mark_dynamic(leaf, 1)
        assert_same_bits(run(compiled, leaves, dout), run(attention, leaves, dout))
    assert counter.frame_count == 1


def test_packed_sequences_in_one_graph():
    leaves, dout = inputs(1000)
    leaves, dout = [x.detach().flatten(0, 1).requires_grad_() for x in leaves], dout.flatten(0, 1)
    cu_seqlens = torch.tensor([0, 700, 1400, 2000], dtype=torch.int32, device="cuda")

    def attention(q, k, v):
        return flash_attn_varlen_func(q * 2, k, v, cu_seqlens, cu_seqlens, 700, 700, causal=True) * 4

    compiled = torch.compile(attention, fullgraph=True)
    assert_same_bits(run(compiled, leaves, dout), run(attention, leaves, dout))


@pytest.mark.parametrize("schedule", ["descending", LongestFirst(heads_per_group=3)], ids=["name", "object"])
def test_the_schedule_survives_compilation(schedule):
    """The record names what ran, though another backward pass came between."""
    compiled = torch.compile(partial(block, schedule=schedule), fullgraph=True)
    leaves, dout = inputs(1024)
    out = compiled(*leaves)
    flash_attn_func(*leaves, schedule="baseline").sum().backward()
    assert last_schedule().name == "baseline"
    out.backward(dout)
    if isinstance(schedule, str):
        assert last_schedule()[:2] == (schedule, schedule)
    else:
        assert last_schedule().schedule == schedule


@pytest.fixture
def count_calls(monkeypatch):
    """How often the CUDA implementations of the forward and the backward ran."""
    counts = {"forward": 0, "backward": 0}

    def counted(name, function):
        def call(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(forward, "forward", counted("forward", forward.forward))
    monkeypatch.setattr(launch, "run", counted("backward", launch.run))
    return counts


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "saved"])
def test_selective_checkpointing_finds_the_op(saved, compiled, count_calls):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saved and op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(q, k, v):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)

    x = inputs(1024)
    expected = run(block, *x)
    function = torch.compile(checkpointed, fullgraph=True) if compiled else checkpointed
    count_calls.update(forward=0, backward=0)
    assert_same_bits(run(function, *x), expected)
    assert count_calls == {"forward": 1 if saved else 2, "backward": 1}
