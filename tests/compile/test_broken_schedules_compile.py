"""Where a schedule that nobody checked makes the DSL fail, the error is one line that names the method and the rule."""

import sys
from importlib import import_module

import pytest

from cute_dash import compile as compile_module
from cute_dash.check import ScheduleError
from cute_dash.config import get_config
from tests.broken_schedules import TRACED


@pytest.fixture(params=TRACED)
def mistake(request, tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    (tmp_path / "broken_schedule.py").write_text(TRACED[request.param].source)
    monkeypatch.syspath_prepend(tmp_path)
    yield TRACED[request.param]
    sys.modules.pop("broken_schedule", None)


def compile_broken():
    compile_module.compile_backward(get_config(64, causal=True), import_module("broken_schedule").SCHEDULE)


def test_the_checker_explains_what_the_dsl_found(mistake):
    with pytest.raises(ScheduleError, match=f"^broken hd64 causal bfloat16 cannot be compiled: {mistake.message}"):
        compile_broken()


@pytest.mark.parametrize("mistake", ["if", "loop"], indirect=True)
def test_without_the_checker_the_dsl_s_words_are_those_of_rule_4(mistake, monkeypatch):
    monkeypatch.setattr(compile_module, "find_small_violation", lambda schedule, config: None)
    advice = (
        r"rule 4 \(traceable\): Broken\.get_\w+ \(.*line \d+\) "
        r"(asks for the truth value|takes a traced value for an index)"
    )
    with pytest.raises(ScheduleError, match=advice) as caught:
        compile_broken()
    assert "\n" not in str(caught.value)
