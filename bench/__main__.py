"""`python -m bench`: times the backward call, or prints tables from recorded results.

Exit status: 0 fine; 1 a schedule of ours cannot be loaded or failed its check, nothing was timed, or --compare found a
regression; 2 wrong usage or no Hopper GPU.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from bench import cells, plot, report
from bench.cells import Cell, list_cells, parse_seqlen
from bench.implementations import (
    OURS,
    SHIPPED_CONFIG,
    Candidate,
    ConfigChange,
    find_candidates,
    parse_peers,
    parse_schedules,
)
from bench.results import FAILED, REGIMES, Results, check_same_environment, merge
from bench.timing import BurstPlan
from cute_dash import registry
from cute_dash.config import ALLOWED_HEAD_DIMS, SUPPORTED_HEAD_DIMS, UNEQUAL_HEAD_DIMS
from cute_dash.registry import SCHEDULE_FAULTS

if TYPE_CHECKING:
    from bench.runner import Run


class NothingRecorded(Exception):
    """The files have no records of the regime that was asked for."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m bench") -> int:
    """Runs one command line; returns the exit status. `prog`: how the help names the command."""
    started_s = monotonic()
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser(prog).parse_args(argv)
    try:
        for name, report_from in _REPORTS.items():
            if getattr(args, name):
                return report_from(args)
        if args.dry_run:
            return _dry_run(args)
        if args.host:
            return _host()
        run = _set_up(args, argv, started_s)
    except (NothingRecorded, *SCHEDULE_FAULTS) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (ValueError, ImportError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return _time(run, args)


def _set_up(args: argparse.Namespace, argv: Sequence[str], started_s: float) -> "Run":
    """The run that the arguments describe.

    Raises:
        ValueError: an argument is wrong, there is no Hopper GPU, or --out must not be written.
    """
    schedules, peers = _selected_schedules(args), parse_peers(args.peers)
    _selected_cells(args)
    if args.plot:
        plot.check_path(args.plot)
    if args.out and args.out.exists() and not args.resume:
        raise ValueError(f"--out {args.out} exists; --resume continues it")

    from cute_dash.testing import why_no_hopper

    if reason := why_no_hopper():
        raise ValueError(f"timing needs a Hopper GPU: {reason}")

    from bench.device import CudaDevice
    from bench.runner import Plan, Run

    burst = BurstPlan(rounds=args.rounds, round_ms=args.round_ms)
    plan = Plan(args.bits_runs, burst, args.sustained, args.max_seconds, started_s)
    device = CudaDevice()
    environment = device.environment()
    environment["command"] = shlex.join(["python", "-m", "bench", *argv])
    if args.commit:
        environment["commit"] = args.commit
    results = _start_results(args, environment, plan.describe())
    configs = [SHIPPED_CONFIG, *args.config]
    find = partial(find_candidates, schedules=schedules, peers=peers, num_sms=environment["sm_count"], configs=configs)
    return Run(device, find, plan, results, args.out, partial(_log, started_s))


def _time(run: "Run", args: argparse.Namespace) -> int:
    """Times the selected cells; the summary is the last thing printed, also after Ctrl-C."""
    environment, selected = run.results.environment, _selected_cells(args)
    run.log(f"{environment['gpu']}, torch {environment['torch']}, DSL {environment['dsl']}, {len(selected)} cells")
    try:
        run.all_cells(selected)
    except KeyboardInterrupt:
        run.log("interrupted")
    for regime in run.plan.regimes:
        print(f"\n{report.summary(run.results, _style(args, regime))}", flush=True)
    if args.plot and run.results.records:
        plot.draw(run.results, args.regime if args.regime in run.plan.regimes else "burst", args.plot)
        print(f"picture: {args.plot}")
    return _run_status(run.results)


def _run_status(results: Results) -> int:
    """1 if one of ours failed or nothing was timed; a peer's failure is reported, and not ours to answer for."""
    failed = any(u.implementation == OURS and u.verdict == FAILED for u in results.untimed)
    return int(failed or not results.records)


def _start_results(args: argparse.Namespace, environment: dict[str, Any], method: dict[str, Any]) -> Results:
    """Empty results, or those of the file that --resume continues."""
    if not (args.resume and args.out and args.out.exists()):
        return Results(environment, method)
    results = Results.load(args.out)
    check_same_environment(results.environment, environment)
    if results.method != method:
        raise ValueError(f"{args.out} was measured as {results.method}, this command says {method}")
    return results


def _dry_run(args: argparse.Namespace) -> int:
    """Says what would be timed and what would not, schedules that break a rule among it; needs no GPU."""
    schedules, peers = _selected_schedules(args), parse_peers(args.peers)
    failed = False
    for cell in _selected_cells(args):
        candidates, untimed = find_candidates(cell, schedules, peers, configs=[SHIPPED_CONFIG, *args.config])
        reasons = {candidate.key.label: _find_reason(candidate) for candidate in candidates}
        print(f"{cell.label}: {', '.join(label for label, reason in reasons.items() if reason is None) or 'nothing'}")
        left_out = {entry.key.label: entry.reason for entry in untimed} | reasons
        for label, reason in left_out.items():
            if reason is not None:
                print(f"  without {label}: {reason}")
        failed |= any(reasons.values()) or any(entry.verdict == FAILED for entry in untimed)
    for peer in peers:
        if peer.missing():
            print(f"not installed: {peer.name} ({peer.missing()})")
    return int(failed)


def _find_reason(candidate: Candidate) -> str | None:
    """Why a candidate will not be timed, as far as it is known without a GPU."""
    try:
        candidate.prove()
    except ValueError as error:
        return str(error)
    return None


def _host() -> int:
    """Prints what a call costs the host."""
    from cute_dash.testing import why_no_hopper

    if reason := why_no_hopper():
        raise ValueError(f"timing needs a Hopper GPU: {reason}")

    import torch

    from bench.host import format_times, make_calls, time_host

    print(format_times(time_host(make_calls(), torch.cuda.synchronize)))
    return 0


def _load(paths: Sequence[Path], regime: str) -> Results:
    """The merged results of the files.

    Raises:
        NothingRecorded: none of them has a record of the regime.
    """
    results = merge(Results.load(path) for path in paths)
    regimes = sorted({record.regime for record in results.records})
    if regime not in regimes:
        names = ", ".join(map(str, paths))
        raise NothingRecorded(f"{names}: no {regime} records; there are: {', '.join(regimes) or 'none'}")
    return results


def _table(args: argparse.Namespace) -> int:
    results = _load(args.table, args.regime)
    print(report.summary(results, _style(args, args.regime)))
    if args.plot:
        plot.draw(results, args.regime, plot.check_path(args.plot))
    return 0


def _prints(option: str, render: Callable[[Results, report.Style], str]) -> Callable[[argparse.Namespace], int]:
    """A report that is one table of the files that its option names."""

    def run(args: argparse.Namespace) -> int:
        print(render(_load(getattr(args, option), args.regime), _style(args, args.regime)))
        return 0

    return run


def _compare(args: argparse.Namespace) -> int:
    old, new = (_load([path], args.regime) for path in args.compare)
    text, regressions = report.compare(old, new, args.threshold, _style(args, args.regime))
    print(text)
    return int(regressions > 0)


def _model(args: argparse.Namespace) -> int:
    from bench import model_vs_measured as mvm

    results = _load(args.model, args.regime)
    model = mvm.Model(args.model_reduce, args.model_latency, args.model_dq_stages)
    selected = [c for c in results.cells() if _is_selected(c, args)]
    print(mvm.report(results, selected, model, args.model_reference, _style(args, args.regime)))
    return 0


_REPORTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "table": _table,
    "headline": _prints("headline", report.headline),
    "price": _prints("price", report.price),
    "compare": _compare,
    "paper": _prints("paper", report.paper),
    "model": _model,
}


def _style(args: argparse.Namespace, regime: str) -> report.Style:
    return report.Style(args.markdown, args.value, regime)


def _selected_schedules(args: argparse.Namespace) -> list[str]:
    """Specs of ours; with 'all', the files that cannot be loaded are named on stderr."""
    if args.schedule == "all":
        for reason in registry.load_all()[1].values():
            print(f"bench: left out: {reason}", file=sys.stderr)
    return parse_schedules(args.schedule)


def _selected_cells(args: argparse.Namespace) -> list[Cell]:
    options = (args.batch, args.heads, args.dtype, args.kv_heads, args.head_dim_v, args.varlen)
    selected = list_cells(args.head_dim, args.mask, args.seqlen, *options)
    for cell in selected:
        cell.shipped_config()  # refuses a head dim of V that does not go with that of Q and K
    return selected


def _is_selected(cell: Cell, args: argparse.Namespace) -> bool:
    is_head_dim = cell.head_dim in args.head_dim and args.head_dim_v in (None, cell.value_dim)
    # the model knows sequences of one length
    return is_head_dim and cell.mask in args.mask and cell.seqlen in args.seqlen and not cell.varlen


def _log(started_s: float, line: str) -> None:
    print(f"[{monotonic() - started_s:4.0f} s] {line}", flush=True)


def _parser(prog: str = "python -m bench") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    _add_what(parser.add_argument_group("what is timed"))
    _add_how(parser.add_argument_group("how"))
    _add_reports(parser.add_argument_group("tables from recorded results (no GPU)"))
    return parser


def _add_what(group: Any) -> None:
    default = ",".join(map(cells.format_seqlen, cells.SEQLENS))
    group.add_argument(
        "--head-dim",
        type=_list_of(_head_dim),
        default=list(cells.HEAD_DIMS),
        help=f"{ALLOWED_HEAD_DIMS}; default: 64,128",
    )
    qk, v = UNEQUAL_HEAD_DIMS
    group.add_argument("--head-dim-v", type=int, help=f"of V: {v} with --head-dim {qk}; default: as head-dim")
    group.add_argument(
        "--mask",
        type=_list_of(_mask),
        default=list(cells.MASKS),
        help="causal, full, local:LEFT:RIGHT (a window in tokens, inf for no limit); default: causal,full",
    )
    group.add_argument(
        "--seqlen", type=_list_of(parse_seqlen), default=list(cells.SEQLENS), help=f"tokens; default: {default}"
    )
    group.add_argument("--batch", type=int, help="default: 16384 / seqlen")
    group.add_argument("--heads", type=int, help="default: 2048 / head dim")
    group.add_argument("--kv-heads", type=int, help="a divisor of heads; default: as many as heads")
    group.add_argument(
        "--varlen",
        action="store_true",
        help="packed sequences of different lengths with cu_seqlens: as many tokens, seqlen is their mean",
    )
    group.add_argument("--dtype", choices=cells.DTYPES, default="bf16", help="default: %(default)s")
    group.add_argument("--schedule", default="all", help="comma-separated names or module:ATTR; all (default), none")
    group.add_argument(
        "--peers", default="all", help="comma-separated: fa4, cudnn; all (default: those installed), none"
    )
    group.add_argument(
        "--config",
        type=_config_change,
        action="append",
        default=[],
        metavar="NAME=VALUE[,...]",
        help="also time our schedules with these fields of BwdConfig changed; may be repeated",
    )
    group.add_argument("--host", action="store_true", help="instead: what a call costs the host, in us")
    group.add_argument("--dry-run", action="store_true", help="print what would be timed, and stop")


def _add_how(group: Any) -> None:
    group.add_argument("--bits-runs", type=_at_least(2), default=10, help="runs with equal bits; default: %(default)s")
    group.add_argument("--rounds", type=_at_least(1), default=7, help="burst rounds; default: %(default)s")
    group.add_argument(
        "--round-ms", type=float, default=8.0, help="a candidate's share of a round; default: %(default)s"
    )
    group.add_argument(
        "--sustained",
        type=_sustained_seconds,
        nargs="?",
        const=3.0,
        metavar="SECONDS",
        help="also time each candidate in a loop of this length, power-capped; 3 if no number is given",
    )
    group.add_argument("--max-seconds", type=float, help="start no cell later than this")
    group.add_argument("--out", type=Path, metavar="FILE.json", help="results, rewritten after every cell")
    group.add_argument("--resume", action="store_true", help="continue --out: time the cells that it has not complete")
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw TFLOPS of every candidate, .png or .svg; also with --table"
    )
    group.add_argument("--commit", help="the commit to record, where the sources are not a git checkout")


def _add_reports(group: Any) -> None:
    group.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="the summary; later files win")
    group.add_argument("--headline", type=Path, nargs="+", metavar="FILE", help="auto and the best beside the peers")
    group.add_argument("--price", type=Path, nargs="+", metavar="FILE", help="what determinism costs each kernel")
    group.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="speed ratios, regressions marked")
    group.add_argument("--threshold", type=float, default=0.03, help="of a regression; default: %(default)s")
    group.add_argument("--paper", type=Path, nargs="+", metavar="FILE", help="the DASH paper's speed-ups beside ours")
    group.add_argument("--model", type=Path, nargs="+", metavar="FILE", help="the DAG model beside the measurement")
    group.add_argument("--model-reduce", type=float, default=0.25, help="dQ addition, in steps; default: %(default)s")
    group.add_argument("--model-latency", type=float, default=0.0, help="of a release, in steps; default: %(default)s")
    group.add_argument("--model-dq-stages", type=_at_least(1), default=1, help="default: %(default)s")
    group.add_argument("--model-reference", default="baseline", help="schedule that times are relative to")
    group.add_argument("--regime", choices=REGIMES, default="burst", help="default: %(default)s")
    group.add_argument("--value", choices=("tflops", "ms"), default="tflops", help="default: %(default)s")
    group.add_argument("--markdown", action="store_true", help="tables for a document")


def _config_change(text: str) -> ConfigChange:
    try:
        return ConfigChange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse_list(text: str) -> list[Any]:
        try:
            return [parse(part.strip()) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_list


def _head_dim(text: str) -> int:
    if text not in map(str, SUPPORTED_HEAD_DIMS):
        raise ValueError(f"head_dim={text!r} is not supported; allowed: {ALLOWED_HEAD_DIMS}")
    return int(text)


def _mask(text: str) -> str:
    cells.parse_window(text)
    return text


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} must be an integer of at least {minimum}")
        return int(text)

    return parse


def _sustained_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not seconds > 1.0:
        raise argparse.ArgumentTypeError(f"{text} must be above 1: the first second is left out")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
