"""The fuzz driver: some cases on the emulator, replay, that it sees wrong values and wrong bits, and its processes."""

import json
import sys
from itertools import product

import pytest
import torch

from tests import fuzz
from tests.fuzz import CPU_LIMITS, GPU_LIMITS, LAYOUTS, Tally, draw_case, list_keys, main
from tests.processes import Ended


@pytest.fixture
def cases():
    return [draw_case(0, number, list_keys(), CPU_LIMITS) for number in range(1000)]


def test_thirty_cases_pass():
    tally = fuzz.fuzz(0, range(30), "cpu")
    assert tally.failures == [] and tally.passed == 30
    assert tally.comparisons >= 90 and 0 < tally.worst_ratio <= fuzz.BUDGET


def test_a_case_is_drawn_alike_every_time():
    first, second = (draw_case(3, 17, list_keys(), GPU_LIMITS) for _ in range(2))
    assert first == second and first.layouts == second.layouts
    assert draw_case(3, 18, list_keys(), GPU_LIMITS) != first != draw_case(4, 17, list_keys(), GPU_LIMITS)
    a, b = (fuzz.make_inputs(draw_case(3, 5, list_keys(), CPU_LIMITS), "cpu") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)


def test_cases_are_various(cases):
    keys = list_keys()
    assert {case.key for case in cases} == set(keys)
    for name, layouts in LAYOUTS.items():
        assert {case.layouts[name] for case in cases if not case.lengths} == set(layouts)
    assert {case.seqlen_q == case.seqlen_k for case in cases} == {True, False}
    assert any(case.seqlen_q > case.seqlen_k and case.causal for case in cases)
    assert {1, 128} <= {case.seqlen_k for case in cases}
    assert any(case.own_forward for case in cases) and any(case.batch > 1 for case in cases)
    assert {case.uses for case in cases} == {"out", "lse", "both"}
    assert {(case.sink, bool(case.lengths), case.own_forward) for case in cases} == set(
        product((True, False), repeat=3)
    )
    assert all((case.uses != "out") == case.key.dlse for case in cases)
    assert all(case.num_heads % case.num_heads_kv == 0 for case in cases)
    if fuzz.takes_varlen(window=False):
        lengths = [pair for case in cases for pair in case.lengths]
        assert any(0 in pair for pair in lengths) and any(q > 128 and q != k for q, k in lengths)
    if fuzz.takes_grouped_queries():
        assert any(case.num_heads > case.num_heads_kv > 1 for case in cases)


def test_cases_keep_to_their_limits():
    for limits in (CPU_LIMITS, GPU_LIMITS):
        for number in range(300):
            case = draw_case(1, number, list_keys(), limits)
            assert max(case.seqlen_q, case.seqlen_k) <= limits.max_seqlen
            if case.lengths:
                assert sum(q * k for q, k in case.lengths) * case.num_heads <= max(limits.max_scores, 500)
                continue
            size = case.batch * case.num_heads * case.seqlen_q * case.seqlen_k
            assert size <= limits.max_scores or case.num_heads_kv == case.batch == 1
    assert any(draw_case(1, number, list_keys(), GPU_LIMITS).seqlen_q > 2048 for number in range(300))


@pytest.mark.parametrize(
    "layout", sorted({layout for layouts in LAYOUTS.values() for layout in layouts} - {"heads last"})
)
def test_layouts(layout):
    x = torch.randn(2, 5, 3, 64)
    laid_out = fuzz.lay_out(x, layout)
    assert laid_out.shape == x.shape and torch.isfinite(laid_out).all()
    values = {"one head": x[:, :, :1], "one sequence": x[:1], "one value": x[0, 0, 0, 0]}.get(layout, x)
    assert torch.equal(laid_out, values.expand(x.shape))
    assert laid_out.is_contiguous() == (layout == "contiguous" or layout.startswith("offset"))
    assert (laid_out.storage_offset() > 0) == (layout in ("offset 1", "offset 8", "fused"))


@pytest.mark.parametrize("layout", LAYOUTS["lse"])
def test_layouts_of_the_lse(layout):
    lse = torch.randn(2, 3, 5)
    laid_out = fuzz.lay_out_lse(lse, layout)
    assert torch.equal(laid_out, lse) and laid_out.is_contiguous() == (layout == "contiguous")


def test_wrong_values_are_seen_and_replayed(monkeypatch, capsys):
    """dV without its last key, in every second case."""
    right = fuzz.attention_backward
    calls = []

    def wrong(*arguments, **options):
        dq, dk, dv = right(*arguments, **options)
        dv[:, -1] = 0
        calls.append(None)
        return dq, dk, dv

    monkeypatch.setattr(fuzz, "attention_backward", wrong)
    assert main(["--cases", "3", "--seed", "9", "--device", "cpu"]) == 1
    output = capsys.readouterr().out
    assert "3 cases, 0 passed, 3 failed" in output
    assert "FAILED python -m tests.fuzz --seed 9 --only 2: dv: relative error" in output
    assert main(["--seed", "9", "--only", "2", "--device", "cpu"]) == 1
    monkeypatch.undo()
    assert main(["--seed", "9", "--only", "2", "--device", "cpu"]) == 0


@pytest.mark.parametrize("lost", ["a gradient of the LSE", "a part of a sink's gradient", "a packed sequence's keys"])
def test_what_is_lost_is_seen(lost, monkeypatch):
    dense, packed, sink = fuzz.attention_backward, fuzz.interface.attention_varlen_backward, fuzz.get_dsink

    def without_dlse(*arguments, dlse, **options):
        dout, q, k, v, out, *rest = arguments
        return dense(torch.zeros_like(out) if dout is None else dout, q, k, v, out, *rest, **options)

    def without_a_query(x):
        return tuple(dsink * 1.02 for dsink in sink(x))

    def without_keys(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest, **options):
        dq, dk, dv = packed(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *rest, **options)
        dk[cu_seqlens_k[-2] : cu_seqlens_k[-1]] = 0
        return dq, dk, dv

    changes = {
        "a gradient of the LSE": (
            fuzz,
            "attention_backward",
            without_dlse,
            lambda c: c.uses != "out" and not c.lengths,
        ),
        "a part of a sink's gradient": (fuzz, "get_dsink", without_a_query, lambda c: c.sink and c.uses == "out"),
        "a packed sequence's keys": (
            fuzz.interface,
            "attention_varlen_backward",
            without_keys,
            lambda c: len(c.lengths) > 1 and min(c.lengths[-1]) > 8,
        ),
    }
    module, name, wrong, concerns = changes[lost]
    drawn = ((number, draw_case(0, number, list_keys(), CPU_LIMITS)) for number in range(400))
    numbers = [number for number, case in drawn if concerns(case)][:4]
    assert fuzz.fuzz(0, numbers, "cpu").failures == []
    monkeypatch.setattr(module, name, wrong)
    failures = fuzz.fuzz(0, numbers, "cpu").failures
    # the keys of a sequence alone are the last ones there: its bits may differ before its values are looked at
    words = {"a packed sequence's keys": ": dk"}.get(lost, "error")
    assert len(failures) == 4 and all(words in failure for failure in failures), failures


def test_queries_that_see_one_key_each_have_no_gradient_but_noise():
    """Found by seed 2, case 2204: dq and dk are 0, and fp32 leaves more of them than half an ulp of fp16."""
    layouts = dict.fromkeys(LAYOUTS, "contiguous")
    key = fuzz.Key("shortest_first", 192, "local", torch.float16, unequal=True)
    case = fuzz.Case(2, 2204, key, 4, 4, 4, 79, 79, (0, 0), 0.5, layouts, True)
    tally = fuzz.Tally()
    fuzz.run_case(case, "cpu", CPU_LIMITS, tally)
    inputs = fuzz.make_inputs(case, "cpu")
    grads = [torch.zeros_like(x) for x in inputs[1:4]]
    for name, grad in zip(("dq", "dk"), grads, strict=False):
        grad[0, 0, 0, 0] = 1.0
        with pytest.raises(AssertionError, match=f"{name}: relative error: its norm is 1"):
            fuzz.check_accuracy(case, inputs, grads, CPU_LIMITS, tally)
        grad.zero_()


def test_wrong_bits_are_seen(monkeypatch):
    """One of the interleavings ends with another bit."""
    right = fuzz.emulator.backward

    def other(*arguments, interleaving=None, **options):
        dq, dk, dv = right(*arguments, interleaving=interleaving, **options)
        if interleaving is not None:
            dk.view(torch.int16)[0, 0, 0, 0] ^= interleaving % 2
        return dq, dk, dv

    monkeypatch.setattr(fuzz.emulator, "backward", other)
    dense = [number for number in range(20) if not draw_case(0, number, list_keys(), CPU_LIMITS).lengths]
    tally = fuzz.fuzz(0, dense[:3], "cpu")
    assert len(tally.failures) == 3
    assert all("interleaving" in failure and "dk differs in 1 of" in failure for failure in tally.failures)


def test_the_emulator_is_compared_with_where_a_case_is_small(monkeypatch):
    """As on the GPU, where it is not what the op runs."""
    limits = CPU_LIMITS._replace(max_emulated=CPU_LIMITS.max_scores)
    case = draw_case(0, 2, list_keys(), limits)
    fuzz.run_case(case, "cpu", limits, fuzz.Tally())
    right = fuzz.emulator.backward

    def scaled(*arguments, **options):
        dq, dk, dv = right(*arguments, **options)
        return dq, dk * 1.05, dv

    inputs = fuzz.make_inputs(case, "cpu")
    options = {"schedule": case.key.schedule, "dlse": inputs.dlse}
    grads = fuzz.attention_backward(*inputs[:6], case.softmax_scale, case.causal, case.window_size, **options)
    monkeypatch.setattr(fuzz.emulator, "backward", scaled)
    with pytest.raises(AssertionError, match="dk is .* from the emulator's"):
        fuzz.check_accuracy(case, inputs, grads, limits, fuzz.Tally())


def test_an_error_is_a_failure_of_its_case(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("something")

    monkeypatch.setattr(fuzz, "attention_backward", refuse)
    dense = [number for number in range(20) if not draw_case(0, number, list_keys(), CPU_LIMITS).lengths]
    tally = fuzz.fuzz(0, dense[:2], "cpu")
    assert len(tally.failures) == 2
    assert tally.failures[0].startswith(f"python -m tests.fuzz --seed 0 --only {dense[0]}: RuntimeError: something")


def test_command_writes_a_summary(tmp_path, capsys):
    file = tmp_path / "fuzz.json"
    assert main(["--cases", "2", "--device", "cpu", "--json", str(file)]) == 0
    assert "2 cases, 2 passed, 0 failed" in capsys.readouterr().out
    assert json.loads(file.read_text())["passed"] == 2


# Processes that share the cases out


def test_processes_come_to_what_one_process_comes_to(tmp_path, capsys):
    """Three of unequal shares; what each of them says is read from JSON."""
    file = tmp_path / "fuzz.json"
    command = ["--cases", "7", "--seed", "5", "--device", "cpu"]
    assert main([*command, "--jobs", "3", "--json", str(file)]) == 0
    assert "7 cases, 7 passed, 0 failed, 0 without a result" in (text := capsys.readouterr().out)
    assert text.endswith("in 3 processes\n")
    found, expected = json.loads(file.read_text()), fuzz.fuzz(5, range(7), "cpu")
    assert (found["jobs"], found["passed"], found["lost"]) == (3, 7, [])
    assert found["comparisons"] == expected.comparisons
    assert found["worst_case"] == expected.worst_case
    assert found["worst_ratio"] == pytest.approx(expected.worst_ratio, rel=0.05)  # other sums with other threads


def test_one_process_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "run_all", None)
    file = tmp_path / "fuzz.json"
    assert main(["--cases", "1", "--device", "cpu", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["jobs"] == 1
    assert main(["--only", "1", "--device", "cpu", "--jobs", "4"]) == 0
    with pytest.raises(SystemExit):
        main(["--cases", "1", "--device", "cpu", "--jobs", "0"])


# a part of the cases that passes all of them, as `fuzz_part` says it, but for what is to happen in case 4
PART = """
import json, os, sys, time
part, parts = map(int, sys.argv[2].split("/"))
for count, number in enumerate(range(9)[part::parts], start=1):
    if number == 4:
        {event}
    tally = dict(passed=count, comparisons=3 * count, worst_ratio=number / 8, worst_case=str(number))
    print("progress", json.dumps([count, tally]))
    print("[a library says something]")
"""


@pytest.mark.parametrize(
    ("event", "how"),
    [
        ("os.kill(os.getpid(), 9)", "ended with status -9"),
        ("sys.exit(1)", "ended with status 1"),
        ("time.sleep(600)", "got stuck"),
        ("print('progress [5, {{', end=''); sys.exit(1)", "ended with status 1"),
    ],
    ids=["killed", "failed", "stuck", "in the middle of a line"],
)
def test_cases_of_a_process_that_dies_are_not_lost(event, how, monkeypatch):
    """Two processes: the odd cases, 4, pass, of the even ones, 5, the first two."""
    monkeypatch.setattr(fuzz, "STUCK_S", 2.0)
    arguments = [sys.executable, "-u", "-S", "-c", PART.format(event=event)]
    tally = fuzz.fuzz_in_processes(3, range(9), 2, arguments)
    assert (tally.passed, tally.comparisons, tally.left, tally.num_cases) == (6, 18, 3, 9)
    assert tally.lost == [f"a process {how} in case 4, with cases 4, 6, 8 of --seed 3 left"] and not tally.ok
    assert (tally.worst_ratio, tally.worst_case) == (7 / 8, "7")


def test_a_process_that_never_begins_has_all_its_cases_left():
    tally = fuzz.fuzz_in_processes(0, range(5), 2, [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    assert tally.lost == [
        "a process ended with status 3 in case 0, with cases 0, 2, 4 of --seed 0 left",
        "a process ended with status 3 in case 1, with cases 1, 3 of --seed 0 left",
    ]
    assert (tally.passed, tally.left) == (0, 5)


def test_a_process_that_dies_behind_its_last_case_is_no_success():
    tally = fuzz.read_part(0, range(2), 'progress [2, {"passed": 2}]\n', Ended(-11, 1.0))
    assert tally.lost == ["a process ended with status -11, with no case left"]
    assert (tally.passed, tally.left, tally.ok) == (2, 0, False)


def test_failures_of_all_processes_are_told(monkeypatch, capsys):
    parts = [Tally(passed=3, failures=["first"]), Tally(passed=2, left=4, lost=["second"], worst_ratio=1.5)]
    monkeypatch.setattr(fuzz, "read_part", lambda *arguments: parts.pop(0))
    monkeypatch.setattr(fuzz, "run_all", lambda programs, *rest: [program.output.touch() for program in programs])
    assert main(["--cases", "10", "--jobs", "2", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "10 cases, 5 passed, 1 failed, 4 without a result" in text and "worst error 1.50" in text
    assert text.endswith("FAILED first\nFAILED second\n")


def test_cases_behind_a_cuda_error_are_told(monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fuzz, "run_case", fail)
    noted = []
    tally = fuzz.fuzz(0, [3, 5, 7], "cpu", note=lambda num_done, tally: noted.append(num_done))
    assert (len(tally.failures), tally.left, tally.num_cases) == (1, 2, 3)
    assert tally.lost == ["the process of case 3 broke off after a CUDA error, with cases 5, 7 of --seed 0 left"]
    assert noted == [3]  # so that they are not lost once more
