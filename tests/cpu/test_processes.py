"""Programs side by side: how they end, together and alone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import ROOT, Program, run_all


@pytest.fixture
def make_program(tmp_path):
    """A program of some Python; `name.out` and `name.err` are its output."""

    def make(name, code, **environment):
        arguments = [sys.executable, "-u", "-S", "-c", code]
        return Program(arguments, tmp_path / f"{name}.out", tmp_path / f"{name}.err", environment)

    return make


def test_each_ends_in_its_own_way(make_program, tmp_path):
    programs = [
        make_program("done", "import os, sys; print(os.environ['WORD']); print('hush', file=sys.stderr)", WORD="hello"),
        make_program("failed", "print('before'); raise SystemExit(3)"),
        make_program("killed", "import os; os.kill(os.getpid(), 9)"),
    ]
    assert [end.status for end in run_all(programs, 2, silence_s=60)] == [0, 3, -9]
    assert (tmp_path / "done.out").read_text() == "hello\n" and (tmp_path / "done.err").read_text() == "hush\n"
    assert (tmp_path / "failed.out").read_text() == "before\n"


def test_no_more_than_that_many_at_once(make_program, tmp_path):
    """Each leaves a file while it runs, and says how many of them there are."""
    code = (
        "import os, time, pathlib; folder = pathlib.Path(os.environ['FOLDER']); mine = folder / str(os.getpid()); "
        "mine.touch(); time.sleep(0.3); print(len(list(folder.iterdir()))); mine.unlink()"
    )
    (tmp_path / "running").mkdir()
    programs = [make_program(str(i), code, FOLDER=str(tmp_path / "running")) for i in range(5)]
    assert [end.status for end in run_all(programs, 2, silence_s=60)] == [0] * 5
    assert max(int(program.output.read_text()) for program in programs) == 2


def test_who_is_silent_is_killed_with_its_children(make_program, tmp_path):
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    talks = "import time; [(print(i), time.sleep(0.3)) for i in range(15)]"
    stuck, talking = run_all([make_program("stuck", child), make_program("talks", talks)], 2, silence_s=4)
    assert stuck.status is None and stuck.seconds < 60
    assert talking.status == 0 and talking.seconds > 4  # longer than it may be silent
    _wait_for_end(int((tmp_path / "stuck.out").read_text()))


def test_an_interrupted_run_leaves_nobody_behind(make_program, tmp_path, monkeypatch):
    begun = tmp_path / "begun.out"

    def sleep(seconds):
        if begun.exists() and begun.read_text():
            raise KeyboardInterrupt
        os.sched_yield()

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        run_all([make_program("begun", "import os, time; print(os.getpid()); time.sleep(600)")], 1, silence_s=60)
    monkeypatch.undo()
    _wait_for_end(int(begun.read_text()))


def test_a_terminated_run_leaves_nobody_behind(tmp_path):
    """`timeout` sends SIGTERM, which no `finally` sees by itself, to the process and then to its group."""
    begun = tmp_path / "begun.out"
    inner = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    code = (
        "import sys; from pathlib import Path; from tests.processes import ROOT, Program, run_all; "
        f"sleeper = Program(['sleep', '600'], Path({str(tmp_path / 'sleeper')!r})); "
        f"first = Program([sys.executable, '-c', {inner!r}], Path({str(begun)!r})); "
        "run_all([first, sleeper, sleeper], 3, silence_s=600)"
    )
    outer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (begun.exists() and begun.read_text().endswith("\n")):
        assert outer.poll() is None
        time.sleep(0.05)
    outer.terminate()
    outer.terminate()
    assert outer.wait(timeout=60) == 128 + signal.SIGTERM
    _wait_for_end(int(begun.read_text()))


def _wait_for_end(pid):
    """Until the process is gone or a zombie, which an orphan stays where nobody reaps it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        if not found or found.startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there: {found}")
