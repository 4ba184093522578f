"""Finding schedules: the scanned package, entry points, "module:ATTR", and what is said when there is none."""

import importlib
import pickle
import pkgutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import cute_dash
import schedules
from cute_dash import ops, registry
from cute_dash.check import check
from cute_dash.config import get_config
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import DenseSchedule, Schedule, SelectingSchedule, SelectorRow
from schedules.hybrid import Hybrid
from schedules.shift import Shift
from schedules.symmetric_shift import SymmetricShift

ROOT = Path(__file__).parents[2]
SHIPPED = {
    *("baseline", "descending", "shift", "symmetric_shift", "shortest_first", "longest_first", "hybrid"),
    *("passes", "auto", "auto_invariant", "unordered"),
}
CAUSAL = ProblemShape(1, 2, 256, 256, 64, 128, causal=True)

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar
from cute_dash.schedule import DenseSchedule

@dataclass(frozen=True)
class Mine(DenseSchedule):
    name: ClassVar[str] = "{name}"

SCHEDULE = Mine()
CLASS = Mine
NUMBER = 3
"""


@pytest.fixture
def drop_in(tmp_path, monkeypatch):
    """Writes a module into a folder that the package `schedules` also looks into."""
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    written = []

    def write(module, name):
        (tmp_path / f"{module}.py").write_text(SOURCE.format(name=name))
        written.append(f"schedules.{module}")

    yield write
    for module in written:
        sys.modules.pop(module, None)


@pytest.fixture
def entry_point(monkeypatch):
    """Pretends that an installed distribution registered `value` under `name`."""

    def register(name, value):
        point = EntryPoint(name, value, registry.ENTRY_POINT_GROUP)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])

    return register


def test_all_shipped_schedules_are_found():
    assert set(registry.available()) >= SHIPPED
    for name in SHIPPED:
        schedule = registry.load(name)
        assert isinstance(schedule, Schedule) and schedule.name == name


def test_a_dropped_in_file_is_found_at_once(drop_in):
    assert "dropped_in" not in registry.available()
    drop_in("dropped_in", "dropped_in")
    assert "dropped_in" in registry.available()
    assert registry.resolve("dropped_in", CAUSAL).name == "dropped_in"


def test_name_must_equal_the_module(drop_in):
    drop_in("one_name", "another_name")
    with pytest.raises(ValueError, match="'one_name' calls itself 'another_name'"):
        registry.load("one_name")


def test_entry_point(entry_point):
    entry_point("shift", "schedules.shift:SCHEDULE")
    with pytest.raises(
        ValueError, match=r"ambiguous: schedules/shift.py and the entry point 'schedules.shift:SCHEDULE'"
    ):
        registry.load("shift")
    entry_point("theirs", "schedules.shift:SCHEDULE")
    assert "theirs" in registry.available()
    with pytest.raises(ValueError, match="'theirs' calls itself 'shift'"):
        registry.load("theirs")


def test_entry_point_loads(entry_point, drop_in):
    drop_in("_theirs", "theirs")
    assert "_theirs" not in registry.available()
    entry_point("theirs", "schedules._theirs:SCHEDULE")
    assert registry.load("theirs").name == "theirs"


def test_module_attribute():
    assert registry.load("schedules.shift:SCHEDULE") == Shift()


def test_object_is_returned_as_it_is():
    schedule = Shift(window=7)
    assert registry.load(schedule) is schedule


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("symetric_shift", "unknown schedule 'symetric_shift': did you mean 'symmetric_shift'.*known are auto, "),
        ("zzz", "unknown schedule 'zzz': known are auto, "),
        ("no_such_module:X", "no module named 'no_such_module'"),
        ("schedules.shift:NOPE", "module 'schedules.shift' has no attribute 'NOPE'"),
        ("schedules.shift:Shift", "is the class Shift; it must be an instance"),
        ("schedules.shift:wrap", "is no Schedule: it lacks .*get_lock_value"),
        (":SCHEDULE", "must be a name or 'module:ATTR'"),
    ],
)
def test_bad_spec(spec, message):
    with pytest.raises(ValueError, match=message):
        registry.load(spec)


def test_known_schedules_are_those_that_load(drop_in, tmp_path):
    drop_in("broken", "broken")
    (tmp_path / "broken.py").write_text("import no_such_dependency")
    with pytest.raises(ValueError, match="unknown schedule 'brokem': known are auto, ") as caught:
        registry.load("brokem")
    assert set(str(caught.value).split("known are ")[1].split(", ")) == SHIPPED


def test_not_a_schedule():
    with pytest.raises(TypeError, match="schedule=3 must be a name"):
        registry.load(3)


BROKEN = [
    ("import no_such_dependency", r"ModuleNotFoundError: No module named 'no_such_dependency' \(.*broken.py, line 1\)"),
    ("x = (\n", r"SyntaxError: .* \(.*broken.py, line 1\)"),
    ("def f():\n    return 1 / 0\nf()", r"ZeroDivisionError: division by zero \(.*broken.py, line 2\)"),
    ("raise SystemExit(3)", r"SystemExit: 3"),
    ("x = 1", r"it has no SCHEDULE"),
    ("SCHEDULE = 3", r"SCHEDULE is no Schedule: it lacks"),
    (SOURCE.format(name="another"), r"schedule 'broken' calls itself 'another'"),
    (
        SOURCE.format(name="broken").replace("(frozen=True)", "").replace("(DenseSchedule)", ""),
        r"SCHEDULE is no Schedule",
    ),
    (
        SOURCE.format(name="broken")
        .replace("@dataclass(frozen=True)\n", "")
        .replace("    name:", "    n: int = 3\n    name:"),
        r"rule 3 \(purity\): Mine: n would not enter equality and hash",
    ),
]


@pytest.mark.parametrize(("source", "message"), BROKEN)
def test_a_broken_file_is_named_and_hides_no_other(drop_in, tmp_path, source, message):
    drop_in("broken", "broken")
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(registry.ScheduleFileError, match=r"broken\.py: " + message) as error:
        registry.load("broken")
    assert "\n" not in str(error.value)
    loaded, broken = registry.load_all()
    assert SHIPPED <= set(loaded)
    assert broken["broken"] == str(error.value)


def test_every_file_in_schedules_is_a_schedule():
    """Of the shipped files, and of those that a user has added: a bad one is named here."""
    assert registry.load_all()[1] == {}


def test_an_error_in_the_module_of_an_attribute_is_named(drop_in, tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(registry.ScheduleFileError, match=r"'elsewhere:X': ZeroDivisionError: .*elsewhere.py, line 1"):
        registry.load("elsewhere:X")


@pytest.mark.parametrize(
    "files", [["schedules/__init__.py", "schedules/mine.py"], ["schedules.py"]], ids=["package", "module"]
)
def test_another_package_of_the_same_name_is_refused(tmp_path, files):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for command in ("available()", "load('baseline')"):
        code = f"import sys; sys.path.append({str(ROOT)!r}); from cute_dash import registry; registry.{command}"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        last = done.stderr.splitlines()[-1]
        assert "ShadowedPackageError: `import schedules` finds schedules" in last and "rename that package" in last


def test_an_object_that_breaks_equality_is_refused():
    class Undecorated(Shift):
        extra: int = 3

    with pytest.raises(ValueError, match="rule 3 .*extra would not enter equality"):
        registry.load(Undecorated())


@dataclass(frozen=True)
class Impostor(DenseSchedule):
    """Not the `hybrid` that is shipped."""

    name: ClassVar[str] = "hybrid"


@dataclass(frozen=True)
class SelectsAnImpostor(SelectingSchedule):
    name: ClassVar[str] = "selects_an_impostor"
    version: ClassVar[int] = 1
    batch_invariant: ClassVar[bool] = True
    table: ClassVar[tuple[SelectorRow, ...]] = (SelectorRow("causal", None, Impostor()),)


class WiderHybrid(Hybrid):
    """Another order under the name that it inherits."""


@pytest.mark.parametrize("spec", [Impostor(), f"{__name__}:IMPOSTOR", SelectsAnImpostor(), WiderHybrid()], ids=repr)
def test_the_name_of_a_shipped_schedule_is_refused(spec):
    with pytest.raises(ValueError, match=r"calls itself 'hybrid', which schedules/hybrid\.py is; .*a name of its own"):
        registry.resolve(spec, CAUSAL)


IMPOSTOR = Impostor()


def test_the_op_refuses_the_name_of_a_shipped_schedule():
    q, k, v = (torch.zeros(1, 300, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match="calls itself 'hybrid'"):
        cute_dash.flash_attn_func(q, k, v, causal=True, schedule=Impostor())


def test_a_file_may_take_its_schedule_from_elsewhere(drop_in, tmp_path):
    drop_in("elsewhere", "elsewhere")
    (tmp_path / "elsewhere.py").write_text(f"from {__name__} import ELSEWHERE as SCHEDULE")
    assert registry.load("elsewhere") is ELSEWHERE
    assert registry.resolve(registry.load("elsewhere"), CAUSAL) is ELSEWHERE


@dataclass(frozen=True)
class Elsewhere(DenseSchedule):
    name: ClassVar[str] = "elsewhere"


ELSEWHERE = Elsewhere()


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        (-1, "-1"),
        (0, "0"),
        (1.0, "1.0 of type float"),
        (True, "True of type bool"),
        (np.int64(1), ".* of type numpy.int64"),
    ],
)
def test_a_version_is_an_int_from_1_up(version, shown):
    @dataclass(frozen=True)
    class Versioned(DenseSchedule):
        name: ClassVar[str] = "versioned"

    Versioned.version = version
    for refuses in (registry.load, lambda schedule: check(schedule, CAUSAL), ops.make_handle):
        with pytest.raises(ValueError, match=rf"rule 3 .*Versioned\.version is {shown}; allowed: (an )?int"):
            refuses(Versioned())


@pytest.mark.parametrize(
    ("cls", "field", "allowed"),
    [
        (DenseSchedule, "heads_per_group", "an int of at least 1, or 0 for a choice by shape"),
        (Shift, "window", "an int of at least 1"),
        (SymmetricShift, "window", "an int of at least 1"),
        (Hybrid, "tail_tiles", "an int of at least 0"),
    ],
)
def test_fields_of_schedules_are_checked(cls, field, allowed):
    for value in ("a", 2.0, True, None, np.int64(3)):
        with pytest.raises(
            TypeError, match=rf"{cls.__name__}: {field}=.* is a (numpy.)?{type(value).__name__}; allowed: an int"
        ):
            cls(**{field: value})
    with pytest.raises(ValueError, match=f"{cls.__name__}: {field}=-1; allowed: {allowed}"):
        cls(**{field: -1})


def test_int_fields_of_ones_own_are_checked():
    @dataclass(frozen=True)
    class Mine(DenseSchedule):
        stride: int = 3
        flavour: str = "x"

    assert Mine(stride=-5, flavour="y").stride == -5
    with pytest.raises(TypeError, match="Mine: stride='a' is a str; allowed: an int"):
        Mine(stride="a")


def test_every_exception_survives_pickling():
    """As a process pool does with what a worker raises."""
    for module in pkgutil.walk_packages(cute_dash.__path__, "cute_dash."):
        with suppress(ImportError):  # what an extra is for
            importlib.import_module(module.name)
    classes = [cls for cls in list_subclasses(Exception) if cls.__module__.split(".")[0] == "cute_dash"]
    names = {cls.__name__ for cls in classes}
    assert names >= {"ScheduleError", "TooManyStepsError", "ScheduleFileError", "ShadowedPackageError", "StuckError"}
    shown = {cls: cls("what") for cls in classes if cls is not registry.UnsupportedShapeError}
    with pytest.raises(registry.UnsupportedShapeError) as caught:
        registry.resolve("shift", CAUSAL)
    for error in (*shown.values(), caught.value):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    assert pickle.loads(pickle.dumps(caught.value)).reason == "orders the full mask only"


def list_subclasses(cls):
    return [other for direct in cls.__subclasses__() for other in (direct, *list_subclasses(direct))]


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "name", "heads"),
    [
        (128, 2048, "shortest_first", 0),
        (128, 2049, "longest_first", 32),
        (192, 6144, "shortest_first", 0),
        (192, 6145, "longest_first", 16),
        (64, 8192, "shortest_first", 0),
        (64, 8193, "longest_first", 32),
    ],
)
def test_rows_of_a_selector_tell_tiles_apart(head_dim, seqlen, name, heads):
    shape = get_config(head_dim, True).make_shape(1, 2, seqlen, seqlen)
    schedule = registry.resolve("auto_invariant", shape)
    assert (schedule.name, schedule.heads_per_group) == (name, heads)


def test_resolve_selects_a_concrete_schedule():
    assert registry.resolve("auto", CAUSAL).name == "hybrid"
    full = replace(CAUSAL, causal=False)
    assert registry.resolve("auto", full).name == "shortest_first"
    assert registry.resolve("auto", replace(full, tile_m=128)).name == "hybrid"
    long = replace(full, tile_m=128, seqlen_q=16384, seqlen_k=16384)
    assert registry.resolve("auto", long).name == "shortest_first"
    assert registry.resolve("auto_invariant", CAUSAL).name == "shortest_first"


def test_resolve_refuses_a_mask_that_the_schedule_cannot_order():
    with pytest.raises(
        ValueError, match="'shift' cannot implement ProblemShape.*causal=True.*: it orders the full mask only"
    ):
        registry.resolve("shift", CAUSAL)


@dataclass(frozen=True)
class NoWindows(DenseSchedule):
    """As a schedule that was written before there were windows might say."""

    name: ClassVar[str] = "no_windows"

    def can_implement(self, shape):
        return shape.window is None


def test_the_refusal_names_every_mask_that_the_schedule_orders():
    local = replace(CAUSAL, causal=False, window=Window(100, 0))
    for schedule, masks in ((NoWindows(), "the full mask and the causal mask"), ("symmetric_shift", "the causal mask")):
        with pytest.raises(ValueError, match=rf"window=Window\(left=100, right=0\).*: it orders {masks} only"):
            registry.resolve(schedule, local)


@pytest.mark.parametrize("name", ["auto", "auto_invariant"])
def test_windows_run_shortest_first(name):
    for seqlen in (256, 65536):
        local = replace(CAUSAL, causal=False, seqlen_q=seqlen, seqlen_k=seqlen, window=Window(100, 0))
        assert registry.resolve(name, local).name == "shortest_first"
