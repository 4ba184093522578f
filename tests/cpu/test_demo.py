"""The demo: a row for every schedule and mask, figures that are right, and a verdict that can fail."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bench.cells import standard_cell
from cute_dash import cli, demo, emulator, registry
from cute_dash.demo import NUM_RUNS, KernelResult, Result, Row

USABLE = set(registry.load_all()[0])  # a user's own file may be among them
ROW = Row("full", "baseline", True, 15.75, 0.5, 0.002, 0.005, NUM_RUNS)
KERNEL = KernelResult(ms=2.0, tflops=500.0, ratio_to_unordered=1.05, equal_runs=NUM_RUNS)


@pytest.fixture
def small(monkeypatch):
    """Sizes that take seconds: 2 x 2 tiles in the emulator, 4 x 4 in the model."""
    monkeypatch.setattr(demo, "MODEL", demo.Size(batch=1, num_heads=2, seqlen=512, head_dim=64))
    monkeypatch.setattr(demo, "EMULATOR", demo.Size(batch=1, num_heads=1, seqlen=200, head_dim=64))
    monkeypatch.setattr(demo, "why_no_hopper", lambda: "this is a test")


def test_rows(small, capsys):
    assert cli.main(["demo", "--json"]) == int(bool(registry.load_all()[1]))
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    shape = demo.MODEL.shape
    expected = {
        (mask, name)
        for mask in demo.MASKS
        for name in USABLE
        if registry.load(name).can_implement(shape(mask == "causal"))
    }
    assert {("full", "shift"), ("full", "auto"), ("causal", "auto"), ("causal", "symmetric_shift")} <= expected
    assert not {("causal", "shift"), ("full", "symmetric_shift")} & expected
    assert {(row["mask"], row["schedule"]) for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        assert 0 < row["gradient_error"] <= row["error_budget"] < 0.01
        assert row["kernel"] is None
        if row["ordered"]:
            assert row["equal_interleavings"] == NUM_RUNS
    # the paper's closed form for 2 heads of 4 KV tiles: m*n*(c+r) + (n-1)*r
    (baseline,) = [row for row in rows if (row["mask"], row["schedule"]) == ("full", "baseline")]
    c, r = demo.COMPUTE, demo.REDUCE
    assert baseline["critical_path"] == 2 * 4 * (c + r) + (4 - 1) * r
    assert len([line for line in captured.err.splitlines() if "model and emulator" in line]) == len(rows)


def test_wrong_gradients_fail(small, monkeypatch, capsys):
    right = emulator.backward

    def wrong(*args, **kwargs):
        dq, dk, dv = right(*args, **kwargs)
        return dq, dk * 1.02, dv

    monkeypatch.setattr(emulator, "backward", wrong)
    assert cli.main(["demo"]) == 1
    assert "FAILED: baseline (full)" in capsys.readouterr().out


def test_bits_that_change_fail(small, monkeypatch, capsys):
    """A backward whose dq depends on the interleaving, by one unit in the last place of one element."""
    right = emulator.backward

    def unstable(*args, interleaving, **kwargs):
        dq, dk, dv = right(*args, interleaving=interleaving, **kwargs)
        if interleaving == 7:
            dq.view(torch.int16)[0, 0, 0, 0] ^= 1
        return dq, dk, dv

    monkeypatch.setattr(emulator, "backward", unstable)
    assert cli.main(["demo"]) == 1
    output = capsys.readouterr().out
    assert "FAILED: baseline (full)" in output
    assert f"{NUM_RUNS - 1}/{NUM_RUNS}" in output


def test_number_of_threads_is_put_back(small):
    before = torch.get_num_threads()
    demo.run(lambda text: None)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("row", "passed"),
    [
        (ROW, True),
        (replace(ROW, gradient_error=0.006), False),
        (replace(ROW, gradient_error=math.nan), False),
        (replace(ROW, equal_interleavings=NUM_RUNS - 1), False),
        (replace(ROW, ordered=False, equal_interleavings=1), True),
        (replace(ROW, kernel=KERNEL), True),
        (replace(ROW, kernel=replace(KERNEL, equal_runs=NUM_RUNS - 1)), False),
        (replace(ROW, ordered=False, kernel=replace(KERNEL, equal_runs=1)), True),
    ],
)
def test_verdict(row, passed):
    assert row.passed is passed


def test_report_with_a_gpu_shows_the_kernel():
    text = demo.report(Result((replace(ROW, kernel=KERNEL),)))
    assert "TFLOPS" in text and "2.000" in text and "1.05" in text
    assert "not run" not in text


def test_report_without_a_gpu_says_why(monkeypatch):
    monkeypatch.setattr(demo, "why_no_hopper", lambda: "the GPU is on holiday")
    text = demo.report(Result((ROW,)))
    assert "the GPU is on holiday" in text
    assert "TFLOPS" not in text


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flops_are_those_of_the_bench(causal):
    size = demo.KERNEL
    cell = standard_cell(size.head_dim, "causal" if causal else "full", size.seqlen)
    assert (cell.batch, cell.heads) == (size.batch, size.num_heads)
    assert size.flops(causal) == cell.flops


@pytest.mark.parametrize(
    ("result", "passed", "text"),
    [
        (Result((ROW,)), True, "All gradients right"),
        (Result(()), False, "FAILED: there was no schedule to show"),
        (Result((ROW,), broken=("schedules/bad.py: oops",)), False, "FAILED: schedules/bad.py: oops"),
        (Result((ROW,), left_out=("shift on the causal mask: no",)), True, "left out: shift on the causal mask: no"),
    ],
    ids=["good", "no rows", "a bad file", "left out"],
)
def test_result(result, passed, text):
    assert result.passed is passed
    report = demo.report(result)
    assert text in report
    assert ("All gradients right" in report) is passed


def test_what_has_no_row_is_named(small, monkeypatch):
    class Raises(type(registry.load("baseline"))):
        name = "raises"

        def get_lock_value(self, m_block, tile, shape):
            return 1 // 0

    loaded = {name: registry.load(name) for name in ("shift", "auto")} | {"raises": Raises()}
    monkeypatch.setattr(registry, "load_all", lambda: (loaded, {"bad": "schedules/bad.py: oops"}))
    result = demo.run(lambda text: None)
    assert {(row.mask, row.schedule) for row in result.rows} == {
        ("full", "shift"),
        ("full", "auto"),
        ("causal", "auto"),
    }
    assert result.left_out == ("shift on the causal mask: it orders the full mask only",)
    assert result.broken[0] == "schedules/bad.py: oops"
    assert len(result.broken) == 3 and all("ZeroDivisionError" in line for line in result.broken[1:])
    assert "auto on the causal mask: hybrid (model)" in result.selected[1]
    assert not result.passed
