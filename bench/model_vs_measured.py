"""The project's own question: does the DAG model predict which schedule is fast?

For every cell of a results file, each schedule's makespan in the list-scheduling model (`cute_dash.analysis.simulate`)
beside its measured time, both relative to a common schedule. Host only.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from bench.cells import Cell
from bench.implementations import OURS
from bench.report import Style, View
from bench.results import Record, Results
from cute_dash import analysis, registry

DEFAULT_NUM_SMS = 132  # of an H200, for a file that does not say
# two measured times closer than this are a tie, which the model can neither get right nor wrong
TIE = 0.01


@dataclass(frozen=True)
class Model:
    """Parameters of the simulation; times in units of one step's compute.

    Attributes:
        reduce: time to add one dQ tile in order.
        latency: time until a release is seen by the CTA that waits for it.
        num_dq_stages: dQ tiles that a CTA may have computed and not yet added.
    """

    reduce: float = 0.25
    latency: float = 0.0
    num_dq_stages: int = 1

    def makespan(self, record: Record, num_sms: int) -> float:
        """Simulated length of the main kernel for a record's cell and schedule, in steps.

        Raises:
            ValueError: the schedule is not registered or cannot implement the cell.
        """
        shape = record.cell.problem_shape()
        # 'name@spec' was chosen by the selector `spec`
        schedule = registry.resolve((record.schedule or "").split("@")[-1], shape)
        timeline = analysis.simulate(
            schedule,
            shape,
            num_sms,
            1.0,
            self.reduce,
            latency=self.latency,
            num_dq_stages=self.num_dq_stages,
        )
        return float(timeline.makespan)


@dataclass(frozen=True)
class Pair:
    """One schedule in one cell: simulated and measured time, both as a multiple of the reference schedule's."""

    cell: Cell
    schedule: str
    model: float
    measured: float


def pairs(results: Results, cells: Sequence[Cell], model: Model, reference: str, regime: str) -> Iterator[Pair]:
    """Deterministic schedules of the given cells; cells without the reference are left out."""
    view = View(results, regime)
    num_sms = int(results.environment.get("sm_count", DEFAULT_NUM_SMS))
    for cell in cells:
        records = [r for r in view.by_cell.get(cell, {}).values() if r.implementation == OURS and r.mode == "det"]
        base = next((r for r in records if r.schedule == reference), None)
        if base is None:
            continue
        base_makespan = model.makespan(base, num_sms)
        for record in records:
            ratio = model.makespan(record, num_sms) / base_makespan
            yield Pair(cell, record.schedule or "", ratio, record.ms_median / base.ms_median)


def concordance(entries: Sequence[Pair]) -> tuple[int, int]:
    """Of the pairs of schedules of one cell that differ by more than 1% in measured time: how many the model orders
    the same way, and how many there are."""
    agreeing = total = 0
    for a, b in combinations(entries, 2):
        if a.cell != b.cell or abs(a.measured / b.measured - 1) <= TIE:
            continue
        total += 1
        agreeing += (a.measured < b.measured) == (a.model < b.model) and a.model != b.model
    return agreeing, total


def report(results: Results, cells: Sequence[Cell], model: Model, reference: str, style: Style) -> str:
    """One row per cell and schedule, and how often the model orders two schedules as the measurement does."""
    entries = []
    for entry in pairs(results, cells, model, reference, style.regime):
        print(f"simulated {entry.cell.label} {entry.schedule}", file=sys.stderr, flush=True)
        entries.append(entry)
    rows = [
        [e.cell.label, e.schedule, f"{e.model:.3f}", f"{e.measured:.3f}", f"{e.measured / e.model:.3f}"]
        for e in entries
    ]
    agreeing, total = concordance(entries)
    lines = [
        f"Time relative to {reference}: list-scheduling model (compute 1, reduce {model.reduce:g}, latency "
        f"{model.latency:g}, {model.num_dq_stages} dQ stages) and {style.regime} measurement of the whole call",
        "",
        style.tabulate(rows, ["cell", "schedule", "model", "measured", "measured / model"]),
        "",
        f"the model orders {agreeing} of {total} pairs of schedules as the measurement does (ties within {TIE:.0%} "
        "left out)",
    ]
    return "\n".join(lines)
