"""Finds schedules by name: the package `schedules`, then the entry points of other distributions.

Host only. The package is scanned at every call, so that a file dropped into it is found at once, without an
installation. Other distributions register a Schedule object under the entry-point group `cute_dash.schedules`.
"""

import difflib
import pkgutil
from importlib import import_module, invalidate_caches
from importlib.metadata import EntryPoint, entry_points

from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, Selector

PACKAGE = "schedules"
ENTRY_POINT_GROUP = "cute_dash.schedules"
_MEMBERS = tuple(member for member in vars(Schedule) if not member.startswith("_"))


def available() -> list[str]:
    """Names of all schedules, sorted; nothing but the package itself is imported."""
    return sorted({*_packaged(), *_registered()})


def load(spec: str | Schedule) -> Schedule:
    """The schedule that `spec` names.

    Args:
        spec: a name from `available()`, "module:ATTR" for a schedule anywhere, or a schedule, returned as it is.

    Raises:
        ValueError: an unknown or ambiguous name (listing the known ones), or an object that is no schedule.
        TypeError: `spec` is neither a string nor a schedule.
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
        return _with_name(spec, _load_attribute(f"{PACKAGE}.{spec}:SCHEDULE"))
    if registered:
        return _with_name(spec, _validated(registered.load(), f"entry point {registered.value!r}"))
    raise ValueError(_describe_unknown(spec))


def resolve(spec: str | Schedule, shape: ProblemShape) -> Schedule:
    """The concrete schedule for a shape: `load`, then what a selector such as `auto` selects.

    Raises:
        ValueError: as `load`, and if the schedule cannot implement `shape`.
    """
    schedule = load(spec)
    if isinstance(schedule, Selector):
        schedule = schedule.select(shape)
    if not schedule.can_implement(shape):
        raise ValueError(f"schedule={schedule.name!r} cannot implement {shape}")
    return schedule


def _packaged() -> list[str]:
    """Module names in the package `schedules`."""
    invalidate_caches()
    path = import_module(PACKAGE).__path__
    return [module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")]


def _registered() -> dict[str, EntryPoint]:
    """Entry points of other distributions by name."""
    return {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}


def _load_attribute(spec: str) -> Schedule:
    module_name, _, attribute = spec.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(f"schedule={spec!r}: no module named {error.name!r}") from error
        raise  # the module is there, one of its own imports is not
    except ValueError as error:  # an empty module name
        raise ValueError(f"schedule={spec!r} must be a name or 'module:ATTR'") from error
    if not hasattr(module, attribute):
        raise ValueError(f"schedule={spec!r}: module {module_name!r} has no attribute {attribute!r}")
    return _validated(getattr(module, attribute), f"schedule={spec!r}")


def _validated_object(schedule: object) -> Schedule:
    missing = _missing(schedule)
    if len(missing) == len(_MEMBERS):
        raise TypeError(f"schedule={schedule!r} must be a name, 'module:ATTR' or a Schedule")
    return _validated(schedule, f"schedule={schedule!r}")


def _validated(schedule: object, what: str) -> Schedule:
    if isinstance(schedule, type):
        raise ValueError(f"{what} is the class {schedule.__name__}; it must be an instance of it")
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{what} is no Schedule: it lacks {', '.join(_missing(schedule))}")
    return schedule


def _missing(schedule: object) -> list[str]:
    return [member for member in _MEMBERS if not hasattr(schedule, member)]


def _with_name(name: str, schedule: Schedule) -> Schedule:
    if schedule.name != name:
        raise ValueError(f"schedule {name!r} calls itself {schedule.name!r}; both names must be equal")
    return schedule


def _describe_unknown(name: str) -> str:
    known = available()
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown schedule {name!r}: {hint}known are {', '.join(known)}"
