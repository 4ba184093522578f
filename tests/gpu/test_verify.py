"""The conditions of `cute-dash verify-bits` come about on the GPU, and the bits hold under each; the command itself."""

import json
import time

import pytest
import torch

from cute_dash import cli, registry, verify, verify_gpu
from cute_dash.device import num_sms
from cute_dash.registry import UnsupportedShapeError
from cute_dash.schedule import Selector
from cute_dash.verify import Configuration, Extents, Outcome

SMALL = Extents(8, 16, 16, 512, 512)  # more work tiles than SMs
CLASSES = [
    (head_dim, mask, window_size)
    for head_dim in (64, 128)
    for mask, window_size in (("full", (-1, -1)), ("causal", (-1, -1)), ("local", (200, 0)))
]
ORDERED = [
    name for name, schedule in registry.load_all()[0].items() if schedule.ordered and not isinstance(schedule, Selector)
]
# how many of the runs must have been under the condition, where one CTA is enough: the rest depends on the host being
# quick, and cooperative launches wait for the SMs that others have
HELD_SHARE = {"plain": 1, "poisoned memory": 0.8, "fewer SMs": 1, "other batches": 1}


def make_problem(schedule, head_dim, mask, window_size=(-1, -1), extents=SMALL):
    configuration = Configuration(schedule, head_dim, mask, window_size, "bfloat16", extents)
    try:
        return configuration.make_problem("cuda")
    except UnsupportedShapeError as error:
        pytest.skip(str(error))


def collect(samples):
    outcome = Outcome()
    for sample in samples:
        outcome.add(sample)
    return outcome


@pytest.mark.parametrize(("head_dim", "mask", "window_size"), CLASSES, ids=str)
def test_a_thousand_runs_longest_first(head_dim, mask, window_size):
    """Short sequences in an order that starts with the longest tile: the best race detector that was found."""
    problem = make_problem("longest_first", head_dim, mask, window_size)
    outcome = collect(verify.plain(problem, 1000))
    assert outcome.all_equal, f"{outcome.where}: {outcome.first}"


@pytest.mark.parametrize(("head_dim", "mask"), [(64, "full"), (64, "causal"), (128, "full"), (128, "causal")], ids=str)
@pytest.mark.parametrize("name", ORDERED)
def test_bits_hold_under_every_condition(name, head_dim, mask):
    problem = make_problem(name, head_dim, mask)
    needs_one_cta = problem.concrete.min_resident_ctas(problem_shape(problem)) == 1
    for condition, (samples_of, num_runs) in verify_gpu.CONDITIONS.items():
        outcome = collect(samples_of(problem, min(num_runs, 12)))
        assert outcome.all_equal, f"{condition}, {outcome.where}: {outcome.first}"
        assert outcome.runs or condition == "other longest" or not problem.batch_invariant
        if needs_one_cta:
            share = HELD_SHARE.get(condition, 0)
            assert outcome.in_force >= max(share * outcome.runs, min(outcome.runs, 1)), f"{condition}: {outcome}"


@pytest.mark.parametrize("options", [{"varlen": True}, {"dlse": True}, {"varlen": True, "dlse": True}], ids=str)
@pytest.mark.parametrize(("head_dim", "mask", "window_size"), CLASSES, ids=str)
def test_bits_hold_with_packed_sequences_and_gradients_of_the_lse(head_dim, mask, window_size, options):
    configuration = Configuration("longest_first", head_dim, mask, window_size, "bfloat16", SMALL, **options)
    problem = configuration.make_problem("cuda")
    for condition, (samples_of, num_runs) in verify_gpu.CONDITIONS.items():
        outcome = collect(samples_of(problem, min(num_runs, 12)))
        assert outcome.runs or (condition == "other longest" and "varlen" not in options), condition
        assert outcome.all_equal, f"{condition}, {outcome.where}: {outcome.first}"
        assert outcome.in_force >= HELD_SHARE.get(condition, 0) * outcome.runs, f"{condition}: {outcome}"


def problem_shape(problem):
    return verify.validation.get_shape(problem.q, problem.k, problem.causal, problem.window_size)


def test_the_control_differs_in_the_same_harness():
    problem = make_problem("unordered", 128, "causal", extents=verify_gpu.CONTROL_EXTENTS)
    outcome = verify.find_any_difference(problem, verify_gpu.busy_neighbour, verify_gpu.CONTROL_RUNS)
    assert outcome.first is not None and outcome.first.gradient == "dq"


def test_poison_reaches_the_workspace():
    """With every byte of it known beforehand, a kernel without a zero-fill of its own would show it: all is filled."""
    problem = make_problem("shortest_first", 128, "full")
    _ = problem.expected
    sizes = verify_gpu.list_allocations(problem.backward)
    outputs = [gradient.nbytes for gradient in problem.expected]
    assert sizes[:3] == outputs and len(sizes) == 4
    assert sizes[3] > 2 * outputs[0]  # dQaccum is fp32, and there are statistics and semaphores


def test_held_sms_come_back_by_themselves():
    count = num_sms(torch.cuda.current_device()) - 1
    with verify_gpu.hold_sms(count, 1.0):
        pass  # compiled
    begin = time.perf_counter()
    with verify_gpu.hold_sms(count, 50.0) as ended:
        assert not ended.query()
    assert ended.query() and 0.03 < time.perf_counter() - begin < 5


def test_one_free_sm_is_enough_for_a_schedule_that_needs_one_cta():
    problem = make_problem("shortest_first", 128, "causal", extents=Extents(1, 8, 8, 512, 512))
    expected = problem.expected
    with verify_gpu.hold_sms(num_sms(torch.cuda.current_device()) - 1, 100.0) as ended:
        grads = problem.backward()
        torch.cuda.current_stream().synchronize()
        assert not ended.query()
    assert verify.find_difference(grads, expected) is None


def test_a_cooperative_schedule_waits_for_its_sms():
    """It needs all of its CTAs at once: it must not start with fewer and hang, and it must end once they are free."""
    problem = make_problem("shift", 128, "full")
    shape = problem_shape(problem)
    assert problem.concrete.min_resident_ctas(shape) > 1
    expected = problem.expected
    with verify_gpu.hold_sms(num_sms(torch.cuda.current_device()) - 1, 30.0):
        grads = problem.backward()
    torch.cuda.synchronize()
    assert verify.find_difference(grads, expected) is None


def test_command(capsys):
    """Fresh processes, with and without the caching allocator, and everything else, on what the op runs by default."""
    argv = ["verify-bits", "--minutes", "0", "--schedule", "auto", "--seqlen-q", "512", "--json"]
    status = cli.main(argv)
    report = json.loads(capsys.readouterr().out)
    assert status == cli.OK, report
    assert {(row["configuration"]["head_dim"], row["configuration"]["mask"]) for row in report["rows"]} == {
        (head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal")
    }
    for row in report["rows"]:
        outcomes = row["outcomes"]
        assert outcomes["processes"]["runs"] == len(verify_gpu.PROCESSES)
        assert set(outcomes) >= set(verify_gpu.CONDITIONS) - {"other batches", "other longest"}
        assert all(outcome["equal"] == outcome["runs"] > 0 for outcome in outcomes.values())
    assert all(control["outcome"]["first"] for control in report["controls"])
