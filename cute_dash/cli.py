"""The `cute-dash` command.

Exit status: 0 = fine, 1 = a check failed (a rule broken, bits differ, something not installed properly), 2 = the
command was used wrongly. Results go to stdout, progress and errors to stderr. Each command imports what it needs when
it runs, so that those without tensors work without torch and the CuTe DSL.
"""

import argparse
import itertools
import json
import math
import os
import re
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tabulate import tabulate

import cute_dash
from cute_dash.check import METHOD_ERRORS, ScheduleError, TooManyStepsError, describe_failure, find_violation
from cute_dash.config import (
    ALLOWED_HEAD_DIMS,
    SUPPORTED_HEAD_DIMS,
    TUNED_HEAD_DIMS,
    UNEQUAL_HEAD_DIMS,
    BwdConfig,
    get_config,
)
from cute_dash.problem import MASKS, ProblemShape, normalize_mask
from cute_dash.registry import SCHEDULE_FAULTS, UnsupportedShapeError
from cute_dash.schedule import Schedule, needs_one_cta

if TYPE_CHECKING:
    from cute_dash import verify
    from cute_dash.compile import CompileKey
    from cute_dash.doctor import Finding

OK, FAILED, USAGE = 0, 1, 2
DTYPES = ("bfloat16", "float16")
SLOW_S = 2.0  # what takes longer says on stderr what it is doing, and says so again each time that has doubled


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _search_current_folder()
    if argv[:1] == ["bench"]:  # its options, --help included, are the bench's own
        return _guarded(lambda: _bench(argv[1:]))
    args = _parser().parse_args(_join_window(argv))
    return _guarded(lambda: int(args.run(args)))


def _join_window(argv: Sequence[str]) -> list[str]:
    """`--window -1,0` as `--window=-1,0`: what begins with a dash and is no number, argparse takes for an option."""
    joined: list[str] = []
    for argument in argv:
        if joined and len(joined[-1]) > 2 and "--window".startswith(joined[-1]) and re.match(r"-\d", argument):
            argument = f"{joined.pop()}={argument}"
        joined.append(argument)
    return joined


def _search_current_folder() -> None:
    """Lets "module:ATTR" mean modules of the current folder too, which console scripts do not search."""
    if os.getcwd() in sys.path or "" in sys.path:
        return
    # last in the path, so that a file there hides nothing that is installed; but an editable install may be found by
    # an import hook, which comes after the whole path: so import what must not be hidden first
    with suppress(Exception):  # the registry says what is wrong with it
        import_module("schedules")
    sys.path.append(os.getcwd())


def _guarded(command: Callable[[], int]) -> int:
    """Runs a command; what the user can put right becomes a message instead of a traceback."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except (UsageError, TooManyStepsError) as error:
        print(f"cute-dash: {error}", file=sys.stderr)
        return USAGE
    except SCHEDULE_FAULTS as error:
        print(f"cute-dash: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:  # the reader of a pipe has seen enough, as in `cute-dash schedules | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit raises again
        return OK


# Arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cute-dash", description="Deterministic attention backward for Hopper GPUs.")
    parser.add_argument("--version", action="version", version=f"cute-dash {cute_dash.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    command = _add_command(commands, "demo", _demo, "show every schedule at work on this machine")
    _add_json(command)

    command = _add_command(commands, "schedules", _schedules, "list the schedules")
    _add_shape(command)
    _add_json(command)

    command = _add_command(commands, "check", _check, "prove that a schedule keeps the rules for a shape")
    _add_schedule(command)
    _add_shape(command)
    command.add_argument(
        "--resident",
        type=_positive,
        metavar="N",
        help="also fail if the schedule needs more than N CTAs at once, on a device that runs no more; that the number "
        "that it says it needs is enough, and every larger one, is proved in any case",
    )
    _add_json(command)

    command = _add_command(commands, "analyze", _analyze, "compare the schedules in the DAG model")
    _add_shape(command)
    _add_model(command).add_argument(
        "--l2",
        type=_megabytes,
        default=48.0,
        metavar="MB",
        help="of the L2 that hold Q, dO and dQ (default: 48 of the 60 of an H200)",
    )
    _add_json(command)

    command = _add_command(commands, "plot", _plot, "draw a schedule in the DAG model as a Gantt chart")
    _add_schedule(command)
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="the picture, .png or .svg")
    _add_shape(command)
    _add_model(command)

    commands.add_parser("bench", add_help=False, help="time the kernel and its peers (in a checkout; bench --help)")

    command = _add_command(commands, "compile", _compile, "compile kernels into the on-disk cache")
    _add_schedules(command, "all that can order the mask")
    command.add_argument(
        "--mask",
        nargs="+",
        choices=MASKS,
        default=["full", "causal"],
        help="local: sliding windows; default: full causal",
    )
    command.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="default: bfloat16")
    _add_head_dims(command)
    command.add_argument(
        "--grouped",
        action="store_true",
        help="the kernels for several query heads per KV head, instead of those for one",
    )
    command.add_argument(
        "--varlen", action="store_true", help="the kernels for sequences of different lengths (cu_seqlens), instead"
    )

    command = _add_command(commands, "verify-bits", _verify_bits, "prove that gradients keep their bits on this GPU")
    _add_verify_options(command)
    _add_json(command)

    command = _add_command(commands, "doctor", _doctor, "say what this machine has, and what will not work and why")
    _add_json(command)
    return parser


def _add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    return command


def _add_schedule(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", metavar="NAME|module:ATTR", help="a schedule's name, or where to import one from")


def _add_schedules(command: argparse.ArgumentParser, default: str) -> None:
    """Any number of schedules, by position or by option; `_get_schedules` has them."""
    command.add_argument("names", nargs="*", metavar="NAME|module:ATTR", help=f"schedules (default: {default})")
    command.add_argument("--schedule", nargs="+", default=[], metavar="NAME", help="the same, as an option")


def _get_schedules(args: argparse.Namespace) -> list[str]:
    return [*args.names, *args.schedule]


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON for a program to read")


def _add_shape(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("shape")
    group.add_argument(
        "--mask", choices=("full", "causal"), help="aligned bottom-right; default: causal, with --window full"
    )
    group.add_argument(
        "--window",
        type=_window,
        metavar="LEFT,RIGHT",
        help="sliding window of so many keys on each side of a query, inf or -1 for no limit: 1k,0; default: none",
    )
    group.add_argument("--seqlen-q", type=_tokens, default=2048, metavar="TOKENS", help="e.g. 1000 or 4k (default: 2k)")
    group.add_argument("--seqlen-k", type=_tokens, metavar="TOKENS", help="default: as seqlen-q")
    group.add_argument("--batch", type=_positive, default=1, metavar="N", help="default: %(default)s")
    group.add_argument("--heads", type=_positive, default=4, metavar="N", help="query heads (default: %(default)s)")
    group.add_argument(
        "--kv-heads", type=_positive, metavar="N", help="KV heads, a divisor of heads (default: as heads)"
    )
    group.add_argument(
        "--head-dim", type=_head_dim, metavar="N", default=128, help=f"{ALLOWED_HEAD_DIMS} (default: %(default)s)"
    )


def _add_model(command: argparse.ArgumentParser) -> Any:
    group = command.add_argument_group("model")
    group.add_argument(
        "--num-sms", type=_positive, default=132, metavar="N", help="default: %(default)s, as on an H200"
    )
    group.add_argument("--compute", type=_time, default=1.0, metavar="T", help="of one step (default: %(default)s)")
    group.add_argument(
        "--reduce", type=_time, default=0.25, metavar="T", help="of one dQ addition (default: %(default)s)"
    )
    group.add_argument("--latency", type=_time, default=0.0, metavar="T", help="of passing a turn on (default: 0)")
    group.add_argument(
        "--dq-stages", type=_positive, default=1, metavar="N", help="dQ tiles that may wait per CTA (default: 1)"
    )
    return group


def _add_verify_options(command: argparse.ArgumentParser) -> None:
    _add_schedules(command, "auto auto_invariant; all: every one that promises bits")
    command.add_argument(
        "--minutes",
        type=_time,
        default=1.0,
        metavar="N",
        help="goes on for so long, after one round of everything, compiling not counted (default: %(default)g)",
    )
    command.add_argument(
        "--emulator", action="store_true", help="the CPU emulator under random interleavings, instead of a GPU"
    )
    group = command.add_argument_group("configurations", "every combination is verified")
    _add_head_dims(group)
    group.add_argument(
        "--mask",
        nargs="+",
        choices=MASKS,
        help="local: the sliding window of --window; default: full causal, with --window local",
    )
    group.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="default: bfloat16")
    group.add_argument(
        "--varlen",
        action="store_true",
        help="sequences of different lengths with cu_seqlens, the longest with the tokens of seqlen-q and seqlen-k",
    )
    group.add_argument("--dlse", action="store_true", help="with a gradient of the LSE, too")
    group = command.add_argument_group("shape", "defaults: batch 4, 16 heads, 1k tokens; smaller on the emulator")
    group.add_argument("--batch", type=_positive, metavar="N", help="sequences; 1 leaves other batches untested")
    group.add_argument("--heads", type=_positive, metavar="N", help="query heads")
    group.add_argument("--kv-heads", type=_positive, metavar="N", help="default: as heads")
    group.add_argument("--seqlen-q", type=_tokens, metavar="TOKENS", help="e.g. 1000 or 4k")
    group.add_argument("--seqlen-k", type=_tokens, metavar="TOKENS", help="default: as seqlen-q")
    group.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="of mask local; default: a quarter of seqlen-k,0"
    )


def _add_head_dims(group: Any) -> None:
    group.add_argument(
        "--head-dim",
        nargs="+",
        type=_head_dim,
        metavar="N",
        default=list(TUNED_HEAD_DIMS),
        help=f"{ALLOWED_HEAD_DIMS} (default: {' '.join(map(str, TUNED_HEAD_DIMS))})",
    )
    qk, v = UNEQUAL_HEAD_DIMS
    group.add_argument(
        "--head-dim-v", type=_head_dim, metavar="N", help=f"of V: {v} with --head-dim {qk} (default: as head-dim)"
    )


def _positive(text: str) -> int:
    return _at_least_one(text, "count", "an integer of at least 1")


def _head_dim(text: str) -> int:
    if text not in map(str, SUPPORTED_HEAD_DIMS):
        raise argparse.ArgumentTypeError(f"invalid head dim {text!r}; allowed: {ALLOWED_HEAD_DIMS}")
    return int(text)


def _tokens(text: str) -> int:
    """ "4k" or "4096" -> 4096."""
    digits, factor = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    try:
        return _at_least_one(digits, "", "") * factor
    except argparse.ArgumentTypeError:
        message = f"invalid token count {text!r}: it must be an integer of at least 1, such as 1000 or 4k"
        raise argparse.ArgumentTypeError(message) from None


def _megabytes(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 2**20:
        raise argparse.ArgumentTypeError(f"invalid size {text!r}; allowed: a number of MB above 0, at most {2**20}")
    return value


def _window(text: str) -> tuple[int, int]:
    """ "1k,0" -> (1024, 0); "inf" and "-1" are -1, no limit."""
    try:
        left, right = (_window_side(side) for side in text.split(","))
    except ValueError:
        message = (
            f"invalid window {text!r}: it must be LEFT,RIGHT in tokens, each at least 0, or inf or -1 for no limit, "
            "such as 1k,0"
        )
        raise argparse.ArgumentTypeError(message) from None
    return left, right


def _window_side(text: str) -> int:
    if text in ("inf", "-1"):
        return -1
    digits, factor = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(text)
    return int(digits) * factor


def _at_least_one(text: str, what: str, allowed: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"invalid {what} {text!r}: it must be {allowed}")
    return int(text)


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _time(text: str) -> float:
    value = _number(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"invalid time {text!r}: it must be a finite number of at least 0")
    return value


def _shape(args: argparse.Namespace) -> ProblemShape:
    """The problem that the shape options describe, in the kernel's tiles."""
    seqlen_k = args.seqlen_k or args.seqlen_q
    mask = args.mask or ("causal" if args.window is None else "full")
    causal, window = normalize_mask(mask == "causal", args.window or (-1, -1), args.seqlen_q, seqlen_k)
    kv_heads = args.kv_heads or args.heads
    if args.heads % kv_heads:
        raise UsageError(f"--kv-heads {kv_heads} does not divide --heads {args.heads}")
    config = get_config(args.head_dim, causal, window is not None)
    return config.make_shape(args.batch, kv_heads, args.seqlen_q, seqlen_k, window, args.heads // kv_heads)


# Commands


def _demo(args: argparse.Namespace) -> int:
    try:
        from cute_dash import demo
    except ImportError as error:
        raise UsageError(f"the demo cannot run here: {error} (see `cute-dash doctor`)") from error

    result = demo.run(_progress)
    if sys.stderr.isatty():
        _progress("")
    if args.json:
        _print_json([asdict(row) for row in result.rows])
        _report_broken(result.broken)
    else:
        print(demo.report(result))
    return OK if result.passed else FAILED


def _schedules(args: argparse.Namespace) -> int:
    from cute_dash import registry

    shape = _shape(args)
    schedules, broken = registry.load_all()
    rows = []
    for name, schedule in schedules.items():
        try:
            rows.append(_schedule_row(schedule, shape))
        except METHOD_ERRORS as error:
            broken[name] = f"{name}: {describe_failure(error, schedule)}"
    if args.json:
        _print_json(rows)
    else:
        print(_table([{**row, "description": textwrap.fill(row["description"], 60)} for row in rows]))
        print(f"\nmin resident ctas: that must run at once for {_describe(shape)}; - = cannot order this shape")
    return _report_broken(broken.values())


def _report_broken(lines: Iterable[str]) -> int:
    """A line on stderr for each schedule that cannot be used; the exit status."""
    lines = list(lines)
    for line in lines:
        print(f"cute-dash: {line}", file=sys.stderr)
    return FAILED if lines else OK


def _schedule_row(schedule: Schedule, shape: ProblemShape) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "version": schedule.version,
        "ordered": schedule.ordered,
        "batch_invariant": schedule.batch_invariant,
        "min_resident_ctas": schedule.min_resident_ctas(shape) if schedule.can_implement(shape) else None,
        "description": _first_line(schedule),
    }


def _first_line(schedule: Schedule) -> str:
    """The first line of the docstring of the schedule's module or, without one, of its class."""
    text = sys.modules[type(schedule).__module__].__doc__ or type(schedule).__doc__ or ""
    return text.strip().split("\n")[0].rstrip(".")


def _check(args: argparse.Namespace) -> int:
    shape = _shape(args)
    given = _load(args.schedule)
    schedule = _resolve(given, shape)
    with _saying_if_slow(f"checking {schedule.name} for {_describe(shape)}"):
        violation = find_violation(given, shape, args.resident)
    if args.json:
        _print_json(
            {
                "schedule": schedule.name,
                "version": schedule.version,
                "shape": vars(shape),
                "resident_ctas": args.resident,
                "ok": violation is None,
                "violation": violation,
            }
        )
    elif violation is None:
        residency = f", with {args.resident} resident CTAs" if args.resident else ""
        print(f"{schedule.name} version {schedule.version} keeps every rule for {_describe(shape)}{residency}")
    else:
        print(f"{schedule.name} version {schedule.version} breaks a rule for {_describe(shape)}: {violation}")
    return OK if violation is None else FAILED


def _analyze(args: argparse.Namespace) -> int:
    from cute_dash import registry

    shape = _shape(args)
    schedules, broken = registry.load_all()
    rows = []
    for name, schedule in schedules.items():
        with _saying_if_slow(f"checking and simulating {name} for {_describe(shape)}"):
            try:
                rows.append(_model_row(name, schedule, shape, args))
            except ScheduleError as error:
                broken[name] = f"{name}: {error}"
                rows.append({**_empty_row(name), "note": str(error)})
    rows.sort(key=lambda row: (row["makespan"] is None, row["makespan"], row["schedule"]))
    if args.json:
        _print_json(rows)
    else:
        print(_table([{**row, "note": textwrap.fill(row["note"], 80)} for row in rows]))
        print(
            f"\n{_describe(shape)} on {args.num_sms} SMs; times in units of compute={args.compute:g}, "
            f"reduce={args.reduce:g}, latency={args.latency:g}; {args.dq_stages} dQ stage(s)\n"
            f"memory traffic: how often Q, dO and dQ come from memory; the L2 keeps the {args.l2:g} MB used last"
        )
    return _report_broken(broken.values())


def _empty_row(name: str) -> dict[str, Any]:
    numbers = dict.fromkeys(("critical_path", "makespan", "stall_share", "memory_traffic"))
    return {"schedule": name, **numbers, "note": ""}


def _model_row(name: str, given: Schedule, shape: ProblemShape, args: argparse.Namespace) -> dict[str, Any]:
    """What the DAG model says of one schedule, or why it says nothing.

    Raises:
        ScheduleError: the schedule breaks a rule.
    """
    from cute_dash import registry

    row = _empty_row(name)
    try:
        schedule = registry.resolve(given, shape)
    except UnsupportedShapeError as error:
        return {**row, "note": error.reason}
    if violation := find_violation(schedule, shape):
        raise ScheduleError(violation)
    if schedule.min_resident_ctas(shape) > args.num_sms:
        return {**row, "note": f"needs {schedule.min_resident_ctas(shape)} CTAs at once"}
    timeline = _simulate(schedule, shape, args)
    return {
        **row,
        "critical_path": _critical_path(schedule, shape, args),
        "makespan": timeline.makespan,
        "stall_share": timeline.stall_share,
        "memory_traffic": _count_memory_traffic(timeline, shape, args),
        "note": "" if schedule.name == name else f"here: {schedule.name}",
    }


def _count_memory_traffic(timeline: Any, shape: ProblemShape, args: argparse.Namespace) -> float:
    from cute_dash import analysis
    from cute_dash.config import get_config

    columns = get_config(args.head_dim, shape.causal, shape.window is not None).head_dim_padded
    return analysis.count_memory_traffic(timeline, max(int(args.l2 * 2**20) // (4 * shape.tile_m * columns), 2))


def _critical_path(schedule: Schedule, shape: ProblemShape, args: argparse.Namespace) -> float | None:
    """None for a schedule that needs more CTAs than the paper's DAG has SMs."""
    from cute_dash import analysis

    if schedule.min_resident_ctas(shape) > shape.num_n_blocks:
        return None
    return analysis.critical_path(schedule, shape, args.compute, args.reduce)


def _simulate(schedule: Schedule, shape: ProblemShape, args: argparse.Namespace) -> Any:
    from cute_dash import analysis

    try:
        return analysis.simulate(
            schedule, shape, args.num_sms, args.compute, args.reduce, latency=args.latency, num_dq_stages=args.dq_stages
        )
    except ScheduleError:
        raise  # the schedule is at fault, not the options
    except ValueError as error:
        raise UsageError(str(error)) from error


def _plot(args: argparse.Namespace) -> int:
    from cute_dash.plot import plot

    shape = _shape(args)
    schedule = _resolve(args.schedule, shape)
    with _saying_if_slow(f"checking and simulating {schedule.name} for {_describe(shape)}"):
        if violation := find_violation(schedule, shape, args.num_sms):
            raise ScheduleError(f"{schedule.name} breaks a rule, so it is not drawn: {violation}")
        timeline = _simulate(schedule, shape, args)
    try:
        plot(timeline, args.output, title=f"{schedule.name}, {_describe(shape)}")
    except ModuleNotFoundError as error:
        from cute_dash.doctor import install_command

        raise UsageError(f"{error}; install what is missing: {install_command('plot')}") from error
    except (OSError, ValueError) as error:  # a folder that is not there, a format that matplotlib does not write
        raise UsageError(f"cannot write {args.output}: {error}") from error
    print(f"{args.output}: makespan {timeline.makespan:g}, stall share {timeline.stall_share:.1%}")
    return OK


def _bench(argv: list[str]) -> int:
    checkout = Path(cute_dash.__file__).parent.parent
    if not (checkout / "bench" / "__main__.py").exists():
        raise UsageError(
            "the bench is not part of the installed package; clone the repository and run `cute-dash bench` from an "
            f"editable install of it (looked in {checkout / 'bench'})"
        )
    sys.path.insert(0, str(checkout))  # `bench` is a folder of the checkout, not an installed package
    return int(import_module("bench.__main__").main(argv, prog="cute-dash bench"))


def _compile(args: argparse.Namespace) -> int:
    schedules, broken = _schedules_to_compile(_get_schedules(args))
    folder = _writable_cache_dir()
    jobs: list[CompileKey] = []
    for head_dim, mask in itertools.product(args.head_dim, args.mask):
        try:
            config = get_config(head_dim, mask == "causal", mask == "local", args.head_dim_v)
        except ValueError as error:
            raise UsageError(str(error)) from error
        for name, schedule in schedules.items():
            try:
                found = _list_keys(schedule, config, args.dtype, args.grouped, args.varlen)
            except ScheduleError as error:
                broken.setdefault(name, f"{name}: not compiled: {error}")
                continue
            if not found and _get_schedules(args):
                reason = "it cannot order this mask" + (", or may need several CTAs at once" if args.varlen else "")
                print(f"{name}: nothing to compile for head dim {config.head_dims}, {mask}: {reason}")
            jobs += [key for key in found if key not in jobs]
    stored = []
    for number, key in enumerate(jobs, start=1):
        start = time.perf_counter()
        try:
            note = _compile_one(key, folder)
        except ScheduleError as error:
            broken[f"{number}"] = f"{_describe_key(key)}: not compiled: {error}"
            continue
        stored += [key] * (not note)
        duration = time.perf_counter() - start
        print(f"[{number}/{len(jobs)}] {_describe_key(key)}: ready after {duration:.1f} s{note}", flush=True)
    print(f"{len(stored)} kernel(s) in {folder}" + (f", of {len(jobs)}" if len(stored) < len(jobs) else ""))
    kept_out = [key for key in jobs if key.is_cacheable() and key not in stored]
    return max(_report_broken(broken.values()), FAILED if kept_out or not jobs else OK)


def _schedules_to_compile(specs: Sequence[str]) -> tuple[dict[str, Schedule], dict[str, str]]:
    """The schedules that were named, or all; and why others cannot be used."""
    from cute_dash import registry

    return ({spec: _load(spec) for spec in specs}, {}) if specs else registry.load_all()


def _writable_cache_dir() -> Path:
    """The folder of the on-disk cache, made if need be: better refused now than after minutes of compiling."""
    from cute_dash.compile import cache_dir

    folder = cache_dir()
    if folder is None:
        raise UsageError("the on-disk cache is turned off by CUTE_DASH_CACHE=0: there is nothing to compile into")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ScheduleError(f"nothing was compiled, because nothing can be stored in {folder}: {error}") from error
    return folder


# square problems by the KV tiles of a head: from short ones to those for which selectors change their mind
_NUM_TILES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class _Kernel(NamedTuple):
    schedule: Schedule
    cooperative: bool


def _list_keys(
    schedule: Schedule, config: BwdConfig, dtypes: Sequence[str], grouped: bool, varlen: bool
) -> "list[CompileKey]":
    """What is to be compiled for a schedule under a configuration, once it has been proved to keep the rules.

    Raises:
        ScheduleError: it breaks one.
    """
    from cute_dash.compile import CompileKey, find_small_violation

    try:
        kernels = _list_kernels([schedule], config, varlen)
    except METHOD_ERRORS as error:
        raise ScheduleError(describe_failure(error, schedule)) from error
    for concrete in dict.fromkeys(kernel.schedule for kernel in kernels):
        if violation := find_small_violation(concrete, config):
            raise ScheduleError(violation)
    return [
        CompileKey(config, kernel.schedule, dtype, kernel.cooperative, grouped=grouped, varlen=varlen)
        for dtype in dtypes
        for kernel in kernels
    ]


def _list_kernels(schedules: Sequence[Schedule], config: BwdConfig, varlen: bool = False) -> list[_Kernel]:
    """The kernels that these schedules run as under a configuration, each once; a selector runs as what it selects."""
    from cute_dash import registry
    from cute_dash.compile import make_square_shape

    kernels: dict[_Kernel, None] = {}  # an ordered set
    for schedule, num_tiles in itertools.product(schedules, _NUM_TILES):
        shape = make_square_shape(1, 16, num_tiles, config)
        if varlen:
            schedule = registry.select(schedule, shape, varlen)
        if schedule.can_implement(shape) and (needs_one_cta(schedule) or not varlen):
            concrete = registry.resolve(schedule, shape)
            kernels[_Kernel(concrete, concrete.min_resident_ctas(shape) > 1)] = None
    return list(kernels)


def _compile_one(key: "CompileKey", folder: Path) -> str:
    """Compiles one kernel; says why it was not stored, or nothing if it was.

    Raises:
        ScheduleError: the kernel cannot be compiled with this schedule.
    """
    from cute_dash.compile import get_backward

    try:
        get_backward(key)
    except ImportError as error:
        raise UsageError(f"kernels cannot be compiled here: {error} (see `cute-dash doctor`)") from error
    except ScheduleError:
        raise
    except METHOD_ERRORS as error:
        raise ScheduleError(describe_failure(error, key.schedule)) from error
    if not key.is_cacheable():
        return (
            "; not stored: only schedules of the package `schedules` that import nothing from elsewhere, unchanged "
            "since the command began, are"
        )
    return "" if (folder / f"{key.digest()}.o").exists() else f"; NOT stored in {folder}"


def _describe_key(key: "CompileKey") -> str:
    flags = [name for name, flag in (("varlen", key.varlen), ("grouped heads", key.grouped)) if flag]
    launch = ", ".join([*flags, "cooperative" if key.cooperative else "plain"])
    return f"head dim {key.config.head_dims}, {key.config.mask}, {key.dtype}, {key.schedule!r}, {launch} launch"


def _verify_bits(args: argparse.Namespace) -> int:
    try:
        from cute_dash import registry, verify, verify_gpu
        from cute_dash.demo import one_thread
        from cute_dash.testing import why_no_hopper
    except ImportError as error:
        raise UsageError(f"nothing can be verified here: {error} (see `cute-dash doctor`)") from error

    if not args.emulator and (reason := why_no_hopper()) is not None:
        raise UsageError(
            f"verify-bits needs a Hopper GPU: {reason}; with --emulator it verifies the CPU emulator of the kernel "
            "instead"
        )
    selection = _select_to_verify(args, verify.EMULATOR_EXTENTS if args.emulator else verify.GPU_EXTENTS)
    try:
        if args.emulator:
            with one_thread():
                report = verify.run_emulator(selection, args.minutes, _progress)
        else:
            report = verify_gpu.run(selection, args.minutes, _progress)
    except SCHEDULE_FAULTS:
        raise  # the schedule is at fault, not the options
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    except verify_gpu.ProcessError as error:
        return _report_broken([str(error)])
    if sys.stderr.isatty():
        _progress("")
    if args.json:
        _print_json(report.as_dict())
    else:
        print(report.render())
    broken = registry.load_all()[1].values() if "all" in selection.schedules else ()
    return max(_report_broken(broken), OK if report.passed else FAILED)


def _select_to_verify(args: argparse.Namespace, default: "verify.Extents") -> "verify.Selection":
    """What the options of verify-bits ask for, with the extents that `default` has where nothing is asked for."""
    from cute_dash.verify import Extents, Selection

    num_heads, seqlen_q = args.heads or default.num_heads, args.seqlen_q or default.seqlen_q
    seqlen_k = args.seqlen_k or seqlen_q
    masks = args.mask or (["local"] if args.window else ["full", "causal"])
    if args.window and "local" not in masks:
        raise UsageError(f"--window {args.window[0]},{args.window[1]} is for --mask local, and --mask has no local")
    window_size = args.window or (seqlen_k // 4, 0)
    extents = Extents(args.batch or default.batch, num_heads, args.kv_heads or num_heads, seqlen_q, seqlen_k)
    schedules = _get_schedules(args) or ["auto", "auto_invariant"]
    return Selection(
        tuple(schedules),
        tuple(args.head_dim),
        tuple(masks),
        window_size,
        tuple(args.dtype),
        extents,
        args.head_dim_v,
        args.varlen,
        args.dlse,
    )


def _doctor(args: argparse.Namespace) -> int:
    from cute_dash.doctor import examine

    findings = examine()
    if args.json:
        _print_json([asdict(finding) for finding in findings])
    else:
        print(_table([{"": finding.subject, "found": finding.found} for finding in findings]))
        print(_describe_limits(findings))
    return FAILED if any(finding.broken for finding in findings) else OK


def _describe_limits(findings: "Sequence[Finding]") -> str:
    limits = [f"- {finding.subject}: {finding.limit}" for finding in findings if finding.limit]
    if not limits:
        return "\nEverything works here."
    return "\n".join(["", "What will not work here, and why:", *limits])


# Shared by the commands


def _load(spec: str | Schedule) -> Schedule:
    from cute_dash import registry

    try:
        return registry.load(spec)
    except SCHEDULE_FAULTS:
        raise  # the schedule is at fault, not who names it
    except ValueError as error:
        raise UsageError(str(error)) from error


def _resolve(spec: str | Schedule, shape: ProblemShape) -> Schedule:
    """The concrete schedule that `spec` means for this shape."""
    from cute_dash import registry

    try:
        return registry.resolve(_load(spec), shape)
    except UnsupportedShapeError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _saying_if_slow(text: str) -> Iterator[None]:
    """Prints `text` and the time so far on stderr if the block takes longer than SLOW_S."""
    done = threading.Event()

    def speak() -> None:
        elapsed = SLOW_S
        while not done.wait(elapsed if elapsed == SLOW_S else elapsed / 2):
            print(f"cute-dash: {text}: {elapsed:.0f} s so far", file=sys.stderr, flush=True)
            elapsed *= 2

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _describe(shape: ProblemShape) -> str:
    mask = f"{shape.mask} mask" if shape.window is None else f"window {shape.window.left},{shape.window.right}"
    return (
        f"{mask}, {shape.seqlen_q} x {shape.seqlen_k} tokens ({shape.num_m_blocks} x {shape.num_n_blocks} tiles), "
        f"batch {shape.batch}, {shape.num_query_heads} heads"
        + (f", {shape.num_heads} KV heads" if shape.group_size > 1 else "")
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain columns; None becomes "-", bools "yes" or "no", shares percents."""
    cells = [{key.replace("_", " "): _cell(key, value) for key, value in row.items()} for row in rows]
    return str(tabulate(cells, headers="keys"))


def _cell(key: str, value: Any) -> Any:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "memory_traffic":
        return f"{value:.2f}"
    return f"{value:.1%}" if key.endswith("share") else value


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _progress(text: str) -> None:
    """One line on stderr: overwritten by the next on a terminal, else kept."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
