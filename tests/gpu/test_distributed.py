"""Context parallelism and sharded ops on two GPUs with NCCL: gradients against fp64, and bits run by run."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cute_dash import flash_attn_func
from cute_dash.distributed import (
    context_parallel_attention,
    register_sharding_rules,
    shard_sequence,
    unshard_sequence,
)
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    random_inputs,
)
from tests.process_group import ProcessGroup

WORLD_SIZE = 2
BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 1536, 4, 128
NAMES = ("out", "dq", "dk", "dv")
METHODS = pytest.mark.parametrize("method", ["ring", "all_to_all"])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(scope="module")
def nccl():
    if torch.cuda.device_count() < WORLD_SIZE:
        pytest.skip(f"{torch.cuda.device_count()} GPU, these tests need {WORLD_SIZE}")
    if not dist.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    with ProcessGroup(WORLD_SIZE, "nccl") as group:
        yield group


def make_inputs():
    """On the CPU: the same on every rank, and in this process."""
    return random_inputs(BATCH, SEQLEN, SEQLEN, HEADS, HEAD_DIM)


def train(q, k, v, dout, attention):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    out.backward(dout)
    return out.detach(), *(leaf.grad for leaf in leaves)


def run_parallel(method, causal, repetitions):
    """out, dq, dk, dv of the first run on the CPU, and whether the others had the same bits; other work is queued between."""
    mesh = init_device_mesh("cuda", (WORLD_SIZE,), mesh_dim_names=("cp",))
    local = [shard_sequence(x.cuda(), mesh) for x in make_inputs()]

    def attention(q, k, v):
        return context_parallel_attention(q, k, v, mesh, method=method, causal=causal, schedule="auto_invariant")

    first = train(*local, attention)
    equal, noise = True, torch.randn(2048, 2048, device="cuda")
    for repetition in range(repetitions):
        for _ in range(5 * (mesh.get_local_rank() ^ (repetition & 1))):  # the ranks fall behind in turns
            noise = noise @ noise / 2048
        again = train(*local, attention)
        equal &= all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    return [unshard_sequence(x, mesh).cpu() for x in first], equal


@METHODS
@MASKS
def test_gradients_and_bits(nccl, method, causal):
    results = nccl.run(run_parallel, method, causal, 20)
    x = make_inputs()
    arguments = *(t.cuda() for t in (x.dout, x.q, x.k, x.v)), HEAD_DIM**-0.5, causal
    references, comparators = attention_backward_ref(*arguments), attention_backward_rounded(*arguments)
    for whole, equal in results:
        assert equal
        for name, actual, ref, comparator in zip(NAMES[1:], whole[1:], references, comparators, strict=True):
            assert_accurate(actual.cuda(), ref, comparator, name)


def run_sharded(causal):
    """out, dq, dk, dv of DTensors that are sharded by heads, whole and on the CPU, and their placements."""
    register_sharding_rules()
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    x = [distribute_tensor(t.cuda(), mesh, [Shard(2)]) for t in make_inputs()]
    results = train(*x, lambda q, k, v: flash_attn_func(q, k, v, causal=causal, schedule="auto_invariant"))
    return [t.full_tensor().cpu() for t in results], [t.placements for t in results]


def assert_bits_of_head_groups(whole, causal, layout):
    """Head by head group, because the bits of the library's forward may depend on how many heads it is given.

    Args:
        layout: makes of one group's q, k, v tensors with the strides that a rank has.
    """
    x, num_heads = make_inputs(), HEADS // WORLD_SIZE
    for rank in range(WORLD_SIZE):
        heads = slice(rank * num_heads, (rank + 1) * num_heads)
        *qkv, dout = (t[:, :, heads].cuda() for t in x)
        attention = lambda q, k, v: flash_attn_func(q, k, v, causal=causal, schedule="auto_invariant")
        for name, a, b in zip(NAMES, whole, train(*layout(qkv), dout, attention), strict=True):
            assert_bitwise_equal(a[:, :, heads].contiguous(), b.cpu().contiguous(), f"{name} of head group {rank}")


@MASKS
def test_all_to_all_has_the_bits_of_each_head_group_on_one_device(nccl, causal):
    for whole, _ in nccl.run(run_parallel, "all_to_all", causal, 0):
        assert_bits_of_head_groups(whole, causal, lambda qkv: torch.cat(qkv, dim=2).chunk(3, dim=2))


@MASKS
def test_sharded_ops_have_the_bits_of_each_head_group_on_one_device(nccl, causal):
    for whole, placements in nccl.run(run_sharded, causal):
        assert placements == 4 * [(Shard(2),)]
        assert_bits_of_head_groups(whole, causal, lambda qkv: [t.contiguous() for t in qkv])
