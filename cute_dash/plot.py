"""Draws a timeline as a Gantt chart: one row per CTA that did work, time to the right, coloured by m_block.

Host only. matplotlib, an optional dependency, is imported when a chart is drawn.
"""

from pathlib import Path
from typing import Any

from cute_dash.analysis import Interval, Timeline

FORMATS = (".png", ".svg")


def plot(timeline: Timeline, path: str | Path, title: str | None = None) -> None:
    """Write a Gantt chart of `timeline` to `path`.

    A step is a filled bar while it computes and a hatched one while it adds to dQ, both in the colour of its m_block;
    what is left white between them is waiting. The end of each work tile is marked. CTAs that found no work are left
    out; the heading counts them.

    Args:
        timeline: result of `analysis.simulate`.
        path: file to write; its suffix says the format, .png or .svg.
        title: heading of the chart.

    Raises:
        ValueError: another suffix.
        ModuleNotFoundError: matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"path={str(path)!r} must end in one of {', '.join(FORMATS)}")
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    ctas = [(cta_idx, intervals) for cta_idx, intervals in enumerate(timeline.ctas) if intervals]
    num_m_blocks = 1 + max(interval.m_block for cta in timeline.ctas for interval in cta)
    colors = ScalarMappable(Normalize(-0.5, num_m_blocks - 0.5), colormaps["viridis"].resampled(num_m_blocks))
    figure = Figure(figsize=(12, _height(len(ctas))), layout="constrained")
    axes = figure.add_subplot()
    for cta_idx, intervals in ctas:
        _draw_cta(axes, cta_idx, intervals, colors)
    # CTAs claim in the order of their numbers, so those without work are the last ones
    axes.set(xlabel="time", ylabel="CTA", xlim=(0, timeline.makespan), ylim=(ctas[-1][0] + 0.5, ctas[0][0] - 0.5))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    heading = f"makespan {float(timeline.makespan):g}, stalled {float(timeline.stall_share):.1%}"
    if len(ctas) < len(timeline.ctas):
        heading += f"; {len(ctas)} of {len(timeline.ctas)} CTAs have work"
    axes.set_title(f"{title}\n{heading}" if title else heading, loc="left", fontsize="medium")
    figure.colorbar(colors, ax=axes, label="m_block", ticks=_ticks(num_m_blocks))
    figure.savefig(path, format=path.suffix[1:].lower(), dpi=150)


def _height(num_rows: int) -> float:
    """Inches: rows as high as they need be to be told apart, on a chart that a screen can show."""
    return min(1.5 + 0.25 * num_rows, 14.0)


def _draw_cta(axes: Any, cta_idx: int, intervals: tuple[Interval, ...], colors: Any) -> None:
    """Bars of one CTA: computes above, adds below where both go on at once."""
    faces = colors.to_rgba([interval.m_block for interval in intervals])
    computes = [(float(i.start), float(i.compute_end - i.start)) for i in intervals]
    adds = [(float(i.add_start), float(i.end - i.add_start)) for i in intervals]
    axes.broken_barh(computes, (cta_idx - 0.4, 0.5), facecolors=faces)
    axes.broken_barh(adds, (cta_idx + 0.1, 0.3), facecolors=faces, hatch="////", edgecolor="white", linewidth=0)
    ends = [float(i.end) for i, after in zip(intervals, intervals[1:], strict=False) if i.tile != after.tile]
    axes.vlines([*ends, float(intervals[-1].end)], cta_idx - 0.45, cta_idx + 0.45, colors="black", linewidth=1)


def _ticks(num_m_blocks: int) -> range:
    """At most 10 ticks from 0 up."""
    return range(0, num_m_blocks, (num_m_blocks + 9) // 10)
