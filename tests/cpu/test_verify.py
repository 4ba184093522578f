"""The harness of `cute-dash verify-bits`: it sees every difference, counts right, and its verdict follows; no GPU."""

import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass, field, fields, replace

import pytest
import torch

from cute_dash import cli, verify, verify_gpu
from cute_dash.schedule import SelectorRow, needs_one_cta
from cute_dash.testing import why_no_hopper
from cute_dash.verify import Configuration, Extents, Outcome, Report, Row, Sample, Selection
from schedules.auto import Auto
from schedules.auto_invariant import AutoInvariant
from schedules.descending import Descending
from schedules.shortest_first import ShortestFirst

SMALL = Extents(2, 2, 2, 300, 300)
needs_no_hopper = pytest.mark.skipif(why_no_hopper() is None, reason="there is a Hopper GPU here")


def make_gradients(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 5, 3, 8, generator=generator).to(dtype) for _ in range(3))


@dataclass
class FakeSubject:
    """Returns the same gradients but for one element in the runs that are named; batch composition as told."""

    wrong_runs: tuple = ()
    place: tuple = (1, 4, 2, 7)
    gradient: int = 0
    batch: int = 2
    batch_invariant: bool = True
    depends_on_batch: bool = False
    sequences: tuple = (0, 1)
    runs: list = field(default_factory=list)

    @property
    def expected(self):
        return tuple(x[list(self.sequences)] for x in make_gradients())

    def backward(self):
        self.runs.append(None)
        grads = [x.clone() for x in self.expected]
        if len(self.runs) in self.wrong_runs:
            grads[self.gradient][self.place] += 1
        if self.depends_on_batch and self.sequences != (0, 1):
            grads[1][0, 0, 0, 0] += 1
        return tuple(grads)

    def select(self, sequences):
        return replace(self, sequences=tuple(sequences), runs=[])

    def select_gradients(self, sequences):
        return tuple(x[list(sequences)] for x in self.expected)


# Comparison


def test_equal_bits_have_no_difference():
    assert verify.find_difference(make_gradients(), make_gradients()) is None


@pytest.mark.parametrize("gradient", range(3), ids=verify.GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_last_bit_of_one_element_is_a_difference(gradient, dtype):
    expected, found = make_gradients(dtype), make_gradients(dtype)
    place = (1, 3, 2, 5)
    found[gradient].view(torch.int32 if dtype is torch.float32 else torch.int16)[place] ^= 1
    difference = verify.find_difference(found, expected)
    assert difference == verify.Difference(
        gradient=verify.GRADIENTS[gradient],
        batch=1,
        row=3,
        head=2,
        column=5,
        expected=expected[gradient][place].item(),
        found=found[gradient][place].item(),
        count=1,
        size=240,
    )
    assert "batch 1, head 2, row 3, column 5" in str(difference) and repr(difference.found) in str(difference)


def test_the_first_of_several_differences_is_named():
    found = make_gradients()
    found[1][0, 2, 1, 6] += 1
    found[1][1, 0, 0, 0] += 1
    found[2][0, 0, 0, 0] += 1
    difference = verify.find_difference(found, make_gradients())
    assert (difference.gradient, difference.batch, difference.row) == ("dk", 0, 2)
    assert (difference.head, difference.column, difference.count) == (1, 6, 2)


def test_negative_zero_and_nan():
    zeros = tuple(torch.zeros(1, 1, 1, 2) for _ in range(3))
    negative = (zeros[0], -zeros[1], zeros[2])
    assert verify.find_difference(negative, zeros).gradient == "dk"
    nans = tuple(torch.full((1, 1, 1, 2), math.nan) for _ in range(3))
    assert verify.find_difference(nans, tuple(x.clone() for x in nans)) is None
    assert verify.find_difference(nans, zeros).gradient == "dq"


def test_other_shapes_and_dtypes_are_refused():
    dq, dk, dv = make_gradients()
    with pytest.raises(ValueError, match=r"dk is \(1, 5, 3, 8\)"):
        verify.find_difference((dq, dk[:1], dv), (dq, dk, dv))
    with pytest.raises(ValueError, match="dv is .*float32"):
        verify.find_difference((dq, dk, dv.float()), (dq, dk, dv))


# Conditions


def test_a_subject_that_changes_once_is_found():
    outcome = verify.verify(FakeSubject(wrong_runs=(7,)), {"plain": (verify.plain, 10)}, {})["plain"]
    assert (outcome.runs, outcome.equal, outcome.in_force) == (10, 9, 10)
    assert outcome.where == "run 7" and outcome.first.gradient == "dq" and not outcome.all_equal


def test_rounds_add_up():
    outcomes = {}
    subject = FakeSubject(wrong_runs=(15,))
    for _ in range(2):
        verify.verify(subject, {"plain": (verify.plain, 10)}, outcomes)
    assert (outcomes["plain"].runs, outcomes["plain"].equal) == (20, 19)
    assert outcomes["plain"].where == "run 15"


def test_batches_are_compared_sequence_by_sequence():
    samples = list(verify.other_batches(FakeSubject(), 10))
    assert [sample.what for sample in samples] == [
        "sequences [1, 0]",
        "sequences [1, 0]",
        "sequences [0]",
        "sequences [1]",
    ]
    assert torch.equal(samples[0].expected[0], make_gradients()[0].flip(0))
    outcome = Outcome()
    assert all(outcome.add(sample) for sample in samples)


def test_a_dependence_on_the_batch_is_found():
    outcomes = verify.verify(FakeSubject(depends_on_batch=True), {"batches": (verify.other_batches, 4)}, {})
    assert outcomes["batches"].equal < outcomes["batches"].runs
    assert outcomes["batches"].first.gradient == "dk"


@pytest.mark.parametrize("changes", [dict(batch=1), dict(batch_invariant=False)], ids=str)
def test_batches_that_nobody_promises_are_not_run(changes):
    assert verify.verify(FakeSubject(**changes), {"batches": (verify.other_batches, 4)}, {}) == {}


def test_the_control_stops_at_the_first_difference():
    outcome = verify.find_any_difference(FakeSubject(wrong_runs=(33, 34)), verify.plain, 100)
    assert (outcome.runs, outcome.equal) == (33, 32) and outcome.first is not None


def test_a_control_without_a_difference_says_so():
    outcome = verify.find_any_difference(FakeSubject(), verify.plain, 50)
    assert outcome.runs == 50 and outcome.first is None
    assert verify.find_any_difference(FakeSubject(batch=1), verify.other_batches, 50).runs == 0


def test_what_was_not_in_force_is_said():
    outcome = Outcome()
    for in_force in (True, False, True):
        outcome.add(Sample(make_gradients(), make_gradients(), in_force))
    assert str(outcome) == "3/3 (2 held)" and str(Outcome()) == "-"


# The emulator is a subject, and its control differs


@pytest.mark.parametrize("window_size", [(-1, -1), (100, 0)], ids=str)
def test_the_emulator_keeps_its_bits_and_its_control_does_not(window_size):
    mask = "full" if window_size == (-1, -1) else "local"
    ordered = Configuration("baseline", 64, mask, window_size, "bfloat16", SMALL)
    outcomes = verify.verify(ordered.make_problem("cpu"), verify.EMULATOR_CONDITIONS, {})
    assert outcomes.keys() == verify.EMULATOR_CONDITIONS.keys() - {"longest"}
    assert all(outcome.all_equal for outcome in outcomes.values())
    control = Configuration("unordered", 64, mask, (260, 0), "bfloat16", verify.EMULATOR_EXTENTS)
    assert verify.find_any_difference(control.make_problem("cpu"), verify.plain, 100).first.gradient == "dq"


def test_a_selector_is_pinned_where_another_batch_may_change_its_choice():
    for spec, expected in (("auto", "object"), ("auto_invariant", "auto_invariant")):
        problem = Configuration(spec, 64, "causal", (-1, -1), "bfloat16", SMALL).make_problem("cpu")
        alone = problem.select([1])
        assert alone.schedule == (problem.concrete if expected == "object" else spec)
        assert alone.batch == 1 and torch.equal(alone.q[0], problem.q[1])


def test_fewer_kv_heads_are_taken_where_the_op_takes_them():
    configuration = Configuration("baseline", 64, "full", (-1, -1), "bfloat16", replace(SMALL, num_heads_kv=1))
    try:
        problem = configuration.make_problem("cpu")
    except ValueError as error:
        assert "k has 1 heads" in str(error)
        return
    assert problem.k.shape[2] == 1 and problem.expected[1].shape == problem.k.shape


# Sequences of different lengths and gradients of the LSE


VARLEN = Configuration("baseline", 64, "causal", (-1, -1), "bfloat16", replace(SMALL, batch=3), varlen=True, dlse=True)


def test_packed_sequences_keep_their_bits_wherever_they_are():
    problem = VARLEN.make_problem("cpu")
    assert problem.lengths == ((300, 300), (200, 200), (100, 100)) and problem.q.shape == (1, 600, 2, 64)
    outcomes = verify.verify(problem, verify.EMULATOR_CONDITIONS, {})
    assert {name: outcome.runs for name, outcome in outcomes.items()} == {
        "interleavings": 8,
        "batches": 4,
        "longest": 4,
    }
    assert all(outcome.all_equal for outcome in outcomes.values())
    moved = problem.select([2, 0])
    assert moved.lengths == ((100, 100), (300, 300)) and moved.max_seqlens == problem.max_seqlens
    assert torch.equal(moved.k[:, :100], problem.k[:, 500:]) and torch.equal(
        moved.lse[..., 100:400], problem.lse[..., :300]
    )
    dq, dk, _ = problem.select_gradients([2, 0])
    assert torch.equal(dq[:, :100], problem.expected[0][:, 500:]) and (dk[:, 400:] == 0).all()


def test_a_window_keeps_its_kind_for_a_short_sequence_alone():
    problem = replace(VARLEN, mask="local", window_size=(150, 0)).make_problem("cpu")
    assert problem.select([2]).longest == problem.longest and problem.longest.window == (150, 0)
    outcome = verify.verify(problem, {"batches": (verify.other_batches, 5)}, {})["batches"]
    assert outcome.runs == 5 and outcome.all_equal


@pytest.mark.parametrize(("head_dim", "mask"), [(128, "causal"), (64, "full")], ids=str)
def test_a_choice_by_the_longest_sequence_is_found(head_dim, mask, monkeypatch):
    """The control of the condition: the batch-invariant selector as it was, which the longest sequence's row chose."""
    configuration = replace(VARLEN, schedule="auto_invariant", head_dim=head_dim, mask=mask)
    condition = {"longest": (verify.other_longest, 4)}
    outcome = verify.verify(configuration.make_problem("cpu"), condition, {})["longest"]
    assert outcome.runs == 4 and outcome.all_equal, outcome.first

    def select_varlen(self, shape):
        return next(row.schedule for row in self.table if row.fits(shape) and needs_one_cta(row.schedule))

    monkeypatch.setattr(AutoInvariant, "select_varlen", select_varlen)
    if mask == "full":  # whose table has no such rows for this tile
        rows = SelectorRow("full", 8, Descending()), SelectorRow("full", None, ShortestFirst())
        monkeypatch.setattr(AutoInvariant, "table", rows)
    outcome = verify.verify(configuration.make_problem("cpu"), condition, {})["longest"]
    assert outcome.equal < outcome.runs and "with much longer ones" in outcome.where


def test_the_longest_sequence_goes_beyond_every_row_that_asks_for_a_length():
    tiles = [row.max_n_blocks or 0 for selector in (Auto(), AutoInvariant()) for row in selector.table]
    assert verify.LONG > max(tiles) * 128 > VARLEN.extents.seqlen_k


@pytest.mark.parametrize("schedule", ["auto", "hybrid"])
def test_other_longest_ones_are_not_run_where_nobody_promises_them(schedule):
    for configuration in (replace(VARLEN, schedule=schedule), replace(VARLEN, varlen=False)):
        assert not list(verify.other_longest(configuration.make_problem("cpu"), 4))


def test_another_longest_one_must_not_mean_another_kind_of_mask():
    """A window of 150 hides nothing from the shorter sequences alone."""
    problem = replace(VARLEN, mask="local", window_size=(150, 0)).make_problem("cpu")
    whats = [sample.what for sample in verify.other_longest(problem, 6)]
    longer = "with much longer ones"
    expected = ((0, "alone"), (0, longer), (1, "alone"), (1, longer), (2, longer))
    assert whats == [f"sequence {sequence} {what}" for sequence, what in expected]


def test_the_control_differs_with_packed_sequences_too():
    control = replace(VARLEN, schedule="unordered", mask="full", extents=verify.EMULATOR_EXTENTS)
    assert verify.find_any_difference(control.make_problem("cpu"), verify.plain, 100).first.gradient == "dq"


@pytest.mark.parametrize("varlen", [False, True])
def test_the_gradient_of_the_lse_is_in_the_run(varlen):
    problem = replace(VARLEN, varlen=varlen).make_problem("cpu")
    assert problem.dlse.shape == problem.lse.shape
    with_dlse, without = problem.expected, replace(problem, dlse=None).backward()
    assert not torch.equal(with_dlse[0], without[0]) and torch.equal(with_dlse[2], without[2])
    moved = problem.select([1])
    assert moved.dlse.shape == moved.lse.shape


def test_fresh_processes_get_packed_sequences_and_gradients_of_the_lse():
    problems = []
    for options in ({"varlen": True}, {"dlse": True}, {"varlen": True, "dlse": True}):
        emulated = replace(VARLEN, **{"varlen": False, "dlse": False, **options}).make_problem("cpu")
        kind = verify.VarlenProblem if options.get("varlen") else verify.Problem
        problems.append(kind(**{name.name: getattr(emulated, name.name) for name in fields(kind)}))
    outcomes = [Outcome() for _ in problems]
    for index, sample in verify_gpu.fresh_processes(problems, {"process": {}}):
        assert outcomes[index].add(sample), outcomes[index].first
    assert [outcome.runs for outcome in outcomes] == [1, 1, 1]
    dq, dk, dv = problems[2].backward()
    problems[2]._first[:] = [(dq + 1, dk, dv)]
    ((_, sample),) = verify_gpu.fresh_processes([problems[2]], {"process": {}})
    assert torch.equal(sample.found[0], dq)


def test_command_with_packed_sequences(capsys):
    argv = ["verify-bits", "--emulator", "--minutes", "0", "--head-dim", "64", "--mask", "full", "--seqlen-q", "200"]
    assert cli.main([*argv, "--varlen", "--dlse", "--schedule", "shift", "auto", "--json"]) == cli.OK
    report = json.loads(capsys.readouterr().out)
    assert [row["configuration"]["varlen"] and row["configuration"]["dlse"] for row in report["rows"]] == [True]
    assert "may need several resident CTAs" in report["left_out"][0]
    assert report["controls"][0]["configuration"]["varlen"]


# Selection and report


def select(**changes):
    options = dict(
        schedules=("baseline",),
        head_dims=(64,),
        masks=("full",),
        window_size=(64, 0),
        dtypes=("bfloat16",),
        extents=SMALL,
    )
    return Selection(**{**options, **changes})


def test_all_means_every_schedule_that_promises_bits():
    names = {c.schedule for c in select(schedules=("auto", "all", "auto")).list_configurations()}
    assert {"auto", "baseline", "hybrid"} <= names and not {"unordered", "auto_invariant"} & names
    assert len(select(schedules=("auto", "auto"), masks=("full", "causal")).list_configurations()) == 2


def test_the_comparator_cannot_be_verified():
    with pytest.raises(ValueError, match="'unordered' promises no bits"):
        select(schedules=("unordered",)).list_configurations()


def make_report(outcome=None, control=None):
    configuration = select().list_configurations()[0]
    good, differing = Outcome(), Outcome()
    good.add(Sample(make_gradients(), make_gradients()))
    differing.add(Sample(FakeSubject(wrong_runs=(1,)).backward(), make_gradients()))
    outcomes = {"plain": outcome or good}
    return Report({}, [Row(configuration, "baseline v1", outcomes)], [(configuration, control or differing)]), good


def test_verdicts():
    report, good = make_report()
    assert report.passed and "All 1 runs of 1 configurations had the bits of their first." in report.render()
    blind, _ = make_report(control=good)
    assert not blind.passed and "the proof proves nothing" in blind.render()
    differing = report.controls[0][1]
    failed, _ = make_report(outcome=differing)
    assert not failed.passed and "DIFFER" in failed.render()
    assert "plain, run 1: dq differs in 1 of 240 elements, first at batch 1, head 2, row 4, column 7" in failed.render()
    assert not Report({}).passed and "nothing to verify" in Report({}).render()
    assert not replace(report, controls=[]).passed


def test_rounds_go_on_until_the_time_is_over():
    configuration = select().list_configurations()[0]
    problem = configuration.make_problem("cpu")
    once, longer = Report({}), Report({})
    verify.run(once, [(configuration, problem)], {"plain": (verify.plain, 1)}, 0.0)
    assert once.rows[0].outcomes["plain"].runs == 1
    verify.run(longer, [(configuration, problem)], {"plain": (verify.plain, 1)}, 0.5 / 60)
    assert longer.rows[0].outcomes["plain"].runs > 1


# The command


def test_command_on_the_emulator(capsys):
    argv = ["verify-bits", "--emulator", "--minutes", "0", "--head-dim", "64", "--mask", "causal", "--seqlen-q", "200"]
    assert cli.main([*argv, "--schedule", "shift", "longest_first", "--json"]) == cli.OK
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and [row["ran"] for row in report["rows"]] == ["longest_first v1"]
    assert "shift" in report["left_out"][0]
    assert report["controls"][0]["outcome"]["first"]["gradient"] == "dq"
    assert cli.main(argv) == cli.OK
    assert "had the bits of their first" in capsys.readouterr().out


def test_command_fails_where_bits_differ(capsys, monkeypatch):
    """The ordered schedule's runs are the comparator's: the command must see it."""
    honest = verify.EmulatedProblem.concrete.fget
    unordered = verify.registry.load("unordered")
    monkeypatch.setattr(verify.EmulatedProblem, "concrete", property(lambda self: honest(self) and unordered))
    argv = ["verify-bits", "--emulator", "--minutes", "0", "--head-dim", "64", "--mask", "full"]
    assert cli.main([*argv, "--schedule", "baseline"]) == cli.FAILED
    output = capsys.readouterr().out
    assert "DIFFER" in output and "FAILED: baseline, head dim 64, full, bfloat16" in output


@needs_no_hopper
def test_command_without_a_gpu_says_what_it_needs(capsys):
    assert cli.main(["verify-bits"]) == cli.USAGE
    error = capsys.readouterr().err
    assert "needs a Hopper GPU" in error and "--emulator" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "unordered"], "promises no bits"),
        (["--schedule", "shfit"], "did you mean 'shift'"),
        (["--mask", "full", "--window", "1k,0"], "--mask has no local"),
        (["--heads", "4", "--kv-heads", "3"], "k has 3 heads"),
        (["--schedule", "shift", "--mask", "causal"], "nothing to verify: shift on head dim 64, causal: it orders"),
    ],
    ids=" ".join,
)
def test_wrong_options(options, message, capsys):
    assert cli.main(["verify-bits", "--emulator", "--minutes", "0", *options]) == cli.USAGE
    assert message in capsys.readouterr().err


def test_schedules_are_named_by_position_or_option():
    parse = cli._parser().parse_args
    for argv, expected in (
        ([], ("auto", "auto_invariant")),
        (["shift", "hybrid", "--minutes", "0"], ("shift", "hybrid")),
        (["shift", "--schedule", "hybrid"], ("shift", "hybrid")),
        (["all"], ("all",)),
    ):
        assert cli._select_to_verify(parse(["verify-bits", *argv]), SMALL).schedules == expected


def test_windows_have_defaults():
    parse = cli._parser().parse_args
    chosen = cli._select_to_verify(parse(["verify-bits", "--window", "64,0"]), SMALL)
    assert chosen.masks == ("local",) and chosen.window_size == (64, 0) and chosen.extents == SMALL
    chosen = cli._select_to_verify(parse(["verify-bits", "--mask", "local", "--seqlen-q", "1k"]), SMALL)
    assert chosen.window_size == (256, 0) and chosen.extents.seqlen_k == 1024


# What does not need a GPU of the GPU's part


def test_watchdog_ends_what_gives_no_sign_of_life(capsys):
    ended = []
    with verify_gpu.Watchdog(0.2, ended.append) as watchdog:
        watchdog.alive("the place")
        time.sleep(0.6)
    assert ended == [verify_gpu.STUCK] and "STUCK for 0 s at the place" in capsys.readouterr().err


def test_watchdog_leaves_alone_what_is_alive():
    ended = []
    with verify_gpu.Watchdog(0.3, ended.append) as watchdog:
        for _ in range(6):
            time.sleep(0.1)
            watchdog.alive()
    assert ended == []


def test_fresh_processes_get_the_same_bits():
    problems = [make_op_problem("shortest_first", seed=seed) for seed in range(2)]
    samples = list(verify_gpu.fresh_processes(problems, {"first": {}, "second": {"OMP_NUM_THREADS": "1"}}))
    assert [(index, sample.what) for index, sample in samples] == [
        (0, "first"),
        (1, "first"),
        (0, "second"),
        (1, "second"),
    ]
    outcome = Outcome()
    assert all(outcome.add(sample) for _, sample in samples)


def test_fresh_processes_hand_back_what_differs():
    problem = make_op_problem("shortest_first")
    dq, dk, dv = problem.backward()
    dv[1, 7, 0, 3] += 1
    problem._first.append((dq, dk, dv))
    ((_, sample),) = verify_gpu.fresh_processes([problem], {"process": {}})
    difference = verify.find_difference(sample.found, sample.expected)
    assert (difference.gradient, difference.batch, difference.row, difference.head, difference.column) == (
        "dv",
        1,
        7,
        0,
        3,
    )


def test_a_fresh_process_that_fails_is_an_error():
    problem = replace(make_op_problem("shortest_first"), _first=[])
    _ = problem.expected
    broken = replace(problem, schedule="not_there")
    with pytest.raises(verify_gpu.ProcessError, match="unknown schedule 'not_there'"):
        list(verify_gpu.fresh_processes([broken], {"process": {}}))


def make_op_problem(schedule, seed=0):
    """A problem of the op on the CPU: without random interleavings."""
    emulated = Configuration(schedule, 64, "causal", (-1, -1), "bfloat16", SMALL).make_problem("cpu", seed)
    return verify.Problem(
        *emulated.tensors, emulated.softmax_scale, emulated.causal, emulated.window_size, emulated.schedule
    )


def test_the_digest_tells_every_bit():
    digest = verify_gpu.get_digest(make_gradients())
    assert digest == verify_gpu.get_digest(make_gradients())
    changed = make_gradients()
    changed[2].view(torch.int16)[1, 4, 2, 7] ^= 1
    assert verify_gpu.get_digest(changed) != digest


def test_the_module_imports_without_a_gpu_and_without_the_dsl():
    program = "import sys; sys.modules['cutlass'] = None; import cute_dash.verify_gpu"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
