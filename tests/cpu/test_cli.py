"""The command line: what it prints, what a program can read from it, and its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cute_dash
from cute_dash import cli, registry
from cute_dash.cli import main
from cute_dash.config import get_config

ROOT = Path(__file__).parents[2]

# claims KV tiles from left to right but adds from right to left: the first CTA waits for the last one
DEADLOCKING = """
from dataclasses import dataclass
from typing import ClassVar
from cute_dash.schedule import DenseSchedule

@dataclass(frozen=True)
class Deadlocking(DenseSchedule):
    name: ClassVar[str] = "deadlocking"

    def get_lock_value(self, m_block, tile, shape):
        return shape.get_n_block_max(m_block) - 1 - tile.n_block

SCHEDULE = Deadlocking()
"""


def run_json(capsys, *argv):
    """Exit status and what the command printed as JSON."""
    status = main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def run_blocked(argv, *modules):
    """Runs a command in a fresh interpreter where importing `modules` fails."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from cute_dash.cli import main; "
    code += f"sys.exit(main({argv!r}))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def deadlocking(tmp_path, monkeypatch):
    """A folder with the module `deadlocking_schedule` is the current one; it is not in the module path."""
    (tmp_path / "deadlocking_schedule.py").write_text(DEADLOCKING)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    yield "deadlocking_schedule:SCHEDULE"
    sys.modules.pop("deadlocking_schedule", None)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"cute-dash {cute_dash.__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["check"],
        ["check", "baseline", "--mask", "window"],
        ["check", "baseline", "--seqlen-q", "0"],
        ["check", "baseline", "--head-dim", "96"],
        ["analyze", "--num-sms", "-1"],
        ["analyze", "--compute", "nan"],
        ["plot", "baseline"],
    ],
    ids=" ".join,
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: cute-dash" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "tokens"), [("1", 1), ("4096", 4096), ("4k", 4096), ("16K", 16384)])
def test_tokens(text, tokens):
    assert cli._parser().parse_args(["check", "baseline", "--seqlen-q", text]).seqlen_q == tokens


def test_schedules_lists_every_schedule(capsys):
    status, rows = run_json(capsys, "schedules", "--mask", "full")
    assert status == 0
    assert [row["name"] for row in rows] == registry.available()
    by_name = {row["name"]: row for row in rows}
    assert by_name["unordered"]["ordered"] is False
    assert by_name["hybrid"]["batch_invariant"] is False
    assert by_name["shift"]["min_resident_ctas"] == 16  # as many as a head of 2,048 tokens has KV tiles
    assert by_name["symmetric_shift"]["min_resident_ctas"] is None
    assert all(row["version"] >= 1 and row["description"] for row in rows)


def test_schedules_table(capsys):
    assert main(["schedules"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in registry.available())


@pytest.mark.parametrize("name", ["baseline", "auto"])
def test_check_of_a_right_schedule(name, capsys):
    status, result = run_json(capsys, "check", name, "--seqlen-q", "300", "--seqlen-k", "700")
    assert status == 0
    assert result["ok"] is True and result["violation"] is None
    assert (result["shape"]["seqlen_q"], result["shape"]["seqlen_k"]) == (300, 700)
    assert main(["check", name]) == 0
    assert "keeps every rule" in capsys.readouterr().out


def test_check_names_the_violation(deadlocking, capsys):
    status, result = run_json(capsys, "check", deadlocking, "--seqlen-q", "1k")
    assert status == 1
    assert result["schedule"] == "deadlocking" and result["ok"] is False
    assert main(["check", deadlocking, "--seqlen-q", "1k"]) == 1
    assert result["violation"] in capsys.readouterr().out


def test_current_folder_is_searched_last(deadlocking):
    main(["check", deadlocking])
    assert sys.path[-1] == os.getcwd()


def test_check_with_too_few_resident_ctas(capsys):
    status, result = run_json(capsys, "check", "shift", "--mask", "full", "--seqlen-q", "1k", "--resident", "2")
    assert status == 1
    assert "2" in result["violation"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("baselin", "did you mean 'baseline'"),
        ("no_such_module:SCHEDULE", "no module named 'no_such_module'"),
        ("json:loads", "no Schedule"),
        ("shift", "cannot implement"),
    ],
)
def test_schedule_that_cannot_be_had(spec, message, capsys):
    assert main(["check", spec, "--mask", "causal"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_analyze_gives_the_closed_form_of_the_paper(capsys):
    """Baseline on a full mask, m heads and n = 4 KV tiles: m*n*(c+r) + (n-1)*r, with 128 x 128 tiles."""
    shape = ["--mask", "full", "--seqlen-q", "512", "--heads", "3", "--head-dim", "64"]
    status, rows = run_json(capsys, "analyze", *shape, "--compute", "2", "--reduce", "0.5", "--num-sms", "4")
    assert status == 0
    by_name = {row["schedule"]: row for row in rows}
    expected = 3 * 4 * (2 + 0.5) + (4 - 1) * 0.5
    assert by_name["baseline"]["critical_path"] == expected
    assert by_name["baseline"]["makespan"] == expected  # 4 SMs are what the closed form assumes
    assert by_name["shift"]["stall_share"] == 0
    assert by_name["symmetric_shift"]["makespan"] is None


def test_analyze_says_why_a_schedule_cannot_run(capsys):
    _, rows = run_json(capsys, "analyze", "--mask", "full", "--num-sms", "3")
    (note,) = [row["note"] for row in rows if row["schedule"] == "shift"]
    assert note == "needs 16 CTAs at once"


def test_analyze_reacts_to_every_model_option(capsys):
    def makespan(*options):
        argv = ["analyze", "--seqlen-q", "1k", "--num-sms", "8", *options]
        _, rows = run_json(capsys, *argv)
        return next(row["makespan"] for row in rows if row["schedule"] == "baseline")

    plain = makespan()
    assert makespan("--latency", "0.5") > plain
    assert makespan("--reduce", "0.5") > plain
    assert makespan("--compute", "2") > plain
    assert makespan("--dq-stages", "2") < plain
    assert makespan("--num-sms", "4") > plain
    assert makespan("--heads", "8") > plain


def test_analyze_of_nothing(capsys):
    assert main(["analyze", "--compute", "0", "--reduce", "0"]) == 2
    assert "must not both be 0" in capsys.readouterr().err


def test_analyze_shows_a_deadlock_in_its_row(deadlocking, monkeypatch, capsys):
    load = registry.load
    monkeypatch.setattr(registry, "available", lambda: ["baseline", "broken"])
    monkeypatch.setattr(registry, "load", lambda spec: load(deadlocking if spec == "broken" else spec))
    status, rows = run_json(capsys, "analyze", "--seqlen-q", "1k", "--num-sms", "2")
    assert status == 0
    assert "deadlock" in rows[1]["note"] and rows[1]["makespan"] is None
    assert rows[0]["makespan"] > 0


def test_plot_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "baseline.png"
    assert main(["plot", "baseline", "-o", str(picture), "--seqlen-q", "512", "--num-sms", "4"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "makespan" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["picture.txt", "no/such/folder/picture.png"])
def test_plot_that_cannot_be_written(output, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "baseline", "-o", output, "--seqlen-q", "512", "--num-sms", "4"]) == 2
    assert output in capsys.readouterr().err


def test_plot_without_matplotlib_says_what_to_install():
    done = run_blocked(["plot", "baseline", "-o", "never-written.png"], "matplotlib")
    assert done.returncode == 2
    assert "pip install 'cute-dash[plot]'" in done.stderr
    assert not (ROOT / "never-written.png").exists()


def test_plot_with_too_few_sms(tmp_path, capsys):
    argv = ["plot", "shift", "--mask", "full", "--num-sms", "2", "-o", str(tmp_path / "shift.png")]
    assert main(argv) == 1
    assert "2 CTAs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["schedules"], ["check", "shift", "--mask", "full"], ["analyze", "--seqlen-q", "512"]], ids=" ".join
)
def test_works_without_torch_and_dsl(argv):
    done = run_blocked(argv, "torch", "cutlass", "numpy")
    assert done.returncode == 0, done.stderr


def test_demo_without_torch_says_so():
    done = run_blocked(["demo"], "torch")
    assert done.returncode == 2
    assert "torch" in done.stderr and "Traceback" not in done.stderr


def test_reader_that_stops_reading_is_no_error():
    command = [sys.executable, "-c", "import sys; from cute_dash.cli import main; sys.exit(main(['schedules']))"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=60) == 0


def test_bench_gets_its_own_options(capfd):
    argv = ["bench", "--dry-run", "--seqlen", "512", "--head-dim", "64", "--mask", "causal", "--peers", "none"]
    assert main(argv) == 0
    assert "hd64 causal 512" in capfd.readouterr().out


def test_bench_outside_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cute_dash, "__file__", str(tmp_path / "cute_dash" / "__init__.py"))
    assert main(["bench", "--dry-run"]) == 2
    assert "clone the repository" in capsys.readouterr().err


def test_compile_lists_each_kernel_that_can_be_asked_for_once():
    schedules = [registry.load(name) for name in ("baseline", "shift", "auto")]
    full = cli._list_kernels(schedules, get_config(64, causal=False))
    assert len(set(full)) == len(full)
    # with one KV tile shift needs one CTA, with more it is launched cooperatively
    assert sorted(cooperative for schedule, cooperative in full if schedule == registry.load("shift")) == [False, True]
    causal = cli._list_kernels(schedules, get_config(64, causal=True))
    assert registry.load("baseline") in [schedule for schedule, _ in causal]
    assert "shift" not in [schedule.name for schedule, _ in causal]
    for row in registry.load("auto").table:
        assert row.schedule in [schedule for schedule, _ in (causal if row.causal else full)]


def test_compile_without_a_cache(monkeypatch, capsys):
    monkeypatch.setenv("CUTE_DASH_CACHE", "0")
    assert main(["compile"]) == 2
    assert "CUTE_DASH_CACHE=0" in capsys.readouterr().err
