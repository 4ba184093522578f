"""The command line: what it prints, what a program can read from it, and its exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cute_dash
from cute_dash import cli, registry
from cute_dash import compile as compile_module
from cute_dash.cli import main
from cute_dash.config import get_config

ROOT = Path(__file__).parents[2]
LISTING_STATUS = int(bool(registry.load_all()[1]))  # 1 where a user's own file in schedules/ is broken

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
        ["check", "baseline", "--head-dim", "36"],
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
    assert status == LISTING_STATUS
    assert [row["name"] for row in rows] == list(registry.load_all()[0])
    by_name = {row["name"]: row for row in rows}
    assert by_name["unordered"]["ordered"] is False
    assert by_name["hybrid"]["batch_invariant"] is False
    assert by_name["shift"]["min_resident_ctas"] == 16  # as many as a head of 2,048 tokens has KV tiles
    assert by_name["symmetric_shift"]["min_resident_ctas"] is None
    assert all(row["version"] >= 1 and row["description"] for row in rows)


def test_schedules_table(capsys):
    assert main(["schedules"]) == LISTING_STATUS
    output = capsys.readouterr().out
    assert all(name in output for name in registry.load_all()[0])


@pytest.mark.parametrize("name", ["baseline", "auto"])
def test_check_of_a_right_schedule(name, capsys):
    status, result = run_json(capsys, "check", name, "--seqlen-q", "300", "--seqlen-k", "700")
    assert status == 0
    assert result["ok"] is True and result["violation"] is None
    assert (result["shape"]["seqlen_q"], result["shape"]["seqlen_k"]) == (300, 700)
    assert main(["check", name]) == 0
    assert "keeps every rule" in capsys.readouterr().out


def test_check_of_grouped_heads(capsys):
    assert main(["check", "auto", "--heads", "8", "--kv-heads", "2", "--seqlen-q", "500", "--json"]) == 0
    shape = json.loads(capsys.readouterr().out)["shape"]
    assert (shape["num_heads"], shape["group_size"]) == (2, 4)
    assert main(["check", "auto", "--heads", "8", "--kv-heads", "1", "--seqlen-q", "500"]) == 0
    assert "batch 1, 8 heads, 1 KV heads" in capsys.readouterr().out
    assert main(["check", "auto", "--heads", "8", "--kv-heads", "3"]) == 2
    assert "--kv-heads 3 does not divide --heads 8" in capsys.readouterr().err


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
    assert status == LISTING_STATUS
    by_name = {row["schedule"]: row for row in rows}
    makespans = [row["makespan"] for row in rows]
    num_simulated = sum(makespan is not None for makespan in makespans)
    assert makespans[:num_simulated] == sorted(makespans[:num_simulated]) and len(set(makespans)) > 2
    assert makespans[num_simulated:] == [None] * (len(rows) - num_simulated)
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


def test_analyze_shows_what_comes_from_memory_in_an_l2_of_a_size(capsys):
    """16 heads of 2k tokens at head dim 128: 32 MB of Q, dO and dQ."""

    def traffic(*options):
        _, rows = run_json(capsys, "analyze", "--heads", "16", *options)
        return next(row["memory_traffic"] for row in rows if row["schedule"] == "longest_first")

    assert traffic() == traffic("--l2", "33") == 1.0
    assert traffic("--l2", "4") > 1.5


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e308", "x"])
def test_sizes_of_an_l2_that_there_are_not(text, capsys):
    with pytest.raises(SystemExit):
        main(["analyze", f"--l2={text}"])
    assert f"invalid size {text!r}; allowed: a number of MB above 0" in capsys.readouterr().err


def test_analyze_of_nothing(capsys):
    assert main(["analyze", "--compute", "0", "--reduce", "0"]) == 2
    assert "must not both be 0" in capsys.readouterr().err


def test_analyze_shows_a_deadlock_in_its_row(deadlocking, monkeypatch, capsys):
    cli._search_current_folder()
    loaded = {"broken": registry.load(deadlocking), "baseline": registry.load("baseline")}
    monkeypatch.setattr(registry, "load_all", lambda: (loaded, {}))
    # with 132 SMs every tile is resident, and nothing would wait forever; the rule asks for more
    for num_sms in ("2", "132"):
        status, rows = run_json(capsys, "analyze", "--seqlen-q", "1k", "--num-sms", num_sms)
        assert status == 1
        assert "deadlock" in rows[1]["note"] and rows[1]["makespan"] is None
        assert rows[0]["makespan"] > 0
    assert main(["analyze", "--seqlen-q", "1k"]) == 1
    assert "cute-dash: broken: rule 2 (progress): deadlock" in capsys.readouterr().err


def test_plot_of_a_schedule_that_breaks_a_rule(deadlocking, tmp_path, capsys):
    argv = ["plot", deadlocking, "--seqlen-q", "1k", "--num-sms", "132", "-o", str(tmp_path / "picture.png")]
    assert main(argv) == 1
    assert "deadlocking breaks a rule, so it is not drawn: rule 2" in capsys.readouterr().err
    assert not (tmp_path / "picture.png").exists()


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
    assert f"pip install -e '{ROOT}[plot]'" in done.stderr
    assert not (ROOT / "never-written.png").exists()


def test_plot_with_too_few_sms(tmp_path, capsys):
    argv = ["plot", "shift", "--mask", "full", "--num-sms", "2", "-o", str(tmp_path / "shift.png")]
    assert main(argv) == 1
    assert "needs 16 resident CTAs for this shape, there are 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["schedules"], ["check", "shift", "--mask", "full"], ["analyze", "--seqlen-q", "512"]], ids=" ".join
)
def test_works_without_torch_and_dsl(argv):
    done = run_blocked(argv, "torch", "cutlass", "numpy")
    assert done.returncode == (0 if argv[0] == "check" else LISTING_STATUS), done.stderr
    assert done.stdout and "Traceback" not in done.stderr


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
    local = cli._list_kernels(schedules, get_config(64, causal=False, local=True))
    kernels = {"full": full, "causal": causal, "local": local}
    for mask in ("full", "causal"):
        config = get_config(64, mask == "causal")
        shapes = [config.make_shape(1, 1, seqlen, seqlen) for seqlen in range(128, 20_000, 128)]
        selected = {registry.resolve("auto", shape) for shape in shapes}
        assert selected <= {schedule for schedule, _ in kernels[mask]}
    assert {schedule.name for schedule, _ in local} == {"baseline", "shortest_first"}


WINDOW = ["--window", "512,0", "--seqlen-q", "1k"]


def test_check_of_a_window(capsys):
    assert main(["check", "auto", *WINDOW, "--seqlen-k", "2k"]) == 0
    assert capsys.readouterr().out == (
        "shortest_first version 1 keeps every rule for window 512,0, 1024 x 2048 tokens (16 x 16 tiles), batch 1, "
        "4 heads\n"
    )


def test_a_schedule_without_windows_says_so(capsys):
    assert main(["check", "shift", *WINDOW]) == 2
    assert "window=Window(left=512, right=0), group_size=1): it orders the full mask only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "mask", "window"),
    [
        (["--window", "64,32"], "local", [64, 32]),
        (["--window", "64,32", "--mask", "causal"], "local", [64, 0]),
        (["--window", "inf,0"], "causal", None),
        ([], "causal", None),  # the default
        (["--window", "inf,inf"], "full", None),
        (["--window=-1,-1"], "full", None),
        (["--window", "-1,-1"], "full", None),
        (["--window", "-1,0"], "causal", None),
        (["--win", "-1,100"], "local", [299, 100]),
        (["--window", "inf,inf", "--mask", "causal"], "causal", None),
        (["--window=64,-1"], "local", [64, 299]),
        (["--window", "1k,1k"], "full", None),  # hides nothing
        (["--window", "inf,100"], "local", [299, 100]),
    ],
    ids=str,
)
def test_windows_are_normalized(capsys, options, mask, window):
    status, report = run_json(capsys, "check", "baseline", "--seqlen-q", "300", *options)
    assert status == 0 and report["shape"]["window"] == window
    assert report["shape"]["causal"] == (mask == "causal")


@pytest.mark.parametrize("text", ["1k", "1,2,3", "a,b", "1,-2", "", "1.5,0", "k,0"])
def test_bad_windows(text, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["check", "baseline", f"--window={text}"])
    assert exit.value.code == 2
    message = f"invalid window {text!r}: it must be LEFT,RIGHT in tokens, each at least 0, or inf or -1 for no limit"
    assert message in capsys.readouterr().err


def test_analyze_ranks_shortest_first_before_baseline_for_windows(capsys):
    status, rows = run_json(capsys, "analyze", *WINDOW)
    assert status == LISTING_STATUS
    rows = {row["schedule"]: row for row in rows}
    assert rows["shortest_first"]["stall_share"] == 0 < rows["baseline"]["stall_share"]
    assert rows["auto"]["note"] == rows["auto_invariant"]["note"] == "here: shortest_first"
    assert rows["shift"]["note"] == "orders the full mask only"


def test_compile_without_a_cache(monkeypatch, capsys):
    monkeypatch.setenv("CUTE_DASH_CACHE", "0")
    assert main(["compile"]) == 2
    assert "CUTE_DASH_CACHE=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--seqlen-q", "1.5k", "invalid token count '1.5k': it must be an integer of at least 1, such as 1000 or 4k"),
        ("--seqlen-k", "k", "invalid token count 'k'"),
        ("--seqlen-q", "-4", "invalid token count '-4'"),
        ("--batch", "two", "invalid count 'two': it must be an integer of at least 1"),
        ("--compute", "fast", "invalid time 'fast': it must be a finite number of at least 0"),
        ("--latency", "-1", "invalid time '-1'"),
    ],
)
def test_wrong_values_are_named(option, text, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["analyze", f"{option}={text}"])
    assert stop.value.code == 2
    assert f"argument {option}: {message}" in capsys.readouterr().err


# Files that are no schedules

BAD_FILES = {
    "bad_syntax": "def f(:\n",
    "bad_import": "import no_such_dependency\n",
    "bad_raises": DEADLOCKING.replace('"deadlocking"', '"bad_raises"').replace("return shape", "return 1 // 0, shape"),
    "bad_shapes": DEADLOCKING.replace('"deadlocking"', '"bad_shapes"').replace(
        "def get_lock_value(self, m_block, tile, shape):", "def can_implement(self, shape):\n        return 1 // 0"
    ),
}


@pytest.fixture
def bad_files(tmp_path, monkeypatch):
    """BAD_FILES lie in a second folder of the package `schedules`."""
    import schedules

    for name, source in BAD_FILES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    yield
    for name in BAD_FILES:
        sys.modules.pop(f"schedules.{name}", None)


def test_bad_files_do_not_hide_the_good_ones(bad_files, capsys):
    for command in (["schedules"], ["analyze", "--seqlen-q", "512"]):
        assert main([*command, "--json"]) == 1
        captured = capsys.readouterr()
        rows = {row.get("name") or row["schedule"]: row for row in json.loads(captured.out)}
        assert {"baseline", "shift", "auto"} <= set(rows)
        lines = captured.err.splitlines()
        expected = set(BAD_FILES) - ({"bad_raises"} if command == ["schedules"] else set())
        for name in expected:
            (line,) = [line for line in lines if f"{name}.py" in line]
            assert line.startswith("cute-dash: ")
        assert not any("cannot order" in str(rows.get(name)) for name in BAD_FILES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad_syntax", "bad_syntax.py: SyntaxError: "),
        ("bad_import", "bad_import.py: ModuleNotFoundError: No module named 'no_such_dependency'"),
        ("bad_raises", "Deadlocking.get_lock_value ({}bad_raises.py, line 11) raised ZeroDivisionError"),
        ("bad_shapes", "Deadlocking.can_implement ({}bad_shapes.py, line 11) raised ZeroDivisionError"),
    ],
)
def test_check_and_plot_of_a_bad_file(bad_files, name, message, tmp_path, capsys):
    for command in (["check", name], ["plot", name, "-o", str(tmp_path / "picture.png")]):
        assert main(command) == 1
        captured = capsys.readouterr()
        (line,) = (captured.out + captured.err).splitlines()
        assert message.format(f"{tmp_path}/") in line


def test_every_command_takes_a_window_without_a_left_side(tmp_path, capsys):
    window = ["--window", "-1,16", "--seqlen-q", "200"]
    picture = ["-o", str(tmp_path / "picture.svg"), "--num-sms", "8"]
    for command in (["schedules"], ["analyze"], ["check", "baseline"], ["plot", "baseline", *picture]):
        assert main([*command, *window]) in (0, LISTING_STATUS), capsys.readouterr().err
    chosen = cli._parser().parse_args(cli._join_window(["verify-bits", *window]))
    assert chosen.window == (-1, 16)
    for text in ("-2,0", "-1"):  # as with =, in the words of the option
        with pytest.raises(SystemExit):
            main(["check", "baseline", "--window", text])
        assert f"invalid window {text!r}: it must be LEFT,RIGHT" in capsys.readouterr().err


def test_verify_bits_of_all_names_files_that_do_not_load(bad_files, capsys, monkeypatch):
    argv = ["verify-bits", "--emulator", "--minutes", "0", "--head-dim", "64", "--mask", "causal", "--seqlen-q", "200"]
    loadable = {"baseline": registry.load("baseline")}
    broken = registry.load_all()[1]
    assert "bad_syntax" in broken
    monkeypatch.setattr(registry, "load_all", lambda: (loadable, broken))
    assert main([*argv, "all"]) == 1
    captured = capsys.readouterr()
    assert "had the bits of their first" in captured.out and "bad_syntax.py: SyntaxError: " in captured.err
    assert main([*argv, "baseline"]) == 0


def test_verify_bits_names_the_schedule_that_breaks_a_rule(deadlocking, bad_files, capsys):
    argv = ["verify-bits", "--emulator", "--minutes", "0", "--head-dim", "64", "--mask", "causal", "--schedule"]
    for spec, message in (
        (deadlocking, "schedule='deadlocking' breaks a rule: rule 2 "),
        ("bad_raises", "schedule='bad_raises' breaks a rule: rule 1 .*ZeroDivisionError"),
        ("bad_shapes", "bad_shapes: Deadlocking.can_implement .*ZeroDivisionError"),
    ):
        assert main([*argv, spec]) == 1
        assert re.search(message, capsys.readouterr().err)


def test_bench_of_a_file_that_does_not_load_ends_as_the_other_commands_do(bad_files, capsys):
    assert main(["bench", "--dry-run", "--schedule", "bad_syntax", "--peers", "none"]) == 1
    assert "bad_syntax.py: SyntaxError: " in capsys.readouterr().err
    assert main(["bench", "--dry-run", "--schedule", "no_such_schedule", "--peers", "none"]) == 2


@pytest.mark.parametrize("options", [[], ["--varlen"]], ids=str)
def test_a_dry_run_says_what_check_says(options, deadlocking, bad_files, capsys):
    cell = ["--head-dim", "64", "--mask", "causal", "--seqlen", "1k", "--peers", "none", *options]
    assert main(["bench", "--dry-run", "--schedule", f"baseline,{deadlocking},bad_shapes", *cell]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"hd64 causal 1k{' varlen' * bool(options)}: cute-dash baseline\n")
    assert re.search(r"without cute-dash deadlocking: schedule='deadlocking' breaks a rule: rule 2 .*deadlock", out)
    assert re.search(r"without cute-dash bad_shapes: bad_shapes: Deadlocking.can_implement .*ZeroDivisionError", out)


def test_shadowed_package(monkeypatch, capsys):
    def shadowed():
        raise registry.ShadowedPackageError("`import schedules` finds schedules/__init__.py")

    monkeypatch.setattr(registry, "_packaged", shadowed)
    for command in (["schedules"], ["analyze"], ["check", "baseline"], ["demo"], ["compile"]):
        assert main(command) == 1
        assert capsys.readouterr().err == "cute-dash: `import schedules` finds schedules/__init__.py\n"


def test_a_package_called_schedules_in_the_current_folder_hides_nothing(tmp_path):
    """As with the console script, which does not search the current folder, and an install by an import hook."""
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "__init__.py").touch()
    code = (
        "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
        "import importlib.machinery\n"
        "class Hook:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        return importlib.machinery.PathFinder.find_spec(name, [{str(ROOT)!r}])\n"
        "sys.meta_path.append(Hook)\n"
        "from cute_dash.cli import main\n"
        "sys.exit(main(['check', 'baseline', '--seqlen-q', '300']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# What takes long


def test_what_takes_long_says_so_and_what_does_not_is_silent(monkeypatch, capsys):
    monkeypatch.setattr(cli, "SLOW_S", 60)
    assert main(["check", "baseline"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli, "SLOW_S", 0.01)
    assert main(["check", "baseline", "--seqlen-q", "4k"]) == 0
    captured = capsys.readouterr()
    assert "checking baseline for causal mask, 4096 x 4096 tokens" in captured.err
    assert len(captured.out.splitlines()) == 1


# Compiling, without the compiler

BRANCHING = DEADLOCKING.replace(
    "def get_lock_value(self, m_block, tile, shape):",
    "def get_m_block(self, step, tile, shape):\n        if step > 0:\n"
    "            return super().get_m_block(step, tile, shape)",
).replace("shape.get_n_block_max(m_block) - 1 - tile.n_block", "super().get_m_block(step, tile, shape)")


GET_BACKWARD = compile_module.get_backward


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A cache folder of its own, and a compiler that stores an empty kernel for what may be stored."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(compile_module, "_sources_changed", lambda: False)
    compiled = []

    def get_backward(key):
        compiled.append(key)
        if key.is_cacheable():
            (folder / f"{key.digest()}.o").touch()

    monkeypatch.setattr(compile_module, "get_backward", get_backward)
    return compiled


def test_compile_takes_names_and_says_how_they_are_launched(compiler, tmp_path, capsys):
    assert main(["compile", "shift", "--schedule", "baseline", "--mask", "full", "--head-dim", "64"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    launches = sorted((line.split(", ")[3].split("(")[0], line.split(", ")[-1].split(":")[0]) for line in lines)
    assert launches == [("Baseline", "plain launch"), ("Shift", "cooperative launch"), ("Shift", "plain launch")]
    assert last == f"3 kernel(s) in {tmp_path / 'cache'}" and len(compiled_names(compiler)) == 3


def test_compile_of_grouped_heads(compiler, capsys):
    argv = ["compile", "baseline", "--mask", "causal", "--head-dim", "64"]
    assert main(argv) == 0 and main([*argv, "--grouped"]) == 0
    assert [key.grouped for key in compiler] == [False, True]
    assert "grouped heads, plain launch" in capsys.readouterr().out


def test_compile_of_a_head_dim_that_is_padded(compiler, capsys):
    assert main(["compile", "baseline", "--mask", "full", "--head-dim", "40", "72"]) == 0
    assert [(key.config.head_dim, key.config.head_dim_padded) for key in compiler] == [(40, 64), (72, 96)]
    assert "head dim 72, full" in capsys.readouterr().out


def test_compile_of_a_smaller_head_dim_of_v(compiler, capsys):
    argv = ["compile", "baseline", "--mask", "full", "--head-dim"]
    assert main([*argv, "192", "--head-dim-v", "128"]) == 0
    assert [key.config.head_dims for key in compiler] == ["192/128"]
    assert "head dim 192/128, full" in capsys.readouterr().out
    assert main([*argv, "128", "--head-dim-v", "64"]) == 2
    assert "head_dim_v=64 is not supported with head_dim=128; allowed: 128, or" in capsys.readouterr().err


def test_head_dims_are_64_and_128_by_default(compiler):
    assert main(["compile", "baseline", "--mask", "full"]) == 0
    assert [key.config.head_dim for key in compiler] == [64, 128]


@pytest.mark.parametrize("command", ["compile", "verify-bits"])
@pytest.mark.parametrize("head_dim", ["36", "264", "24", "all"])
def test_head_dims_that_there_are_not_are_refused(command, head_dim, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "baseline", "--head-dim", head_dim])
    assert stop.value.code == 2
    assert f"invalid head dim {head_dim!r}; allowed: multiples of 8 from 32 to 256" in capsys.readouterr().err


def test_check_of_a_head_dim_that_is_padded(capsys):
    outputs = []
    for head_dim in ("72", "128"):
        assert main(["check", "hybrid", "--mask", "causal", "--seqlen-q", "600", "--head-dim", head_dim]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_compile_of_sequences_of_different_lengths(compiler, capsys):
    assert main(["compile", "auto", "shift", "--varlen", "--head-dim", "128"]) == 0
    assert compiled_names(compiler) == ["shortest_first", "hybrid"]  # of full, and causal
    assert all(key.varlen and not key.cooperative and key.config.tile_m == 64 for key in compiler)
    out = capsys.readouterr().out
    assert (
        "shift: nothing to compile for head dim 128, full: it cannot order this mask, or may need several CTAs" in out
    )
    assert "varlen, plain launch" in out
    compiler.clear()
    assert main(["compile", "auto", "--varlen", "--mask", "local", "--head-dim", "64"]) == 0
    assert compiled_names(compiler) == ["shortest_first"]
    assert compiler[0].varlen and compiler[0].config.local


def compiled_names(compiler):
    return [key.schedule.name for key in compiler]


def test_compile_says_why_there_is_nothing_to_compile(compiler, capsys):
    assert main(["compile", "--schedule", "shift", "--mask", "causal", "--head-dim", "64"]) == 1
    assert "shift: nothing to compile for head dim 64, causal: it cannot order this mask" in capsys.readouterr().out
    assert compiler == []


def test_compile_checks_first(compiler, deadlocking, tmp_path, capsys):
    (tmp_path / "branching_schedule.py").write_text(BRANCHING)
    for spec, message in ((deadlocking, "rule 2 (progress): deadlock"), ("branching_schedule:SCHEDULE", "rule 4")):
        assert main(["compile", spec, "baseline", "--mask", "full", "--head-dim", "64"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"cute-dash: {spec}: not compiled: {message}")
    sys.modules.pop("branching_schedule")
    assert compiled_names(compiler) == ["baseline", "baseline"]


def test_compile_into_a_folder_that_cannot_be_written(compiler, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(tmp_path / "file" / "x"))
    assert main(["compile", "baseline", "--mask", "full", "--head-dim", "64"]) == 1
    captured = capsys.readouterr()
    assert "kernel(s)" not in captured.out and compiler == []
    assert f"nothing can be stored in {tmp_path / 'file' / 'x'}" in captured.err


def test_compile_that_stores_nothing_fails(compiler, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compile_module, "get_backward", lambda key: None)  # a disk that is full, say
    assert main(["compile", "baseline", "--mask", "full", "--head-dim", "64"]) == 1
    output = capsys.readouterr().out
    assert "NOT stored" in output and f"0 kernel(s) in {tmp_path / 'cache'}, of 1" in output


def test_compile_of_a_schedule_from_elsewhere_says_that_it_is_not_stored(compiler, tmp_path, monkeypatch, capsys):
    source = DEADLOCKING.replace("shape.get_n_block_max(m_block) - 1 - tile.n_block", "tile.n_block")
    (tmp_path / "from_elsewhere.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["compile", "from_elsewhere:SCHEDULE", "--mask", "full", "--head-dim", "64"]) == 0
    sys.modules.pop("from_elsewhere")
    output = capsys.readouterr().out
    assert "not stored: only schedules of the package `schedules`" in output
    assert f"0 kernel(s) in {tmp_path / 'cache'}, of 1" in output


def test_an_error_of_the_dsl_is_one_plain_line(compiler, monkeypatch, capsys):
    def fail(key, options=""):
        key.schedule.get_m_block(None, None, None)  # as the DSL does while it traces

    class TracingError(Exception):
        pass

    def get_m_block(self, step, tile, shape):
        raise TracingError(
            "\n\x1b[91m\x1b[1merror:\x1b[0m no boolean here\n \x1b[94m-->\x1b[0m x.py:3\nDecorate it with @jit"
        )

    monkeypatch.setattr(compile_module, "get_backward", GET_BACKWARD)
    monkeypatch.setattr(compile_module, "build", fail)
    monkeypatch.setattr(compile_module, "find_small_violation", lambda schedule, config: None)
    monkeypatch.setattr(type(registry.load("baseline")), "get_m_block", get_m_block)
    assert main(["compile", "baseline", "--mask", "full", "--head-dim", "64"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert "Baseline.get_m_block (" in line and line.endswith("raised TracingError: error: no boolean here")
    assert "\x1b" not in line
