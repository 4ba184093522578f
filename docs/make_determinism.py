"""Rewrites what is generated of determinism.md: `python -m docs.make_determinism` from the root of a checkout.

Fills in what recorded runs found, from the JSON that `cute-dash verify-bits --json` and `python -m tests.fuzz --json`
write into the folder `docs/results`; no GPU.
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
    python -m tests.fuzz --cases 2000 --json docs/results/fuzz.json
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
    environment = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    table = tabulate(
        totals, ["condition", "configurations", "runs", "with equal bits", "seen in force"], tablefmt="pipe", intfmt=","
    )
    return (
        f"`cute-dash verify-bits`, {len(report['rows'])} configurations, {report['seconds']:.0f} s; {environment}:\n\n"
        f"{table}\n\nThe control `unordered` changed its bits in {len(differed)} of {len(controls)} configurations"
        + (f", after {min(differed)} to {max(differed)} runs." if differed else ".")
    )


def _describe_fuzz(summary: dict[str, Any]) -> str:
    cases = summary["passed"] + len(summary["failures"])
    return (
        f"`python -m tests.fuzz` on {summary['device']}, seed {summary['seed']}: {cases:,} cases, "
        f"{len(summary['failures'])} failed; {summary['comparisons']:,} comparisons of bits; the worst error was "
        f"{summary['worst_ratio']:.2f} times the comparator's, of 2 allowed."
    )


if __name__ == "__main__":
    main()
