"""What users get wrong in a schedule is said in one line that names the method and the rule: by `check` and the op."""

import re
import sys

import pytest
import torch

from cute_dash import check, flash_attn_func, flash_attn_varlen_func, registry, validation
from cute_dash.cli import main
from cute_dash.config import get_config
from tests.broken_schedules import MISTAKES

MODULE = "broken_schedule"


@pytest.fixture(params=MISTAKES)
def mistake(request, tmp_path, monkeypatch):
    """Its source is the module `broken_schedule`."""
    (tmp_path / f"{MODULE}.py").write_text(MISTAKES[request.param].source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield MISTAKES[request.param]
    sys.modules.pop(MODULE, None)


def test_check_names_method_and_rule(mistake, capsys):
    status = main(["check", f"{MODULE}:SCHEDULE", "--seqlen-q", "1k"])
    output = capsys.readouterr()
    (line,) = (output.out + output.err).splitlines()
    assert status in (1, 2) and re.search(mistake.message, line), line


def test_the_op_names_method_and_rule_before_it_runs(mistake):
    q, k, v = (torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with pytest.raises(ValueError, match=mistake.message) as caught:
        flash_attn_func(q, k, v, causal=True, schedule=f"{MODULE}:SCHEDULE")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", ["get_m_block", "get_lock_value", "can_implement"])
def test_an_interruption_is_no_mistake(method, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    (tmp_path / f"{MODULE}.py").write_text(MISTAKES["None"].source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(type(registry.load(f"{MODULE}:SCHEDULE")), method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(["check", f"{MODULE}:SCHEDULE"])
    sys.modules.pop(MODULE, None)


SELECTORS = """
from dataclasses import dataclass
from typing import ClassVar

from cute_dash.schedule import SelectingSchedule, SelectorRow
from schedules.longest_first import LongestFirst
from schedules.shortest_first import ShortestFirst


@dataclass(frozen=True)
class Selects(SelectingSchedule):
    name: ClassVar[str] = "selects"
    version: ClassVar[int] = 1
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (SelectorRow("causal", None, ShortestFirst()),)


@dataclass(frozen=True)
class ByBatch(Selects):
    def select(self, shape):
        return LongestFirst() if shape.batch > 1 else ShortestFirst()


@dataclass(frozen=True)
class ByLongest(Selects):
    def select_varlen(self, shape):
        return LongestFirst() if shape.seqlen_q > 1000 else ShortestFirst()


@dataclass(frozen=True)
class ByLongestInBitsOnly(Selects):
    def select_varlen(self, shape):
        return LongestFirst(heads_per_group=4 if shape.seqlen_q > 1000 else 2)


@dataclass(frozen=True)
class Raises(Selects):
    def select_varlen(self, shape):
        return {}[shape.mask]


@dataclass(frozen=True)
class Nothing(Selects):
    def select_varlen(self, shape):
        pass

    def select(self, shape):
        return ShortestFirst()


@dataclass(frozen=True)
class Exits(Selects):
    def select_varlen(self, shape):
        exit(0)


@dataclass(frozen=True)
class SelectsItself(Selects):
    def select(self, shape):
        return self


globals().update({cls.__name__.upper(): cls() for cls in Selects.__subclasses__()})
"""


@pytest.fixture
def selectors(tmp_path, monkeypatch):
    """The module `broken_schedule` has one of each class of SELECTORS, by its name in capitals."""
    (tmp_path / f"{MODULE}.py").write_text(SELECTORS)
    monkeypatch.syspath_prepend(tmp_path)
    yield MODULE
    sys.modules.pop(MODULE, None)


def run_dense(schedule, batch):
    q, k, v = (torch.zeros(batch, 300, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    return flash_attn_func(q, k, v, causal=True, schedule=schedule)


def run_varlen(schedule, *lengths):
    x = torch.zeros(sum(lengths), 2, 64, dtype=torch.bfloat16)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return flash_attn_varlen_func(x, x, x, starts, starts, max(lengths), max(lengths), causal=True, schedule=schedule)


def test_a_selector_by_batch_is_no_batch_invariant_one(selectors, capsys):
    message = r"rule 3 .* alone, though 'selects', which selects its schedule, says batch_invariant"
    argv = ["check", f"{selectors}:BYBATCH", "--seqlen-q", "1k", "--batch"]
    assert main([*argv, "1"]) == 0
    assert main([*argv, "2"]) == 1
    assert re.search(message, capsys.readouterr().out)
    run_dense(f"{selectors}:BYBATCH", 1)
    with pytest.raises(check.ScheduleError, match=rf"schedule='selects' breaks a rule: {message}"):
        run_dense(f"{selectors}:BYBATCH", 2)
    large = get_config(64, causal=True).make_shape(8, 16, 8192, 8192)  # of which a part and a sample are looked at
    with pytest.raises(check.ScheduleError, match=message):
        validation.prove(registry.load(f"{selectors}:BYBATCH"), large)


def test_a_selector_by_the_longest_sequence_is_no_batch_invariant_one(selectors, capsys):
    message = r"rule 3 .* where the longest sequence has .* by which 'selects' selects, though it says batch_invariant"
    assert main(["check", f"{selectors}:BYLONGEST"]) == 1
    assert re.search(message, capsys.readouterr().out)
    with pytest.raises(check.ScheduleError, match=message):
        run_dense(f"{selectors}:BYLONGEST", 2)
    large = get_config(64, causal=True).make_shape(8, 16, 8192, 8192)
    with pytest.raises(check.ScheduleError, match=message):
        validation.prove(registry.load(f"{selectors}:BYLONGEST"), large)
    for lengths in ([600], [600, 1100]):
        with pytest.raises(check.ScheduleError, match=message):
            run_varlen(f"{selectors}:BYLONGEST", *lengths)
    assert main(["check", f"{selectors}:BYLONGESTINBITSONLY"]) == 0
    run_varlen(f"{selectors}:BYLONGESTINBITSONLY", 600, 1100)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("RAISES", r"selects: Raises\.select_varlen \(.*broken_schedule.py, line \d+\) raised KeyError: 'causal'"),
        ("NOTHING", r"selects: Nothing\.select_varlen gives None; allowed: a Schedule that is no selector"),
        ("EXITS", r"selects: Exits\.select_varlen \(.*\) raised SystemExit: 0"),
    ],
)
def test_a_bad_select_varlen_is_named(name, message, selectors, capsys):
    with pytest.raises(check.ScheduleError, match=message) as caught:
        run_varlen(f"{selectors}:{name}", 100, 200)
    assert "\n" not in str(caught.value)
    assert main(["check", f"{selectors}:{name}"]) == 0  # it is right for sequences of one length
    assert main(["compile", f"{selectors}:{name}", "--varlen", "--mask", "causal"]) == 1
    assert re.search(message.removeprefix("selects: "), capsys.readouterr().err)


def test_a_selector_of_itself_is_named(selectors, capsys):
    assert main(["check", f"{selectors}:SELECTSITSELF"]) == 1
    assert re.search(r"SelectsItself\.select gives .*allowed: a Schedule that is no selector", capsys.readouterr().err)


def test_what_cannot_be_enumerated_is_refused_at_once(capsys):
    assert main(["check", "baseline", "--seqlen-q", "1024k", "--heads", "64"]) == 2
    message = capsys.readouterr().err
    assert "steps or more; at most 20,000,000 are enumerated: fewer sequences, heads or tokens" in message
    huge = get_config(64, causal=True).make_shape(2**15, 2**15, 128, 128)
    with pytest.raises(check.TooManyStepsError, match="1,073,741,824 steps or more"):
        check.check(registry.load("baseline"), huge)
