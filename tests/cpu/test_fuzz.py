"""The fuzz driver: some cases on the emulator, replay, and that it sees wrong values and wrong bits."""

import json
from itertools import product

import pytest
import torch

from tests import fuzz
from tests.fuzz import CPU_LIMITS, GPU_LIMITS, LAYOUTS, draw_case, list_keys, main


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
