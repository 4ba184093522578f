"""Several GPUs with NCCL: context parallelism, sharded ops, tensor parallel and FSDP2, on two of them.

Gradients against fp64, bits run by run and, where that is promised, against one GPU. A kernel is compiled by the rank
that needs it first, so the first test of a kind takes some seconds longer.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from cute_dash import attention_backward, flash_attn_func
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
    relative_error,
)
from tests.process_group import ProcessGroup

DEVICE = "cuda"
WORLD_SIZE = 2
TIMEOUT_SECONDS = 90  # of one test, kernels compiled in it included
BATCH, SEQLEN, HEADS, HEAD_DIM = 2, 1536, 4, 128
NAMES = ("out", "dq", "dk", "dv")
METHODS = pytest.mark.parametrize("method", ["ring", "all_to_all"])
INVARIANT = "auto_invariant"
BY_BATCH, BY_HEADS = Shard(0), Shard(2)
SHARDS = pytest.mark.parametrize("shard", [BY_BATCH, BY_HEADS], ids=["batch", "heads"])
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture(scope="module")
def nccl():
    if torch.cuda.device_count() < WORLD_SIZE:
        pytest.skip(f"{torch.cuda.device_count()} GPU, these tests need {WORLD_SIZE}")
    if not dist.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    with ProcessGroup(WORLD_SIZE, "nccl", TIMEOUT_SECONDS) as group:
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
    """out, dq, dk, dv of the first run on the CPU, and whether the others had its bits; other work queues between."""
    mesh = init_device_mesh(DEVICE, (WORLD_SIZE,), mesh_dim_names=("cp",))
    local = [shard_sequence(x.to(DEVICE), mesh) for x in make_inputs()]

    def attention(q, k, v):
        return context_parallel_attention(q, k, v, mesh, method=method, causal=causal, schedule=INVARIANT)

    first = train(*local, attention)
    equal, noise = True, torch.randn(2048, 2048, device=DEVICE)
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
    arguments = *(t.to(DEVICE) for t in (x.dout, x.q, x.k, x.v)), HEAD_DIM**-0.5, causal
    references, comparators = attention_backward_ref(*arguments), attention_backward_rounded(*arguments)
    for whole, equal in results:
        assert equal
        for name, actual, ref, comparator in zip(NAMES[1:], whole[1:], references, comparators, strict=True):
            assert_accurate(actual.to(DEVICE), ref, comparator, name)


def run_sharded(shard, causal):
    """out, dq, dk, dv of DTensors that are sharded, whole and on the CPU, and their placements."""
    register_sharding_rules()
    mesh = init_device_mesh(DEVICE, (WORLD_SIZE,))
    x = [distribute_tensor(t.to(DEVICE), mesh, [shard]) for t in make_inputs()]
    results = train(*x, lambda q, k, v: flash_attn_func(q, k, v, causal=causal, schedule=INVARIANT))
    return [t.full_tensor().cpu() for t in results], [t.placements for t in results]


def assert_bits_of_parts(whole, causal, shard, layout):
    """Part by part, because the bits of the library's forward may depend on how many heads and sequences it is given.

    Args:
        shard: the dimension that the ranks share.
        layout: makes of one part's q, k, v tensors with the strides that a rank has.
    """
    chunks = (t.to(DEVICE).chunk(WORLD_SIZE, shard.dim) for t in make_inputs())
    parts = list(zip(*chunks, strict=True))
    attention = lambda q, k, v: flash_attn_func(q, k, v, causal=causal, schedule=INVARIANT)
    for rank, (*qkv, dout) in enumerate(parts):
        for name, a, b in zip(NAMES, whole, train(*layout(qkv), dout, attention), strict=True):
            assert_bitwise_equal(a.chunk(WORLD_SIZE, shard.dim)[rank].contiguous(), b.cpu(), f"{name} of part {rank}")


@MASKS
def test_all_to_all_has_the_bits_of_each_head_group_on_one_device(nccl, causal):
    for whole, _ in nccl.run(run_parallel, "all_to_all", causal, 0):
        assert_bits_of_parts(whole, causal, BY_HEADS, lambda qkv: torch.cat(qkv, dim=2).chunk(3, dim=2))


@SHARDS
@MASKS
def test_sharded_ops_have_the_bits_of_each_part_on_one_device(nccl, causal, shard):
    for whole, placements in nccl.run(run_sharded, shard, causal):
        assert placements == 4 * [(shard,)]
        assert_bits_of_parts(whole, causal, shard, lambda qkv: [t.contiguous() for t in qkv])


def run_sharded_backward(shard, causal, out, lse):
    """dq, dk, dv of the backward op alone, for the given out and LSE."""
    register_sharding_rules()
    mesh = init_device_mesh(DEVICE, (WORLD_SIZE,))
    q, k, v, dout, out = (distribute_tensor(t.to(DEVICE), mesh, [shard]) for t in (*make_inputs(), out))
    lse = distribute_tensor(lse.to(DEVICE), mesh, [BY_BATCH if shard == BY_BATCH else Shard(1)])
    grads = attention_backward(dout, q, k, v, out, lse, causal=causal, schedule=INVARIANT)
    return [grad.full_tensor().cpu() for grad in grads]


@SHARDS
@MASKS
def test_sharded_gradients_of_one_out_and_lse_have_the_bits_of_one_device(nccl, causal, shard):
    x = [t.to(DEVICE) for t in make_inputs()]
    out, lse = flash_attn_func(*x[:3], causal=causal, return_lse=True)
    expected = attention_backward(x[3], *x[:3], out, lse, causal=causal, schedule=INVARIANT)
    for grads in nccl.run(run_sharded_backward, shard, causal, out.cpu(), lse.cpu()):
        for name, actual, wanted in zip(NAMES[1:], grads, expected, strict=True):
            assert_bitwise_equal(actual, wanted.cpu(), name)


# A model


class Block(nn.Module):
    """In fp32 but for attention."""

    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (linear(normed).bfloat16().unflatten(-1, (-1, HEAD_DIM)) for linear in (self.q, self.k, self.v))
        return x + self.o(flash_attn_func(q, k, v, causal=True, schedule=INVARIANT).flatten(2).float())


def make_model():
    """Two layers and a batch, the same on every rank and in this process."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    x = torch.randn(BATCH, SEQLEN, HEADS * HEAD_DIM)
    return model.to(DEVICE), x.to(DEVICE)


def get_model_gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).cpu() for name, g in grads.items()}


def run_model(sizes):
    """Gradients of every weight, and whether a second run had the same bits.

    Args:
        sizes: (dp, tp): FSDP2 over the first, tensor parallel over the second; heads are DTensors, tokens of a rank are
            not.
    """
    mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=("dp", "tp"))
    register_sharding_rules()
    model, x = make_model()
    plan = {name: ColwiseParallel(use_local_output=False) for name in "qkv"} | {"o": RowwiseParallel()}
    for block in model:
        if sizes[1] > 1:
            parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    local = x.chunk(sizes[0])[mesh["dp"].get_local_rank()]
    grads, again = (get_model_gradients(model, local) for _ in range(2))
    return grads, all(torch.equal(grads[name], again[name]) for name in grads)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["fsdp2", "tensor parallel"])
def test_a_model_has_the_gradients_of_one_device_and_the_same_bits_again(nccl, sizes):
    """Close to those of one device, not equal: matrix products and sums over ranks are others."""
    expected = get_model_gradients(*make_model())
    for grads, equal in nccl.run(run_model, sizes):
        assert equal
        for name, grad in grads.items():
            assert relative_error(grad, expected[name]) < 0.01, name
