"""A new schedule is one file: the README's example, dropped beside the others, is found, checked, run and compiled."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import schedules
from cute_dash import analysis, check, emulator, interface, registry
from cute_dash.cli import main
from cute_dash.config import get_config
from cute_dash.problem import ProblemShape, Window
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    random_inputs,
)

ROOT = Path(__file__).parents[2]
NAME = "evens_first_of_the_readme"  # not the name in the README: a reader may have left that file in place
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def read_example() -> str:
    """The code block of the README."""
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(
        r"schedule-example:begin -->\n```python\n(.*?)```\n<!-- schedule-example:end", readme, re.DOTALL
    )
    return code


@pytest.fixture
def schedule_file(tmp_path, monkeypatch):
    """The example as a file of the package `schedules`, in a second folder of the package for the time of a test."""
    path = tmp_path / f"{NAME}.py"
    path.write_text(read_example().replace('"evens_first"', f'"{NAME}"'))
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    yield path
    sys.modules.pop(f"schedules.{NAME}", None)
    vars(schedules).pop(NAME, None)


def test_it_is_not_there_without_the_file():
    assert NAME not in registry.available()
    with pytest.raises(ValueError, match=NAME):
        registry.load(NAME)


def test_it_is_short(schedule_file):
    assert len(schedule_file.read_text().splitlines()) < 60


def test_it_is_found_by_its_name(schedule_file, capsys):
    assert NAME in registry.available()
    assert registry.load(NAME).name == NAME
    main(["schedules", "--json"])
    assert NAME in [row["name"] for row in json.loads(capsys.readouterr().out)]


def test_table_in_its_docstring_is_its_order(schedule_file):
    schedule = registry.load(NAME)
    table = analysis.table(schedule, ProblemShape(1, 1, 4 * 128, 4 * 128, 128, 128, causal=True))
    docstring = [line.strip() for line in sys.modules[f"schedules.{NAME}"].__doc__.splitlines()]
    assert "\n".join(line.strip() for line in table.splitlines()) in "\n".join(docstring)


@MASKS
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(512, 512), (1, 1), (799, 3), (113, 1203), (1000, 400)], ids=lambda length: str(length)
)
def test_it_keeps_the_rules(schedule_file, causal, seqlen_q, seqlen_k):
    config = get_config(64, causal)
    check.check(registry.load(NAME), ProblemShape(2, 3, seqlen_q, seqlen_k, config.tile_m, config.tile_n, causal))


@pytest.mark.parametrize("sides", [(0, 0), (300, 0), (100, 250)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(512, 512), (113, 1203), (1000, 400)], ids=str)
def test_it_keeps_the_rules_for_windows(schedule_file, sides, seqlen_q, seqlen_k):
    shape = get_config(64, False, local=True).make_shape(2, 3, seqlen_q, seqlen_k, Window(*sides))
    check.check(registry.load(NAME), shape)


def test_order_is_even_first(schedule_file):
    shape = ProblemShape(1, 1, 5 * 128, 5 * 128, 128, 128, causal=False)
    schedule = registry.load(NAME)
    tiles = [schedule.get_work_tile(work_idx, shape) for work_idx in range(5)]
    assert [tile.n_block for tile in tiles] == [0, 2, 4, 1, 3]
    assert [schedule.get_lock_value(3, tile, shape) for tile in tiles] == [0, 1, 2, 3, 4]


def test_command_line_checks_and_analyzes_it(schedule_file, capsys):
    assert main(["check", NAME]) == 0
    assert "keeps every rule" in capsys.readouterr().out
    main(["analyze", "--seqlen-q", "1k", "--json"])
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["schedule"] == NAME]
    assert row["makespan"] > 0


@MASKS
def test_its_gradients_are_right_and_repeat(schedule_file, causal):
    q, k, v, dout = random_inputs(batch=1, seqlen_q=300, seqlen_k=500, num_heads=2, head_dim=64)
    scale = 0.125
    out, lse = emulator.forward(q, k, v, scale, causal)
    exact = attention_backward_ref(dout, q, k, v, scale, causal)
    rounded = attention_backward_rounded(dout, q, k, v, scale, causal)
    first = interface.attention_backward(dout, q, k, v, out, lse, scale, causal, schedule=NAME)
    for gradient, ref, comparator, name in zip(first, exact, rounded, ("dq", "dk", "dv"), strict=True):
        assert_accurate(gradient, ref, comparator, name)
    for seed in range(5):
        again = emulator.backward(dout, q, k, v, out, lse, scale, causal, NAME, interleaving=seed)
        for gradient, repeated, name in zip(first, again, ("dq", "dk", "dv"), strict=True):
            assert_bitwise_equal(gradient, repeated, name)


def test_it_has_an_order_of_its_own(schedule_file):
    """With five KV tiles, another accumulation order than `baseline`'s rounds dq differently."""
    q, k, v, dout = random_inputs(batch=1, seqlen_q=128, seqlen_k=640, num_heads=1, head_dim=64, dtype=torch.float32)
    out, lse = emulator.forward(q, k, v, 0.125, False)
    dqs = [emulator.backward(dout, q, k, v, out, lse, 0.125, False, name)[0] for name in (NAME, "baseline")]
    assert not torch.equal(*dqs)
    torch.testing.assert_close(*dqs)


def test_it_is_compiled(schedule_file, tmp_path):
    """In a process of its own: files that are newer than a process are not kept on disk by it."""
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    cache = tmp_path / "cache"
    code = f"import sys, schedules; schedules.__path__.append({str(tmp_path)!r}); from cute_dash.cli import main; "
    code += f"sys.exit(main(['compile', {NAME!r}, '--head-dim', '64', '--mask', 'causal']))"
    environment = {**os.environ, "CUTE_DASH_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"1 kernel(s) in {cache}"
    assert "plain launch" in done.stdout
    (kernel,) = cache.glob("*.o")
    assert kernel.stat().st_size > 10_000
