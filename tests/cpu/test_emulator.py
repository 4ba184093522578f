"""The emulator: right gradients, order and nothing else decides the bits, and wrong schedules are caught."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from cute_dash import emulator, registry
from cute_dash.check import ScheduleError
from cute_dash.config import BwdConfig, get_config
from cute_dash.problem import normalize_mask
from cute_dash.schedule import DenseSchedule
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    random_inputs,
    relative_error,
)

FP32_TOLERANCE = 2e-6  # relative; a few hundred fp32 additions and an exp2
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
EVERY_SCHEDULE = pytest.mark.parametrize("name", registry.available())
LENGTHS = [(1, 1), (1, 128), (127, 129), (239, 1), (799, 3), (113, 203), (257, 256), (256, 257), (256, 64), (300, 520)]
SCALE = 0.125
SEEDS = range(6)
KV_HEADS = pytest.mark.parametrize("num_heads_kv", [8, 4, 2, 1], ids=lambda n: f"{8 // n} to 1")  # of 8 query heads


def schedule_or_skip(name, seqlen_q, seqlen_k, causal, *, window_size=(-1, -1), batch=1, num_heads=2, head_dim=64):
    causal, window = normalize_mask(causal, window_size, seqlen_q, seqlen_k)
    config = get_config(head_dim, causal, window is not None)
    shape = config.make_shape(batch, num_heads, seqlen_q, seqlen_k, window)
    try:
        return registry.resolve(name, shape)
    except ValueError as error:
        pytest.skip(str(error))


def run(x, causal, schedule, *, window_size=(-1, -1), **options):
    out, lse = emulator.forward(x.q, x.k, x.v, SCALE, causal, window_size)
    return emulator.backward(
        x.dout, x.q, x.k, x.v, out, lse, SCALE, causal, schedule, window_size=window_size, **options
    )


def assert_same_bits(grads, expected):
    for name, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert_bitwise_equal(a, b, name)


@MASKS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_forward_equals_fp64(lengths, causal):
    x = random_inputs(2, *lengths, num_heads=2, head_dim=64, dtype=torch.float32)
    out, lse = emulator.forward(x.q, x.k, x.v, SCALE, causal)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, SCALE, causal)
    assert out.shape == x.q.shape and lse.dtype == torch.float32
    assert relative_error(out, ref_out) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)


@MASKS
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gradients_equal_fp64_for_all_lengths(lengths, causal):
    assert_gradients_equal_fp64("auto_invariant", lengths, causal)


@MASKS
@pytest.mark.parametrize("lengths", [(127, 129), (257, 256), (239, 1)], ids=str)
@EVERY_SCHEDULE
def test_gradients_equal_fp64_for_all_schedules(name, lengths, causal):
    assert_gradients_equal_fp64(name, lengths, causal)


# with LENGTHS: windows narrower than a tile and wider than the sequence, one side or both, right above seqlen_k
WINDOWS = [(0, 0), (50, 0), (0, 60), (70, 70), (200, 10), (-1, 30), (130, -1), (1000, 0), (1000, 1000)]


@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [*LENGTHS, (100, 700), (700, 100)], ids=str)
def test_windows_equal_fp64_for_all_lengths(lengths, window_size):
    assert_gradients_equal_fp64("auto_invariant", lengths, False, window_size)
    x = random_inputs(1, *lengths, num_heads=1, head_dim=64, dtype=torch.float32)
    out, lse = emulator.forward(x.q, x.k, x.v, SCALE, False, window_size)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, SCALE, False, window_size)
    assert relative_error(out, ref_out) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window_size", [(90, 0), (90, 5), (300, 200), (0, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("lengths", [(400, 400), (100, 700), (700, 100)], ids=str)
@EVERY_SCHEDULE
def test_windows_equal_fp64_for_all_schedules(name, lengths, causal, window_size):
    assert_gradients_equal_fp64(name, lengths, causal, window_size)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_window_that_hides_nothing_has_the_bits_of_none(causal):
    x = random_inputs(1, 300, 260, num_heads=2, head_dim=128)
    expected = run(x, causal, "auto")
    for window_size in ((259, 299), (1000, 1000), (-1, 299), (259, -1)):
        assert_same_bits(run(x, causal, "auto", window_size=window_size), expected)
    if causal:
        for window_size in ((-1, 0), (-1, 7), (259, 0)):
            assert_same_bits(run(x, True, "auto", window_size=window_size), expected)
        assert_same_bits(run(x, False, "auto", window_size=(-1, 0)), expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_and_queries_beyond_a_window_get_zero(head_dim):
    """100 queries at the end of 700 keys: the first 570 see nobody; 700 queries: the first 570 see nothing."""
    x = random_inputs(1, 100, 700, num_heads=2, head_dim=head_dim)
    dq, dk, dv = run(x, False, "auto", window_size=(30, 0))
    assert (dk[:, :570] == 0).all() and (dv[:, :570] == 0).all()
    assert (dk[:, 570:].abs().amax(dim=-1) > 0).all() and (dv[:, 570:].abs().amax(dim=-1) > 0).all()
    x = random_inputs(1, 700, 100, num_heads=2, head_dim=head_dim)
    out, lse = emulator.forward(x.q, x.k, x.v, SCALE, False, (30, 30))
    dq, dk, dv = run(x, False, "auto", window_size=(30, 30))
    assert (dq[:, :570] == 0).all() and (out[:, :570] == 0).all() and (lse[:, :, :570] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 570:]).all() and all(torch.isfinite(t).all() for t in (out, dq, dk, dv))


def test_tiles_outside_the_window_are_not_visited(monkeypatch):
    """Work for each visited tile only, and masking for each that needs it: 32 x 16 tiles of 64 x 128, window 512."""
    steps, masked = [], []
    step, visible = emulator._BackwardRun._step, emulator._visible
    monkeypatch.setattr(
        emulator._BackwardRun,
        "_step",
        lambda self, m, tile, *a: steps.append((m, tile.n_block)) or step(self, m, tile, *a),
    )
    monkeypatch.setattr(emulator, "_visible", lambda *a: masked.append(a[:2]) or visible(*a))
    x = random_inputs(1, 2048, 2048, num_heads=1, head_dim=128)
    run(x, False, "auto", window_size=(512, 0))
    # KV tile n is seen by queries 128 n .. 128 n + 639
    assert len(steps) == len(set(steps)) == 12 * 10 + 8 + 6 + 4 + 2
    # two at each end of a range; the last four KV tiles have no left end; one mask is the forward's
    assert len(masked) - 1 == 12 * 4 + 4 * 2


def assert_gradients_equal_fp64(name, lengths, causal, window_size=(-1, -1)):
    x = random_inputs(1, *lengths, num_heads=2, head_dim=64, dtype=torch.float32)
    grads = run(x, causal, schedule_or_skip(name, *lengths, causal, window_size=window_size), window_size=window_size)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal, window_size)
    scale = max(ref.norm().item() for ref in refs)  # with a single key dq and dk are exactly 0
    for grad, ref in zip(grads, refs, strict=True):
        assert (grad.double() - ref).norm().item() < FP32_TOLERANCE * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@MASKS
def test_rounding_costs_what_the_dtype_must_cost(causal, head_dim, dtype):
    x = random_inputs(2, 400, 400, num_heads=2, head_dim=head_dim, dtype=dtype)
    args = (x.dout, x.q, x.k, x.v, SCALE, causal)
    refs, comparators = attention_backward_ref(*args), attention_backward_rounded(*args)
    for name, grad, ref, comparator in zip(("dq", "dk", "dv"), run(x, causal, "auto"), refs, comparators, strict=True):
        assert grad.dtype == dtype
        assert_accurate(grad, ref, comparator, name, factor=1.1)


def run_with_constant_p(p, c_n, c_m, schedule, *, dtype=torch.float32):
    """Backward of a problem made by hand, with P = p everywhere, dPsum = 0 and softmax_scale 1.

    Key n has v = c_n[n] e0 and k = e0, query m has dout = c_m[m] e0 and q = e1, so that S = q k = 0 and p comes from
    LSE: dP = c_m c_n, dV = e0 sum_m p c_m, dK = e1 sum_m p c_m c_n, dQ = e0 sum_n p c_m c_n.
    """
    e = torch.eye(64)
    q, k = e[1].expand(len(c_m), 64), e[0].expand(len(c_n), 64)
    v, dout = c_n[:, None] * e[0], c_m[:, None] * e[0]
    dout, q, k, v = (x[None, :, None].to(dtype) for x in (dout, q, k, v))
    lse = torch.full((1, 1, len(c_m)), -math.log(p))
    grads = emulator.backward(dout, q, k, v, torch.zeros_like(q), lse, 1.0, False, schedule)
    dq, dk, dv = (grad[0, :, 0] for grad in grads)
    return dq[:, 0], dk[:, 1], dv[:, 0]


@MASKS
@KV_HEADS
@pytest.mark.parametrize("window_size", [(-1, -1), (40, 10)], ids=["", "window"])
@pytest.mark.parametrize("lengths", [(150, 300), (300, 150)], ids=str)
def test_grouped_heads_equal_fp64(lengths, window_size, num_heads_kv, causal):
    """With the window, 150 queries leave the first of 3 KV tiles no step, and some of 300 see no key."""
    x = random_inputs(2, *lengths, num_heads=8, num_heads_kv=num_heads_kv, head_dim=64, dtype=torch.float32)
    out, lse = emulator.forward(x.q, x.k, x.v, SCALE, causal, window_size)
    ref_out, ref_lse = attention_forward_ref(x.q, x.k, x.v, SCALE, causal, window_size)
    assert relative_error(out, ref_out) < FP32_TOLERANCE
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)
    tensors, options = (x.dout, x.q, x.k, x.v, out, lse), dict(window_size=window_size, interleaving=0)
    grads = emulator.backward(*tensors, SCALE, causal, "auto", **options)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal, window_size)
    for grad, ref, leaf in zip(grads, refs, (x.q, x.k, x.v), strict=True):
        assert grad.shape == leaf.shape
        assert relative_error(grad, ref) < FP32_TOLERANCE


def test_the_references_of_grouped_heads_are_those_of_repeated_heads():
    x = random_inputs(1, 70, 90, num_heads=6, num_heads_kv=2, head_dim=64, dtype=torch.float64)
    k, v = (t.repeat_interleave(3, dim=2) for t in (x.k, x.v))
    repeated = attention_backward_ref(x.dout, x.q, k, v, SCALE, True)
    dq, dk, dv = attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, True)
    assert torch.equal(dq, repeated[0])
    for grad, whole in ((dk, repeated[1]), (dv, repeated[2])):
        for head in range(2):
            torch.testing.assert_close(grad[:, :, head], whole[:, :, 3 * head : 3 * head + 3].sum(2))


def test_p_and_ds_are_rounded_to_the_input_dtype():
    """100 times 1.003: bf16 has 1 and 1 + 2^-7 there, and near 100 it has 100 and 100.5."""
    ones = torch.ones(100)
    for grad in run_with_constant_p(1.003, ones, ones, "baseline"):
        torch.testing.assert_close(grad, torch.full((100,), 100.3))
    for grad in run_with_constant_p(1.003, ones, ones, "baseline", dtype=torch.bfloat16):
        assert (grad == 100.0).all()


@pytest.mark.parametrize("window_size", [(-1, -1), (200, 40)], ids=["", "window"])
@MASKS
@EVERY_SCHEDULE
def test_bits_do_not_depend_on_the_interleaving(name, causal, window_size):
    schedule = schedule_or_skip(name, 500, 500, causal, window_size=window_size)
    if not schedule.ordered:
        pytest.skip(f"{name} promises no bits")
    x = random_inputs(1, 500, 500, num_heads=2, head_dim=64, dtype=torch.float32)
    expected = run(x, causal, schedule, window_size=window_size)
    for seed in SEEDS:
        assert_same_bits(run(x, causal, schedule, window_size=window_size, interleaving=seed), expected)


@MASKS
@EVERY_SCHEDULE
@pytest.mark.parametrize("window_size", [(-1, -1), (200, 40)], ids=["", "window"])
def test_bits_of_grouped_heads_do_not_depend_on_the_interleaving(name, causal, window_size):
    schedule = schedule_or_skip(name, 500, 500, causal, window_size=window_size)
    if not schedule.ordered:
        pytest.skip(f"{name} promises no bits")
    x = random_inputs(1, 500, 500, num_heads=6, num_heads_kv=2, head_dim=64, dtype=torch.float32)
    expected = run(x, causal, schedule, window_size=window_size)
    for seed in SEEDS[:3]:
        assert_same_bits(run(x, causal, schedule, window_size=window_size, interleaving=seed), expected)


@MASKS
@pytest.mark.parametrize("name", ["baseline", "shortest_first"])
def test_dq_of_a_query_head_is_that_of_a_head_of_its_own(name, causal):
    """Head by head the same steps in the same order; dk and dv are one sum over the group, not a sum of sums."""
    x = random_inputs(1, 300, 300, num_heads=4, num_heads_kv=1, head_dim=64, dtype=torch.float32)
    grouped = run(x, causal, name)
    repeated = run(x._replace(k=x.k.expand_as(x.q), v=x.v.expand_as(x.q)), causal, name)
    assert_bitwise_equal(grouped[0], repeated[0], "dq")
    for grad, parts in zip(grouped[1:], repeated[1:], strict=True):
        assert relative_error(grad[:, :, 0], parts.double().sum(2)) < FP32_TOLERANCE


@MASKS
def test_bits_of_the_unordered_comparator_depend_on_the_interleaving(causal):
    x = random_inputs(1, 500, 500, num_heads=2, head_dim=64, dtype=torch.float32)
    results = [run(x, causal, "unordered", interleaving=seed) for seed in SEEDS]
    assert any(not torch.equal(results[0][0], result[0]) for result in results[1:])
    for result in results[1:]:
        for grad, expected in zip(result[1:], results[0][1:], strict=True):
            assert torch.equal(grad, expected)  # dk and dv have an owner each


@dataclass(frozen=True)
class Fold(DenseSchedule):
    """Three m_blocks, three n_blocks, and any accumulation and loop order; `order` is the inverse of lock values."""

    order: tuple[int, ...] = (0, 1, 2)
    loop: tuple[int, ...] = (0, 1, 2)
    name = "fold"

    def min_resident_ctas(self, shape):
        return 3

    def get_m_block(self, step, tile, shape):
        return self.loop[step]

    def get_lock_value(self, m_block, tile, shape):
        return self.order.index(tile.n_block)


def by_tile(constants):
    """One nonzero value per tile of 128 tokens."""
    x = torch.zeros(3, 128)
    x[:, 0] = torch.tensor(constants)
    return x.flatten()


# in fp32 the 1 survives only if it is added to 2^30 - 2^30
BIG_ONE_BIG = (2.0**30, 1.0, -(2.0**30))
PERMUTATIONS = pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)


@PERMUTATIONS
def test_dq_adds_in_the_order_of_the_lock_values(order):
    schedule = Fold(order=order)
    dq, _, _ = run_with_constant_p(1.0, by_tile(BIG_ONE_BIG), by_tile((1.0, 1.0, 1.0)), schedule)
    one_is_last = order[2] == 1
    assert dq[::128].tolist() == 3 * [float(one_is_last)]


@PERMUTATIONS
def test_dk_and_dv_add_in_loop_order(order):
    schedule = Fold(loop=order)
    _, dk, dv = run_with_constant_p(1.0, by_tile((1.0, 1.0, 1.0)), by_tile(BIG_ONE_BIG), schedule)
    one_is_last = order[2] == 1
    assert dk[::128].tolist() == 3 * [float(one_is_last)]
    assert dv.tolist() == 384 * [float(one_is_last)]


@EVERY_SCHEDULE
@MASKS
@pytest.mark.parametrize("window_size", [(-1, -1), (150, 40)], ids=["", "window"])
def test_batch_invariant_schedules_keep_a_sequences_bits(name, causal, window_size):
    schedule = schedule_or_skip(name, 300, 400, causal, window_size=window_size, batch=3)
    if not schedule.batch_invariant:
        pytest.skip(f"{name} is not batch invariant")
    x = random_inputs(3, 300, 400, num_heads=2, head_dim=64, dtype=torch.float32)
    whole = run(x, causal, schedule, window_size=window_size)
    alone = run(type(x)(*(t[1:2] for t in x)), causal, schedule, window_size=window_size)
    assert_same_bits(alone, [grad[1:2] for grad in whole])


@EVERY_SCHEDULE
def test_queries_without_keys_get_zero_and_nothing_is_nan(name):
    schedule = schedule_or_skip(name, 256, 64, True)
    x = random_inputs(1, 256, 64, num_heads=2, head_dim=64)
    out, lse = emulator.forward(x.q, x.k, x.v, SCALE, causal=True)
    dq, dk, dv = emulator.backward(x.dout, x.q, x.k, x.v, out, lse, SCALE, True, schedule)
    blind = 256 - 64
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == -math.inf).all() and (dq[:, :blind] == 0).all()
    assert torch.isfinite(lse[:, :, blind:]).all() and (dq[:, blind:] != 0).any()
    assert all(torch.isfinite(t).all() for t in (out, dq, dk, dv))


def test_tile_shapes_can_be_chosen():
    x = random_inputs(1, 100, 300, num_heads=1, head_dim=64, dtype=torch.float32)
    config = BwdConfig(head_dim=64, causal=True, tile_m=64, tile_n=128)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, True)
    for grad, ref in zip(run(x, True, "shortest_first", config=config, interleaving=0), refs, strict=True):
        assert relative_error(grad, ref) < FP32_TOLERANCE


@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("lengths", [(300, 520), (97, 96), (700, 193)], ids=str)
@pytest.mark.parametrize("head_dim_v", [192, 128])
def test_gradients_in_kv_tiles_of_96_keys_equal_fp64(head_dim_v, lengths, mask, monkeypatch):
    """Neither a power of two nor a multiple of the queries of a Q tile."""
    causal, window_size = mask == "causal", (130, 40) if mask == "local" else (-1, -1)
    config = get_config(192, causal, mask == "local", head_dim_v)
    x = random_inputs(1, *lengths, 4, 192, num_heads_kv=2, head_dim_v=head_dim_v, dtype=torch.float32)
    widths, step = [], emulator._BackwardRun._step
    monkeypatch.setattr(
        emulator._BackwardRun,
        "_step",
        lambda self, m, tile, dk, dv: widths.append(len(dk)) or step(self, m, tile, dk, dv),
    )
    grads = run(x, causal, "shortest_first", window_size=window_size, config=config, interleaving=1)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal, window_size)
    for grad, ref in zip(grads, refs, strict=True):
        assert relative_error(grad, ref) < FP32_TOLERANCE
    assert set(widths) == {96, lengths[1] % 96 or 96}


@dataclass(frozen=True)
class SkipsAPlace(DenseSchedule):
    """Lock values from 1: nobody ever stores."""

    name = "skips_a_place"

    def get_lock_value(self, m_block, tile, shape):
        return 1 + tile.n_block


@dataclass(frozen=True)
class Ring(DenseSchedule):
    """n_block 0 waits for n_block 1, which is claimed later; says that one CTA is enough."""

    name = "ring"

    def get_lock_value(self, m_block, tile, shape):
        return shape.num_n_blocks - 1 - tile.n_block


@dataclass(frozen=True)
class StopsEarly(DenseSchedule):
    """The last work tile leaves out its last m_block."""

    name = "stops_early"

    def get_num_steps(self, tile, shape):
        return super().get_num_steps(tile, shape) - int(tile.n_block == shape.num_n_blocks - 1)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (SkipsAPlace(), r"'skips_a_place' deadlocks.*n_block=0.*lock value 1 of dQ tile m_block=0, which stays at 0"),
        (Ring(), r"'ring' deadlocks with 1 resident CTAs: .*n_block=0.*lock value 1"),
        (StopsEarly(), r"'stops_early': dQ tile m_block=1 .*got 1 contributions, 2 KV tiles reach it"),
    ],
    ids=["skips_a_place", "ring", "stops_early"],
)
def test_wrong_schedules_raise_and_name_the_tile(schedule, message):
    x = random_inputs(1, 256, 256, num_heads=1, head_dim=64)
    with pytest.raises(ScheduleError, match=message):
        run(x, False, schedule)


def test_the_ring_runs_with_two_resident_ctas():
    x = random_inputs(1, 256, 256, num_heads=1, head_dim=64, dtype=torch.float32)

    @dataclass(frozen=True)
    class HonestRing(Ring):
        def min_resident_ctas(self, shape):
            return 2

    expected = run(x, False, "shortest_first")  # the same loop and accumulation order, claimed right to left
    for seed in SEEDS:
        assert_same_bits(run(x, False, HonestRing(), interleaving=seed), expected)


# Head dims between those of the tiles


@pytest.mark.parametrize("name", ["auto", "hybrid", "unordered"])
@pytest.mark.parametrize("head_dim", [32, 40, 72, 96, 120, 192, 248])
@MASKS
def test_any_head_dim_equals_fp64(causal, head_dim, name):
    x = random_inputs(1, 203, 300, num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=torch.float32)
    refs = attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal)
    for grad, ref, like in zip(run(x, causal, name), refs, (x.q, x.k, x.v), strict=True):
        assert grad.shape == like.shape
        assert relative_error(grad, ref) < FP32_TOLERANCE


@pytest.mark.parametrize(("head_dim", "padded"), [(32, 64), (56, 64), (72, 96), (112, 128), (144, 192), (200, 256)])
@MASKS
def test_a_head_dim_has_the_order_of_its_tiles(causal, head_dim, padded):
    """As many zeros behind q, k and v as the tiles hold change nothing but the fp32 rounding of S and dP."""
    x = random_inputs(1, 300, 300, num_heads=2, head_dim=head_dim, dtype=torch.float32)
    wide = type(x)(*(torch.nn.functional.pad(t, (0, padded - head_dim)) for t in x))
    for grad, wide_grad in zip(run(x, causal, "auto"), run(wide, causal, "auto"), strict=True):
        assert relative_error(grad, wide_grad[..., :head_dim]) < FP32_TOLERANCE
        assert (wide_grad[..., head_dim:] == 0).all()


@pytest.mark.parametrize("window_size", [(-1, -1), (100, 20)], ids=str)
@MASKS
def test_a_smaller_head_dim_of_v(causal, window_size):
    """V's own columns, and the same bits in every interleaving."""
    x = random_inputs(1, 203, 300, num_heads=4, num_heads_kv=2, head_dim=192, head_dim_v=128, dtype=torch.float32)
    grads = run(x, causal, "auto", window_size=window_size)
    assert [grad.shape[-1] for grad in grads] == [192, 192, 128]
    for grad, ref in zip(grads, attention_backward_ref(x.dout, x.q, x.k, x.v, SCALE, causal, window_size), strict=True):
        assert relative_error(grad, ref) < FP32_TOLERANCE
    for seed in SEEDS:
        assert_same_bits(run(x, causal, "auto", window_size=window_size, interleaving=seed), grads)
