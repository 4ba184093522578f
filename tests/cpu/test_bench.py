"""The bench without a GPU: formulas, gate, timing on a fake clock, results file, tables, command line."""

import contextlib
import csv
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import bench.__main__ as command
from bench import host, implementations, model_vs_measured, report
from bench.cells import Cell, draw_lengths, format_seqlen, list_cells, parse_seqlen, standard_cell
from bench.device import num_input_sets
from bench.gate import Verdict, check_candidate
from bench.implementations import (
    OURS,
    PEERS,
    SHIPPED_CONFIG,
    Candidate,
    ConfigChange,
    find_candidates,
    parse_peers,
    parse_schedules,
)
from bench.reference import Inputs, choose_streams, make_yardstick, reference_gradients
from bench.results import FAILED, FORMAT, NOT_APPLICABLE, Key, Results, Untimed, check_same_environment, merge
from bench.runner import Plan, Run, make_record, with_ratios
from bench.timing import BurstPlan, Timing, order_in_round, time_burst, time_sustained
from cute_dash import launch, registry
from cute_dash.config import get_config
from cute_dash.testing import random_inputs, why_no_hopper

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "sm_count": 132,
    "driver": "580.1",
    "torch": "2.11",
    "dsl": "4.8.1",
    "commit": "0123456789abcdef",
    "date": "2026-01-02T03:04:05+00:00",
    "command": "python -m bench --out x.json",
}
BASELINE, SHIFT, UNORDERED = (
    Key(OURS, "det", "baseline"),
    Key(OURS, "det", "shift"),
    Key(OURS, "nondet", "unordered"),
)
FA4_DET, FA4_NONDET = Key("flash-attn-4", "det", None), Key("flash-attn-4", "nondet", None)


# Cells


def _rows(name):
    with (ROOT / "bench" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_flops_are_those_of_the_five_matmuls():
    cell = Cell(head_dim=64, mask="full", seqlen=512, batch=3, heads=5)
    num_multiplications = 512 * 512 * 64  # S, dP, dV, dK, dQ: each has S * S * D of them per stream
    assert cell.flops == 5 * 2 * num_multiplications * 15
    assert replace(cell, mask="causal").flops == cell.flops / 2


@pytest.mark.parametrize("head_dim", [40, 96])
def test_flops_are_those_of_the_tensors_head_dim(head_dim):
    """Not of the tiles', which hold zeros beyond it."""
    cell = standard_cell(head_dim, "full", 1024)
    assert cell.heads == 2048 // head_dim
    assert cell.flops == 5 * 2 * 1024 * 1024 * head_dim * cell.batch * cell.heads
    assert cell.problem_shape().tile_m == (128 if head_dim <= 64 else 64)


def test_flops_and_bytes_of_a_smaller_head_dim_of_v():
    cell = standard_cell(192, "full", 1024, heads=8, kv_heads=4, head_dim_v=128)
    pairs, tokens = 1024 * 1024 * cell.batch * 8, 1024 * cell.batch
    assert cell.flops == 2 * pairs * (3 * 192 + 2 * 128)  # S, dQ, dK and dP, dV
    assert cell.input_bytes == tokens * (2 * (8 * 192 + 4 * 192 + 4 * 128 + 2 * 8 * 128) + 4 * 8)
    moved_bytes = 2 * tokens * (2 * 8 * 192 + 2 * 4 * 192 + 2 * 4 * 128 + 2 * 8 * 128)
    assert cell.floor_ms(1e9, 1.0) == pytest.approx(moved_bytes * 1e-9)
    assert cell.label == "hd192/128 full 1k h8 kv4".replace(" h8", f" b{cell.batch} h8")
    assert cell.shipped_config().head_dims == "192/128"
    assert standard_cell(64, "full", 1024, head_dim_v=64) == standard_cell(64, "full", 1024)


@pytest.mark.parametrize("name", ["h200_peers.csv", "h800_dash_paper.csv"])
def test_flops_agree_with_published_rates(name):
    rows = _rows(name)
    assert len(rows) > 100
    for row in rows:
        cell = standard_cell(int(row["head_dim"]), row["mask"], int(row["seqlen"]))
        if "batch" in row:
            assert (cell.batch, cell.heads) == (int(row["batch"]), int(row["heads"]))
        # both figures of a row are rounded: ms to 3 or 4 digits behind the point, TFLOPS to one
        assert cell.tflops(float(row["ms"])) == pytest.approx(float(row["tflops"]), rel=2e-3), row


def test_the_24_standard_cells():
    cells = list_cells()
    assert len(set(cells)) == 24
    assert {(c.head_dim, c.mask) for c in cells} == {(64, "causal"), (64, "full"), (128, "causal"), (128, "full")}
    assert all(c.batch * c.seqlen == 16384 and c.heads * c.head_dim == 2048 and c.dtype == "bf16" for c in cells)
    assert sorted({c.seqlen for c in cells}) == [512, 1024, 2048, 4096, 8192, 16384]


def test_any_shape_by_arguments():
    (cell,) = list_cells([128], ["full"], [799], batch=2, heads=3, dtype="fp16")
    assert cell == Cell(128, "full", 799, 2, 3, "fp16")
    assert cell.label == "hd128 full 799 b2 h3 fp16"
    assert standard_cell(128, "causal", 8192).label == "hd128 causal 8k"
    grouped = standard_cell(128, "causal", 8192, kv_heads=4)
    assert grouped.label == "hd128 causal 8k kv4" and grouped.flops == standard_cell(128, "causal", 8192).flops
    shape = grouped.problem_shape()
    assert (shape.num_heads, shape.group_size, shape.num_query_heads) == (4, 4, 16)
    assert grouped.input_bytes == grouped.tensor_bytes * 3 + grouped.tensor_bytes // 2 + 4 * 2 * 16 * 8192
    with pytest.raises(
        ValueError, match="'local:-1:0' .* local:LEFT:RIGHT in tokens, each at least 0, or inf for no limit"
    ):
        replace(grouped, mask="local:-1:0")
    with pytest.raises(ValueError, match="kv_heads=3 must divide heads=16"):
        replace(grouped, kv_heads=3)
    assert standard_cell(64, "full", 32768).batch == 1


@pytest.mark.parametrize(
    "mask, window_size", [("local:64:0", (64, 0)), ("local:inf:9", (-1, 9)), ("local:3:99", (3, 99))]
)
def test_cells_with_a_window(mask, window_size):
    cell = standard_cell(128, mask, 96, batch=1, heads=1)
    assert cell.window_size == window_size and cell.label.startswith(f"hd128 {mask} 96")
    offsets = torch.arange(96)[None, :] - torch.arange(96)[:, None]
    left, right = (96 if side < 0 else side for side in window_size)
    pairs = int(((offsets >= -left) & (offsets <= right)).sum())
    assert cell.flops == 5 * 2 * pairs * 128
    assert cell.problem_shape().mask == "local"
    hides_nothing = standard_cell(128, "local:96:inf", 96)
    assert hides_nothing.flops == standard_cell(128, "full", 96).flops
    assert hides_nothing.problem_shape().mask == "full"


def test_a_peer_without_windows_is_not_applicable():
    peer = SimpleNamespace(name="other", missing=lambda: None, refuses=PEERS["cudnn"].refuses, prepare=None)
    candidates, untimed = find_candidates(standard_cell(64, "local:64:0", 512), ["shortest_first", "shift"], [peer])
    assert [c.key.schedule for c in candidates] == ["shortest_first"]
    assert [(u.implementation, u.verdict) for u in untimed] == [
        (OURS, NOT_APPLICABLE),
        ("other", NOT_APPLICABLE),
        ("other", NOT_APPLICABLE),
    ]
    candidates, untimed = find_candidates(standard_cell(64, "full", 512), [], [peer])
    assert len(candidates) == 2 and not untimed


@pytest.mark.parametrize("window_size", [(20, 0), (7, 30), (-1, 5)], ids=str)
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_reference_of_a_window_equals_automatic_differentiation(kv_heads, window_size):
    inputs = replace(_inputs(False, batch=2, seqlen=75, heads=3, kv_heads=kv_heads), window_size=window_size)
    streams = {3: [0, 4, 5], 1: [1]}[kv_heads]
    query_streams = {3: [0, 4, 5], 1: [3, 4, 5]}[kv_heads]
    got = reference_gradients(inputs, streams, chunk_rows=32)
    for g, expected, pick in zip(got, _autograd(inputs), (query_streams, streams, streams), strict=True):
        torch.testing.assert_close(g, expected.transpose(1, 2).flatten(0, 1)[pick], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("field, value", [("seqlen", 0), ("heads", -1), ("mask", "local"), ("dtype", "fp8")])
def test_a_bad_cell_names_the_argument(field, value):
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        replace(standard_cell(64, "full", 512), **{field: value})


def test_seqlens_are_read_and_written():
    assert [parse_seqlen(t) for t in ("512", "8k", "1K")] == [512, 8192, 1024]
    assert [format_seqlen(s) for s in (512, 8192, 1025)] == ["512", "8k", "1025"]
    for text in ("", "k", "0", "-1", "8kk", "1.5k"):
        with pytest.raises(ValueError, match="seqlen="):
            parse_seqlen(text)


def test_floor_takes_the_slower_of_matmuls_and_traffic():
    cell = standard_cell(128, "full", 16384)  # 5.5e12 FLOPs, eight tensors of 64 MiB
    assert cell.floor_ms(gemm_tflops=cell.flops / 1e12, copy_tb_per_s=100.0) == pytest.approx(1000.0)
    assert cell.floor_ms(gemm_tflops=1e9, copy_tb_per_s=4.0) == pytest.approx(8 * 2**26 / 4e12 * 1e3)


def test_input_sets_outgrow_the_cache():
    l2 = 60 << 20
    assert num_input_sets(standard_cell(64, "full", 512).input_bytes, l2) == 1
    for mib in (59, 40, 20, 10):
        num_sets = num_input_sets(mib << 20, l2)
        assert num_sets >= 2 and num_sets * (mib << 20) >= 2 * l2
    assert num_input_sets(1, l2) == 16


# Reference and gate


def _inputs(causal, batch=3, seqlen=96, heads=4, head_dim=64, dtype=torch.bfloat16, kv_heads=None):
    generator = torch.Generator().manual_seed(0)
    kv_heads = kv_heads or heads
    q, k, v, dout = (
        torch.randn((batch, seqlen, h, head_dim), generator=generator).to(dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    logits = torch.einsum("bihd,bjhd->bhij", q.float(), _repeated(k, q).float()) / math.sqrt(head_dim)
    if causal:
        logits += torch.full((seqlen, seqlen), -math.inf).triu(1)
    out = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), _repeated(v, q).float()).to(dtype)
    return Inputs(q, k, v, out, dout, logits.logsumexp(-1), 1 / math.sqrt(head_dim), causal)


def _repeated(x, q):
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _sequences(inputs):
    """Each packed sequence as a batch of one, without an LSE."""
    tensors = (t.split(inputs.lengths) for t in (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout))
    options = None, inputs.softmax_scale, inputs.causal, inputs.window_size
    return [Inputs(*(t[None] for t in part), *options) for part in zip(*tensors, strict=True)]


def _autograd(inputs):
    """Gradients in fp64 by automatic differentiation of the plain formula, in the shapes of q, k, v."""
    if inputs.lengths:
        parts = [_autograd(x) for x in _sequences(inputs)]
        return tuple(torch.cat([grad[0] for grad in grads]) for grads in zip(*parts, strict=True))
    q, k, v = (t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    logits = torch.einsum("bihd,bjhd->bhij", q, _repeated(k, q)) * inputs.softmax_scale
    if inputs.causal:
        logits = logits + torch.full(logits.shape[-2:], -math.inf, dtype=torch.float64).triu(1)
    left, right = inputs.window_size
    if left >= 0:
        logits = logits + torch.full(logits.shape[-2:], -math.inf, dtype=torch.float64).tril(-left - 1)
    if right >= 0:
        logits = logits + torch.full(logits.shape[-2:], -math.inf, dtype=torch.float64).triu(right + 1)
    out = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), _repeated(v, q))
    return torch.autograd.grad(out, (q, k, v), inputs.dout.double())


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "full"])
def case(request):
    inputs = _inputs(request.param)
    right = tuple(g.to(inputs.q.dtype) for g in _autograd(inputs))
    return SimpleNamespace(inputs=inputs, right=right, yardstick=make_yardstick(inputs))


def _check(case, grads, **kwargs):
    options = {"deterministic": True, "num_runs": 3, **kwargs}
    return check_candidate(lambda: lambda: tuple(g.clone() for g in grads), case.yardstick, **options)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_reference_equals_automatic_differentiation(causal):
    inputs = _inputs(causal, batch=2, seqlen=75, heads=3)
    streams = [0, 4, 5]
    got = reference_gradients(inputs, streams, chunk_rows=32)
    for g, expected in zip(got, _autograd(inputs), strict=True):
        expected = torch.stack([expected[s // 3, :, s % 3] for s in streams])
        torch.testing.assert_close(g, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_reference_of_grouped_heads_equals_automatic_differentiation(causal):
    inputs = _inputs(causal, batch=2, seqlen=75, heads=6, kv_heads=2)
    assert inputs.num_streams == 4
    got = reference_gradients(inputs, [1, 2], chunk_rows=32)
    dq, dk, dv = _autograd(inputs)
    torch.testing.assert_close(
        got[0], torch.cat([dq[0, :, 3:], dq[1, :, :3]], dim=1).transpose(0, 1), rtol=1e-10, atol=1e-12
    )
    for g, expected in zip(got[1:], (dk, dv), strict=True):
        torch.testing.assert_close(g, torch.stack([expected[0, :, 1], expected[1, :, 0]]), rtol=1e-10, atol=1e-12)
    yardstick = make_yardstick(inputs)
    assert yardstick.find_error(tuple(g.to(inputs.q.dtype) for g in (dq, dk, dv))) is None
    wrong = dk.clone()
    wrong[1, :, 1] *= 1.1
    assert yardstick.find_error(tuple(g.to(inputs.q.dtype) for g in (dq, wrong, dv))).startswith("error of dk")


def test_streams_reach_from_the_first_to_the_last():
    assert choose_streams(512) == [0, 170, 340, 511]
    assert choose_streams(3) == [0, 1, 2]


def test_budget_is_twice_the_error_of_the_flash_backward(case):
    for name, budget in enumerate(case.yardstick.budgets):
        flash, right = case.yardstick.flash[name], _autograd(case.inputs)[name]
        per_stream = [
            ((flash[b, :, h].double() - right[b, :, h]).norm() / right[b, :, h].norm()).item()
            for b, h in [divmod(s, 4) for s in case.yardstick.streams]
        ]
        assert budget == pytest.approx(max(2 * max(per_stream), 2**-8), rel=1e-6)


def test_right_gradients_with_equal_bits_pass(case):
    verdict = _check(case, case.right)
    assert verdict.passed and verdict.bitwise_runs == 3
    assert 0 < verdict.max_rel_err < 2**-8  # rounded to bf16 once


@pytest.mark.parametrize("name_idx", [0, 1, 2], ids=["dq", "dk", "dv"])
def test_an_error_beyond_the_budget_is_refused(case, name_idx):
    grads = list(case.right)
    grads[name_idx] = grads[name_idx] * (1 + 3 * case.yardstick.budgets[name_idx])
    verdict = _check(case, grads)
    assert not verdict.passed and ("dq", "dk", "dv")[name_idx] in verdict.reason


def test_one_wrong_stream_without_a_reference_is_refused(case):
    stream = next(s for s in range(12) if s not in case.yardstick.streams)
    dk = case.right[1].clone()
    dk[stream // 4, :, stream % 4] *= 1.1
    verdict = _check(case, (case.right[0], dk, case.right[2]))
    assert not verdict.passed and "dk" in verdict.reason and "some stream" in verdict.reason


def test_nan_is_refused(case):
    dv = case.right[2].clone()
    dv[1, 5, 2, 7] = float("nan")
    assert "dv" in _check(case, (*case.right[:2], dv)).reason


def test_a_wrong_shape_is_refused(case):
    assert "(3, 96, 4, 64)" in _check(case, (case.right[0][:, :-1], *case.right[1:])).reason


def _flaky(case, period):
    """A candidate whose dk differs in one bit in every run that `period` divides."""
    runs = iter(range(1, 100))

    def call():
        dq, dk, dv = (g.clone() for g in case.right)
        if next(runs) % period == 0:
            dk.view(torch.int16)[0, 1, 2, 3] ^= 1
        return dq, dk, dv

    return lambda: call


def test_changing_bits_refuse_a_deterministic_candidate(case):
    verdict = check_candidate(_flaky(case, 4), case.yardstick, deterministic=True, num_runs=9)
    assert not verdict.passed and verdict.bitwise_runs == 7
    assert "2 of 9 runs" in verdict.reason and "dk" in verdict.reason and "(0, 1, 2, 3)" in verdict.reason


def test_changing_bits_are_counted_for_a_nondeterministic_candidate(case):
    verdict = check_candidate(_flaky(case, 4), case.yardstick, deterministic=False, num_runs=9)
    assert verdict.passed and verdict.bitwise_runs == 7


def test_a_candidate_that_raises_is_refused(case):
    def prepare():
        raise RuntimeError("no kernel\nfor this shape")

    verdict = check_candidate(prepare, case.yardstick, deterministic=True, num_runs=2)
    assert verdict.reason == "RuntimeError: no kernel for this shape" and verdict.bitwise_runs == 0


def test_one_run_proves_no_bits(case):
    with pytest.raises(ValueError, match="num_runs=1"):
        _check(case, case.right, num_runs=1)


# Timing


class FakeClock:
    """A time line that calls move on by their cost; marks may be read only after somebody waited for them."""

    def __init__(self):
        self.now_ms = 0.0
        self.reached_ms = -1.0
        self.log = []

    def mark(self):
        self.log.append("mark")
        return self.now_ms

    def wait(self, mark):
        self.reached_ms = max(self.reached_ms, mark)

    def elapsed_ms(self, start, end):
        assert max(start, end) <= self.reached_ms, "read before it was reached"
        return end - start

    def call(self, name, cost_ms):
        """A call that takes `cost_ms`, a number or a function of the time it starts at."""

        def run():
            self.log.append(name)
            self.now_ms += cost_ms(self.now_ms) if callable(cost_ms) else cost_ms

        return run


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde", "abcdefghijkl", "abcdefghijklm"])
def test_everybody_follows_everybody_else_equally_often(names):
    times = 1 + len(names) % 2
    orders = [order_in_round(list(names), i) for i in range(times * len(names))]
    assert all(sorted(o) == list(names) for o in orders)
    assert sorted(o[0] for o in orders) == sorted(o[-1] for o in orders) == sorted(times * names)
    followed = Counter(pair for o in orders for pair in pairwise(o))
    assert followed == {pair: times for pair in permutations(names, 2)}


@pytest.mark.parametrize("num", range(5, 16))
def test_few_rounds_have_different_neighbours(num):
    """As many as are usual; whose median is not that of one neighbour."""
    for rounds in (5, 7):
        followed = Counter(pair for i in range(rounds) for pair in pairwise(order_in_round(range(num), i)))
        assert max(followed.values()) <= 2


def test_nobody_has_an_empty_order():
    assert order_in_round([], 3) == []


def test_burst_times_calls_and_not_the_lead_in():
    clock = FakeClock()
    calls = {name: clock.call(name, cost) for name, cost in (("fast", 0.25), ("slow", 40.0))}
    plan = BurstPlan(rounds=4, round_ms=2.0, min_calls=3, max_calls=20, warmup_ms=0.0)
    timings = time_burst(calls, clock, plan)
    assert timings == {"fast": Timing(0.25, 0.25, 0.25), "slow": Timing(40.0, 40.0, 40.0)}
    rounds = clock.log[2 * 5 :]  # the warm-up: call, mark, two calls, mark for each
    fast, slow = ["fast", "mark", *["fast"] * 8, "mark"], ["slow", "mark", *["slow"] * 3, "mark"]
    assert rounds == fast + slow + slow + fast + fast + slow + slow + fast


def test_three_candidates_alternate_in_changing_order():
    clock = FakeClock()
    plan = BurstPlan(rounds=3, round_ms=1.0, min_calls=1, max_calls=1, warmup_ms=0.0)
    time_burst({n: clock.call(n, 1.0) for n in "abc"}, clock, plan)
    timed = [n for n in clock.log[3 * 5 :] if n != "mark"][::2]
    assert timed == [*"abc", *"acb", *"cab"]


def test_burst_reports_median_and_range_over_rounds():
    clock = FakeClock()
    costs = iter([1.0] * 3 + [c for cost in (2.0, 3.0, 9.0, 2.5, 1.0) for c in (7.0, cost)])
    plan = BurstPlan(rounds=5, round_ms=1.0, min_calls=1, max_calls=1, warmup_ms=0.0)
    timing = time_burst({"a": clock.call("a", lambda _: next(costs))}, clock, plan)["a"]
    assert timing == Timing(2.5, 1.0, 9.0)


def test_warm_up_lasts_as_long_as_told():
    clock = FakeClock()
    time_burst({"a": clock.call("a", 1.0)}, clock, BurstPlan(rounds=1, max_calls=3, warmup_ms=30.0))
    assert clock.now_ms == 30.0 + 4.0  # then one lead-in and three timed calls


def test_nobody_to_time():
    assert time_burst({}, FakeClock(), BurstPlan()) == {}


def test_sustained_leaves_out_the_first_second():
    clock = FakeClock()
    # a cold device is fast for 0.9 s, then the power cap sets in
    timing = time_sustained(clock.call("a", lambda now: 5.0 if now < 900 else 8.0), clock, seconds=3.0)
    assert timing.ms == pytest.approx(8.0) and timing.ms_min == timing.ms_max == pytest.approx(8.0)
    assert 3000 <= clock.now_ms < 3300


def test_sustained_is_the_mean_of_what_is_left():
    clock = FakeClock()
    timing = time_sustained(clock.call("a", lambda now: 10.0 if now < 2000 else 20.0), clock, seconds=3.0)
    assert timing.ms_min == 10.0 and timing.ms_max == 20.0
    assert 11.0 < timing.ms < 19.0


def test_sustained_must_be_longer_than_what_it_leaves_out():
    with pytest.raises(ValueError, match="sustained=1.0"):
        time_sustained(lambda: None, FakeClock(), seconds=1.0)


# Sequences of different lengths


def test_lengths_are_drawn_alike_and_keep_the_tokens():
    assert draw_lengths(4, 512) == (134, 890, 173, 851)  # recorded results mean these
    for batch, seqlen in ((32, 512), (7, 1000), (1, 16384), (3, 1)):
        lengths = draw_lengths(batch, seqlen)
        assert len(lengths) == batch and sum(lengths) == batch * seqlen and min(lengths) >= max(seqlen // 8, 1)
    assert draw_lengths(4, 512, seed=1) != draw_lengths(4, 512)


@pytest.mark.parametrize(("mask", "window"), [("full", None), ("causal", None), ("local:9:2", (9, 2))])
def test_a_varlen_cell_counts_the_pairs_of_each_sequence(mask, window):
    cell = standard_cell(64, mask, 48, batch=5, heads=3, varlen=True)
    of_lengths = [standard_cell(64, mask, length, batch=1, heads=3).flops for length in cell.lengths]
    assert cell.flops == sum(of_lengths) and cell.label.endswith("varlen")
    dense = standard_cell(64, mask, 48, batch=5, heads=3)
    assert dense != cell and cell.input_bytes == dense.input_bytes and "varlen" not in dense.label
    shape = cell.problem_shape()
    assert shape.batch == 1 and shape.seqlen_q == shape.seqlen_k == max(cell.lengths) and shape.window == window


VARLEN = standard_cell(64, "causal", 40, batch=5, heads=4, kv_heads=2, varlen=True)


@pytest.fixture(params=["causal", "full", "local"])
def packed(request):
    generator = torch.Generator().manual_seed(0)
    total, mask = sum(VARLEN.lengths), request.param
    q, k, v, dout = (torch.randn((total, h, 64), generator=generator).bfloat16() for h in (4, 2, 2, 4))
    window_size = (9, 2) if mask == "local" else (-1, -1)
    return Inputs(q, k, v, torch.zeros_like(q), dout, None, 0.125, mask == "causal", window_size, VARLEN.lengths)


def _flash_of_each(inputs):
    return tuple(g.bfloat16() for g in _autograd(inputs))


def test_reference_of_packed_sequences_equals_automatic_differentiation(packed):
    streams, longest = [0, 3, 8], max(VARLEN.lengths)
    got = reference_gradients(packed, streams, chunk_rows=32)
    assert [g.shape[:2] for g in got] == [(6, longest), (3, longest), (3, longest)]
    alone = [_autograd(x) for x in _sequences(packed)]
    for place, stream in enumerate(streams):
        sequence, head = divmod(stream, 2)
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in alone[sequence])
        parts = dq[2 * head : 2 * head + 2], dk[head : head + 1], dv[head : head + 1]
        for g, expected in zip(got, parts, strict=True):
            mine = g[place * len(expected) : (place + 1) * len(expected)]
            length = expected.shape[1]
            torch.testing.assert_close(mine[:, :length], expected, rtol=1e-9, atol=1e-9)
            assert (mine[:, length:] == 0).all()


def test_the_gate_sees_an_error_in_any_packed_sequence(packed):
    yardstick = make_yardstick(packed, _flash_of_each)
    lengths = [VARLEN.lengths[stream // 2] for stream in yardstick.streams]
    assert lengths == sorted(lengths) and (lengths[0], lengths[-1]) == (min(VARLEN.lengths), max(VARLEN.lengths))
    right = _flash_of_each(packed)
    assert yardstick.find_error(right) is None
    for start, length in zip([0, *torch.tensor(VARLEN.lengths).cumsum(0).tolist()], VARLEN.lengths, strict=False):
        for place, name in enumerate(("dq", "dk", "dv")):
            wrong = [g.clone() for g in right]
            wrong[place][start : start + length, 1] *= 1.2
            assert yardstick.find_error(tuple(wrong)).removeprefix("error of ").startswith(name)


def test_packed_sequences_are_for_schedules_of_one_cta_and_peers_that_take_them(fake_flash_attn, packed):
    candidates, untimed = find_candidates(
        VARLEN, ["symmetric_shift", "auto"], [PEERS["fa4"], PEERS["cudnn"]], configs=[SHIPPED_CONFIG]
    )
    assert "cute-dash hybrid" in [c.key.label for c in candidates]
    assert {u.schedule or u.implementation for u in untimed} >= {"symmetric_shift"}
    assert all(u.verdict == NOT_APPLICABLE and u.cell == VARLEN for u in untimed)
    det = next(c for c in candidates if c.key == FA4_DET)
    for grad, right in zip(det.prepare(packed)(), _flash_of_each(packed), strict=True):
        assert torch.equal(grad, right)
    change = ConfigChange.parse("fuse_dQ=False")
    assert find_candidates(VARLEN, ["hybrid"], [], configs=[change])[0] == []
    assert "sequences of one length" in PEERS["cudnn"].refuses(VARLEN)


def test_ours_is_called_with_the_packed_sequences(monkeypatch, packed):
    module = ModuleType("cute_dash.launch")
    module.backward_varlen = lambda *args, window: (*args, window)
    monkeypatch.setitem(sys.modules, "cute_dash.launch", module)
    monkeypatch.setattr(sys.modules["cute_dash"], "launch", module, raising=False)
    mask = "causal" if packed.causal else "full" if packed.window_size == (-1, -1) else "local:9:2"
    (candidate,), _ = find_candidates(replace(VARLEN, mask=mask), ["shortest_first"], [])
    *tensors, cu_q, cu_k, scale, causal, schedule, window = candidate.prepare(packed)()
    x = packed
    assert all(a is b for a, b in zip(tensors, (x.dout, x.q, x.k, x.v, x.out, x.lse), strict=True))
    assert cu_q.dtype == torch.int32 and cu_q.diff().tolist() == list(VARLEN.lengths) and torch.equal(cu_q, cu_k)
    assert (scale, causal, schedule.name) == (x.softmax_scale, x.causal, "shortest_first")
    assert window == (None if x.window_size == (-1, -1) else x.window_size)


def test_varlen_cells_survive_the_file_and_older_files_are_read(tmp_path):
    results = _results({VARLEN: {BASELINE: 500.0}, replace(VARLEN, varlen=False): {BASELINE: 600.0}})
    results.untimed.append(Untimed.of(SHIFT, VARLEN, FAILED, "bits changed"))
    results.save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json").cells() == [VARLEN, replace(VARLEN, varlen=False)]
    content = json.loads((tmp_path / "r.json").read_text())
    for entry in (*content["records"], *content["untimed"]):
        del entry["varlen"]
    (tmp_path / "r.json").write_text(json.dumps(content))
    assert not any(cell.varlen for cell in Results.load(tmp_path / "r.json").cells())


def test_varlen_can_be_asked_for(capsys):
    argv = ["--dry-run", "--head-dim", "128", "--mask", "causal", "--seqlen", "2k", "--kv-heads", "4", "--varlen"]
    assert command.main([*argv, "--schedule", "auto", "--peers", "none"]) == 0
    assert capsys.readouterr().out.startswith("hd128 causal 2k kv4 varlen: cute-dash ")


# Results file


def _record(key, cell, tflops, regime="burst"):
    timing = Timing(cell.flops / tflops * 1e-9, 0.1, 9.0)
    return make_record(cell, key, regime, timing, Verdict(None, 3e-3, 10))


def _results(rates, regime="burst", ceilings=None):
    """Synthetic results: {cell: {key: TFLOPS}}."""
    records = []
    for cell, by_key in rates.items():
        records += with_ratios([_record(key, cell, tflops, regime) for key, tflops in by_key.items()])
    return Results(dict(ENVIRONMENT), {"bits_runs": 10}, ceilings or {}, records)


CELL = standard_cell(128, "full", 2048)


def test_records_have_exactly_the_promised_fields(tmp_path):
    _results({CELL: {BASELINE: 500.0}}).save(tmp_path / "r.json")
    content = json.loads((tmp_path / "r.json").read_text())
    promised = (
        "implementation mode schedule head_dim head_dim_v mask batch seqlen_q seqlen_k heads kv_heads dtype regime "
        "ms_median ms_min ms_max tflops ratio_to_best_nondet max_rel_err bitwise_runs varlen"
    )
    assert list(content["records"][0]) == promised.split()
    assert {"gpu", "sm_count", "driver", "torch", "dsl", "commit", "date", "command"} <= content["environment"].keys()


def test_results_survive_the_file(tmp_path):
    results = _results({CELL: {BASELINE: 500.0, FA4_NONDET: 400.0}}, ceilings={"copy_tb_per_s": 4.3})
    results.untimed.append(Untimed.of(SHIFT, CELL, FAILED, "bits changed"))
    path = tmp_path / "new folder" / "r.json"
    results.save(path)
    assert Results.load(path) == results
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


@pytest.mark.parametrize("change", [{"speed": 1}, {"tflops": None}], ids=["unknown", "missing"])
def test_other_fields_are_refused(tmp_path, change):
    path = tmp_path / "r.json"
    _results({CELL: {BASELINE: 500.0}}).save(path)
    content = json.loads(path.read_text())
    content["records"][0].update(change)
    if change == {"tflops": None}:
        del content["records"][0]["tflops"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"fields: {next(iter(change))}"):
        Results.load(path)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"format": 99}', b"\x89PNG\r\n", f'{{"format": {FORMAT}}}'.encode()]
)
def test_a_file_that_is_no_results_file_is_refused(tmp_path, content, capsys):
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"r\.json (is not JSON|is not a results file|has no ceilings, environment, )"):
        Results.load(tmp_path / "r.json")
    assert command.main(["--table", str(tmp_path / "r.json")]) == 2
    assert capsys.readouterr().err.startswith(f"bench: {tmp_path / 'r.json'} ")


def test_ratio_is_to_the_best_nondeterministic_of_the_same_regime():
    records = [
        _record(BASELINE, CELL, 300.0),
        _record(UNORDERED, CELL, 400.0),
        _record(FA4_NONDET, CELL, 500.0),
        _record(BASELINE, CELL, 300.0, "sustained"),
    ]
    assert [r.ratio_to_best_nondet for r in with_ratios(records)] == [0.6, 0.8, 1.0, None]


def test_merged_cells_come_from_one_run():
    other = standard_cell(64, "causal", 512)
    first = _results({CELL: {BASELINE: 300.0, SHIFT: 310.0}, other: {BASELINE: 100.0}})
    second = _results({CELL: {BASELINE: 400.0}})
    merged = merge([first, second])
    assert {(r.cell, r.key): r.tflops for r in merged.records} == {(other, BASELINE): 100.0, (CELL, BASELINE): 400.0}


def test_a_file_of_another_machine_is_not_continued():
    check_same_environment(ENVIRONMENT, {**ENVIRONMENT, "date": "later", "command": "other"})
    with pytest.raises(ValueError, match="commit='0123456789abcdef'"):
        check_same_environment(ENVIRONMENT, {**ENVIRONMENT, "commit": "fedcba"})


# The run


class FakeDevice:
    """Small CPU inputs and a fake clock; cells give names and FLOPs only."""

    def __init__(self):
        self.clock = FakeClock()
        self.inputs = _inputs(False, batch=1, seqlen=32, heads=1)
        self.right = tuple(g.to(torch.bfloat16) for g in _autograd(self.inputs))
        self.alive_checks = 0

    def make_inputs(self, cell):
        return [self.inputs, self.inputs]

    def make_yardstick(self, inputs):
        return make_yardstick(inputs)

    def check_alive(self):
        self.alive_checks += 1

    def ceilings(self, sustained_s):
        rates = {"gemm_tflops_burst": 790.0, "copy_tb_per_s": 4.3}
        return rates if sustained_s is None else {**rates, "gemm_tflops_sustained": 643.0}

    def candidate(self, key, cost_ms, scale=1.0):
        def prepare(inputs):
            def call():
                self.clock.call(key, cost_ms)()
                return tuple(g * scale for g in self.right)

            return call

        return Candidate(key, prepare)


def _run(device, candidates, tmp_path, results=None, **plan):
    plan = {"bits_runs": 2, "burst": BurstPlan(rounds=2, warmup_ms=0.0), **plan}
    results = Results(dict(ENVIRONMENT)) if results is None else results
    lines = []
    find = candidates if callable(candidates) else lambda cell: (candidates, [])
    return Run(device, find, Plan(**plan), results, tmp_path / "r.json", lines.append, now=lambda: 100.0), lines


CELLS = list_cells([128], ["full"], [512, 1024, 2048])


def test_a_run_records_every_cell_candidate_and_regime(tmp_path):
    device = FakeDevice()
    candidates = [device.candidate(BASELINE, 2.0), device.candidate(FA4_NONDET, 1.0)]
    run, lines = _run(device, candidates, tmp_path, sustained_s=1.5)
    run.all_cells(CELLS)
    saved = Results.load(tmp_path / "r.json")
    assert len(saved.records) == 3 * 2 * 2 and not saved.untimed
    by_key = {(r.cell, r.key, r.regime): r for r in saved.records}
    for cell in CELLS:
        for regime in ("burst", "sustained"):
            ours = by_key[cell, BASELINE, regime]
            assert ours.ms_median == 2.0 and ours.ratio_to_best_nondet == 0.5 and ours.bitwise_runs == 2
            assert ours.tflops == pytest.approx(cell.flops / 2e-3 / 1e12, rel=1e-4)
    assert saved.ceilings["gemm_tflops_sustained"] == 643.0
    assert any("checking cute-dash baseline" in line for line in lines)


def test_a_failing_candidate_has_no_time(tmp_path):
    device = FakeDevice()
    candidates = [device.candidate(SHIFT, 0.5, scale=1.05), device.candidate(BASELINE, 2.0)]
    run, lines = _run(device, candidates, tmp_path)
    run.all_cells(CELLS[:1])
    saved = Results.load(tmp_path / "r.json")
    assert [r.key for r in saved.records] == [BASELINE]
    (refused,) = saved.untimed
    assert (refused.key, refused.cell, refused.verdict) == (SHIFT, CELLS[0], FAILED) and "dq" in refused.reason
    assert any("shift FAILED, no time" in line for line in lines)
    assert device.alive_checks == 1
    # the gate ran it once, the timing never
    assert device.clock.log.count(SHIFT) == 1


def test_an_interrupted_run_keeps_its_cells(tmp_path):
    device = FakeDevice()

    def find(cell):
        if cell == CELLS[2]:
            raise KeyboardInterrupt
        return [device.candidate(BASELINE, 1.0)], []

    run, _ = _run(device, find, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run.all_cells(CELLS)
    assert [r.cell for r in Results.load(tmp_path / "r.json").records] == CELLS[:2]


def test_a_resumed_run_times_only_incomplete_cells(tmp_path):
    device = FakeDevice()
    run, _ = _run(device, [device.candidate(BASELINE, 1.0)], tmp_path)
    run.all_cells(CELLS[:2])
    saved = Results.load(tmp_path / "r.json")
    # the second cell lacks a candidate that there is now
    saved.untimed.append(Untimed.of(SHIFT, CELLS[0], FAILED, "bits"))
    slower = [device.candidate(BASELINE, 4.0), device.candidate(SHIFT, 5.0)]
    run, lines = _run(device, slower, tmp_path, results=saved)
    run.all_cells(CELLS)
    times = {(r.cell, r.key): r.ms_median for r in Results.load(tmp_path / "r.json").records}
    assert times == {
        (CELLS[0], BASELINE): 1.0,
        (CELLS[1], BASELINE): 4.0,
        (CELLS[1], SHIFT): 5.0,
        (CELLS[2], BASELINE): 4.0,
        (CELLS[2], SHIFT): 5.0,
    }
    assert f"{CELLS[0].label}: already in the file" in lines


def test_no_cell_starts_after_the_time_is_used(tmp_path):
    device = FakeDevice()
    run, lines = _run(device, [device.candidate(BASELINE, 1.0)], tmp_path, max_seconds=30.0, started_s=50.0)
    seconds = iter([60.0, 79.0, 81.0])
    run.now = lambda: next(seconds)
    run.all_cells(CELLS)
    assert [r.cell for r in run.results.records] == CELLS[:2]
    assert lines[-1] == "--max-seconds is used up: 1 of 3 cells not run"


def test_calls_rotate_among_input_sets(tmp_path):
    device, seen = FakeDevice(), []
    sets = [device.inputs, replace(device.inputs, softmax_scale=device.inputs.softmax_scale)]
    device.make_inputs = lambda cell: sets

    def prepare(inputs):
        def call():
            seen.append(next(i for i, x in enumerate(sets) if x is inputs))
            device.clock.now_ms += 1.0
            return tuple(g.clone() for g in device.right)

        return call

    run, _ = _run(device, [Candidate(BASELINE, prepare)], tmp_path)
    run.all_cells(CELLS[:1])
    assert seen[:2] == [0, 0]  # the gate knows the right gradients of one set
    assert len(seen) > 10 and all(a != b for a, b in pairwise(seen[2:]))


# Implementations


def _names(candidates):
    return [c.key.schedule for c in candidates]


def test_each_kernel_is_a_candidate_once():
    everything = parse_schedules("all")
    assert {"auto", "baseline", "unordered"} <= set(everything)
    for mask in ("causal", "full"):
        candidates, untimed = find_candidates(standard_cell(128, mask, 512), everything, [])
        names = _names(candidates)
        assert len(names) == len(set(names)) and "auto" not in names
        missing = {u.key.schedule for u in untimed}
        assert missing == {"shift" if mask == "causal" else "symmetric_shift"}
        modes = {c.key.schedule: c.key.mode for c in candidates}
        assert modes.pop("unordered") == "nondet" and set(modes.values()) == {"det"}


def test_a_selected_variant_does_not_take_the_name_of_the_registered_schedule():
    (candidate,), _ = find_candidates(standard_cell(128, "causal", 16384), ["auto_invariant"], [])
    assert candidate.key.schedule == "longest_first@auto_invariant"  # all heads in one group
    (candidate,), _ = find_candidates(standard_cell(64, "causal", 2048), ["auto"], [])
    assert candidate.key.schedule == "hybrid"


def test_a_schedule_that_the_device_cannot_hold_is_not_applicable():
    cell = standard_cell(128, "full", 16384)
    _, untimed = find_candidates(cell, ["shift"], [], num_sms=1)
    assert untimed[0].verdict == NOT_APPLICABLE and "device holds 1" in untimed[0].reason
    (candidate,), untimed = find_candidates(cell, ["shift"], [], num_sms=132)
    assert candidate.key == SHIFT and not untimed


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="baselin"):
        parse_schedules("baselin")
    with pytest.raises(ValueError, match="peers='fa5'"):
        parse_peers("fa4,fa5")
    assert parse_schedules("none") == [] and parse_peers("none") == []


def test_ours_is_called_with_the_contract_arguments(monkeypatch):
    module, inputs = ModuleType("cute_dash.launch"), _inputs(True, batch=1, seqlen=8, heads=1)
    module.backward = lambda *args, window_size: (*args, window_size)
    monkeypatch.setitem(sys.modules, "cute_dash.launch", module)
    monkeypatch.setattr(sys.modules["cute_dash"], "launch", module, raising=False)
    (candidate,), _ = find_candidates(standard_cell(128, "causal", 512), ["hybrid"], [])
    *tensors, scale, causal, schedule, config, window_size = candidate.prepare(inputs)()
    x = inputs
    assert all(a is b for a, b in zip(tensors, (x.dout, x.q, x.k, x.v, x.out, x.lse), strict=True))
    assert (scale, causal, schedule.name, config) == (x.softmax_scale, True, "hybrid", get_config(128, True))
    assert window_size == (-1, -1)


def test_a_changed_configuration_is_a_candidate_of_its_own(monkeypatch):
    cell = standard_cell(128, "causal", 512)
    change = ConfigChange.parse("fuse_dQ=False, tile_m=128,num_stages=2")
    candidates, untimed = find_candidates(cell, ["hybrid"], [], configs=[SHIPPED_CONFIG, change])
    assert [c.key.schedule for c in candidates] == ["hybrid"]
    (refused,) = untimed
    assert refused.schedule == "hybrid[fuse_dQ=False,tile_m=128,num_stages=2]"
    assert refused.verdict == NOT_APPLICABLE and "shared memory" in refused.reason  # 294912 bytes

    change = ConfigChange.parse("fuse_dQ=False")
    candidates, untimed = find_candidates(cell, ["hybrid"], [], configs=[SHIPPED_CONFIG, change])
    assert [c.key.schedule for c in candidates] == ["hybrid", "hybrid[fuse_dQ=False]"] and not untimed
    module = ModuleType("cute_dash.launch")
    module.backward = lambda *args, window_size: args[-1]
    monkeypatch.setitem(sys.modules, "cute_dash.launch", module)
    monkeypatch.setattr(sys.modules["cute_dash"], "launch", module, raising=False)
    inputs = _inputs(True, batch=1, seqlen=8, heads=1)
    shipped, changed = (candidate.prepare(inputs)() for candidate in candidates)
    assert shipped == get_config(128, True) and changed == replace(shipped, fuse_dQ=False)


@pytest.mark.parametrize("text", ["tile_k=3", "head_dim=64", "fuse_dQ=1", "tile_m=big", "tile_m", ""])
def test_unknown_configuration_changes_are_refused(text):
    with pytest.raises(ValueError, match="config="):
        ConfigChange.parse(text)


def _install(monkeypatch, modules):
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    implementations._import_error.cache_clear()


@pytest.fixture
def fake_flash_attn(monkeypatch):
    """flash-attn-4 as far as the bench uses it; gradients by automatic differentiation."""

    def _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=None,
        causal=False,
        *,
        window_size_left=None,
        window_size_right=None,
        deterministic=False,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
    ):
        window_size = tuple(-1 if side is None else side for side in (window_size_left, window_size_right))
        lengths = None
        if cu_seqlens_q is not None:
            lengths = tuple(cu_seqlens_k.diff().tolist())
            assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == max(lengths)
        grads = _autograd(Inputs(q, k, v, out, dout, lse, softmax_scale, causal, window_size, lengths))
        sign = 1 if deterministic else -1
        return *(sign * g.to(q.dtype) for g in grads), None

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_bwd = _flash_attn_bwd
    packages = {name: ModuleType(name) for name in ("flash_attn", "flash_attn.cute")}
    _install(monkeypatch, {**packages, "flash_attn.cute.interface": interface})
    yield
    implementations._import_error.cache_clear()


class FakeGraph:
    """A cudnn graph of one backward node, on (B, H, S, D) tensors; it fails unless its steps come in order."""

    def __init__(self, **types):
        self.types, self.steps = types, []

    def tensor_like(self, tensor):
        return SimpleHandle(tensor.shape)

    def sdpa_backward(self, **kwargs):
        self.node = kwargs
        self.grads = [SimpleHandle(kwargs[name].dim) for name in "qkv"]
        return self.grads

    def __getattr__(self, name):
        if name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
            return lambda *args: self.steps.append(name)
        raise AttributeError(name)

    def get_workspace_size(self):
        assert self.steps[-1] == "build_plans"
        return 64

    def execute(self, pack, workspace):
        assert workspace.numel() == 64 and all(g.is_output for g in self.grads)
        node = self.node
        q, k, v, out, dout = (pack[node[name]].transpose(1, 2) for name in ("q", "k", "v", "o", "dO"))
        assert pack[node["stats"]].shape == (*pack[node["q"]].shape[:3], 1)
        inputs = Inputs(q, k, v, out, dout, None, node["attn_scale"], node["use_causal_mask"])
        sign = 1 if node["use_deterministic_algorithm"] else -1
        for handle, grad in zip(self.grads, _autograd(inputs), strict=True):
            assert list(pack[handle].shape) == handle.dim and list(pack[handle].stride()) == handle.stride
            pack[handle].copy_(sign * grad.transpose(1, 2))


class SimpleHandle:
    def __init__(self, dim):
        self.dim, self.stride, self.is_output = list(dim), None, False

    def set_output(self, is_output):
        self.is_output = is_output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self


@pytest.fixture
def fake_cudnn(monkeypatch):
    cudnn = ModuleType("cudnn")
    cudnn.pygraph = FakeGraph
    cudnn.data_type = SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32")
    cudnn.heur_mode = SimpleNamespace(A="a", FALLBACK="fallback")
    _install(monkeypatch, {"cudnn": cudnn})
    yield
    implementations._import_error.cache_clear()


@pytest.mark.parametrize("name, fixture", [("fa4", "fake_flash_attn"), ("cudnn", "fake_cudnn")])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_peers_give_gradients_in_our_layout(request, name, fixture, causal):
    request.getfixturevalue(fixture)
    inputs = _inputs(causal, batch=2, seqlen=48, heads=3)
    peer = type(PEERS[name])()
    det, nondet = find_candidates(standard_cell(64, "causal", 512), [], [peer])[0]
    assert (det.key, nondet.key) == (Key(peer.name, "det", None), Key(peer.name, "nondet", None))
    first, second = det.prepare(inputs)(), det.prepare(inputs)()
    for a, b, minus, right in zip(first, second, nondet.prepare(inputs)(), _autograd(inputs), strict=True):
        assert a.data_ptr() != b.data_ptr() and a.shape == inputs.q.shape
        assert torch.equal(a, right.to(a.dtype)) and torch.equal(minus, -a)


@pytest.mark.parametrize("window_size", [(9, 0), (-1, 5), (7, -1)], ids=str)
def test_flash_attn_gets_the_window(window_size, fake_flash_attn):
    inputs = replace(_inputs(False, batch=1, seqlen=48, heads=2), window_size=window_size)
    det, _ = find_candidates(standard_cell(64, "local:9:0", 512), [], [PEERS["fa4"]])[0]
    for grad, right in zip(det.prepare(inputs)(), _autograd(inputs), strict=True):
        assert torch.equal(grad, right.to(grad.dtype))


def test_a_peer_that_is_not_installed_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)  # an import then fails
    implementations._import_error.cache_clear()
    assert "cudnn" in PEERS["cudnn"].missing()
    assert find_candidates(CELL, [], [PEERS["cudnn"]]) == ([], [])
    implementations._import_error.cache_clear()


# Tables


def _table_rows(text):
    """Cells of a markdown table's rows, header first."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[part.strip() for part in line.strip("|").split("|")] for line in lines if not set(line) <= set("|:-")]


MARKDOWN = report.Style(markdown=True)


def test_summary_shows_rates_ratios_failures_and_floor():
    causal = standard_cell(64, "causal", 512)
    results = _results(
        {
            CELL: {UNORDERED: 600.0, BASELINE: 500.0, SHIFT: 550.0, FA4_DET: 440.0, FA4_NONDET: 500.0},
            causal: {BASELINE: 200.0},
        },
        ceilings={"gemm_tflops_burst": 800.0, "copy_tb_per_s": 4.0},
    )
    results.untimed.append(Untimed.of(FA4_DET, causal, FAILED, "dq is wrong"))
    results.untimed.append(Untimed.of(SHIFT, causal, NOT_APPLICABLE, "causal"))
    results.environment["missing"] = {"cudnn": "ModuleNotFoundError: no cudnn"}
    text = report.summary(results, MARKDOWN)
    header, *rows = _table_rows(text)
    # of the candidates' floor: 550 of 800; at 512 causal the eight 64 MiB tensors take 0.134 ms at 4 TB/s of 0.430 ms
    assert [dict(zip(header, row, strict=True)) for row in rows] == [
        {
            "cell": "hd128 full 2k",
            "baseline": "500",
            "shift": "550",
            "unordered": "600",
            "FA4 det": "440",
            "FA4 nondet": "500",
            "best det": "shift",
            "/ FA4 det": "1.25",
            "/ best nondet": "0.92",
            "of floor": "69%",
        },
        {
            "cell": "hd64 causal 512",
            "baseline": "200",
            "shift": "-",
            "unordered": "-",
            "FA4 det": "FAILED",
            "FA4 nondet": "-",
            "best det": "baseline",
            "/ FA4 det": "-",
            "/ best nondet": "-",
            "of floor": "31%",
        },
    ]
    assert header[1:6] == ["baseline", "shift", "unordered", "FA4 det", "FA4 nondet"]
    assert "not installed: cudnn (ModuleNotFoundError: no cudnn)" in text
    assert "FAILED hd64 causal 512 flash-attn-4 det: dq is wrong" in text
    assert "NVIDIA H200 (132 SMs), driver 580.1" in text and "command: python -m bench --out x.json" in text


def test_headline_puts_auto_and_the_best_beside_the_peers():
    cell = standard_cell(128, "full", 8192)
    (auto,), _ = find_candidates(cell, ["auto"], [])
    rates = {UNORDERED: 600.0, auto.key: 520.0, SHIFT: 550.0, FA4_DET: 400.0, FA4_NONDET: 500.0}
    results = _results({cell: rates, standard_cell(64, "causal", 512): {BASELINE: 200.0}})
    header, row, without_auto = _table_rows(report.headline(results, MARKDOWN))
    assert dict(zip(header, row, strict=True)) == {
        "cell": "hd128 full 8k",
        "auto": "520",
        "FA4 det": "400",
        "FA4 nondet": "500",
        "unordered": "600",
        "auto / FA4 det": "1.30",
        "auto / best nondet peer": "1.04",
        "best": "550",
        "which": "shift",
    }
    assert without_auto == ["hd64 causal 512", "-", "-", "-", "-", "-", "-", "200", "baseline"]


def test_price_compares_each_kernel_with_itself():
    cells = [standard_cell(128, "causal", length) for length in (512, 8192)]
    (auto,), _ = find_candidates(cells[0], ["auto"], [])
    first = {UNORDERED: 400.0, auto.key: 500.0, BASELINE: 100.0, FA4_DET: 400.0, FA4_NONDET: 500.0}
    second = {UNORDERED: 500.0, auto.key: 400.0, FA4_NONDET: 500.0}
    results = _results(dict(zip(cells, (first, second), strict=True)))
    header, *rows = _table_rows(report.price(results, MARKDOWN))
    assert header == ["cell", "cute-dash auto", "flash-attn-4"]
    assert rows[:2] == [["hd128 causal 512", "-20%", "+25%"], ["hd128 causal 8k", "+25%", "-"]]
    assert rows[2:] == [["all causal", "+0%", "+25%"]]


def test_summary_in_ms_of_one_regime():
    results = _results({CELL: {BASELINE: 500.0}}, regime="sustained")
    header, row = _table_rows(report.summary(results, report.Style(True, "ms", "sustained")))
    assert row[header.index("baseline")] == f"{CELL.flops / 500e12 * 1e3:.3f}"
    assert len(_table_rows(report.summary(results, MARKDOWN))) == 1  # only a header: nothing in burst


def test_plain_summary_wraps_long_names():
    text = report.summary(_results({CELL: {Key(OURS, "det", "shortest_first"): 500.0}}), report.Style())
    assert "shortest_first" not in text.split("hd128")[0] and "shortest_" in text


def test_compare_marks_regressions_of_ours_only():
    old = _results({CELL: {BASELINE: 500.0, SHIFT: 500.0, FA4_DET: 500.0, UNORDERED: 500.0}})
    new = _results({CELL: {BASELINE: 480.0, SHIFT: 490.0, FA4_DET: 400.0}})
    text, regressions = report.compare(old, new, 0.03, MARKDOWN)
    _, *rows = _table_rows(text)
    assert [(row[1], row[4], row[5]) for row in rows] == [
        ("flash-attn-4 det", "0.800", "slower"),
        ("cute-dash baseline", "0.960", "REGRESSION"),
        ("cute-dash shift", "0.980", ""),
    ]
    assert regressions == 1 and "1 records only in old, 0 only in new" in text


def test_paper_speed_ups_beside_ours():
    causal = standard_cell(64, "causal", 16384)
    ours = Key(OURS, "det", "symmetric_shift")
    results = _results(
        {
            CELL: {BASELINE: 400.0, Key(OURS, "det", "descending"): 380.0, SHIFT: 500.0, UNORDERED: 900.0},
            causal: {BASELINE: 300.0, ours: 450.0},
            standard_cell(64, "full", 32768): {BASELINE: 300.0},  # not in the paper
        }
    )
    header, *rows = _table_rows(report.paper(results, MARKDOWN))
    full, causal_row = [dict(zip(header, row, strict=True)) for row in rows]
    # hd128 full 2048: baseline 1.587 ms, descending 1.578, shift 1.459, the best of all
    assert full == {
        "cell": "hd128 full 2k",
        "paper descending": f"{1.587 / 1.578:.2f}",
        "ours descending": "0.95",
        "paper shift": f"{1.587 / 1.459:.2f}",
        "ours shift": "1.25",
        "paper best": f"{1.587 / 1.459:.2f}",
        "ours best": "1.25",
        "which": "shift",
    }
    # hd64 causal 16384: baseline 6.103, shift 6.010, descending 5.941, the best of all
    assert causal_row["paper shift"] == f"{6.103 / 6.010:.2f}" and causal_row["paper best"] == f"{6.103 / 5.941:.2f}"
    assert causal_row["ours shift"] == "1.50" and causal_row["ours descending"] == "-"


def test_model_beside_measurement(monkeypatch):
    shift_ms, baseline_ms = (CELL.flops / x * 1e-9 for x in (500.0, 400.0))
    results = _results({CELL: {BASELINE: 400.0, SHIFT: 500.0, UNORDERED: 600.0}, CELLS[0]: {SHIFT: 1.0}})
    calls = []

    def simulate(schedule, shape, num_sms, compute, reduce, latency=0, num_dq_stages=1):
        calls.append((schedule.name, shape.num_streams, num_sms, compute, reduce, latency, num_dq_stages))
        return SimpleNamespace(makespan={"baseline": 200.0, "shift": 150.0}[schedule.name])

    monkeypatch.setattr(model_vs_measured.analysis, "simulate", simulate)
    model = model_vs_measured.Model(reduce=0.5, latency=0.125, num_dq_stages=2)
    text = model_vs_measured.report(results, results.cells(), model, "baseline", MARKDOWN)
    _, *rows = _table_rows(text)
    measured = shift_ms / baseline_ms
    assert rows == [
        ["hd128 full 2k", "baseline", "1.000", "1.000", "1.000"],
        ["hd128 full 2k", "shift", "0.750", f"{measured:.3f}", f"{measured / 0.75:.3f}"],
    ]
    assert set(calls) == {(name, 128, 132, 1.0, 0.5, 0.125, 2) for name in ("baseline", "shift")}
    assert "orders 1 of 1 pairs" in text


def test_concordance_counts_pairs_of_one_cell_and_no_ties():
    def pair(name, model, measured, cell=CELL):
        return model_vs_measured.Pair(cell, name, model, measured)

    entries = [pair("a", 1.0, 1.0), pair("b", 0.9, 1.2), pair("c", 1.1, 1.205), pair("d", 0.5, 0.5, CELLS[0])]
    # a-b: model wrong; a-c: right; b-c: measured within 1%; d: another cell
    assert model_vs_measured.concordance(entries) == (1, 2)


def test_the_real_model_agrees_with_hand_counted_makespans():
    # one stream of 2 Q and 2 KV tiles on 2 SMs; baseline: both CTAs visit m_block 0, then 1
    cell = Cell(64, "full", 256, 1, 1)
    record = _record(BASELINE, cell, 100.0)
    # n_block 0: compute until 1, reduce until 1.5, compute until 2.5, reduce until 3; n_block 1 computes until 1, waits
    # until 1.5, reduces until 2, computes until 3, reduces until 3.5
    assert model_vs_measured.Model(reduce=0.5).makespan(record, 2) == pytest.approx(3.5)


# Command line


def test_timing_without_a_gpu_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--seqlen", "512", "--out", str(tmp_path / "r.json")]) == 2
    assert "Hopper" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_an_existing_file_is_not_overwritten(capsys, tmp_path):
    path = tmp_path / "r.json"
    path.write_text("precious")
    assert command.main(["--out", str(path)]) == 2
    assert "--resume" in capsys.readouterr().err and path.read_text() == "precious"


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--schedule", "baselin"], "baseline"),
        (["--peers", "fa5"], "fa4, cudnn"),
        (["--batch", "0"], "batch=0"),
        (["--table", "no_such_file.json"], "no_such_file.json"),
        (["--plot", "picture.gif"], ".png, .svg"),
        (["--plot", "no_such_folder/picture.png"], "no_such_folder"),
    ],
)
def test_wrong_arguments_are_named(capsys, argv, text):
    assert command.main(argv) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--seqlen", "x"], ["--mask", "local"], ["--bits-runs", "1"], ["--sustained", "1"]])
def test_unreadable_arguments_end_with_status_2(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2 and argv[0] in capsys.readouterr().err


def test_dry_run_lists_what_would_be_timed(capsys):
    argv = ["--dry-run", "--head-dim", "128", "--mask", "causal", "--seqlen", "2k", "--schedule", "baseline,shift"]
    assert command.main([*argv, "--peers", "none"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "hd128 causal 2k: cute-dash baseline"
    assert second.startswith("  without cute-dash shift: ") and "cannot implement" in second


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib, the `plot` extra, is not installed")
    saved = []
    save = figure.Figure.savefig
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k)))
    return saved


def test_picture_of_lengths(tmp_path, figures):
    """A panel for each mask, a line for each candidate over the lengths that it was timed at."""
    causal = {standard_cell(128, "causal", s): {BASELINE: s / 10.0, UNORDERED: 500.0} for s in (1024, 512)}
    full = {standard_cell(128, "full", 512): {BASELINE: 300.0, FA4_DET: 400.0}}
    _results(causal | full).save(tmp_path / "a.json")
    picture = tmp_path / "a.svg"
    assert command.main(["--table", str(tmp_path / "a.json"), "--plot", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml")
    panels = figures[0].axes
    assert [axes.get_title() for axes in panels] == ["hd128 causal", "hd128 full"]
    lines = [{line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in panels]
    assert lines == [{"baseline": [51.2, 102.4], "unordered": [500, 500]}, {"baseline": [300], "FA4 det": [400]}]
    assert [tick.get_text() for tick in panels[0].get_xticklabels()] == ["512", "1k"]


def test_picture_of_one_shape(tmp_path, figures):
    """Bars, the fastest at the top."""
    _results({CELL: {SHIFT: 500.0, BASELINE: 400.0, UNORDERED: 450.0}}).save(tmp_path / "a.json")
    assert command.main(["--table", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]) == 0
    (axes,) = figures[0].axes
    assert axes.get_title() == CELL.label
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["baseline", "unordered", "shift"]
    assert [round(bar.get_width()) for bar in axes.patches] == [400, 450, 500]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [False, True, False]


def test_tables_are_printed_from_files(capsys, tmp_path):
    _results({CELL: {BASELINE: 500.0, SHIFT: 400.0}}).save(tmp_path / "a.json")
    _results({CELL: {BASELINE: 300.0, SHIFT: 400.0}}).save(tmp_path / "b.json")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert command.main(["--table", a, "--markdown"]) == 0
    assert _table_rows(capsys.readouterr().out)[1][1:3] == ["500", "400"]
    assert command.main(["--table", a, b, "--markdown"]) == 0
    assert _table_rows(capsys.readouterr().out)[1][1:3] == ["300", "400"]
    assert command.main(["--paper", a]) == 0
    assert "H800" in capsys.readouterr().out
    assert command.main(["--compare", a, b]) == 1
    assert command.main(["--compare", b, a]) == 0
    assert command.main(["--compare", a, b, "--threshold", "0.5"]) == 0


def test_status_tells_whether_ours_passed():
    good = _results({CELL: {BASELINE: 500.0}})
    assert command._run_status(good) == 0
    peer = replace(good, untimed=[Untimed.of(FA4_DET, CELL, FAILED, "raised")])
    assert command._run_status(peer) == 0
    ours = replace(good, untimed=[Untimed.of(SHIFT, CELL, FAILED, "bits")])
    assert command._run_status(ours) == 1
    assert command._run_status(Results(dict(ENVIRONMENT))) == 1


def test_tables_need_neither_torch_nor_cutlass(tmp_path):
    _results({CELL: {BASELINE: 500.0}}).save(tmp_path / "a.json")
    code = (
        "import sys; sys.modules.update(torch=None, cutlass=None)\n"
        "from bench.__main__ import main\n"
        f"sys.exit(main(['--table', {str(tmp_path / 'a.json')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "hd128 full 2k" in done.stdout


def test_a_smaller_head_dim_of_v_can_be_timed(capsys):
    argv = ["--dry-run", "--head-dim", "192", "--head-dim-v", "128", "--mask", "full", "--seqlen", "512"]
    assert command.main([*argv, "--schedule", "baseline", "--peers", "none"]) == 0
    assert capsys.readouterr().out == "hd192/128 full 512: cute-dash baseline\n"
    assert command.main([*argv[:2], "128", "--head-dim-v", "64"]) == 2
    assert "head_dim_v=64 is not supported with head_dim=128" in capsys.readouterr().err


def test_a_padded_head_dim_can_be_timed(capsys):
    argv = ["--dry-run", "--head-dim", "40,96", "--mask", "full", "--seqlen", "512"]
    assert command.main([*argv, "--schedule", "baseline", "--peers", "none"]) == 0
    assert capsys.readouterr().out == "hd40 full 512: cute-dash baseline\nhd96 full 512: cute-dash baseline\n"


@pytest.mark.parametrize("head_dim", ["36", "264", "sixty-four", ""])
def test_a_head_dim_that_the_kernel_does_not_have_is_refused(capsys, head_dim):
    with pytest.raises(SystemExit) as stop:
        command.main(["--dry-run", "--head-dim", head_dim])
    assert stop.value.code == 2
    assert f"head_dim={head_dim!r} is not supported; allowed: multiples of 8 from 32 to 256" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--table", "--headline", "--price", "--paper", "--model"])
def test_a_regime_without_records_is_an_error(capsys, tmp_path, option):
    _results({CELL: {BASELINE: 500.0}}).save(tmp_path / "a.json")
    assert command.main([option, str(tmp_path / "a.json"), "--regime", "sustained"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "a.json: no sustained records; there are: burst" in captured.err


def test_the_help_names_the_command_that_was_typed(capsys):
    for prog in ("cute-dash bench", "python -m bench"):
        with pytest.raises(SystemExit):
            command.main(["--help"], prog=prog)
        assert capsys.readouterr().out.startswith(f"usage: {prog} [-h]")


def test_a_schedule_that_does_not_load_is_left_out_of_all_and_named(capsys, monkeypatch):
    loaded = {"baseline": registry.load("baseline")}
    monkeypatch.setattr(registry, "load_all", lambda: (loaded, {"bad": "schedules/bad.py: SyntaxError"}))
    argv = ["--dry-run", "--head-dim", "64", "--mask", "full", "--seqlen", "512", "--peers", "none"]
    assert command.main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out == "hd64 full 512: cute-dash baseline\n"
    assert "schedules/bad.py: SyntaxError" in captured.err


def test_host_times_count_the_calls_and_not_the_synchronization(monkeypatch):
    now = [0.0]

    def passing(seconds):
        now[0] += seconds

    monkeypatch.setattr(host, "perf_counter", lambda: now[0])
    calls = {"short": lambda: passing(3e-6), "long": lambda: passing(50e-6)}
    times = host.time_host(calls, synchronize=lambda: passing(1.0))
    assert times["short"] == host.HostTime(pytest.approx(3), pytest.approx(3))
    assert times["long"].us == pytest.approx(50)
    text = host.format_times(times)
    assert [line.split()[-1] for line in text.splitlines()[1:]] == ["3.0", "50.0"]


def test_host_calls_are_calls_of_this_package():
    """On the CPU, where the emulator answers: all of them run, and the backward ones give the same gradients."""
    results = {name: call() for name, call in host.make_calls("cpu").items()}
    for a, b in zip(results["attention_backward"], results["backward by autograd"], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(results["flash_attn_func"], results["flash_attn_func with gradients"])


def test_the_parts_of_a_host_call_are_those_of_a_launch(monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "get_backward", lambda key: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(launch, "num_sms", lambda device_index: 10)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    launch._plan.cache_clear()
    x = random_inputs(1, 64, 64, 1, 64, dtype=torch.bfloat16)
    tensors = x.dout, x.q, x.k, x.v, x.q.clone(), torch.zeros(1, 1, 64)
    parts = host.make_parts(*tensors)
    assert not launched
    results = {name.strip(): call() for name, call in parts.items()}
    launch._plan.cache_clear()
    (arguments,) = launched
    assert all(a is b for a, b in zip(tensors, arguments, strict=False))
    allocated = results["its four allocations"]
    assert [x.shape for x in allocated] == [x.shape for x in arguments[6:10]]


def test_host_times_need_a_hopper(capsys):
    if why_no_hopper() is None:
        pytest.skip("there is one")
    assert command.main(["--host"]) == 2
    assert "Hopper" in capsys.readouterr().err
