"""Draws a results file: TFLOPS of every candidate, a panel for each head dim and mask.

Host only. matplotlib, the `plot` extra, is imported when something is drawn. Schedules of ours that keep an order are
solid and coloured; what they are to be compared with is not: `unordered` dashed, peers grey, their deterministic mode
solid.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cells import Cell, format_seqlen
from bench.implementations import OURS
from bench.report import View, describe_machine, short_name
from bench.results import Key, Results
from cute_dash.plot import FORMATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = [f"C{i}" for i in range(10) if i != 7]  # which is grey
_PEER_GREYS = ("0.35", "0.65")
_MARKERS = "osDv^P*Xph"


def check_path(path: Path) -> Path:
    """The path, if a picture can be written to it.

    Raises:
        ValueError: a suffix that is not known, a folder that is not there, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot {path} must end in one of {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install -e '.[plot]'") from error
    return path


def draw(results: Results, regime: str, path: Path) -> None:
    """Writes the picture of the records of one regime.

    Lines over the lengths, or bars where no panel has more than one length.

    Raises:
        ValueError: there are no such records.
    """
    from matplotlib.figure import Figure

    view = View(results, regime)
    panels = _group_cells(list(view.by_cell))
    if not panels:
        raise ValueError(f"there are no {regime} records to draw")
    styles = _list_styles([key for key in view.keys if any(view.find(cell, key) for cell in view.by_cell)])
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    as_bars = max(map(len, panels.values())) == 1
    height = 0.6 + 0.25 * len(styles) if as_bars else 4
    figure = Figure(figsize=(6.5 * columns, height * rows + 1), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (title, cells) in zip(grid, panels.items(), strict=False):
        axes.set_title(title)
        if as_bars:
            _draw_bars(axes, view, cells[0], styles)
        else:
            _draw_lines(axes, view, cells, styles)
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    if not as_bars:
        handles = {line.get_label(): line for axes in figure.axes for line in axes.lines}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(f"Attention backward, {regime}; {describe_machine(results)}", fontsize=8)
    figure.savefig(path, dpi=150)


def _group_cells(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by what they have in common beside the length, which is their title; sorted by length."""
    panels: dict[str, list[Cell]] = {}
    as_bars = len({_panel_of(cell) for cell in cells}) == len(cells)
    for cell in sorted(cells, key=lambda cell: cell.seqlen):
        panels.setdefault(cell.label if as_bars else _panel_of(cell), []).append(cell)
    return dict(sorted(panels.items(), key=lambda item: cells.index(item[1][0])))


def _panel_of(cell: Cell) -> str:
    """The label without the length and what belongs to it: batch and heads are those of 16,384 tokens, or say so."""
    label = cell.label.split()
    return " ".join([*label[:2], *label[3:]])


def _list_styles(keys: Sequence[Key]) -> dict[Key, dict[str, Any]]:
    """How each candidate is drawn, the same in all panels."""
    styles: dict[Key, dict[str, Any]] = {}
    peers = list(dict.fromkeys(key.implementation for key in keys if key.implementation != OURS))
    ours = [key for key in keys if key.implementation == OURS and key.mode == "det"]
    for key in keys:
        style: dict[str, Any] = {"label": short_name(key), "linestyle": "-" if key.mode == "det" else "--"}
        if key.implementation != OURS:
            style["color"] = _PEER_GREYS[peers.index(key.implementation) % len(_PEER_GREYS)]
        elif key in ours:
            place = ours.index(key)
            style |= {"color": _COLORS[place % len(_COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}
        else:
            style["color"] = "black"
        styles[key] = style
    return styles


def _draw_lines(axes: "Axes", view: View, cells: Sequence[Cell], styles: dict[Key, dict[str, Any]]) -> None:
    for key, style in styles.items():
        places = [(i, record.tflops) for i, cell in enumerate(cells) if (record := view.find(cell, key))]
        if places:
            axes.plot(*zip(*places, strict=True), markersize=5, **style)
    axes.set_xticks(range(len(cells)), [format_seqlen(cell.seqlen) for cell in cells])
    axes.set(xlabel="tokens", ylabel="TFLOPS", ylim=(0, None))
    axes.grid(axis="y", alpha=0.3)


def _draw_bars(axes: "Axes", view: View, cell: Cell, styles: dict[Key, dict[str, Any]]) -> None:
    """The fastest at the top."""
    records = sorted(view.by_cell[cell].values(), key=lambda record: record.tflops)
    for place, record in enumerate(records):
        style = styles[record.key]
        hatch = "" if record.mode == "det" else "///"
        axes.barh(place, record.tflops, color=style["color"], hatch=hatch, edgecolor="white")
        axes.text(record.tflops, place, f" {record.tflops:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(records)), [styles[record.key]["label"] for record in records], fontsize=8)
    axes.set(xlabel="TFLOPS (hatched: not deterministic)")
    axes.margins(x=0.1)
