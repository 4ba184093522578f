"""Sequences of different lengths on the GPU: gradients, bits, isolation, what follows the last, no synchronisation."""

import math
import random

import pytest
import torch

from cute_dash import attention_backward, attention_varlen_backward, flash_attn_varlen_func, launch, validation
from cute_dash.config import get_config
from cute_dash.problem import normalize_mask
from cute_dash.registry import load
from cute_dash.schedule import needs_one_cta
from cute_dash.testing import (
    AttentionInputs,
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    relative_error,
)
from tests.gpu.ratios import ERROR_RATIOS

BUDGET = 2.0
LSE_TOLERANCE = 1e-3
NAMES = ("dq", "dk", "dv")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128], ids=lambda head_dim: f"hd{head_dim}")
SCHEDULES = pytest.mark.parametrize("name", sorted(n for n in validation.TESTED_SCHEDULES if needs_one_cta(load(n))))
# queries and keys per sequence: equal and not, whole tiles and one token, none on either side or both, at the ends too
LENGTHS = [
    (0, 0),
    (512, 512),
    (1, 300),
    (0, 140),
    (129, 1),
    (140, 0),
    (700, 333),
    (0, 0),
    (64, 900),
    (256, 128),
    (70, 0),
]


class Packed:
    """Sequences one behind the other, with `behind` NaN tokens more; a sequence's tokens depend only on its lengths."""

    def __init__(self, lengths, num_heads, num_heads_kv, head_dim, causal, behind=(0, 0), window_size=(-1, -1)):
        self.causal, self.scale, self.window_size = causal, head_dim**-0.5, window_size
        heads = (num_heads, num_heads_kv, num_heads_kv, num_heads)

        def normal(i, pair):
            generator = torch.Generator("cuda").manual_seed(10_000 * pair[0] + 10 * pair[1] + i)
            size = (pair[i in (1, 2)], heads[i], head_dim)
            return torch.randn(size, generator=generator, device="cuda").bfloat16()

        def tokens(i):
            rest = torch.full((behind[i in (1, 2)], heads[i], head_dim), math.nan, device="cuda").bfloat16()
            return torch.cat([*(normal(i, pair) for pair in lengths), rest])

        self.inputs = AttentionInputs(*(tokens(i) for i in range(4)))
        self.starts = [[0, *torch.tensor(side).cumsum(0).tolist()] for side in zip(*lengths, strict=True)]
        self.cu_seqlens = [torch.tensor(starts, dtype=torch.int32, device="cuda") for starts in self.starts]
        self.max_seqlens = [max(side) for side in zip(*lengths, strict=True)]
        self.out, self.lse = self.forward()

    def forward(self):
        q, k, v, _ = self.inputs
        options = self.scale, self.causal, self.window_size
        return flash_attn_varlen_func(q, k, v, *self.lengths, *options, return_lse=True)

    @property
    def lengths(self):
        return *self.cu_seqlens, *self.max_seqlens

    def slices(self):
        sides = ([slice(a, b) for a, b in zip(s, s[1:], strict=False)] for s in self.starts)
        return list(zip(*sides, strict=True))

    def take_forward(self, whole, pairs):
        """Takes out and LSE of `whole` for (rows here, rows there): the forward's bits are not what is tested."""
        for here, there in pairs:
            self.out[here], self.lse[:, here] = whole.out[there], whole.lse[:, there]

    def backward(self, schedule="auto"):
        q, k, v, dout = self.inputs
        options = *self.lengths, self.scale, self.causal, self.window_size
        return attention_varlen_backward(dout, q, k, v, self.out, self.lse, *options, schedule=schedule)

    def one(self, rows, keys):
        """dout, q, k, v, out, lse of a sequence as a batch of one."""
        q, k, v, dout = self.inputs
        return (
            dout[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            self.out[None, rows],
            self.lse[None, :, rows],
        )


def both(rows, keys):
    return rows.start < rows.stop and keys.start < keys.stop


def assert_same_bits(grads, expected, what=""):
    for name, a, b in zip(NAMES, grads, expected, strict=True):
        assert_bitwise_equal(a, b, f"{name} {what}")


@SCHEDULES
@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("num_heads_kv", [4, 2])
def test_every_sequence_has_the_gradients_of_attention(name, num_heads_kv, head_dim, causal, poison):
    x = Packed(LENGTHS, 4, num_heads_kv, head_dim, causal, behind=(50, 90))
    poison()
    dq, dk, dv = x.backward(name)
    for rows, keys in x.slices():
        if not both(rows, keys):
            assert (dq[rows] == 0).all() and (dk[keys] == 0).all() and (dv[keys] == 0).all()
            continue
        dout, q, k, v, _, _ = x.one(rows, keys)
        refs = attention_backward_ref(dout, q, k, v, x.scale, causal)
        comparators = attention_backward_rounded(dout, q, k, v, x.scale, causal)
        for gradient, grad, ref, comparator in zip(
            NAMES, (dq[rows], dk[keys], dv[keys]), refs, comparators, strict=True
        ):
            ERROR_RATIOS.append(assert_accurate(grad[None], ref, comparator, gradient, BUDGET))
    for grad, starts in ((dq, x.starts[0]), (dk, x.starts[1]), (dv, x.starts[1])):
        assert len(grad) > starts[-1] and (grad[starts[-1] :] == 0).all()


@MASKS
@HEAD_DIMS
@pytest.mark.parametrize("name", ["longest_first", "hybrid"])
@pytest.mark.parametrize("num_heads_kv", [4, 1])
def test_a_sequence_has_the_bits_of_a_batch_of_one(name, num_heads_kv, head_dim, causal, poison):
    x = Packed(LENGTHS, 4, num_heads_kv, head_dim, causal)
    poison()
    dq, dk, dv = x.backward(name)
    config = get_config(head_dim, causal)
    for rows, keys in filter(lambda pair: both(*pair), x.slices()):
        tensors = (t.clone(memory_format=torch.contiguous_format) for t in x.one(rows, keys))
        expected = launch.backward(*tensors, x.scale, causal, load(name), config)
        assert_same_bits((dq[None, rows], dk[None, keys], dv[None, keys]), expected, f"of {rows}, {keys}")


# narrow, open on one side, beyond some of the sequences; KV tiles and queries that see nothing
WINDOWS = [(0, 0), (100, 30), (-1, 50), (300, -1), (500, 0), (400, 650)]


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@pytest.mark.parametrize("name", ["auto", "hybrid", "unordered"])
@HEAD_DIMS
@pytest.mark.parametrize("num_heads_kv", [4, 2])
def test_windows(num_heads_kv, head_dim, name, window_size, poison):
    """Out, LSE and gradients of every sequence; but for the unordered ones, also the bits of a batch of one."""
    poison()
    x = Packed(LENGTHS, 4, num_heads_kv, head_dim, False, (50, 90), window_size)
    poison()
    grads = x.backward(name)
    for rows, keys in x.slices():
        own = grads[0][rows], grads[1][keys], grads[2][keys]
        if not both(rows, keys):
            assert all((grad == 0).all() for grad in own)
            continue
        dout, q, k, v, out, lse = x.one(rows, keys)
        ref_out, ref_lse = attention_forward_ref(q, k, v, x.scale, False, window_size)
        assert (out.double() - ref_out).norm() <= torch.finfo(torch.bfloat16).eps * ref_out.norm()
        torch.testing.assert_close(lse.double(), ref_lse, rtol=0, atol=LSE_TOLERANCE)
        refs = attention_backward_ref(dout, q, k, v, x.scale, False, window_size)
        comparators = attention_backward_rounded(dout, q, k, v, x.scale, False, window_size)
        scale = max(ref.norm().item() for ref in refs)
        for gradient, grad, ref, comparator in zip(NAMES, own, refs, comparators, strict=True):
            if ref.norm() < 1e-6 * scale:  # of queries that see one key each
                assert (grad[None].double() - ref).norm() < torch.finfo(torch.bfloat16).eps * scale
                continue
            ERROR_RATIOS.append(assert_accurate(grad[None], ref, comparator, gradient, BUDGET))
        is_local = normalize_mask(False, window_size, q.shape[1], k.shape[1])[1] is not None
        if name == "hybrid" and is_local:  # else the batch of one would run as another mask
            expected = attention_backward(
                *(t.contiguous() for t in (dout, q, k, v, out, lse)), x.scale, False, window_size, schedule=name
            )
            assert_same_bits([grad[None] for grad in own], expected, f"of {rows}, {keys}")
    for grad, starts in ((grads[0], x.starts[0]), (grads[1], x.starts[1]), (grads[2], x.starts[1])):
        assert len(grad) > starts[-1] and (grad[starts[-1] :] == 0).all()


@HEAD_DIMS
def test_bits_of_windows_are_equal_over_runs(head_dim, noise, poison):
    x = Packed(4 * LENGTHS, 8, 4, head_dim, False, (10, 10), (150, 20))
    expected = x.backward()
    for run in range(20):
        noise(run % 4)
        poison()
        assert_same_bits(x.backward(), expected)


@MASKS
@HEAD_DIMS
def test_bits_are_equal_over_runs(head_dim, causal, noise, poison):
    x = Packed(4 * LENGTHS, 8, 4, head_dim, causal, behind=(10, 10))
    expected = x.backward()
    for run in range(50):
        noise(run % 4)
        poison()
        assert_same_bits(x.backward(), expected)


@MASKS
@HEAD_DIMS
def test_other_sequences_do_not_change_a_sequences_bits(head_dim, causal, poison):
    whole = Packed(LENGTHS, 4, 2, head_dim, causal)
    expected = whole.backward()
    for order in ([8], [6, 1, 2, 9, 4], [0, 8, 8, 3, 1]):
        x = Packed([LENGTHS[i] for i in order], 4, 2, head_dim, causal, behind=(3, 200))
        pairs = zip(order, x.slices(), strict=True)
        x.take_forward(whole, [(rows, whole.slices()[i][0]) for i, (rows, _) in pairs])
        poison()
        grads = x.backward()
        for i, (rows, keys) in zip(order, x.slices(), strict=True):
            rows_there, keys_there = whole.slices()[i]
            there = (expected[0][rows_there], expected[1][keys_there], expected[2][keys_there])
            assert_same_bits((grads[0][rows], grads[1][keys], grads[2][keys]), there, f"of sequence {i}")


@MASKS
@HEAD_DIMS
def test_nan_stays_in_its_sequence(head_dim, causal):
    x = Packed([(100, 100), (70, 130), (33, 65)], 2, 2, head_dim, causal)
    expected = x.backward()
    rows, keys = x.slices()[1]
    for t, part in zip((*x.inputs, x.out), (rows, keys, keys, rows, rows), strict=True):
        t[part] = math.nan
    x.lse[:, rows] = math.nan
    grads = x.backward()
    for other_rows, other_keys in (x.slices()[0], x.slices()[2]):
        here = (grads[0][other_rows], grads[1][other_keys], grads[2][other_keys])
        assert_same_bits(here, (expected[0][other_rows], expected[1][other_keys], expected[2][other_keys]))
    assert grads[0][rows].isnan().any()


@MASKS
@pytest.mark.parametrize("num_sequences", [32, 33, 1025, 3000])
def test_many_short_sequences(num_sequences, causal):
    """As many as the search for a sequence takes one, two and three rounds for; many of them are empty."""
    rng = random.Random(num_sequences)
    lengths = [(rng.choice([0, 1, 5, 40, 130]), rng.choice([0, 1, 7, 64, 129])) for _ in range(num_sequences)]
    x = Packed(lengths, 2, 1, 64, causal, behind=(64, 64))
    first = dict(zip(reversed(lengths), reversed(x.slices()), strict=True))
    x.take_forward(x, [(rows, first[pair][0]) for pair, (rows, _) in zip(lengths, x.slices(), strict=True)])
    grads = x.backward()
    assert_same_bits(x.backward(), grads)

    def of(rows, keys):
        return grads[0][rows], grads[1][keys], grads[2][keys]

    for pair, there in zip(lengths, x.slices(), strict=True):
        assert_same_bits(of(*there), of(*first[pair]), f"of {pair}")
    for pair, there in first.items():
        if not min(pair):
            assert all((grad == 0).all() for grad in of(*there))
            continue
        alone = Packed([pair], 2, 1, 64, causal)
        alone.take_forward(x, [(slice(None), there[0])])
        assert_same_bits(of(*there), alone.backward(), f"of {pair} alone")
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 40)], [(300, 0), (0, 40)]], ids=str)
def test_no_pair_of_a_query_and_a_key(lengths, poison):
    x = Packed(lengths, 2, 2, 64, True, behind=(0, 0))
    poison()
    assert all((grad == 0).all() for grad in x.backward())


@MASKS
@pytest.mark.parametrize("num_heads_kv", [4, 1])
def test_forward_equals_fp64(num_heads_kv, causal, poison):
    x = Packed(LENGTHS, 4, num_heads_kv, 128, causal, behind=(50, 90))
    poison()
    out, lse = x.forward()
    assert lse.shape == (4, len(out)) and lse.is_contiguous() and out.is_contiguous()
    for rows, keys in x.slices():
        if not both(rows, keys):
            assert (out[rows] == 0).all() and (lse[:, rows] == -math.inf).all()
            continue
        _, q, k, v, _, _ = x.one(rows, keys)
        ref_out, ref_lse = attention_forward_ref(q, k, v, x.scale, causal)
        assert relative_error(out[None, rows], ref_out) < torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(lse[None, :, rows].double(), ref_lse, rtol=0, atol=LSE_TOLERANCE)
    assert (out[x.starts[0][-1] :] == 0).all() and (lse[:, x.starts[0][-1] :] == -math.inf).all()


@MASKS
def test_forward_of_single_queries(causal):
    x = Packed([(1, 700), (0, 3), (1, 1)], 4, 1, 128, causal)
    for rows, keys in (x.slices()[0], x.slices()[2]):
        _, q, k, v, _, _ = x.one(rows, keys)
        ref_out, ref_lse = attention_forward_ref(q, k, v, x.scale, causal)
        assert relative_error(x.out[None, rows], ref_out) < torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(x.lse[None, :, rows].double(), ref_lse, rtol=0, atol=LSE_TOLERANCE)


def test_forward_and_backward_do_not_wait_for_the_device():
    x = Packed(LENGTHS, 4, 2, 128, True)
    x.backward()  # compiled before
    q, k, v = (t.clone().requires_grad_() for t in x.inputs[:3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_varlen_func(q, k, v, *x.lengths, x.scale, True).backward(x.inputs.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits((q.grad, k.grad, v.grad), x.backward())


def test_a_graph_replays_with_other_lengths(poison):
    x, other = Packed([(512, 300), (200, 400)], 4, 4, 128, True), Packed([(200, 400), (512, 300)], 4, 4, 128, True)
    x.backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = x.backward()
    expected = [packed.backward() for packed in (x, other)]
    saved = [[t.clone() for t in (*packed.inputs, packed.out, packed.lse, *packed.cu_seqlens)] for packed in (x, other)]
    for turn in (0, 1, 0):
        for target, source in zip((*x.inputs, x.out, x.lse, *x.cu_seqlens), saved[turn], strict=True):
            target.copy_(source)
        poison()
        graph.replay()
        assert_same_bits(grads, expected[turn])


def test_opcheck():
    x = Packed(LENGTHS[1:5], 4, 2, 64, True)
    q, k, v, dout = x.inputs
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(
        torch.ops.cute_dash.attention_varlen_forward.default, (*leaves, *x.lengths, 0.1, True, -1, -1, "baseline")
    )
    arguments = (dout, q, k, v, x.out, x.lse, *x.lengths, 0.1, True, -1, -1, "baseline")
    torch.library.opcheck(torch.ops.cute_dash.attention_varlen_backward.default, arguments)


def test_strides_do_not_change_the_bits():
    x = Packed(LENGTHS, 4, 4, 128, True)
    expected = x.backward()
    layouts = {
        "heads first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "fused": lambda t: torch.cat([t, torch.full_like(t, math.nan)], dim=1)[:, :4],
        "last dim strided": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for name, change in layouts.items():
        y = Packed(LENGTHS, 4, 4, 128, True)
        y.inputs, y.out, y.lse = AttentionInputs(*map(change, x.inputs)), change(x.out), x.lse
        assert_same_bits(y.backward(), expected, name)
