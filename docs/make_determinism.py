"""Rewrites what is generated of determinism.md: `python -m docs.make_determinism` from the root of a checkout.

Fills in what recorded runs found, from the JSON that `cute-dash verify-bits`, `python -m tests.fuzz` and
`python -m tests.sanitize` write into the folder `docs/results` with `--json`; no GPU.
"""

import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from docs import regions

DOCUMENT = regions.FOLDER / "determinism.md"
RESULTS = regions.FOLDER / "results"
NONE = """No run is recorded in the repository yet. On a Hopper GPU,

    mkdir -p docs/results
    cute-dash verify-bits all --minutes 10 --json > docs/results/verify_bits.json
    python -m tests.fuzz --cases 2000 --jobs 12 --json docs/results/fuzz.json
    python -m tests.sanitize --json docs/results/sanitize.json
    python -m docs.make_determinism

put one here."""


def main() -> None:
    """Rewrites the document."""
    DOCUMENT.write_text(render(DOCUMENT.read_text()))


def render(document: str, results: Path = RESULTS) -> str:
    """The document with its generated part as it is today."""
    return regions.fill(document, "proof", describe_results(results))


def describe_results(results: Path) -> str:
    """What the recorded runs found, or how to record one."""
    parts = []
    if (file := results / "verify_bits.json").exists():
        parts.append(_describe_proof(json.loads(file.read_text())))
    if (file := results / "fuzz.json").exists():
        parts.append(_describe_fuzz(json.loads(file.read_text())))
    if (file := results / "sanitize.json").exists():
        parts.append(_describe_sanitizer(json.loads(file.read_text())))
    return "\n\n".join(parts) or NONE


def _describe_proof(report: dict[str, Any]) -> str:
    conditions = list(dict.fromkeys(name for row in report["rows"] for name in row["outcomes"]))
    totals = []
    for name in conditions:
        outcomes = [row["outcomes"][name] for row in report["rows"] if name in row["outcomes"]]
        counts = (sum(outcome[key] for outcome in outcomes) for key in ("runs", "equal", "in_force"))
        totals.append([name, len(outcomes), *counts])
    controls = [control["outcome"] for control in report["controls"]]
    differed = [outcome["runs"] for outcome in controls if outcome["first"]]
    table = tabulate(
        totals, ["condition", "configurations", "runs", "with equal bits", "seen in force"], tablefmt="pipe", intfmt=","
    )
    return (
        f"`cute-dash verify-bits`, {len(report['rows'])} configurations, {report['seconds']:.0f} s; "
        f"{_describe_environment(report)}:\n\n"
        f"{table}\n\nThe control `unordered` changed its bits in {len(differed)} of {len(controls)} configurations"
        + (f", within {max(differed)} run{'s' * (max(differed) > 1)}." if differed else ".")
    )


def _describe_fuzz(summary: dict[str, Any]) -> str:
    failed, left, jobs = len(summary["failures"]), summary["left"], summary["jobs"]
    return (
        f"`python -m tests.fuzz` on {summary['device']}, seed {summary['seed']}: "
        f"{summary['passed'] + failed + left:,} cases in {jobs} process{'es' * (jobs != 1)}, {failed} failed, {left} "
        f"without a result; {summary['comparisons']:,} comparisons of bits; the worst error was "
        f"{summary['worst_ratio']:.2f} times the comparator's, of 2 allowed."
    )


def _describe_sanitizer(report: dict[str, Any]) -> str:
    """A row per tool, what was found, each kind of finding once, a row per problem, and what is said of the chains."""
    columns = ["tool", "problems", "clean", "not finished", "explained findings", "others", "a fault made for it"]
    table = tabulate([_sum_up_run(run) for run in report["runs"]], columns, tablefmt="pipe", intfmt=",")
    findings: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
    for run in report["runs"]:
        for task, row in _list_findings(run):
            roles = (access["role"] for access in row["accesses"])
            findings.setdefault((run["tool"], row["kind"], row["buffer"], *roles), []).append((task, row))
    listed = "\n".join(f"- {_describe_finding(key, found)}" for key, found in findings.items())
    parts = [f"`python -m tests.sanitize`, {_describe_environment(report)}:", table, listed]
    return "\n\n".join(filter(None, [*parts, _tabulate_problems(report), _tabulate_chains(report)]))


def _tabulate_problems(report: dict[str, Any]) -> str:
    problems: dict[str, dict[str, str]] = {}
    for run in report["runs"]:
        for result in run["results"]:
            problems.setdefault(result["task"], {"problem": result["task"]})[run["tool"]] = result["result"]
    return tabulate(list(problems.values()), "keys", tablefmt="pipe")


def _tabulate_chains(report: dict[str, Any]) -> str:
    """What the tool says of the controls, a row for each order of the main kernel, a column for each form of it."""
    rows: dict[str, dict[str, str]] = {}
    for chain in (chain for run in report["runs"] for chain in run["chains"]):
        text = f"in CTAs {', '.join(map(str, chain['ctas']))}" if chain["ctas"] else chain["result"]
        form = f"`{chain['form']}`, {'right' if chain['right'] else 'a race'}"
        rows.setdefault(chain["buffer"], {"control": f"`{chain['buffer']}`"})[form] = text
    return tabulate(list(rows.values()), "keys", tablefmt="pipe", missingval="none")


def _sum_up_run(run: dict[str, Any]) -> list[Any]:
    clean = sum(result["result"] == "clean" for result in run["results"])
    unfinished = sum(bool(result["failure"]) for result in run["results"])
    explained, others = (
        sum(row["count"] for _, row in _list_findings(run) if bool(row["explanation"]) == known)
        for known in (True, False)
    )
    control = "none" if run["control"] is None else "seen" if run["control"]["seen"] else "not seen"
    return [run["tool"], len(run["results"]), clean, unfinished, explained, others, control]


def _list_findings(run: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """With the problem of each."""
    return [(result["task"], row) for result in run["results"] for row in result["rows"]]


def _describe_finding(key: tuple[str, ...], found: list[tuple[str, dict[str, Any]]]) -> str:
    tool, kind, buffer, *roles = key
    problems = len({task for task, _ in found})
    return (
        f"{tool}, {sum(row['count'] for _, row in found):,} in {problems} problem{'s' * (problems != 1)}: {kind}"
        f"{f' on `{buffer}`' if buffer else ''}{', ' * bool(roles)}{', then '.join(roles)}: "
        f"{found[0][1]['explanation'] or '**not explained**'}"
    )


def _describe_environment(report: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in report["environment"].items())


if __name__ == "__main__":
    main()
