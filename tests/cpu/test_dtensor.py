"""The ops on DTensors in gloo processes: which placements survive, and the bits of one device."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cute_dash import attention_backward, attention_varlen_backward, flash_attn_func, flash_attn_varlen_func
from cute_dash.distributed import register_sharding_rules
from cute_dash.distributed.dtensor import _divides
from cute_dash.testing import assert_bitwise_equal, random_inputs

BATCH, HEADS, HEAD_DIM = 4, 4, 64
INVARIANT = "auto_invariant"
BY_BATCH, BY_HEADS, BY_TOKENS = Shard(0), Shard(2), Shard(1)
NAMES = ("out", "lse", "dq", "dk", "dv")
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 4])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@functools.cache
def get_mesh(*sizes):
    """A mesh of these sizes; of fewer than four ranks, one of its copies."""
    copies = 4 // torch.Size(sizes).numel()
    names = tuple(f"d{i}" for i in range(len(sizes)))
    return init_device_mesh("cpu", (copies, *sizes), mesh_dim_names=("copy", *names))[names]


def train(q, k, v, dout, causal):
    """out, LSE, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, causal=causal, schedule=INVARIANT, return_lse=True)
    out.backward(dout)
    return out.detach(), lse, *(leaf.grad for leaf in leaves)


# What runs in the processes


def run_sharded(sizes, placements, x, causals):
    """For each of `causals` the whole results, and the placements that they had."""
    register_sharding_rules()
    mesh = get_mesh(*sizes)
    q, k, v, dout = (distribute_tensor(t, mesh, placements[name]) for name, t in zip(x._fields, x, strict=True))
    answers = []
    for causal in causals:
        results = train(q, k, v, dout, causal)
        answers.append(([r.full_tensor() for r in results], [r.placements for r in results]))
    return answers


def run_partial(x):
    """Gradients for a dout whose ranks each hold a part of the sum."""
    register_sharding_rules()
    mesh = get_mesh(2)
    q, k, v = (distribute_tensor(t, mesh, [BY_HEADS]) for t in x[:3])
    half = DTensor.from_local(x.dout / 2, mesh, [Partial()])
    return [r.full_tensor() for r in train(q, k, v, half, True)]


def run_backward_op(x):
    """attention_backward itself, without autograd."""
    register_sharding_rules()
    mesh = get_mesh(4)
    q, k, v, dout = (distribute_tensor(t, mesh, [BY_HEADS]) for t in x)
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    return [grad.full_tensor() for grad in attention_backward(dout, q, k, v, out, lse, schedule=INVARIANT)]


def run_lse_gradient(x):
    """Gradients that come through the LSE alone, once from autograd and once from attention_backward itself."""
    register_sharding_rules()
    mesh = get_mesh(4)
    leaves = [distribute_tensor(t, mesh, [BY_HEADS]).requires_grad_() for t in x[:3]]
    out, lse = flash_attn_func(*leaves, schedule=INVARIANT, return_lse=True)
    dlse = lse.detach().sin()
    grads = torch.autograd.grad(lse, leaves, dlse)
    q, k, v, out, lse = (t.detach() for t in (*leaves, out, lse))
    by_hand = attention_backward(torch.zeros_like(out), q, k, v, out, lse, schedule=INVARIANT, dlse=dlse)
    return [grad.full_tensor() for grad in (*grads, *by_hand)]


def run_sink(x):
    """What a learnable sink raises."""
    register_sharding_rules()
    mesh = get_mesh(4)
    q, k, v = (distribute_tensor(t, mesh, [BY_HEADS]) for t in x[:3])
    try:
        flash_attn_func(q, k, v, learnable_sink=distribute_tensor(torch.zeros(HEADS), mesh, [Shard(0)]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_varlen(x):
    """What DTensors with cu_seqlens raise, forward and backward."""
    register_sharding_rules()
    mesh = get_mesh(4)
    local = [t[0] for t in x]
    q, k, v, dout = (distribute_tensor(t, mesh, [Shard(1)]) for t in local)
    cu_seqlens = torch.tensor([0, len(local[0])], dtype=torch.int32)
    lengths = cu_seqlens, cu_seqlens, len(local[0]), len(local[0])
    messages = []
    for function, arguments in (
        (flash_attn_varlen_func, (q, k, v)),
        (flash_attn_varlen_func, (local[0], k, v)),
        (attention_varlen_backward, (dout, q, k, v, q, torch.zeros(HEADS, len(local[0])))),
    ):
        try:
            function(*arguments, *lengths)
        except TypeError as error:
            messages.append(str(error))
    return messages


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v))
        return self.o(flash_attn_func(q, k, v, causal=True, schedule=INVARIANT).flatten(2))


def make_model():
    torch.manual_seed(0)
    return Attention(), torch.randn(BATCH, 40, HEADS * HEAD_DIM)


def get_weight_grads(model):
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def make_plan():
    """Column-wise projections whose outputs stay DTensors, so that the op is given heads that are sharded."""
    return {name: ColwiseParallel(use_local_output=False) for name in "qkv"} | {"o": RowwiseParallel()}


def run_tensor_parallel():
    register_sharding_rules()
    model, x = make_model()
    parallelize_module(model, get_mesh(4), make_plan())
    out = model(x)
    out.square().sum().backward()
    return out.detach(), get_weight_grads(model)


def run_fsdp(tensor_parallel):
    """Half the batch on two ranks, or on two pairs that share the heads; FSDP averages the gradients of the halves."""
    register_sharding_rules()
    mesh = get_mesh(2, 2) if tensor_parallel else get_mesh(2)
    model, x = make_model()
    if tensor_parallel:
        parallelize_module(model, mesh["d1"], make_plan())
    fully_shard(model, mesh=mesh["d0"])
    (model(x.chunk(2)[mesh.get_local_rank("d0")]).square().sum() * 2).backward()
    return get_weight_grads(model)


# Tests


def same(placement, mesh_dims=1):
    """The same placements for each of q, k, v, dout."""
    return dict.fromkeys(("q", "k", "v", "dout"), mesh_dims * [placement])


def assert_equal(actual, expected):
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert_bitwise_equal(a, b, name)


def inputs(batch=BATCH, heads=HEADS):
    return random_inputs(batch, 150, 150, heads, HEAD_DIM)


@WORLD_SIZES
@MASKS
@pytest.mark.parametrize("placement", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
def test_batch_and_heads_stay_sharded(gloo, placement, causal, world_size):
    x = inputs()
    for [(results, placements)] in gloo.run(run_sharded, (world_size,), same(placement), x, [causal]):
        assert_equal(results, train(*x, causal))
        of_lse = BY_BATCH if placement == BY_BATCH else Shard(1)
        assert placements == [(placement,), (of_lse,), (placement,), (placement,), (placement,)]


def test_batch_and_heads_over_a_mesh_of_two_dimensions(gloo):
    x = inputs()
    both = [BY_BATCH, BY_HEADS]
    [(results, placements)] = gloo.run(run_sharded, (2, 2), dict.fromkeys(same(None), both), x, [True])[0]
    assert_equal(results, train(*x, True))
    assert placements == [tuple(both), (BY_BATCH, Shard(1)), *3 * [tuple(both)]]


@pytest.mark.parametrize(
    ("placements", "x"),
    [
        (same(BY_TOKENS), inputs()),
        (same(Shard(3)), inputs()),
        (same(BY_HEADS) | dict(k=[Replicate()], dout=[BY_BATCH]), inputs()),
        (same(BY_BATCH), inputs(batch=3)),
        (same(BY_HEADS), inputs(heads=3)),
    ],
    ids=["tokens", "head dim", "mixed", "uneven batch", "uneven heads"],
)
def test_other_placements_are_redistributed(gloo, placements, x):
    """Also with options that change from call to call, while DTensor remembers what it does with the placements."""
    causals = [True, False, True]
    answers = gloo.run(run_sharded, (2,), placements, x, causals)[0]
    for (results, _), causal in zip(answers, causals, strict=True):
        assert_equal(results, train(*x, causal))


@pytest.mark.usefixtures("grouped_queries")
@pytest.mark.parametrize("heads_kv", [1, 2])
def test_fewer_kv_heads(gloo, heads_kv):
    """Two KV heads stay sharded over two ranks; a single one cannot be, and the op takes other parts."""
    x = inputs()
    x = x._replace(k=x.k[:, :, :heads_kv].contiguous(), v=x.v[:, :, :heads_kv].contiguous())
    placements = same(BY_HEADS) if heads_kv == 2 else same(BY_HEADS) | dict(k=[Replicate()], v=[Replicate()])
    [(results, kept)] = gloo.run(run_sharded, (2,), placements, x, [True])[0]
    assert_equal(results, train(*x, True))
    assert (kept[0] == (BY_HEADS,)) is (heads_kv == 2)


def test_partial_gradients_are_summed_first(gloo):
    x = inputs()
    for results in gloo.run(run_partial, x):
        assert_equal(results, train(*x, True))


def test_backward_op(gloo):
    x = inputs()
    for results in gloo.run(run_backward_op, x):
        for name, a, b in zip(NAMES[2:], results, train(*x, False)[2:], strict=True):
            assert_bitwise_equal(a, b, name)


def test_tensor_parallel_layers(gloo):
    """Close and not equal: the projections are other matrix products than on one device."""
    model, x = make_model()
    out = model(x)
    out.square().sum().backward()
    for parallel_out, grads in gloo.run(run_tensor_parallel):
        torch.testing.assert_close(parallel_out, out.detach())
        for actual, expected in zip(grads, get_weight_grads(model), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("tensor_parallel", [False, True], ids=["", "tensor parallel"])
def test_fsdp(gloo, tensor_parallel):
    model, x = make_model()
    model(x).square().sum().backward()
    for grads in gloo.run(run_fsdp, tensor_parallel):
        for actual, expected in zip(grads, get_weight_grads(model), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("sizes", "extent", "divides"),
    [((2,), 4, True), ((2,), 3, False), ((4,), 2, True), ((2, 2), 4, True), ((2, 2), 6, False), ((8, 4), 8, True)],
    ids=str,
)
def test_equal_parts(sizes, extent, divides):
    """(4,), 2: DTensor never makes more parts than there are elements, so that two heads are not cut in four."""

    class Mesh:
        ndim = len(sizes)
        size = staticmethod(sizes.__getitem__)

    assert _divides(Mesh, extent) is divides


def test_a_gradient_of_the_lse(gloo):
    x = inputs()
    out, lse = flash_attn_func(*x[:3], schedule=INVARIANT, return_lse=True)
    expected = attention_backward(None, *x[:3], out, lse, schedule=INVARIANT, dlse=lse.sin())
    for answer in gloo.run(run_lse_gradient, x):
        for name, a, b in zip(NAMES[2:] * 2, answer, expected * 2, strict=True):
            assert_bitwise_equal(a, b, name)


def test_a_sink_is_refused(gloo):
    for answer in gloo.run(run_sink, inputs()):
        assert "learnable_sink is given with DTensors; allowed: None" in answer


def test_sequences_of_different_lengths_are_local_tensors(gloo):
    for messages in gloo.run(run_varlen, inputs()):
        for name, message in zip("qkq", messages, strict=True):
            assert f"{name} is a DTensor; allowed with cu_seqlens: this rank's part, {name}.to_local()" in message
