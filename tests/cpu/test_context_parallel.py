"""Context parallelism in gloo processes: gradients against fp64, bits run by run, and the order that is documented."""

import functools
import inspect
import math
import re
import time

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from cute_dash import attention_backward, flash_attn_func
from cute_dash.distributed import context_parallel_attention, sequence_positions, shard_sequence, unshard_sequence
from cute_dash.distributed.all_to_all import check_heads
from cute_dash.distributed.ring import RingOptions, get_block, ring_attention
from cute_dash.distributed.sequence import get_chunks, get_place
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    random_inputs,
    relative_error,
)

HEADS, HEAD_DIM = 4, 64
SCALE = 1 / math.sqrt(HEAD_DIM)
INVARIANT = "auto_invariant"
NAMES = ("out", "dq", "dk", "dv")
METHODS = pytest.mark.parametrize("method", ["ring", "all_to_all"])
LAYOUTS = pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])


def inputs(seqlen_q=272, seqlen_k=272, dtype=torch.bfloat16, batch=2):
    """272 tokens: chunks of 34 on four ranks, so that tiles are cut at other places than on one device."""
    return random_inputs(batch, seqlen_q, seqlen_k, HEADS, HEAD_DIM, dtype=dtype)


@functools.cache
def get_mesh(world_size):
    """The part with this process of a mesh of all four, with `world_size` ranks in the dimension cp."""
    return init_device_mesh("cpu", (4 // world_size, world_size), mesh_dim_names=("dp", "cp"))["cp"]


def train(q, k, v, dout, attention):
    """out, dq, dk, dv of `attention`."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    out.backward(dout)
    return out.detach(), *(leaf.grad for leaf in leaves)


# What runs in the processes


def run_parallel(world_size, x, delay, options):
    """out, dq, dk, dv of whole sequences; with a delay the ranks start one after the other, in turns."""
    mesh = get_mesh(world_size)
    layout = options.get("layout", "zigzag")

    def attention(q, k, v):
        time.sleep(delay * mesh.get_local_rank())
        out = context_parallel_attention(q, k, v, mesh, **options)
        out.register_hook(lambda grad: time.sleep(delay * (world_size - mesh.get_local_rank())))
        return out

    local = [shard_sequence(t, mesh, layout=layout) for t in x]
    return [unshard_sequence(t, mesh, layout=layout) for t in train(*local, attention)]


def run_helpers(world_size, layout):
    mesh = get_mesh(world_size)
    whole = torch.arange(48.0).view(2, 24)
    local = shard_sequence(whole, mesh, layout=layout)
    assert torch.equal(unshard_sequence(local, mesh, layout=layout), whole)
    positions = sequence_positions(24, mesh, layout=layout)
    assert torch.equal(whole[:, positions], local)
    length = 24 // (world_size * (2 if layout == "zigzag" else 1))
    expected = [c * length + i for c in get_chunks(mesh.get_local_rank(), world_size, layout) for i in range(length)]
    assert positions.tolist() == expected


def run_sharding_gradient(world_size):
    """The gradient of a part is zero elsewhere."""
    mesh = get_mesh(world_size)
    whole = torch.zeros(2, 16, requires_grad=True)
    shard_sequence(whole, mesh).sum().backward()
    expected = torch.zeros(16)
    expected[sequence_positions(16, mesh)] = 1
    assert torch.equal(whole.grad, expected.expand(2, 16))


def run_without_keys(causal):
    """LSE of a ring, and out and gradients, of queries that no rank has a key for; causal: of no queries either."""
    q, k = torch.randn(1, 0 if causal else 4, HEADS, HEAD_DIM), torch.randn(1, 0, HEADS, HEAD_DIM)
    options = RingOptions(get_place(get_mesh(2)), "zigzag", None, causal, 0.0, "auto")
    results = train(q, k, k, torch.randn_like(q), lambda *qkv: ring_attention(*qkv, options)[0])
    return ring_attention(q, k, k, options)[1], *results


def run_bad_call(call):
    """What `call` of this module, given a mesh of two ranks and all their tensors, raises."""
    try:
        BAD_CALLS[call][0](get_mesh(2), inputs(batch=1))
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return None


# Gradients


@METHODS
@LAYOUTS
@MASKS
@WORLD_SIZES
def test_gradients_of_attention(gloo, method, layout, causal, world_size):
    """In fp32 nothing but the sums' rounding is left; the tolerance would show a single missing or doubled token."""
    x = inputs(dtype=torch.float32, batch=1)
    results = gloo.run(run_parallel, world_size, x, 0, dict(method=method, layout=layout, causal=causal))
    out, _ = attention_forward_ref(x.q, x.k, x.v, SCALE, causal)
    expected = out, *attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal)
    for name, actual, ref in zip(NAMES, results[0], expected, strict=True):
        assert relative_error(actual, ref) < 2e-6, name
    for other in results[1:]:  # replicas of the sequence and all its ranks have one result
        for name, actual, again in zip(NAMES, results[0], other, strict=True):
            assert_bitwise_equal(actual, again, name)


@METHODS
@MASKS
def test_error_in_bf16_is_that_of_one_device(gloo, method, causal):
    """A ring rounds each step's gradients to bf16 before adding them, which costs up to half of what one call costs."""
    x = inputs()
    _, *grads = gloo.run(run_parallel, 4, x, 0, dict(method=method, causal=causal))[0]
    arguments = x.dout, x.q, x.k, x.v, SCALE, causal
    comparators = attention_backward_rounded(*arguments)
    for name, actual, ref, comparator in zip(
        NAMES[1:], grads, attention_backward_ref(*arguments), comparators, strict=True
    ):
        assert_accurate(actual, ref, comparator, name)


@METHODS
def test_options_reach_forward_and_backward(gloo, method):
    x = inputs(dtype=torch.float32, batch=1)
    out, *grads = gloo.run(run_parallel, 2, x, 0, dict(method=method, softmax_scale=0.5, schedule="descending"))[0]
    assert relative_error(out, attention_forward_ref(x.q, x.k, x.v, 0.5, False)[0]) < 2e-6
    for actual, ref in zip(grads, attention_backward_ref(x.dout, x.q, x.k, x.v, 0.5, False), strict=True):
        assert relative_error(actual, ref) < 2e-6


@pytest.mark.parametrize(("method", "causal"), [("ring", False), ("all_to_all", False), ("all_to_all", True)], ids=str)
def test_keys_of_another_length(gloo, method, causal):
    x = inputs(136, 272, dtype=torch.float32, batch=1)
    out, *grads = gloo.run(run_parallel, 2, x, 0, dict(method=method, causal=causal))[0]
    assert relative_error(out, attention_forward_ref(x.q, x.k, x.v, SCALE, causal)[0]) < 2e-6
    for actual, ref in zip(grads, attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal), strict=True):
        assert relative_error(actual, ref) < 2e-6


@MASKS
def test_a_ring_without_keys_gives_zeros(gloo, causal):
    """As one device does."""
    for lse, *results in gloo.run(run_without_keys, causal):
        assert (lse == -math.inf).all()
        for result in results:
            assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.usefixtures("grouped_queries")
@METHODS
@MASKS
def test_fewer_kv_heads(gloo, method, causal):
    """Against one device with each KV head given to all query heads of its group."""
    x = inputs(dtype=torch.float32, batch=1)
    grouped = x._replace(k=x.k[:, :, ::2].contiguous(), v=x.v[:, :, ::2].contiguous())
    out, *grads = gloo.run(run_parallel, 2, grouped, 0, dict(method=method, causal=causal))[0]
    repeated = x._replace(k=grouped.k.repeat_interleave(2, dim=2), v=grouped.v.repeat_interleave(2, dim=2))
    assert relative_error(out, attention_forward_ref(*repeated[:3], SCALE, causal)[0]) < 2e-6
    dq, *dkv = attention_backward_ref(x.dout, *repeated[:3], SCALE, causal)
    expected = dq, *(t.unflatten(2, (-1, 2)).sum(dim=3) for t in dkv)
    for actual, ref in zip(grads, expected, strict=True):
        assert relative_error(actual, ref) < 2e-6


# Bits


@METHODS
@MASKS
def test_bits_do_not_depend_on_who_comes_first(gloo, method, causal):
    x, options = inputs(), dict(method=method, causal=causal)
    first, slow_last = (gloo.run(run_parallel, 4, x, delay, options)[0] for delay in (0, 0.03))
    for name, a, b in zip(NAMES, first, slow_last, strict=True):
        assert_bitwise_equal(a, b, name)


@LAYOUTS
@MASKS
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_to_all_has_the_bits_of_one_device(gloo, layout, causal, world_size):
    x = inputs()
    one = train(*x, lambda q, k, v: flash_attn_func(q, k, v, causal=causal, schedule=INVARIANT))
    options = dict(method="all_to_all", layout=layout, causal=causal, schedule=INVARIANT)
    for name, a, b in zip(NAMES, gloo.run(run_parallel, world_size, x, 0, options)[0], one, strict=True):
        assert_bitwise_equal(a, b, name)


def test_all_to_all_takes_a_smaller_head_dim_of_v(gloo):
    x = random_inputs(1, 272, 272, num_heads=4, head_dim=192, head_dim_v=128)
    x = (x.q, x.k, x.v, x.dout)
    one = train(*x, lambda q, k, v: flash_attn_func(q, k, v, causal=True, schedule=INVARIANT))
    options = dict(method="all_to_all", causal=True, schedule=INVARIANT)
    for name, a, b in zip(NAMES, gloo.run(run_parallel, 2, x, 0, options)[0], one, strict=True):
        assert_bitwise_equal(a, b, name)


@pytest.mark.usefixtures("windows")
def test_all_to_all_takes_a_window(gloo):
    x, options = inputs(), dict(causal=True, window_size=(40, 0), schedule=INVARIANT)
    one = train(*x, lambda q, k, v: flash_attn_func(q, k, v, **options))
    for name, a, b in zip(
        NAMES, gloo.run(run_parallel, 2, x, 0, options | dict(method="all_to_all"))[0], one, strict=True
    ):
        assert_bitwise_equal(a, b, name)


@METHODS
@MASKS
def test_one_rank_has_the_bits_of_one_device(gloo, method, causal):
    x = inputs(batch=1)
    one = train(*x, lambda q, k, v: flash_attn_func(q, k, v, causal=causal))
    for name, a, b in zip(
        NAMES, gloo.run(run_parallel, 1, x, 0, dict(method=method, causal=causal))[0], one, strict=True
    ):
        assert_bitwise_equal(a, b, name)


@LAYOUTS
@MASKS
def test_ring_adds_in_the_documented_order(gloo, layout, causal):
    """A replay on one process of the table in ring.py: other orders of the same sums have other bits."""
    n, x = 4, inputs()
    result = gloo.run(run_parallel, n, x, 0, dict(method="ring", layout=layout, causal=causal))[0]
    parts = [[select(t, rank, n, layout) for t in x] for rank in range(n)]
    for name, whole, replayed in zip(
        NAMES, result, zip(*replay(parts, causal, layout, step=1), strict=True), strict=True
    ):
        for rank in range(n):
            assert_bitwise_equal(select(whole, rank, n, layout), replayed[rank], f"{name} of rank {rank}")
    backwards = list(zip(*replay(parts, causal, layout, step=-1), strict=True))
    assert not all(torch.equal(select(result[2], r, n, layout), backwards[2][r]) for r in range(n))


def select(x, rank, world_size, layout):
    chunks = x.chunk(world_size * (2 if layout == "zigzag" else 1), dim=1)
    return torch.cat([chunks[chunk] for chunk in get_chunks(rank, world_size, layout)], dim=1)


def replay(parts, causal, layout, step):
    """out, dq, dk, dv of each rank, from all ranks' (q, k, v, dout), summed along the ring in steps of `step`."""
    n, seqlen = len(parts), parts[0][0].shape[1]
    outs = [replay_forward(rank, parts, causal, layout, step) for rank in range(n)]

    def gradients(rank, source):
        """The slices of queries and keys, and their dq, dk, dv."""
        if (block := get_block(rank, source, seqlen, causal, layout)) is None:
            return None
        q, _, _, dout = (t[:, block.queries] for t in parts[rank])
        k, v = (t[:, block.keys] for t in parts[source][1:3])
        out, lse = outs[rank][0][:, block.queries], outs[rank][1][:, :, block.queries]
        return block, attention_backward(dout, q, k, v, out, lse, causal=block.causal)

    results = []
    for rank in range(n):
        q, k, v, _ = parts[rank]
        dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
        for t in range(n):
            if (of_queries := gradients(rank, (rank - step * t) % n)) is not None:
                block, (block_dq, _, _) = of_queries
                dq[:, block.queries] += block_dq
            if (of_keys := gradients((rank + step * t) % n, rank)) is not None:
                block, (_, block_dk, block_dv) = of_keys
                dk[:, block.keys] += block_dk
                dv[:, block.keys] += block_dv
        results.append((outs[rank][0], *(t.to(q.dtype) for t in (dq, dk, dv))))
    return results


def replay_forward(rank, parts, causal, layout, step):
    n, q = len(parts), parts[rank][0]
    out, lse = torch.zeros(q.shape), torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    for t in range(n):
        source = (rank - step * t) % n
        if (block := get_block(rank, source, q.shape[1], causal, layout)) is None:
            continue
        k, v = (t[:, block.keys] for t in parts[source][1:3])
        part, part_lse = flash_attn_func(q[:, block.queries], k, v, causal=block.causal, return_lse=True)
        rows = block.queries
        merged = torch.logaddexp(lse[:, :, rows], part_lse)
        weights = [torch.exp(x - merged).transpose(1, 2)[..., None] for x in (lse[:, :, rows], part_lse)]
        out[:, rows] = out[:, rows] * weights[0] + part * weights[1]
        lse[:, :, rows] = merged
    return out.to(q.dtype), lse


# Sequences and blocks


@LAYOUTS
@WORLD_SIZES
def test_sharding_and_unsharding(gloo, layout, world_size):
    gloo.run(run_helpers, world_size, layout)


def test_sharding_is_differentiable(gloo):
    gloo.run(run_sharding_gradient, 2)


@LAYOUTS
@MASKS
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_blocks_are_the_mask(layout, causal, world_size):
    """Every (query, key) pair that the mask leaves is in exactly one block, and no other is."""
    length = 2 * (2 if layout == "zigzag" else 1)
    seqlen = world_size * length
    positions = select(torch.arange(seqlen)[None], 0, 1, "contiguous")[0]
    held = [select(positions[None], rank, world_size, layout)[0] for rank in range(world_size)]
    seen = torch.zeros(seqlen, seqlen, dtype=torch.int)
    for rank in range(world_size):
        for source in range(world_size):
            if (block := get_block(rank, source, length, causal, layout)) is not None:
                queries, keys = held[rank][block.queries], held[source][block.keys]
                seen[queries[:, None], keys] += torch.ones(len(queries), len(keys), dtype=torch.int).tril(
                    0 if block.causal else seqlen
                )
    expected = torch.ones(seqlen, seqlen, dtype=torch.int)
    assert torch.equal(seen, expected.tril() if causal else expected)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_zigzag_gives_every_rank_the_same_work_in_every_step(world_size):
    def pairs(rank, step):
        block = get_block(rank, (rank - step) % world_size, 8, True, "zigzag")
        queries, keys = (len(range(8)[part]) for part in (block.queries, block.keys))
        return queries * keys, block.causal

    for step in range(world_size):
        assert {pairs(rank, step) for rank in range(world_size)} == {(64, True) if step == 0 else (32, False)}


# Errors


def call(mesh, x, length=136, **changes):
    tensors = {name: getattr(x, name)[:, :length] for name in "qkv"}
    return context_parallel_attention(**{**tensors, "mesh": mesh, **changes})


BAD_CALLS = {
    "mesh": (lambda mesh, x: call("cp", x), TypeError, "mesh is a str"),
    "mesh dims": (lambda mesh, x: call(init_device_mesh("cpu", (2, 2)), x), ValueError, "mesh has 2 dimensions"),
    "method": (lambda mesh, x: call(mesh, x, method="ulysses"), ValueError, "method='ulysses'; allowed: 'ring'"),
    "layout": (lambda mesh, x: call(mesh, x, layout="striped"), ValueError, "layout='striped'; allowed: 'zigzag'"),
    "heads": (
        lambda mesh, x: call(mesh, x, method="all_to_all", **{name: getattr(x, name)[:, :, :3] for name in "qkv"}),
        ValueError,
        "q has 3 heads; allowed with method='all_to_all': a multiple of the 2 ranks",
    ),
    "KV heads": (
        lambda mesh, x: check_heads(x.q, x.k[:, :, :3], mesh.size()),
        ValueError,
        "k has 3 KV heads; allowed with method='all_to_all': a multiple of the 2 ranks",
    ),
    "odd ring": (lambda mesh, x: call(mesh, x, 7, causal=True), ValueError, "q has 7 tokens on each rank"),
    "odd all_to_all": (lambda mesh, x: call(mesh, x, 7, method="all_to_all"), ValueError, "q has 7 tokens"),
    "causal lengths": (
        lambda mesh, x: call(mesh, x, causal=True, q=x.q[:, :68]),
        ValueError,
        "k has 136 tokens on each rank and q has 68",
    ),
    "not a tensor": (lambda mesh, x: call(mesh, x, k=None), TypeError, "k is a NoneType"),
    "DTensor": (
        lambda mesh, x: call(mesh, x, v=distribute_tensor(x.v, mesh, [Replicate()])),
        TypeError,
        "v is a DTensor",
    ),
    "head dim": (
        lambda mesh, x: call(mesh, x, **{name: getattr(x, name)[..., :36] for name in "qkv"}),
        ValueError,
        "head_dim 36",
    ),
    "head dim of v in a ring": (
        lambda mesh, x: call(mesh, x, q=x.q.repeat(1, 1, 1, 3), k=x.k.repeat(1, 1, 1, 3), v=x.v.repeat(1, 1, 1, 2)),
        ValueError,
        "v has shape .*; allowed with method='ring': that of k",
    ),
    "causal": (lambda mesh, x: call(mesh, x, causal=1), TypeError, "causal=1"),
    "scale": (lambda mesh, x: call(mesh, x, softmax_scale=0.0), ValueError, "softmax_scale=0.0"),
    "window": (lambda mesh, x: call(mesh, x, window_size=(64, 0)), ValueError, "window_size=.*; allowed"),
    "schedule": (lambda mesh, x: call(mesh, x, schedule="shfit"), ValueError, "did you mean 'shift'"),
    "schedule of a ring's own block": (
        lambda mesh, x: call(mesh, x, schedule="shift", causal=True),
        ValueError,
        "schedule='shift' cannot implement",
    ),
    "schedule of a ring's other blocks": (
        lambda mesh, x: call(mesh, x, schedule="symmetric_shift", causal=True),
        ValueError,
        "schedule='symmetric_shift' cannot implement",
    ),
    "sharding": (lambda mesh, x: shard_sequence(x.q[:, :6], mesh), ValueError, "x has 6 tokens in dimension 1"),
    "sharding no tensor": (lambda mesh, x: shard_sequence([1], mesh), TypeError, "x is a list; allowed: a torch.Ten"),
    "sharding dim": (
        lambda mesh, x: shard_sequence(torch.zeros(8), mesh),
        ValueError,
        r"dim=1; allowed: a dimension of x, which has shape \(8,\)",
    ),
    "sharding dim's type": (lambda mesh, x: shard_sequence(x.q, mesh, 1.0), TypeError, "dim=1.0 is a float; allowed"),
    "unsharding no tensor": (lambda mesh, x: unshard_sequence([1], mesh), TypeError, "x is a list; allowed"),
    "unsharding dim": (lambda mesh, x: unshard_sequence(torch.zeros(8), mesh), ValueError, "dim=1; allowed"),
    "positions": (
        lambda mesh, x: sequence_positions(-4, mesh),
        ValueError,
        "seqlen=-4; allowed: a multiple above 0",
    ),
    "no positions": (
        lambda mesh, x: sequence_positions(0, mesh),
        ValueError,
        "seqlen=0; allowed: a multiple above 0",
    ),
    "odd positions": (
        lambda mesh, x: sequence_positions(6, mesh),
        ValueError,
        "seqlen=6; allowed: a multiple above 0",
    ),
    "positions' type": (lambda mesh, x: sequence_positions(8.0, mesh), TypeError, "seqlen=8.0 is a float; allowed"),
    "positions' mesh": (lambda mesh, x: sequence_positions(8, "cp"), TypeError, "mesh is a str"),
    "unsharding": (
        lambda mesh, x: unshard_sequence(x.q.clone().requires_grad_(), mesh),
        ValueError,
        "x requires grad",
    ),
    "odd unsharding": (lambda mesh, x: unshard_sequence(x.q[:, :7], mesh), ValueError, "x has 7 tokens"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_on_every_rank(gloo, name):
    _, error, message = BAD_CALLS[name]
    for raised in gloo.run(run_bad_call, name):
        assert raised is not None and issubclass(raised[0], error)
        assert re.search(message, raised[1]), raised[1]


def test_public_names_are_documented():
    import cute_dash.distributed as distributed

    for name in distributed.__all__:
        assert inspect.getdoc(getattr(distributed, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        distributed.nothing  # noqa: B018
