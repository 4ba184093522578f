"""What users get wrong in a schedule is said in one line that names the method and the rule: by `check` and the op."""

import re
import sys

import pytest
import torch

from cute_dash import check, flash_attn_func, registry
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


def test_what_cannot_be_enumerated_is_refused_at_once(capsys):
    assert main(["check", "baseline", "--seqlen-q", "1024k", "--heads", "64"]) == 2
    message = capsys.readouterr().err
    assert "steps or more; at most 20,000,000 are enumerated: fewer sequences, heads or tokens" in message
    huge = get_config(64, causal=True).make_shape(2**15, 2**15, 128, 128)
    with pytest.raises(check.TooManyStepsError, match="1,073,741,824 steps or more"):
        check.check(registry.load("baseline"), huge)
