"""Rewrites what is generated in schedules.md: `python -m docs.make_gallery` from the root of a checkout.

That is the gallery (summary, and of each schedule figure, model and order), and the outputs of the tutorial's commands.
Needs the `plot` extra; no GPU. What is said about a schedule in words stays as it is.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from bench.cells import Cell, standard_cell
from bench.implementations import OURS
from bench.results import Results
from cute_dash import analysis, registry
from cute_dash.config import get_config
from cute_dash.plot import plot
from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, SelectingSchedule
from docs import regions, tutorial
from schedules.hybrid import Hybrid

DOCUMENT = regions.FOLDER / "schedules.md"
# the recorded run that the gallery quotes
MEASURED = regions.FOLDER.parent / "bench" / "results" / "h200_backward_733a4d0.json"
CELLS = (
    standard_cell(64, "causal", 2048),
    standard_cell(128, "causal", 8192),
    standard_cell(64, "full", 2048),
    standard_cell(128, "full", 4096),
)
# what is drawn: 4 heads of 8 x 8 tiles on 8 SMs, as many as a head has KV tiles, in units of a step's compute
SEQLEN, HEADS, HEAD_DIM = 1024, 4, 64
NUM_SMS, COMPUTE, REDUCE = 8, 1.0, 0.25
TABLE_BLOCKS = 4
# with its usual tail of 256 work tiles, each of the four heads would belong to it
DRAWN: dict[str, Schedule] = {"hybrid": Hybrid(tail_tiles=16)}
EXAMPLE = "evens_first"  # the README's, which a reader may have left in `schedules/`


@dataclass(frozen=True)
class Entry:
    """One schedule of the gallery, as drawn."""

    name: str
    schedule: Schedule
    shape: ProblemShape
    timeline: analysis.Timeline

    @property
    def mask(self) -> str:
        return "causal" if self.shape.causal else "full"

    @property
    def figure(self) -> Path:
        return regions.FIGURES / f"{self.name}.png"

    @property
    def bound(self) -> float:
        """No order can be faster: all steps, spread evenly over the SMs."""
        num_steps = sum(len(order.m_blocks) for order in analysis.expand(self.schedule, self.shape))
        return num_steps * (COMPUTE + REDUCE) / NUM_SMS


def main() -> None:
    """Draws the figures and rewrites the document."""
    entries = list_entries()
    for entry in entries:
        plot(entry.timeline, entry.figure, title=f"{entry.schedule!r}, {entry.mask} mask")
        regions.compact(entry.figure)
    DOCUMENT.write_text(render(DOCUMENT.read_text(), entries))


def render(document: str, entries: list[Entry]) -> str:
    """The document with its generated parts as they are today."""
    results = Results.load(MEASURED)
    document = regions.fill(document, "summary", summarize(entries, results))
    for entry in entries:
        document = regions.fill(document, f"gallery {entry.name}", describe(entry, results))
    for selector in list_selectors():
        table = analysis.selection_table(selector)
        document = regions.fill(document, f"gallery {selector.name}", f"```text\n{table}\n```")
    with tempfile.TemporaryDirectory() as folder:
        return tutorial.run(document, Path(folder))


def list_names() -> list[str]:
    """What the gallery shows: every schedule that ships."""
    return [name for name in registry.available() if name != EXAMPLE]


def list_entries() -> list[Entry]:
    """Every concrete schedule: on the causal mask where it orders it, else on the full one."""
    schedules = {name: DRAWN.get(name, registry.load(name)) for name in list_names()}
    return [_simulate(name, s) for name, s in schedules.items() if not isinstance(s, SelectingSchedule)]


def list_selectors() -> list[SelectingSchedule]:
    """`auto` and its kin."""
    loaded = (registry.load(name) for name in list_names())
    return [schedule for schedule in loaded if isinstance(schedule, SelectingSchedule)]


def _simulate(name: str, schedule: Schedule) -> Entry:
    for causal in (True, False):
        shape = get_config(HEAD_DIM, causal).make_shape(1, HEADS, SEQLEN, SEQLEN)
        if schedule.can_implement(shape):
            return Entry(name, schedule, shape, analysis.simulate(schedule, shape, NUM_SMS, COMPUTE, REDUCE))
    raise ValueError(f"{schedule!r} orders neither mask of {shape}")


def summarize(entries: list[Entry], results: Results) -> str:
    """One row per schedule: what it promises, what the model says of it as drawn, and what it reached."""
    headers = ["schedule", "mask", "batch-invariant", "CTAs it needs", "critical path", "least", "stalled"]
    headers += [cell.label for cell in CELLS]
    rows = []
    for e in entries:
        row = [f"[`{e.name}`](#{e.name})", e.mask, "yes" if e.schedule.batch_invariant else "no"]
        row += [e.schedule.min_resident_ctas(e.shape), f"{e.timeline.makespan:g}", f"{e.bound:g}"]
        row += [f"{e.timeline.stall_share:.1%}", *(_measured(e, cell, results) for cell in CELLS)]
        rows.append(row)
    table = tabulate(rows, headers, tablefmt="pipe", disable_numparse=True, colalign=["left"] * 3 + ["right"] * 8)
    environment = results.environment
    where = f"{environment['gpu']}, commit {environment['commit']}, {environment['date'][:10]}"
    source = f"[{MEASURED.name}](../bench/results/{MEASURED.name})"
    return f"{table}\n\nThe last four columns are TFLOPS of the whole backward call, burst ({where}; {source})."


def _measured(entry: Entry, cell: Cell, results: Results) -> str:
    """TFLOPS of the schedule with its usual parameters; "-" where it was not timed."""
    records = [
        record
        for record in results.records
        if (record.implementation, record.schedule, record.regime) == (OURS, entry.name, "burst")
        and record.cell == cell
    ]
    return f"{records[0].tflops:.0f}" if records else "-"


def describe(entry: Entry, results: Results) -> str:
    """Figure, figures of the model and measured ones, and the order of 4 x 4 tiles."""
    length, share = entry.timeline.makespan, entry.timeline.stall_share
    model = f"Model: critical path {length:g}, least {entry.bound:g}, stalled {share:.1%}."
    times = ", ".join(f"{cell.label} {_measured(entry, cell, results)}" for cell in CELLS)
    picture = f"![Gantt chart of {entry.name}](figures/{entry.figure.name})"
    return f"{picture}\n\n{model} Measured, TFLOPS: {times}.\n\n```text\n{order_table(entry)}\n```"


def order_table(entry: Entry) -> str:
    """The order of 4 x 4 tiles; two tables, of the first and the last head, where they differ."""
    size = TABLE_BLOCKS * entry.shape.tile_n
    # of `hybrid`, as drawn, the last 4 heads of 4 tiles are the tail
    shape = ProblemShape(1, 2 * HEADS, size, size, entry.shape.tile_m, entry.shape.tile_n, entry.shape.causal)
    first, last = (analysis.table(entry.schedule, shape, head_idx=head) for head in (0, shape.num_heads - 1))
    return first if first == last else f"first head\n{first}\n\nlast head\n{last}"


if __name__ == "__main__":
    main()
