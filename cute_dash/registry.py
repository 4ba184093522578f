"""Finds schedules by name: the package `schedules`, then the entry points of other distributions.

Host only. The package is scanned at every call, so that a file dropped into it is found at once, without an
installation. Other distributions register a Schedule object under the entry-point group `cute_dash.schedules`.
"""

import difflib
import os
import pkgutil
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module, invalidate_caches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from cute_dash import check
from cute_dash.check import METHOD_ERRORS, ScheduleError, check_value_object, describe_failure, show_path
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import Schedule, Selector, needs_one_cta

PACKAGE = "schedules"
ENTRY_POINT_GROUP = "cute_dash.schedules"
_SHIPPED = "baseline"  # a module by which the package of this distribution is known
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MEMBERS = tuple(member for member in vars(Schedule) if not member.startswith("_"))


class ShadowedPackageError(ImportError):
    """`import schedules` gives another package than the one that ships with cute-dash."""


class ScheduleFileError(ValueError):
    """A module that should define a schedule does not; the message names the file and the error."""


SCHEDULE_FAULTS = (ScheduleError, ScheduleFileError, ShadowedPackageError)  # not of who names the schedule


class UnsupportedShapeError(ValueError):
    """A schedule cannot order a shape.

    Attributes:
        reason: in a few words, such as "orders the full mask only".
    """

    def __init__(self, name: str, shape: ProblemShape, reason: str) -> None:
        super().__init__(f"schedule={name!r} cannot implement {shape}: it {reason}")
        self.reason = reason
        self._arguments = name, shape, reason

    def __reduce__(self) -> tuple[type["UnsupportedShapeError"], tuple[str, ProblemShape, str]]:
        """For pickle, which else calls the class with the message alone."""
        return type(self), self._arguments


def available() -> list[str]:
    """Names of all schedules, sorted; nothing but the package itself is imported.

    Raises:
        ShadowedPackageError: another package is called `schedules`.
    """
    return sorted({*_packaged(), *_registered()})


def load_all() -> tuple[dict[str, Schedule], dict[str, str]]:
    """Every schedule of `available()` by name; and, for the names that `load` refuses, why."""
    loaded: dict[str, Schedule] = {}
    broken: dict[str, str] = {}
    for name in available():
        try:
            loaded[name] = load(name)
        except ValueError as error:
            broken[name] = str(error)
    return loaded, broken


def load(spec: str | Schedule) -> Schedule:
    """The schedule that `spec` names.

    Args:
        spec: a name from `available()`, "module:ATTR" for a schedule anywhere, or a schedule, returned as it is.

    Raises:
        ValueError: an unknown or ambiguous name (listing the known ones), a module that cannot be imported
            (ScheduleFileError), or an object that is no schedule.
        TypeError: `spec` is neither a string nor a schedule.
        ShadowedPackageError: another package is called `schedules`.
    """
    if not isinstance(spec, str):
        return _validated_object(spec)
    if ":" in spec:
        return _load_attribute(spec)
    packaged, registered = spec in _packaged(), _registered().get(spec)
    if packaged and registered:
        raise ValueError(
            f"schedule={spec!r} is ambiguous: {PACKAGE}/{spec}.py and the entry point {registered.value!r}; "
            f"name one as 'module:ATTR'"
        )
    if packaged:
        return _load_packaged(spec)
    if registered:
        return _load_registered(registered)
    raise ValueError(_describe_unknown(spec))


def find_loaded(spec: str) -> object:
    """What a string that `load` takes names now, not validated; None if a loaded module has no such object.

    So it is of an entry point. Another object than before tells that a module was loaded again, or assigned to.
    """
    module, separator, attribute = spec.partition(":")
    if not separator:
        module, attribute = f"{PACKAGE}.{spec}", "SCHEDULE"
    return getattr(sys.modules.get(module), attribute, None)


def resolve(spec: str | Schedule, shape: ProblemShape) -> Schedule:
    """The concrete schedule for a shape: `load`, then what a selector such as `auto` selects.

    Raises:
        ValueError: as `load`, and if the schedule cannot implement `shape` (UnsupportedShapeError) or its methods raise
            (ScheduleError).
    """
    given = load(spec)
    schedule = select(given, shape)
    try:
        answer = schedule.can_implement(shape)
        reason = None if answer else _describe_refusal(schedule, shape)
    except METHOD_ERRORS as error:
        raise ScheduleError(f"{given.name}: {describe_failure(error, schedule)}") from error
    if type(answer) is not bool:
        raise ScheduleError(f"{given.name}: can_implement gives {answer!r}; allowed: True or False")
    if reason is not None:
        raise UnsupportedShapeError(schedule.name, shape, reason)
    return schedule


def select(given: Schedule, shape: ProblemShape, varlen: bool = False) -> Schedule:
    """The schedule itself, or what it selects, as `check.select`; refused as `load` refuses.

    Raises:
        ScheduleError: the selector and what is wrong with it or with its choice.
    """
    if not isinstance(given, Selector):
        return given
    what = f"{given.name}: what it selects"
    try:
        return _with_own_name(_validated(check.select(given, shape, varlen), what), what)
    except ValueError as error:
        text = str(error)
        raise ScheduleError(text if text.startswith(what) else f"{given.name}: {text}") from error


def resolve_varlen(spec: str | Schedule, longest: ProblemShape) -> Schedule:
    """`resolve` for sequences of different lengths, fit for all; what is not batch-invariant may choose by the longest.

    Raises:
        ValueError: as `resolve`, and for a schedule that may need several resident CTAs.
    """
    schedule = resolve(select(load(spec), longest, varlen=True), longest)
    if not needs_one_cta(schedule):
        raise ValueError(
            f"schedule={schedule.name!r} may need several resident CTAs, how many depends on lengths that only the "
            "device knows; allowed with cu_seqlens: 'auto', 'auto_invariant' and schedules that inherit "
            "min_resident_ctas and get_window from DenseSchedule"
        )
    return schedule


def _describe_refusal(schedule: Schedule, shape: ProblemShape) -> str:
    """Why `can_implement` said no, found by asking for the other masks."""
    window = Window(left=(shape.seqlen_k - 1) // 2, right=0)
    others = {
        "the full mask": replace(shape, causal=False, window=None),
        "the causal mask": replace(shape, causal=True, window=None),
        "sliding windows": replace(shape, causal=False, window=window),
    }
    ordered = [name for name, other in others.items() if other.mask != shape.mask and schedule.can_implement(other)]
    return f"orders {' and '.join(ordered)} only" if ordered else "orders other shapes only, says its can_implement"


def _packaged() -> list[str]:
    """Module names in the package `schedules`."""
    names = [module.name for module in pkgutil.iter_modules(_package_path())]
    if _SHIPPED not in names:
        raise ShadowedPackageError(_describe_shadow())
    return [name for name in names if not name.startswith("_")]


def _package_path() -> list[str]:
    """Folders of the package `schedules`."""
    invalidate_caches()
    try:
        package = import_module(PACKAGE)
    except Exception as error:  # another package of this name can raise anything
        raise ShadowedPackageError(f"{_describe_shadow()} ({describe_failure(error)})") from error
    return list(getattr(package, "__path__", []))  # none: another *module* of this name


def _describe_shadow() -> str:
    found = _find_package()
    where = f"finds {show_path(found)}" if found else "finds nothing"
    return (
        f"`import {PACKAGE}` {where}, not the schedules of cute-dash; rename that package, or start Python where it is "
        f"not in front of cute-dash in sys.path; name your own schedules as 'module:ATTR'"
    )


def _find_package() -> str | None:
    """The file or folder that `import schedules` means, without importing it."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ValueError:  # imported, but without a spec
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or []), None)


def _registered() -> dict[str, EntryPoint]:
    """Entry points of other distributions by name."""
    return {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}


def _load_packaged(name: str) -> Schedule:
    """`SCHEDULE` of a module of the package; whatever is wrong with the module is said with its file."""
    candidates = [Path(folder) / file for folder in _package_path() for file in (f"{name}.py", f"{name}/__init__.py")]
    path = show_path(str(next((path for path in candidates if path.exists()), f"{PACKAGE}/{name}.py")))
    try:
        module = import_module(f"{PACKAGE}.{name}")
    except (Exception, SystemExit) as error:
        raise ScheduleFileError(f"{path}: {_describe_import_failure(error)}") from error
    if not hasattr(module, "SCHEDULE"):
        raise ScheduleFileError(f"{path}: it has no SCHEDULE; end it with SCHEDULE = YourSchedule()")
    try:
        return _with_name(name, _validated(module.SCHEDULE, "SCHEDULE"))
    except ValueError as error:
        raise ScheduleFileError(f"{path}: {error}") from error


def _load_registered(entry_point: EntryPoint) -> Schedule:
    what = f"entry point {entry_point.value!r}"
    try:
        schedule = entry_point.load()
    except (Exception, SystemExit) as error:
        raise ScheduleFileError(f"{what}: {_describe_import_failure(error)}") from error
    return _with_name(entry_point.name, _validated(schedule, what))


def _load_attribute(spec: str) -> Schedule:
    module_name, _, attribute = spec.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise _attribute_error(spec, module_name, error) from error
    if not hasattr(module, attribute):
        raise ValueError(f"schedule={spec!r}: module {module_name!r} has no attribute {attribute!r}")
    return _with_own_name(_validated(getattr(module, attribute), f"schedule={spec!r}"), f"schedule={spec!r}")


def _attribute_error(spec: str, module_name: str, error: BaseException) -> ValueError:
    """What to raise where the module of a "module:ATTR" cannot be imported."""
    if module_name.startswith(".") or not module_name:
        return ValueError(f"schedule={spec!r} must be a name or 'module:ATTR'")
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (module_name + ".").startswith(missing + "."):
        return ValueError(f"schedule={spec!r}: no module named {missing!r}")
    return ScheduleFileError(f"schedule={spec!r}: {_describe_import_failure(error)}")


def _describe_import_failure(error: BaseException) -> str:
    """Error, file and line of what went wrong while a module was imported; the line outside of Python's own library."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({show_path(error.filename or '?')}, line {error.lineno})"
    place, traceback = "", error.__traceback__
    while traceback:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith("<frozen") and not _is_standard_library(filename):
            place = f" ({show_path(filename)}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return describe_failure(error) + place


def _is_standard_library(filename: str) -> bool:
    """Site-packages are below its folder, but not of it."""
    return filename.startswith(_STANDARD_LIBRARY) and f"-packages{os.sep}" not in filename


def _validated_object(schedule: object) -> Schedule:
    missing = missing_members(schedule)
    if len(missing) == len(_MEMBERS):
        raise TypeError(f"schedule={schedule!r} must be a name, 'module:ATTR' or a Schedule")
    return _with_own_name(_validated(schedule, f"schedule={schedule!r}"), f"schedule={schedule!r}")


def _with_own_name(schedule: Schedule, what: str) -> Schedule:
    """The schedule, unless it has the name of a file in the package whose SCHEDULE is of another class."""
    name = schedule.name
    if type(schedule).__module__ == f"{PACKAGE}.{name}" or name not in _packaged():
        return schedule
    with suppress(ScheduleFileError):
        if type(schedule) is type(_load_packaged(name)):  # a file may take its schedule from elsewhere
            return schedule
    raise ValueError(
        f"{what} calls itself {name!r}, which {PACKAGE}/{name}.py is; name and version say what the bits depend on, so "
        "it must have a name of its own"
    )


def _validated(schedule: object, what: str) -> Schedule:
    if isinstance(schedule, type):
        raise ValueError(f"{what} is the class {schedule.__name__}; it must be an instance of it")
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{what} is no Schedule: it lacks {', '.join(missing_members(schedule))}")
    check_value_object(schedule)
    return schedule


def missing_members(schedule: object) -> list[str]:
    """What an object lacks to be a Schedule."""
    return [member for member in _MEMBERS if not hasattr(schedule, member)]


def _with_name(name: str, schedule: Schedule) -> Schedule:
    if schedule.name != name:
        raise ValueError(f"schedule {name!r} calls itself {schedule.name!r}; both names must be equal")
    return schedule


def _describe_unknown(name: str) -> str:
    known = list(load_all()[0])
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown schedule {name!r}: {hint}known are {', '.join(known)}"
