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
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

import cute_dash
from cute_dash.check import ScheduleError, find_violation
from cute_dash.config import SUPPORTED_HEAD_DIMS, BwdConfig, get_config
from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule

if TYPE_CHECKING:
    from cute_dash.doctor import Finding

OK, FAILED, USAGE = 0, 1, 2
MASKS = ("full", "causal")
DTYPES = ("bfloat16", "float16")


class UsageError(Exception):
    """What the user asked for cannot be done; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # "module:ATTR" means modules of the current folder too, which console scripts do not search; last in the path,
    # so that a file there hides nothing that is installed
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    if argv[:1] == ["bench"]:  # its options, --help included, are the bench's own
        return _guarded(lambda: _bench(argv[1:]))
    args = _parser().parse_args(argv)
    return _guarded(lambda: int(args.run(args)))


def _guarded(command: Callable[[], int]) -> int:
    """Runs a command; what the user can put right becomes a message instead of a traceback."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"cute-dash: {error}", file=sys.stderr)
        return USAGE
    except ScheduleError as error:
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
        help="CTAs that run at once (default: the number that the schedule says it needs)",
    )
    _add_json(command)

    command = _add_command(commands, "analyze", _analyze, "compare the schedules in the DAG model")
    _add_shape(command)
    _add_model(command)
    _add_json(command)

    command = _add_command(commands, "plot", _plot, "draw a schedule in the DAG model as a Gantt chart")
    _add_schedule(command)
    command.add_argument("-o", "--output", required=True, metavar="FILE", help="the picture, .png or .svg")
    _add_shape(command)
    _add_model(command)

    commands.add_parser("bench", add_help=False, help="time the kernel and its peers (in a checkout; bench --help)")

    command = _add_command(commands, "compile", _compile, "compile kernels into the on-disk cache")
    command.add_argument("--schedule", nargs="+", metavar="NAME", help="default: all that can order the mask")
    command.add_argument("--mask", nargs="+", choices=MASKS, default=list(MASKS), help="default: both")
    command.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"], help="default: bfloat16")
    command.add_argument(
        "--head-dim", nargs="+", type=int, choices=SUPPORTED_HEAD_DIMS, default=list(SUPPORTED_HEAD_DIMS)
    )

    command = _add_command(commands, "doctor", _doctor, "say what this machine has, and what will not work and why")
    _add_json(command)
    return parser


def _add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> Any:
    command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    command.set_defaults(run=run)
    return command


def _add_schedule(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", metavar="NAME|module:ATTR", help="a schedule's name, or where to import one from")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON for a program to read")


def _add_shape(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("shape")
    group.add_argument("--mask", choices=MASKS, default="causal", help="default: %(default)s, aligned bottom-right")
    group.add_argument("--seqlen-q", type=_tokens, default=2048, metavar="TOKENS", help="e.g. 1000 or 4k (default: 2k)")
    group.add_argument("--seqlen-k", type=_tokens, metavar="TOKENS", help="default: as seqlen-q")
    group.add_argument("--batch", type=_positive, default=1, metavar="N", help="default: %(default)s")
    group.add_argument("--heads", type=_positive, default=4, metavar="N", help="query heads (default: %(default)s)")
    group.add_argument("--head-dim", type=int, choices=SUPPORTED_HEAD_DIMS, default=128, help="default: %(default)s")


def _add_model(command: argparse.ArgumentParser) -> None:
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _tokens(text: str) -> int:
    """ "4k" or "4096" -> 4096."""
    return _positive(text[:-1]) * 1024 if text.lower().endswith("k") else _positive(text)


def _time(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} must be a finite time of at least 0")
    return value


def _shape(args: argparse.Namespace, mask: str | None = None) -> ProblemShape:
    """The problem that the shape options describe, in the kernel's tiles."""
    causal = (mask or args.mask) == "causal"
    config = get_config(args.head_dim, causal)
    seqlen_k = args.seqlen_k or args.seqlen_q
    return ProblemShape(args.batch, args.heads, args.seqlen_q, seqlen_k, config.tile_m, config.tile_n, causal)


# Commands


def _demo(args: argparse.Namespace) -> int:
    try:
        from cute_dash import demo
    except ImportError as error:
        raise UsageError(f"the demo cannot run here: {error} (see `cute-dash doctor`)") from error

    rows = demo.run(_progress)
    if sys.stderr.isatty():
        _progress("")
    if args.json:
        _print_json([asdict(row) for row in rows])
    else:
        print(demo.report(rows))
    return OK if all(row.passed for row in rows) else FAILED


def _schedules(args: argparse.Namespace) -> int:
    from cute_dash import registry

    shape = _shape(args)
    rows = [_schedule_row(registry.load(name), shape) for name in registry.available()]
    if args.json:
        _print_json(rows)
        return OK
    rows = [{**row, "description": textwrap.fill(row["description"], 60)} for row in rows]
    print(_table(rows))
    print(f"\nmin resident ctas: that must run at once for {_describe(shape)}; - = cannot order this shape")
    return OK


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
    schedule = _resolve(args.schedule, shape)
    violation = find_violation(schedule, shape, args.resident)
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
        print(f"{schedule.name} version {schedule.version} keeps every rule for {_describe(shape)}")
    else:
        print(f"{schedule.name} version {schedule.version} breaks a rule for {_describe(shape)}: {violation}")
    return OK if violation is None else FAILED


def _analyze(args: argparse.Namespace) -> int:
    from cute_dash import registry

    shape = _shape(args)
    rows = [_model_row(name, shape, args) for name in registry.available()]
    if args.json:
        _print_json(rows)
        return OK
    print(_table(rows))
    print(
        f"\n{_describe(shape)} on {args.num_sms} SMs; times in units of compute={args.compute:g}, "
        f"reduce={args.reduce:g}, latency={args.latency:g}; {args.dq_stages} dQ stage(s)"
    )
    return OK


def _model_row(name: str, shape: ProblemShape, args: argparse.Namespace) -> dict[str, Any]:
    """What the DAG model says of one schedule, or why it says nothing."""
    from cute_dash import analysis, registry

    row: dict[str, Any] = {"schedule": name, "critical_path": None, "makespan": None, "stall_share": None, "note": ""}
    try:
        schedule = registry.resolve(name, shape)
    except ValueError:
        return {**row, "note": "cannot order this shape"}
    if schedule.min_resident_ctas(shape) > args.num_sms:
        return {**row, "note": f"needs {schedule.min_resident_ctas(shape)} CTAs at once"}
    try:
        timeline = _simulate(schedule, shape, args)
        path_length = analysis.critical_path(schedule, shape, args.compute, args.reduce)
    except ScheduleError as error:
        return {**row, "note": str(error)}
    return {
        **row,
        "critical_path": path_length,
        "makespan": timeline.makespan,
        "stall_share": timeline.stall_share,
        "note": "" if schedule.name == name else f"here: {schedule.name}",
    }


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
    timeline = _simulate(schedule, shape, args)
    try:
        plot(timeline, args.output, title=f"{schedule.name}, {_describe(shape)}")
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; install it: pip install 'cute-dash[plot]'") from error
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
    return int(import_module("bench.__main__").main(argv))


def _compile(args: argparse.Namespace) -> int:
    from cute_dash import registry
    from cute_dash.compile import cache_dir

    if cache_dir() is None:
        raise UsageError("the on-disk cache is turned off by CUTE_DASH_CACHE=0: there is nothing to compile into")
    schedules = [_load(name) for name in args.schedule or registry.available()]
    jobs = []
    for head_dim, mask in itertools.product(args.head_dim, args.mask):
        config = get_config(head_dim, mask == "causal")
        jobs += [(config, dtype, kernel) for dtype in args.dtype for kernel in _list_kernels(schedules, config)]
    for number, (config, dtype, (schedule, cooperative)) in enumerate(jobs, start=1):
        mask = "causal" if config.causal else "full"
        start = time.perf_counter()
        _compile_one(config, schedule, dtype, cooperative)
        duration = time.perf_counter() - start
        label = f"[{number}/{len(jobs)}] head dim {config.head_dim}, {mask}, {dtype}, {schedule!r}"
        print(f"{label}: ready after {duration:.1f} s", flush=True)
    print(f"{len(jobs)} kernel(s) in {cache_dir()}")
    return OK if jobs else FAILED


def _list_kernels(schedules: Sequence[Schedule], config: BwdConfig) -> list[tuple[Schedule, bool]]:
    """The (schedule, launched cooperatively) that these schedules run as under a configuration, each once.

    A selector runs as what it selects. Found by asking for one short to very long sequences.
    """
    from cute_dash import registry

    kernels: dict[tuple[Schedule, bool], None] = {}  # an ordered set
    for schedule, num_tiles in itertools.product(schedules, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)):
        seqlen = num_tiles * config.tile_n
        shape = ProblemShape(1, 16, seqlen, seqlen, config.tile_m, config.tile_n, config.causal)
        if schedule.can_implement(shape):
            concrete = registry.resolve(schedule, shape)
            kernels[concrete, concrete.min_resident_ctas(shape) > 1] = None
    return list(kernels)


def _compile_one(config: BwdConfig, schedule: Schedule, dtype: str, cooperative: bool) -> None:
    from cute_dash.compile import compile_backward

    try:
        compile_backward(config, schedule, dtype, cooperative=cooperative)
    except ImportError as error:
        raise UsageError(f"kernels cannot be compiled here: {error} (see `cute-dash doctor`)") from error


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


def _load(spec: str) -> Schedule:
    from cute_dash import registry

    try:
        return registry.load(spec)
    except (ValueError, ImportError, AttributeError) as error:
        raise UsageError(str(error)) from error


def _resolve(spec: str, shape: ProblemShape) -> Schedule:
    """The concrete schedule that `spec` means for this shape."""
    from cute_dash import registry

    try:
        return registry.resolve(_load(spec), shape)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _describe(shape: ProblemShape) -> str:
    mask = "causal" if shape.causal else "full"
    return (
        f"{mask} mask, {shape.seqlen_q} x {shape.seqlen_k} tokens ({shape.num_m_blocks} x {shape.num_n_blocks} tiles), "
        f"batch {shape.batch}, {shape.num_heads} heads"
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
