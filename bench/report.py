"""Tables from results files. Needs no GPU and no torch; every figure printed is in the file.

TFLOPS by the formula of `bench.cells`; a ratio above 1 means faster than what it is compared with.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from tabulate import tabulate

from bench.cells import Cell
from bench.implementations import OURS, find_candidates
from bench.results import FAILED, Key, Record, Results

PAPER_FILE = Path(__file__).parent / "h800_dash_paper.csv"
FA4_DET = Key("flash-attn-4", "det", None)
# the paper's reference point and its schedules beside those of ours that realise the same order, by mask
PAPER_BASELINE = "baseline"
PAPER_SCHEDULES = {
    "descending": {"causal": "descending", "full": "descending"},
    "shift": {"causal": "symmetric_shift", "full": "shift"},
}


@dataclass(frozen=True)
class Style:
    """How a table looks.

    Attributes:
        markdown: a table for a document; otherwise a plain one for a terminal.
        value: 'tflops' or 'ms'.
        regime: which records.
    """

    markdown: bool = False
    value: str = "tflops"
    regime: str = "burst"

    def format(self, record: Record) -> str:
        return f"{record.tflops:.0f}" if self.value == "tflops" else f"{record.ms_median:.3f}"

    def tabulate(self, rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
        if not self.markdown:  # narrow columns: a terminal has room for a word each
            headers = [h.replace("_", "_\n").replace("@", "@\n").replace(" ", "\n") for h in headers]
        left = {"cell", "candidate", "schedule", "best\ndet", "best det", "which", "verdict"}
        return str(
            tabulate(
                rows,
                headers,
                tablefmt="pipe" if self.markdown else "simple",
                disable_numparse=True,
                colalign=["left" if h in left else "right" for h in headers],
            )
        )


class View:
    """The records of one regime, by cell and candidate."""

    def __init__(self, results: Results, regime: str) -> None:
        self.results = results
        self.regime = regime
        self.by_cell: dict[Cell, dict[Key, Record]] = {}
        for record in results.records:
            if record.regime == regime:
                self.by_cell.setdefault(record.cell, {})[record.key] = record
        self.failed = {(u.cell, u.key): u for u in results.untimed if u.verdict == FAILED}

    @property
    def cells(self) -> list[Cell]:
        return [c for c in self.results.cells() if c in self.by_cell or any(c == cell for cell, _ in self.failed)]

    @property
    def keys(self) -> list[Key]:
        """Ours first, deterministic ones before the others; then the peers; in the order of the file."""
        keys = dict.fromkeys(key for records in self.by_cell.values() for key in records)
        keys.update(dict.fromkeys(key for _, key in self.failed))
        return sorted(keys, key=lambda k: (k.implementation != OURS, k.implementation, k.mode))

    def find(self, cell: Cell, key: Key) -> Record | None:
        return self.by_cell.get(cell, {}).get(key)

    def best(self, cell: Cell, *, ours: bool | None = None, mode: str) -> Record | None:
        """The fastest record of a cell in a mode; `ours` limits it to our own or to the peers."""
        records = [
            r
            for r in self.by_cell.get(cell, {}).values()
            if r.mode == mode and (ours is None or (r.implementation == OURS) == ours)
        ]
        return max(records, key=lambda r: r.tflops, default=None)


def summary(results: Results, style: Style) -> str:
    """Cells by candidates, the best deterministic schedule of ours and its ratios, then who is not in the table."""
    view = View(results, style.regime)
    keys = view.keys
    headers = ["cell", *(short_name(k) for k in keys), "best det", "/ FA4 det", "/ best nondet", "of floor"]
    rows = [_summary_row(view, cell, keys, style) for cell in view.cells]
    unit = "TFLOPS" if style.value == "tflops" else "ms per call"
    lines = [
        f"Attention backward, {style.regime}, {unit}; {describe_machine(results)}",
        "",
        style.tabulate(rows, headers),
        "",
    ]
    return "\n".join([*lines, *_footnotes(results)])


def _summary_row(view: View, cell: Cell, keys: Sequence[Key], style: Style) -> list[str]:
    row = [cell.label]
    for key in keys:
        record = view.find(cell, key)
        row.append(style.format(record) if record else "FAILED" if (cell, key) in view.failed else "-")
    best = view.best(cell, ours=True, mode="det")
    row.append(best.schedule or "-" if best else "-")
    row.append(_ratio(best, view.find(cell, FA4_DET)))
    row.append(_ratio(best, view.best(cell, mode="nondet")))
    row.append(_floor_share(best, view.results.ceilings))
    return row


def headline(results: Results, style: Style) -> str:
    """The table of the README: `auto` and the best of ours beside the peers, without the other schedules.

    `auto` is the record of the schedule that it selects for the cell today; `-` if the file has none.
    """
    view = View(results, style.regime)
    peers = [key for key in view.keys if key.implementation != OURS]
    unordered = Key(OURS, "nondet", "unordered")
    shown = [*peers, unordered]
    headers = ["cell", "auto", *map(short_name, shown), "auto / FA4 det", "auto / best nondet peer", "best", "which"]
    rows = []
    for cell in view.cells:
        auto, best = _auto_record(view, cell), view.best(cell, ours=True, mode="det")
        cells = [view.find(cell, key) for key in shown]
        ratios = [_ratio(auto, view.find(cell, FA4_DET)), _ratio(auto, view.best(cell, ours=False, mode="nondet"))]
        values = [style.format(r) if r else "-" for r in (auto, *cells)]
        rows.append([cell.label, *values, *ratios, style.format(best) if best else "-", _schedule_of(best)])
    unit = "TFLOPS" if style.value == "tflops" else "ms per call"
    return "\n".join([f"{style.regime}, {unit}; {describe_machine(results)}", "", style.tabulate(rows, headers)])


def price(results: Results, style: Style) -> str:
    """What determinism costs each kernel: how much longer its deterministic call takes than its other one.

    Of ours `auto` against `unordered`. The last rows are geometric means over the cells of a mask.
    """
    view = View(results, style.regime)
    names = list(dict.fromkeys(key.implementation for key in view.keys))
    ratios = {cell: [_price(view, cell, name) for name in names] for cell in view.cells}
    rows = [[cell.label, *map(_percent, of_cell)] for cell, of_cell in ratios.items()]
    for mask in dict.fromkeys(cell.mask for cell in ratios):
        columns = zip(*(of_cell for cell, of_cell in ratios.items() if cell.mask == mask), strict=True)
        means = [geometric_mean(known) if (known := [x for x in column if x]) else None for column in columns]
        rows.append([f"all {mask}", *map(_percent, means)])
    headers = ["cell", *("cute-dash auto" if name == OURS else name for name in names)]
    title = f"Time of the deterministic call against the other, {style.regime}; {describe_machine(results)}"
    return "\n".join([title, "", style.tabulate(rows, headers)])


def _price(view: View, cell: Cell, implementation: str) -> float | None:
    ours = implementation == OURS
    det = _auto_record(view, cell) if ours else view.find(cell, Key(implementation, "det", None))
    nondet = view.find(cell, Key(implementation, "nondet", "unordered" if ours else None))
    return det.ms_median / nondet.ms_median if det and nondet else None


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{round(100 * (ratio - 1)):+d}%"


def _schedule_of(record: Record | None) -> str:
    return record.schedule or "-" if record else "-"


def _auto_record(view: View, cell: Cell) -> Record | None:
    ours, _ = find_candidates(cell, ["auto"], [])
    return view.find(cell, ours[0].key) if ours else None


def compare(old: Results, new: Results, threshold: float, style: Style) -> tuple[str, int]:
    """Every record that both files have, slowest change first.

    Args:
        old, new: the results to compare.
        threshold: a record is a regression if its TFLOPS fell by more than this fraction.
        style: regime and looks.
    Returns:
        The table, and the number of regressions.
    """
    a, b = View(old, style.regime), View(new, style.regime)
    common = [(c, k) for c in a.by_cell for k in a.by_cell[c] if b.find(c, k)]
    changes = sorted((b.by_cell[c][k].tflops / a.by_cell[c][k].tflops, c.label, k.label, c, k) for c, k in common)
    rows, regressions = [], 0
    for ratio, cell_label, label, cell, key in changes:
        slower = ratio < 1 - threshold
        # a peer's code did not change: its ratio shows how far the two runs' clocks differ
        verdict = ("REGRESSION" if key.implementation == OURS else "slower") if slower else ""
        regressions += verdict == "REGRESSION"
        times = (f"{v.by_cell[cell][key].ms_median:.3f}" for v in (a, b))
        rows.append([cell_label, label, *times, f"{ratio:.3f}", verdict])
    only = [sum(len(v.by_cell[c]) for c in v.by_cell) - len(common) for v in (a, b)]
    lines = [
        f"old: {describe_machine(old)}",
        f"new: {describe_machine(new)}",
        "",
        style.tabulate(rows, ["cell", "candidate", "old ms", "new ms", "speed ratio", "verdict"]),
        "",
        f"{regressions} of ours slower by more than {threshold:.0%}; {only[0]} records only in old, {only[1]} only in "
        "new",
    ]
    return "\n".join(lines), regressions


def paper(results: Results, style: Style) -> str:
    """Speed-ups over the baseline schedule: the paper's on an H800 beside ours on the results' GPU."""
    published = load_paper()
    view = View(results, style.regime)
    headers = ["cell"]
    for name in PAPER_SCHEDULES:
        headers += [f"paper {name}", f"ours {name}"]
    headers += ["paper best", "ours best", "which"]
    rows = [row for cell in view.cells if (row := _paper_row(published, view, cell))]
    gpu = results.environment.get("gpu", "unknown GPU")
    lines = [
        f"Speed-up over the baseline schedule: paper (arXiv 2601.21824, H800) and ours ({gpu}, {style.regime})",
        "",
        style.tabulate(rows, headers),
        "",
        "ours shift: `shift` on the full mask, `symmetric_shift` on the causal one; best: of the deterministic "
        "schedules",
    ]
    return "\n".join(lines)


def _paper_row(published: dict[tuple[str, int, str, int], float], view: View, cell: Cell) -> list[str] | None:
    """Speed-ups of one cell; None if the paper does not have it."""
    if cell.varlen:
        return None
    shape = (cell.head_dim, cell.mask, cell.seqlen)
    theirs = {name: ms for (name, *rest), ms in published.items() if tuple(rest) == shape}
    if PAPER_BASELINE not in theirs:
        return None
    ours_baseline = view.find(cell, Key(OURS, "det", "baseline"))
    row = [cell.label]
    for name, by_mask in PAPER_SCHEDULES.items():
        row.append(f"{theirs[PAPER_BASELINE] / theirs[name]:.2f}")
        row.append(_ratio(view.find(cell, Key(OURS, "det", by_mask[cell.mask])), ours_baseline))
    best = view.best(cell, ours=True, mode="det")
    row.append(f"{theirs[PAPER_BASELINE] / min(theirs.values()):.2f}")
    row += [_ratio(best, ours_baseline), best.schedule or "-" if best else "-"]
    return row


def load_paper(path: Path = PAPER_FILE) -> dict[tuple[str, int, str, int], float]:
    """The paper's raw times in ms by (schedule, head_dim, mask, seqlen)."""
    with path.open(newline="") as file:
        return {
            (row["schedule"], int(row["head_dim"]), row["mask"], int(row["seqlen"])): float(row["ms"])
            for row in csv.DictReader(file)
        }


def short_name(key: Key) -> str:
    """What a candidate is called in tables and pictures."""
    if key.implementation == OURS:
        return key.schedule or OURS
    return f"{'FA4' if key.implementation == FA4_DET.implementation else key.implementation} {key.mode}"


def describe_machine(results: Results) -> str:
    """Device, versions, commit and date of a file."""
    e = results.environment
    names = ("gpu", "sm_count", "driver", "torch", "dsl", "commit", "date")
    gpu, sms, driver, torch, dsl, commit, date = (e.get(name, "unknown") for name in names)
    return f"{gpu} ({sms} SMs), driver {driver}, torch {torch}, DSL {dsl}, commit {commit[:12]}, {date[:10]}"


def _footnotes(results: Results) -> list[str]:
    lines = []
    if results.ceilings:
        lines.append("ceilings: " + ", ".join(f"{name} {x:.4g}" for name, x in results.ceilings.items()))
    lines += [f"not installed: {name} ({why})" for name, why in results.environment.get("missing", {}).items()]
    lines += [f"FAILED {u.cell.label} {u.key.label}: {u.reason}" for u in results.untimed if u.verdict == FAILED]
    if "command" in results.environment:
        lines.append(f"command: {results.environment['command']}")
    return lines


def _floor_share(record: Record | None, ceilings: dict[str, float]) -> str:
    """How much of the call's time its floor is."""
    if record is None or f"gemm_tflops_{record.regime}" not in ceilings or "copy_tb_per_s" not in ceilings:
        return "-"
    floor = record.cell.floor_ms(ceilings[f"gemm_tflops_{record.regime}"], ceilings["copy_tb_per_s"])
    return f"{floor / record.ms_median:.0%}"


def _ratio(record: Record | None, reference: Record | None) -> str:
    return f"{record.tflops / reference.tflops:.2f}" if record and reference else "-"
