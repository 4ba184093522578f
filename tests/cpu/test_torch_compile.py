"""The op under torch.compile and activation checkpointing, on CPU tensors: one graph, few compilations, equal bits."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cute_dash
from cute_dash.interface import last_schedule
from cute_dash.testing import assert_bitwise_equal, random_inputs
from schedules.longest_first import LongestFirst
from tests.compiled import assert_same_bits, fresh_compiler, run

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
FORWARD = torch.ops.cute_dash.attention_forward.default
BACKWARD = torch.ops.cute_dash.attention_backward.default
CU_SEQLENS = torch.tensor([0, 40], dtype=torch.int32)


@pytest.fixture(autouse=True)
def without_caches():
    with fresh_compiler():
        yield


def block(q, k, v, **options):
    """Attention between pointwise operations, so that there is something beside it to compile."""
    return cute_dash.flash_attn_func(q * 2, k, v.sin(), **options).cos()


def inputs(seqlen_q, seqlen_k=None):
    x = random_inputs(2, seqlen_q, seqlen_k or seqlen_q, 2, 64, dtype=torch.bfloat16)
    return [t.requires_grad_() for t in (x.q, x.k, x.v)], x.dout


@BACKENDS
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_graph_with_the_bits_of_eager_mode(dynamic, causal, backend):
    attention = partial(block, causal=causal)
    compiled = torch.compile(attention, fullgraph=True, backend=backend, dynamic=dynamic)
    for lengths in ((40, 40), (40, 150)):
        x = inputs(*lengths)
        assert_same_bits(run(compiled, *x), run(attention, *x))


def test_inductor_keeps_the_bits_of_the_op():
    """Inductor may round the pointwise part otherwise, so here is none."""
    x = inputs(40)
    attention = partial(cute_dash.flash_attn_func, causal=True)
    compiled = torch.compile(attention, fullgraph=True)
    assert_same_bits(run(compiled, *x), run(attention, *x))


def test_marked_lengths_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(block, causal=True), fullgraph=True, backend=counter)
    for seqlen in (40, 50, 130, 257, 64):
        leaves, dout = inputs(seqlen)
        for leaf in leaves:
            torch._dynamo.mark_dynamic(leaf, 1)
        compiled(*leaves).backward(dout)
    assert counter.frame_count == 1


def test_lengths_that_change_on_every_call_compile_twice():
    """Once for the first lengths, once for all others, found dynamic; queries and keys vary on their own."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(partial(block, causal=True), fullgraph=True, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for lengths in ((40, 50), (50, 70), (130, 90), (64, 257), (257, 64)):
            x = inputs(*lengths)
            assert_same_bits(run(compiled, *x), run(partial(block, causal=True), *x))
    assert counter.frame_count == 2


class Causal(torch.nn.Module):
    def forward(self, q, k, v):
        return cute_dash.flash_attn_func(q, k, v, causal=True)


class CausalVarlen(torch.nn.Module):
    def forward(self, q, k, v, cu_seqlens):
        return cute_dash.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 40, 40, causal=True)


@pytest.mark.parametrize("is_varlen", [False, True], ids=["dense", "varlen"])
def test_export_takes_a_length_without_a_maximum(is_varlen):
    module, cu_seqlens = (CausalVarlen(), (CU_SEQLENS,)) if is_varlen else (Causal(), ())
    seqlen_dim, seqlen = 0 if is_varlen else 1, torch.export.Dim("seqlen")

    def arguments(seqlen):
        tensors = [x.detach() for x in inputs(seqlen)[0]]
        return *(x[0] if is_varlen else x for x in tensors), *cu_seqlens

    dynamic_shapes = *({seqlen_dim: seqlen} for _ in "qkv"), *(None for _ in cu_seqlens)
    exported = torch.export.export(module, arguments(48), dynamic_shapes=dynamic_shapes).module()
    for length in (48, 150):
        assert_bitwise_equal(exported(*arguments(length)), module(*arguments(length)), "out")


def test_each_scale_compiles_anew():
    """As with torch's own attention: to both, a float is a constant of the graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    x = inputs(40)
    scales = 0.1, 0.2, 0.3, 0.4
    for softmax_scale in (*scales, *scales):
        options = dict(softmax_scale=softmax_scale)
        assert_same_bits(run(partial(compiled, **options), *x), run(partial(block, **options), *x))
    assert len(scales) <= counter.frame_count <= 2 * len(scales)  # torch looks at some twice
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for i in range(10):
            compiled(*x[0], softmax_scale=0.5 + i)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (partial(block, causal=1), "causal=1 is a int; allowed: True or False"),
        (partial(block, softmax_scale="x"), "softmax_scale='x' is a str; allowed: a finite number above 0, or None"),
        (partial(block, window_size=(1.5, 0)), r"window_size=\(1.5, 0\) holds a float; allowed: ints, or None"),
        (partial(block, softcap="x"), "softcap='x' is a str; allowed: the number 0"),
        (
            lambda q, k, v: cute_dash.flash_attn_varlen_func(q[0], k[0], v[0], CU_SEQLENS, CU_SEQLENS, 40.5, 40),
            "max_seqlen_q=40.5 is a float; allowed: an int, or a 0-d tensor of an integer dtype",
        ),
    ],
    ids=["causal", "softmax_scale", "window_size", "softcap", "max_seqlen_q"],
)
def test_the_message_of_a_wrong_type_comes_through(attention, message):
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=message):  # torch's own, which quotes it
        compiled(*inputs(40)[0])


def test_a_step_with_graph_breaks_around_the_op_keeps_the_bits():
    """The op and its backward then run outside of graphs, while the compiler watches the frames that Python enters."""

    def step(q, k, v, dout):
        for _ in range(2):
            torch._dynamo.graph_break()  # in a loop: the whole frame is left to Python
            out = block(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    leaves, dout = inputs(40)
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        assert_same_bits(compiled(*leaves, dout), step(*leaves, dout))


class Graphs:
    """A backend that keeps the forward and the backward graph that it is given."""

    def __init__(self):
        self.forward = self.backward = None

    def __call__(self, module, example_inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(name, module, _):
            setattr(self, name, module.graph)
            return make_boxed_func(module)

        compiler = aot_autograd(fw_compiler=partial(keep, "forward"), bw_compiler=partial(keep, "backward"))
        return compiler(module, example_inputs)


def calls_of(graph, op):
    return [node for node in graph.nodes if node.target is op]


@pytest.mark.parametrize("schedule", ["descending", LongestFirst(heads_per_group=3)], ids=["name", "object"])
def test_the_schedule_survives_compilation(schedule):
    """It is an argument of the op in both graphs, and the record names what ran."""
    graphs = Graphs()
    compiled = torch.compile(partial(block, schedule=schedule), fullgraph=True, backend=graphs)
    leaves, dout = inputs(40)
    out = compiled(*leaves)
    cute_dash.flash_attn_func(*leaves, schedule="baseline").sum().backward()
    assert last_schedule().name == "baseline"
    out.backward(dout)
    (forward,), (backward,) = calls_of(graphs.forward, FORWARD), calls_of(graphs.backward, BACKWARD)
    assert forward.args[-1] == backward.args[-1] == last_schedule().requested
    if isinstance(schedule, str):
        assert backward.args[-1] == last_schedule().name == schedule
    else:
        assert last_schedule().schedule == schedule


def test_attention_backward_compiles_too():
    leaves, dout = inputs(40)
    q, k, v = (leaf.detach() for leaf in leaves)
    out, lse = cute_dash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    backward = partial(cute_dash.attention_backward, causal=True)
    compiled = torch.compile(backward, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(dout, q, k, v, out, lse), backward(dout, q, k, v, out, lse), strict=True):
        assert_bitwise_equal(a, b, "grad")


@pytest.fixture
def count_calls(monkeypatch):
    """How often the CPU implementations of the forward and the backward ran."""
    from cute_dash import emulator

    counts = {"forward": 0, "backward": 0}

    def counted(name, function):
        def call(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        return call

    for name in counts:
        monkeypatch.setattr(emulator, name, counted(name, getattr(emulator, name)))
    return counts


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "saved"])
def test_selective_checkpointing_finds_the_op(saved, compiled, count_calls):
    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saved and op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def checkpointed(q, k, v):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(block, q, k, v, use_reentrant=False, context_fn=contexts)

    x = inputs(40)
    expected = run(block, *x)
    function = torch.compile(checkpointed, fullgraph=True, backend="aot_eager") if compiled else checkpointed
    count_calls.update(forward=0, backward=0)
    assert_same_bits(run(function, *x), expected)
    assert count_calls == {"forward": 1 if saved else 2, "backward": 1}
