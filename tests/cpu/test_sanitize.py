"""What `tests.sanitize` makes of the output of compute-sanitizer, with a stand-in for it; no GPU."""

import shutil
import sys

import pytest

from cute_dash.testing import why_no_hopper
from tests import sanitize
from tests.sanitize import FOUND, OK, UNAVAILABLE, Result, read_findings, report

OUTPUT = """========= COMPUTE-SANITIZER
== first
== second
========= Invalid __global__ write of size 4 bytes
=========     at kernel_cutlass_flash_bwd_control+0x90
=========     by thread (0,0,0) in block (0,0,0)
========= Error: Race reported between Write access at flash_bwd+0x10
=========     and Read access at flash_bwd+0x20 [32 hazards]
========= Barrier error detected. Missing wait.
== third
========= ERROR SUMMARY: 3 errors
"""


def test_findings_belong_to_the_problem_before_them():
    findings = read_findings(OUTPUT)
    assert list(findings) == ["first", "second", "third"]
    assert findings["first"] == findings["third"] == []
    assert findings["second"] == [
        "Invalid __global__ write of size 4 bytes",
        "Error: Race reported between Write access at flash_bwd+0x10",
        "Barrier error detected. Missing wait.",
    ]


def test_report():
    clean = Result("memcheck", {"first": [], "second": []})
    found = Result("racecheck", read_findings(OUTPUT))
    control = Result("memcheck", {"control": ["Invalid __global__ write"]})
    text, status = report([clean], [control])
    assert status == OK and "clean" in text and "memcheck sees a fault" in text
    text, status = report([clean, found], [control])
    assert status == FOUND and "3 found" in text and "racecheck, second: Barrier error detected" in text


@pytest.mark.parametrize(
    ("results", "controls"),
    [
        ([Result("memcheck", {"first": []}, failure="not finished")], []),
        ([Result("memcheck", {"first": []})], [Result("memcheck", {"control": []})]),
        ([Result("memcheck", {}, failure="status 1")], []),
    ],
    ids=["unfinished", "blind", "no problems"],
)
def test_no_findings_are_not_enough(results, controls):
    assert report(results, controls)[1] == FOUND


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in the place of compute-sanitizer that prints a text and ends with a status."""

    def make(text, status):
        path = tmp_path / "compute-sanitizer"
        path.write_text(f"#!{sys.executable}\nimport sys\nprint('''{text}''')\nsys.exit({status})\n")
        path.chmod(0o755)
        return path

    return make


def test_tool_is_run_and_read(stand_in):
    assert sanitize.run_tool(stand_in("== first", 0), "memcheck").clean
    assert not sanitize.run_tool(stand_in(OUTPUT, 0), "racecheck").clean
    assert "status 7" in sanitize.run_tool(stand_in("== first", 7), "memcheck").failure
    assert "status 0" in sanitize.run_tool(stand_in("nothing was run", 0), "memcheck").failure


def test_sanitizer_is_found_in_the_path_and_the_toolkit(stand_in, tmp_path, monkeypatch):
    path = stand_in("", 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.find_sanitizer() == path
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    shutil.move(path, tmp_path / "toolkit" / "bin")
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


@pytest.mark.skipif(why_no_hopper() is None, reason="there is a Hopper GPU here")
def test_without_a_gpu_it_says_so(capsys):
    assert sanitize.main([]) == UNAVAILABLE
    assert "nothing was run" in capsys.readouterr().err
