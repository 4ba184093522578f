"""The on-disk cache of compiled kernels: hits across processes, damage, races, switches, and what a key covers.

One key is compiled for real, by two processes at once; everything else reuses its entry.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import schedules
from cute_dash import compile as compile_module
from cute_dash import registry, validation
from cute_dash.compile import CompileKey
from cute_dash.config import get_config
from cute_dash.schedule import DenseSchedule

ROOT = Path(compile_module.__file__).parents[1]
KEY = CompileKey(get_config(64, False), registry.load("baseline"), "bfloat16")
GET_BACKWARD = """
from cute_dash import registry
from cute_dash.compile import compile_backward
from cute_dash.config import get_config
assert callable(compile_backward(get_config(64, False), registry.load("baseline")))
"""


PRINT_DIGEST = """
from cute_dash import registry
from cute_dash.compile import CompileKey
from cute_dash.config import get_config
print(CompileKey(get_config(64, False), registry.load({!r}), "bfloat16").digest())
"""


def start_process(code, folder, *path):
    """A fresh interpreter that caches in `folder` and reports what it compiles on stderr; `path` precedes its own."""
    path = [*map(str, path or (ROOT,)), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CUTE_DASH_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(path)}
    for switch in ("CUTE_DASH_CACHE", "CUTE_DASH_QUIET"):
        environment.pop(switch, None)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=path[0],  # which `python -c` searches first
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """(stdout, stderr) of a process that must succeed."""
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    return stdout, stderr


def assert_one_whole_entry(folder):
    digest = KEY.digest()
    assert {path.name for path in folder.iterdir()} == {f"{digest}.o", f"{digest}.sha256"}
    contents = (folder / f"{digest}.o").read_bytes()
    assert hashlib.sha256(contents).hexdigest() == (folder / f"{digest}.sha256").read_text()


@pytest.fixture(scope="module")
def raced_folder(tmp_path_factory):
    """A cache folder that two processes filled at once, each having found nothing in it."""
    folder = tmp_path_factory.mktemp("cache") / "made" / "on demand"
    for process in [start_process(GET_BACKWARD, folder) for _ in range(2)]:
        _, stderr = finish(process)
        assert "compiled baseline hd64 full bfloat16 in" in stderr
    return folder


@dataclass
class FakeCompiled:
    """Stands for the DSL's function: exports the given bytes."""

    contents: bytes

    def export_to_c(self, object_file_path, function_name):
        Path(object_file_path).write_bytes(self.contents)


@pytest.fixture
def cache(raced_folder, tmp_path, monkeypatch):
    """A copy of the filled folder, in use, in a process that has nothing in memory and does not really compile."""
    folder = tmp_path / "cache"
    shutil.copytree(raced_folder, folder)
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(folder))
    monkeypatch.setenv("CUTE_DASH_QUIET", "1")
    monkeypatch.delenv("CUTE_DASH_CACHE", raising=False)
    monkeypatch.setattr(compile_module, "_compiled", {})
    return folder


@pytest.fixture
def builds(raced_folder, monkeypatch):
    """The list of keys that were compiled; a compile exports the real object again."""
    contents = (raced_folder / f"{KEY.digest()}.o").read_bytes()
    keys = []

    def build(key, options=""):
        keys.append(key)
        return FakeCompiled(contents)

    monkeypatch.setattr(compile_module, "build", build)
    return keys


def test_two_processes_at_once_leave_one_whole_entry(raced_folder):
    assert_one_whole_entry(raced_folder)


def test_fresh_process_does_not_compile(raced_folder):
    _, stderr = finish(start_process(GET_BACKWARD, raced_folder))
    assert "compil" not in stderr


def test_found_on_disk_then_in_memory(cache, builds):
    compiled = compile_module.get_backward(KEY)
    assert callable(compiled)
    shutil.rmtree(cache)
    assert compile_module.get_backward(KEY) is compiled
    assert builds == []


def damage_object(folder):
    path = folder / f"{KEY.digest()}.o"
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def cut_object(folder):
    path = folder / f"{KEY.digest()}.o"
    path.write_bytes(path.read_bytes()[:-1])


def not_an_object(folder):
    """Whole by its digest, but nothing that can be loaded."""
    (folder / f"{KEY.digest()}.o").write_bytes(b"no object")
    (folder / f"{KEY.digest()}.sha256").write_text(hashlib.sha256(b"no object").hexdigest())


def remove_object(folder):
    (folder / f"{KEY.digest()}.o").unlink()


def remove_digest(folder):
    (folder / f"{KEY.digest()}.sha256").unlink()


def empty_digest(folder):
    (folder / f"{KEY.digest()}.sha256").write_text("")


@pytest.mark.parametrize(
    "damage", [damage_object, cut_object, not_an_object, remove_object, remove_digest, empty_digest]
)
def test_damaged_entry_is_ignored_and_rewritten(damage, cache, builds, monkeypatch):
    damage(cache)
    assert isinstance(compile_module.get_backward(KEY), FakeCompiled)
    assert builds == [KEY]
    assert_one_whole_entry(cache)
    monkeypatch.setattr(compile_module, "_compiled", {})
    assert not isinstance(compile_module.get_backward(KEY), FakeCompiled)
    assert builds == [KEY]


def test_switched_off_it_reads_and_writes_nothing(cache, builds, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DASH_CACHE", "0")
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    before = sorted(tmp_path.rglob("*"))
    compile_module.get_backward(KEY)
    assert builds == [KEY]
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setattr(compile_module, "_compiled", {})
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(cache))
    compile_module.get_backward(KEY)
    assert builds == [KEY, KEY]


def test_a_switch_is_0_or_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(tmp_path))
    for value, folder in (("0", None), ("1", tmp_path), ("", tmp_path)):
        monkeypatch.setenv("CUTE_DASH_CACHE", value)
        assert compile_module.cache_dir() == folder
    monkeypatch.setenv("CUTE_DASH_CACHE", "maybe")
    with pytest.warns(UserWarning, match=r"CUTE_DASH_CACHE='maybe' has no effect; allowed: 0 or 1 \(default: 1\)"):
        assert compile_module.cache_dir() == tmp_path
    for value, lines in (("1", ""), ("0", "cute-dash: x\n"), ("", "cute-dash: x\n")):
        monkeypatch.setenv("CUTE_DASH_QUIET", value)
        compile_module._progress("x")
        assert capsys.readouterr().err == lines
    monkeypatch.setenv("CUTE_DASH_QUIET", "yes")
    with pytest.warns(UserWarning, match=r"CUTE_DASH_QUIET='yes' has no effect; allowed: 0 or 1 \(default: 0\)"):
        compile_module._progress("x")


def test_folder_that_cannot_be_written_costs_a_compile_and_nothing_else(cache, builds, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.delenv("CUTE_DASH_QUIET")
    assert isinstance(compile_module.get_backward(KEY), FakeCompiled)
    assert builds == [KEY]
    assert "not cached in" in capsys.readouterr().err


def test_default_folder(monkeypatch, tmp_path):
    for name in ("CUTE_DASH_CACHE", "CUTE_DASH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_module.cache_dir() == tmp_path / "home" / ".cache" / "cute-dash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile_module.cache_dir() == tmp_path / "xdg" / "cute-dash"
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", "")  # not the current folder
    assert compile_module.cache_dir() == tmp_path / "xdg" / "cute-dash"
    assert list(tmp_path.iterdir()) == []


def test_digest_differs_with_every_part_of_the_key():
    symmetric = registry.load("symmetric_shift")
    keys = [
        KEY,
        replace(KEY, dtype="float16"),
        replace(KEY, cooperative=True),
        replace(KEY, debug=True),
        replace(KEY, config=get_config(64, True)),
        replace(KEY, config=get_config(128, False)),
        replace(KEY, schedule=replace(KEY.schedule, heads_per_group=3)),
        replace(KEY, schedule=registry.load("unordered")),
        replace(KEY, schedule=symmetric),
        replace(KEY, schedule=replace(symmetric, window=8)),
    ]
    assert len({key.digest() for key in keys}) == len(keys)
    assert replace(KEY, schedule=type(KEY.schedule)()).digest() == KEY.digest()


def test_unknown_dtype_is_no_key():
    with pytest.raises(ValueError, match=r"dtype='float32'.*bfloat16, float16"):
        replace(KEY, dtype="float32")


def copy_sources(target):
    for package in ("cute_dash", "schedules"):
        shutil.copytree(ROOT / package, target / package, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.mark.parametrize("edited", ["cute_dash/kernels/mask.py", "cute_dash/problem.py", "schedules/baseline.py"])
def test_digest_differs_with_the_sources(edited, tmp_path):
    """And not with the folder they lie in."""
    original, changed = copy_sources(tmp_path / "original"), copy_sources(tmp_path / "changed")
    with (changed / edited).open("a") as file:
        file.write("# one more line\n")
    code = PRINT_DIGEST.format("baseline")
    processes = [start_process(code, tmp_path / "cache", root) for root in (original, changed)]
    (original_digest, _), (changed_digest, _) = (finish(process) for process in processes)
    assert original_digest.strip() == KEY.digest()
    assert changed_digest.strip() != KEY.digest()


class Elsewhere(DenseSchedule):
    """A schedule of another package: nothing tells which sources it depends on."""

    name = "elsewhere"


def test_digest_differs_with_a_folder_of_schedules_that_a_process_adds_later(tmp_path, monkeypatch):
    digest = KEY.digest()
    (tmp_path / "late.py").write_text("LATE = 1\n")
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    assert KEY.digest() != digest


def test_digest_differs_with_the_processor(tmp_path):
    """Its objects hold host code for the machine that compiled them."""
    path, digests = tmp_path / "cpuinfo", [KEY.digest()]
    for flags in ("fpu avx2", "fpu avx2 avx512f"):
        path.write_text(f"processor: 0\nflags\t\t: {flags}\nmodel: A\n")
        description = compile_module._describe_processor(path)
        assert description == f"flags\t\t: {flags}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compile_module, "_describe_processor", lambda description=description: description)
            compile_module._fingerprint_of.cache_clear()
            digests.append(KEY.digest())
    compile_module._fingerprint_of.cache_clear()
    assert len(set(digests)) == 3
    assert KEY.digest() == digests[0]
    assert compile_module._describe_processor(tmp_path / "nothing there") == platform.processor()


def test_a_schedule_of_another_package_is_never_on_disk(cache, builds):
    key = replace(KEY, schedule=Elsewhere())
    before = sorted(cache.iterdir())
    compile_module.get_backward(key)
    assert builds == [key]
    assert sorted(cache.iterdir()) == before
    (cache / f"{key.digest()}.o").write_bytes((cache / f"{KEY.digest()}.o").read_bytes())
    (cache / f"{key.digest()}.sha256").write_text((cache / f"{KEY.digest()}.sha256").read_text())
    compile_module._compiled.clear()
    assert isinstance(compile_module.get_backward(key), FakeCompiled)


@pytest.fixture
def make_schedule(tmp_path, monkeypatch):
    """Writes modules into a folder that `schedules` also looks into, and loads the schedule of the first."""
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    monkeypatch.setattr(compile_module, "_sources_changed", lambda: False)
    before = set(sys.modules)

    def make(line, **modules):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "my_order.py").write_text("SHIFT = 1\n")
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        (tmp_path / "cached.py").write_text(f"{line}\n{SCHEDULE_SOURCE}")
        return registry.load("cached")

    yield make
    for name in set(sys.modules) - before:  # not the DSL, which cannot be loaded twice
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


SCHEDULE_SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from cute_dash.schedule import DenseSchedule

@dataclass(frozen=True)
class Cached(DenseSchedule):
    name: ClassVar[str] = "cached"
    inner: object = None

SCHEDULE = Cached()

def make():
    @dataclass(frozen=True)
    class Local(DenseSchedule):
        name: ClassVar[str] = "local"
    return Local()
"""


@pytest.mark.parametrize(
    "line",
    [
        "import math, collections.abc",
        "from cute_dash import ints",
        "from schedules import baseline",
        "from . import descending",
        "from .baseline import SCHEDULE as other",
        "import cutlass",
    ],
)
def test_a_schedule_that_imports_what_the_digest_covers_is_on_disk(line, make_schedule):
    assert replace(KEY, schedule=make_schedule(line)).is_cacheable()


@pytest.mark.parametrize(
    "line",
    [
        "import my_order",
        "from my_order import SHIFT",
        "def get_shift():\n    from my_order import SHIFT\n",
        "from schedules import helper",
        "import schedules.helper",
        "from . import helper",
        "from .helper import SHIFT",
        "import importlib; my_order = importlib.import_module('my_order')",
        "my_order = __import__('my_order')",
        "SHIFT = int(open(__file__).read(0) or 1)",
        "import numpy",
        "from cute_dash import registry",
        "from cute_dash.registry import load",
    ],
)
def test_a_schedule_that_imports_from_elsewhere_is_never_on_disk(line, make_schedule):
    """Not through another file of the package either: an edit there would leave a stale kernel."""
    schedule = make_schedule(line, helper="from .further import *\n", further="from my_order import SHIFT\n")
    assert not replace(KEY, schedule=schedule).is_cacheable()


def test_what_the_digest_does_not_tell_apart_is_never_on_disk(make_schedule):
    """Classes that a function makes share a name; a field can hold an object that looks like another."""
    schedule = make_schedule("")
    assert replace(KEY, schedule=replace(schedule, inner=(1, 2.0, "x", (None,)))).is_cacheable()
    for other in (replace(schedule, inner=Elsewhere()), sys.modules["schedules.cached"].make()):
        assert not replace(KEY, schedule=other).is_cacheable()


@pytest.mark.parametrize("name", sorted(validation.TESTED_SCHEDULES))
def test_shipped_schedules_are_on_disk(name, monkeypatch):
    monkeypatch.setattr(compile_module, "_sources_changed", lambda: False)
    assert replace(KEY, schedule=registry.load(name)).is_cacheable()


def test_nothing_is_on_disk_once_a_source_has_changed(cache, builds, monkeypatch):
    """What this process imported may be older than what a digest of the files would say."""
    newest = max(
        path.stat().st_mtime for folder in ("cute_dash", "schedules") for path in (ROOT / folder).rglob("*.py")
    )
    monkeypatch.setattr(compile_module, "_IMPORTED_AT", newest - 1)
    shutil.rmtree(cache)
    compile_module.get_backward(KEY)
    compile_module._compiled.clear()
    compile_module.get_backward(KEY)
    assert builds == [KEY, KEY]
    assert not cache.exists()
