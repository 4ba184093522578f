"""How `tests.sanitize` runs problems under compute-sanitizer, and what it makes of the results; stand-ins, no GPU."""

import json
import shutil
import sys

import pytest

from cute_dash.testing import why_no_hopper
from tests import sanitize
from tests.processes import Ended
from tests.sanitize import (
    CHAINS,
    CONTROLS,
    DONE,
    EXPLANATIONS,
    FOUND,
    OK,
    UNAVAILABLE,
    Chain,
    Finding,
    Result,
    Run,
    Setting,
    Task,
    find_failure,
)
from tests.sanitizer_output import Buffer, read_output

MAIN = "kernel_flash_bwd_sm90_0"
BUFFERS = [Buffer("sDuty", 208, 256)]
HAZARD = f"""
========= Error: Potential WAR hazard detected at __shared__ 0x4d0 in block (3,0,0) :
=========     Read Thread (130,0,0) at {MAIN}+0x20
=========     Write Thread (32,0,0) at {MAIN}+0x10
=========
"""
BARRIER = f"""
========= Barrier error detected. Divergent thread(s) in block.
=========     at {MAIN}+0x10
=========     by thread (130,0,0) in block (0,0,0)
=========
"""
# takes the tool's options and then the command line of a problem, which says on stderr what is found in it
STAND_IN = """#!{python} -S
import subprocess, sys
i = sys.argv.index({python!r})
tool = sys.argv[sys.argv.index("--tool") + 1] if "--tool" in sys.argv else ""
print("========= COMPUTE-SANITIZER", flush=True)
done = subprocess.run(sys.argv[i:], stderr=subprocess.PIPE, text=True)
found = done.stderr if tool == "racecheck" else ""
print(found)
print("options", *sys.argv[1:i])
print("========= ERROR SUMMARY:", found.count("Error"), "errors")
if done.returncode:
    print("========= Target application returned an error")
sys.exit(done.returncode)
"""
REASON = EXPLANATIONS[Finding("racecheck", "WAR", "sDuty", ("MMA warpgroup 0", "STORE_DQ_EVEN"))]
LIMITS = frozenset({("WAR", "sDuty")})
CONTROL_HAZARD = HAZARD.replace(MAIN, "kernel_flash_bwd_control_0").replace("(32,0,0)", "(0,0,0)")


def make_result(text, tool="racecheck", failure="", task="first", limits=frozenset()):
    return Result(tool, task, read_output(text.splitlines(), BUFFERS).rows, failure, limits)


def make_task(name, found="", code=""):
    """A process that behaves like a problem and lets the stand-in find something."""
    code = code or f"import sys; print('== {name}'); print('== {DONE}'); print({found!r}, file=sys.stderr)"
    return Task(name, (sys.executable, "-S", "-c", code), BUFFERS)


@pytest.fixture
def setting(tmp_path):
    path = tmp_path / "compute-sanitizer"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return Setting(path, tmp_path, jobs=2)


@pytest.fixture
def controls(monkeypatch):
    """In the place of the kernels of which it is known what is to be found: what the stand-in finds in those named."""

    def set_controls(found, *names):
        def run_inside(name):
            return make_task(name, found if name in names else "").arguments

        monkeypatch.setattr(sanitize, "_run_inside", run_inside)

    return set_controls


# What is said


def test_results_in_a_word_or_two():
    assert make_result("").cell == "clean"
    assert make_result(HAZARD + BARRIER).cell == "2 found"
    assert make_result(HAZARD, failure="stopped").cell == "at least 1 found"
    assert make_result("", failure="stopped").cell == "not finished"


def test_an_explained_finding_does_not_fail():
    explained, both = make_result(HAZARD * 2, limits=LIMITS), make_result(HAZARD + BARRIER, limits=LIMITS)
    assert (explained.cell, explained.passed) == ("2 explained", True)
    assert f"  explained: {REASON}" in "\n".join(explained.describe())
    assert (both.cell, both.passed) == ("1 found, 1 explained", False)
    assert [row["explanation"] for row in both.as_dict()["rows"]] == [REASON, None]
    unfinished = make_result(HAZARD, failure="stopped", limits=LIMITS)
    assert (unfinished.cell, unfinished.passed) == ("at least 1 explained", False)


@pytest.mark.parametrize(
    "other",
    [
        make_result(HAZARD, tool="synccheck", limits=LIMITS),
        make_result(HAZARD.replace("WAR", "RAW"), limits=LIMITS | {("RAW", "sDuty")}),
        make_result(HAZARD.replace("0x4d0", "0x500"), limits=LIMITS),
        make_result(HAZARD.replace("(32,0,0)", "(0,0,0)"), limits=LIMITS),
    ],
    ids=["tool", "kind", "buffer", "role"],
)
def test_an_explanation_is_for_one_finding(other):
    assert make_result(HAZARD, limits=LIMITS).passed and not other.passed


@pytest.mark.parametrize("limits", [frozenset(), frozenset({("WAW", "sDuty"), ("WAR", "sdQ")})])
def test_an_explanation_is_worth_nothing_where_the_tool_does_not_report_its_control(limits):
    result = make_result(HAZARD, limits=limits)
    assert not result.passed and result.as_dict()["rows"][0]["explanation"] is None
    assert "not explained: the tool does not report the control sDuty whole" in "\n".join(result.describe())


def test_limits_are_what_is_reported_of_whole_chains():
    """Not what is reported of other forms, or of a control that broke off, nor the next round's use of the buffer."""
    found = make_result(CONTROL_HAZARD)
    chains = {Chain("sDuty", "whole"): found, Chain("sdQ", "direct"): found, Chain("sStats", "broken"): found}
    assert sanitize.find_limits(chains) == LIMITS
    assert not sanitize.find_limits({Chain("sDuty", "whole"): make_result(CONTROL_HAZARD, failure="stopped")})
    assert not sanitize.find_limits({Chain("sDuty", "whole"): make_result("")})
    others = CONTROL_HAZARD.replace("(0,0,0)", "(64,0,0)"), BARRIER, "========= Error: Something new"
    assert not sanitize.find_limits({Chain("sDuty", "whole"): make_result("".join(others))})


def test_explanations_are_of_tools_and_have_reasons_and_controls():
    names = {chain.name for chain in CHAINS}
    for finding, reason in EXPLANATIONS.items():
        assert finding.tool in sanitize.TOOLS and len(reason.split()) > 5
        assert {f"{finding.buffer} {form}" for form in ("whole", "direct", "broken")} <= names
    assert len(EXPLANATIONS) == 14  # two warpgroups; two store warps for sDuty and, of two kinds, sdQ


def test_chains_are_reported_with_what_they_are():
    chains = {
        Chain("sDuty", "whole"): make_result(CONTROL_HAZARD * 2),
        Chain("sDuty", "direct"): make_result(""),
        Chain("sDuty", "broken"): make_result("", failure="stopped"),
    }
    run = Run("racecheck", [make_result("")], make_result(BARRIER), chains)
    text = sanitize.report([run])
    assert (
        "control sDuty whole, right: reported in CTAs [3]\n  2 x WAR (0x4d0) in 1 CTA: read by warp 4 of control"
        in text
    )
    assert "control sDuty direct, right: clean" in text
    assert "control sDuty broken, a race: not finished\n  not finished: stopped" in text
    records = [(record["form"], record["right"], record["ctas"]) for record in run.as_dict()["chains"]]
    assert records == [("whole", True, [3]), ("direct", True, []), ("broken", False, [])]


def test_report():
    clean = Run("memcheck", [make_result("", "memcheck"), make_result("", "memcheck", task="second")], seconds=3)
    found = Run("racecheck", [make_result(HAZARD), make_result("", task="second", failure="stopped")])
    assert clean.passed and not found.passed
    text = sanitize.report([clean, found])
    rows = [line.split("  ") for line in text.splitlines()[2:4]]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        ["first", "clean", "1 found"],
        ["second", "clean", "not finished"],
    ]
    assert "racecheck, first:\n  1 x WAR on sDuty (0x4d0) in 1 CTA: read by MMA warpgroup 0 at main+0x20, then" in text
    assert "racecheck, second:\n  not finished: stopped" in text and "memcheck 3 s" in text


def test_unknown_records_are_shown_in_full():
    text = "\n".join(make_result("========= Error: Deadlock of 3\n=========     somewhere").describe())
    assert "unparsed: Error: Deadlock of #" in text and "| Error: Deadlock of 3" in text and "| somewhere" in text


@pytest.mark.parametrize(("control", "blind"), [("", True), ("========= Error: Something new", True), (BARRIER, False)])
def test_a_tool_that_does_not_see_its_fault_is_blind(control, blind):
    run = Run("memcheck", [make_result("")], make_result(control, "memcheck", failure="stopped", task="control"))
    assert run.blind == blind and run.passed == (not blind)
    assert ("does not see" in sanitize.report([run])) == blind
    assert run.as_dict()["control"]["seen"] == (not blind)


def test_a_run_of_nothing_is_no_proof():
    assert not Run("memcheck", []).passed


# Whether all was seen

SUMMARY = "========= ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("lines", "status", "expected"),
    [
        (["== first", "== done", SUMMARY], 0, ""),
        (["== first", "== done", SUMMARY], None, "said nothing for"),
        (["== first", "== done", SUMMARY], 1, "ended with status 1"),
        (["== first", "== done"], 0, "did not come to its summary"),
        (["== first", SUMMARY], 1, "status 1 after the backward"),
        ([SUMMARY], 1, "status 1 before there was a backward"),
        (["== second", "== done", SUMMARY], 0, "status 0 after"),
        (["== first", "== done", "========= ERROR SUMMARY: 3 errors"], 0, "printed 3 findings, 0 were read"),
        (["== first", "== done", SUMMARY, "========= 9 errors were not printed."], 0, "9 errors were not printed"),
        (["== first", "== done", SUMMARY, "========= 9 errors were skipped (error buffer overflow)."], 0, "9 errors"),
    ],
)
def test_why_there_may_be_more(lines, status, expected):
    failure = find_failure(read_output(lines, []), Ended(status, 1.0), "first")
    assert (not failure) if not expected else expected in failure


def test_without_a_tool_no_summary_is_missed():
    output = read_output(["== first", "== done"], [])
    assert find_failure(output, Ended(0, 1.0), "first", is_under_tool=False) == ""


# Running


def test_problems_run_under_every_tool(setting, controls):
    """What is found in one problem is not taken for another's, and a problem that breaks off is not left out."""
    controls(HAZARD, "race")
    tasks = [
        make_task("clean"),
        make_task("found", HAZARD),
        make_task("ends early", code="print('== ends early'); raise SystemExit('CUDA error: launch failure')"),
        make_task("never begins", code="raise SystemExit(3)"),
    ]
    run = sanitize.run_tool(setting, "racecheck", tasks, {})
    assert [result.cell for result in run.results] == ["clean", "1 found", "not finished", "not finished"]
    assert run.results[2].failure == (
        "it ended with status 1 after the backward was launched; Target application returned an error"
    )
    assert "status 3 before there was a backward" in run.results[3].failure
    assert not run.blind and not run.passed
    run = sanitize.run_tool(setting, "memcheck", tasks[:2], {})
    assert [result.cell for result in run.results] == ["clean", "clean"] and run.blind and not run.chains


def test_an_explanation_counts_in_a_run_that_reports_its_control(setting, controls):
    tasks = [make_task("found", HAZARD)]
    for names, cell in (("sDuty whole",), "1 explained"), (("sDuty direct", "sdQ whole"), "1 found"):
        controls(CONTROL_HAZARD, *names)
        run = sanitize.run_tool(setting, "racecheck", tasks, {})
        assert [result.cell for result in run.results] == [cell]
        assert [chain.name for chain, result in run.chains.items() if result.rows] == sorted(names)
        assert tuple(run.chains) == CHAINS


def test_what_a_tool_is_told(setting, controls):
    controls("")
    limited = Setting(setting.sanitizer, setting.folder, 1, limit=7, environment={"WORD": "in the environment"})
    code = "import os; print('==', 'first'); print(os.environ['WORD']); print('==', 'done')"
    for tool in sanitize.TOOLS:
        assert sanitize.run_tool(limited, tool, [make_task("first", code=code)], {}).results[0].cell == "clean"
        text = (setting.folder / f"{tool}-first.txt").read_text()
        assert "in the environment" in text
        options = text.split("options ")[1].split("\n")[0]
        assert f"--tool {tool} --kernel-name kns=flash_bwd --print-limit 7 " in options
        assert ("--racecheck-report all" in options) == (tool == "racecheck")
    assert "--print-limit 0" in " ".join(sanitize._make_command(setting, "memcheck", make_task("first"), 0))


def test_processes_side_by_side_have_ports_of_their_own(setting):
    commands = [sanitize._make_command(setting, "memcheck", make_task("first"), number) for number in range(3)]
    ports = [int(command[command.index("--port") + 1]) for command in commands]
    assert ports == [49152, 49162, 49172]


def test_a_problem_that_fails_without_a_tool_is_not_run_under_one(setting, controls):
    controls("")
    tasks = [make_task("good"), make_task("bad", code="raise SystemExit('no such kernel')")]
    broken = sanitize.compile_all(setting, tasks)
    assert list(broken) == ["bad"] and "no such kernel" in broken["bad"]
    run = sanitize.run_tool(setting, "synccheck", tasks, broken)
    assert [result.cell for result in run.results] == ["clean", "not finished"]
    assert "it fails without the tool" in run.results[1].failure
    assert not (setting.folder / "synccheck-bad.txt").exists()


def test_kernels_with_line_numbers_are_cached_apart(tmp_path):
    environment = sanitize.make_environment(tmp_path)
    assert environment["CUTE_DSL_LINEINFO"] == "1" and environment["CUTE_DASH_CACHE_DIR"] == str(tmp_path / "line_info")


def test_the_command(setting, controls, monkeypatch, tmp_path, capsys):
    controls(CONTROL_HAZARD, "race")
    monkeypatch.setattr(sanitize, "why_no_hopper", lambda: None)
    monkeypatch.setattr(sanitize, "describe_environment", lambda: {"GPU": "a stand-in"})
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: setting.sanitizer)
    monkeypatch.setattr(sanitize, "get_version", lambda sanitizer: "1.2")
    monkeypatch.setattr(sanitize, "list_tasks", lambda: [make_task("clean"), make_task("found", HAZARD)])
    options = ["--tool", "racecheck", "--jobs", "2"]
    file, raw = tmp_path / "sanitize.json", tmp_path / "raw"
    assert sanitize.main([*options, "--json", str(file), "--raw", str(raw)]) == FOUND
    text = capsys.readouterr().out
    assert "1 x WAR on sDuty" in text and "control: racecheck sees a fault made for it" in text
    record = json.loads(file.read_text())
    assert record["environment"] == {"GPU": "a stand-in", "compute-sanitizer": "1.2"}
    (run,) = record["runs"]
    assert [(result["task"], result["result"]) for result in run["results"]] == [
        ("clean", "clean"),
        ("found", "1 found"),
    ]
    assert run["results"][1]["rows"][0]["lines"][0].startswith("Error: Potential WAR hazard detected at")
    assert "Potential WAR hazard" in (raw / "racecheck-found.txt").read_text()
    controls(CONTROL_HAZARD, "race", "sDuty whole")
    assert sanitize.main(options) == OK
    assert "control sDuty whole, right: reported in CTAs [3]" in capsys.readouterr().out


def test_the_version_is_the_tools(tmp_path):
    path = tmp_path / "compute-sanitizer"
    path.write_text("#!/bin/sh\necho NVIDIA\necho 'Version 2026.4.0.0 (build 39022338) (public-release)'\n")
    path.chmod(0o755)
    assert sanitize.get_version(path) == "2026.4.0.0"


def test_sanitizer_is_found_in_the_path_and_the_toolkit(setting, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.find_sanitizer() == setting.sanitizer
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    shutil.move(setting.sanitizer, tmp_path / "toolkit" / "bin")
    assert sanitize.find_sanitizer() == tmp_path / "toolkit" / "bin" / "compute-sanitizer"


def test_every_build_is_among_the_problems():
    problems = sanitize.list_problems()
    assert {(c.head_dim, c.mask) for c in problems} >= {
        (head_dim, mask) for head_dim in (64, 128) for mask in ("full", "causal", "local")
    }
    assert {c.head_dim for c in problems} == {64, 96, 128, 192, 256}
    assert any(c.extents.num_heads_kv == 1 for c in problems) and any(c.head_dim_v == 128 for c in problems)
    assert any(c.varlen for c in problems) and any(c.dlse and not c.varlen for c in problems)
    assert len({c.describe() for c in problems}) == len(problems)  # findings are told apart by it
    for configuration in problems:
        assert configuration.make_problem("cpu").concrete.name == configuration.schedule  # none is left out


def test_every_problem_is_a_task():
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    tasks = sanitize.list_tasks()
    assert [task.name for task in tasks] == [problem.describe() for problem in sanitize.list_problems()]
    assert [task.arguments[-1] for task in tasks] == [str(number) for number in range(len(tasks))]
    # tile_m x columns of fp32
    sizes = [buffer.end - buffer.start for task in tasks for buffer in task.buffers if buffer.name == "sdQ"]
    assert len(sizes) == len(tasks) and set(sizes) == {128 * 64 * 4, *(64 * d * 4 for d in (96, 128, 192, 256))}


def test_the_inside_takes_what_it_is_given(monkeypatch):
    ran = []
    monkeypatch.setattr(sanitize, "run_problem", lambda number: ran.append(number))
    monkeypatch.setattr(sanitize, "run_control", lambda name: ran.append(name))
    names = [*CONTROLS.values(), *(chain.name for chain in CHAINS)]
    insides = [sanitize._run_inside("problem", "--number", "3"), *map(sanitize._run_inside, names)]
    assert {sanitize.main(list(inside[3:])) for inside in insides} == {OK}
    assert ran == [3, *names]


@pytest.mark.skipif(why_no_hopper() is None, reason="there is a Hopper GPU here")
def test_without_a_gpu_it_says_so(capsys):
    assert sanitize.main([]) == UNAVAILABLE
    assert "nothing was run" in capsys.readouterr().err
