"""The main kernel's CTA: warps, rings, named barriers, shared and global memory. Positions are drawn by hand."""

from typing import Any

from cute_dash.config import NUM_DS_STAGES, get_config

# what the boxes say of stages, warpgroups and the way of dK and dV holds up to head dim 128
CONFIG = get_config(64, True)
WARP, RING, BUFFER, GLOBAL = "#dbe9f6", "#e5f2df", "#fdf1d3", "#eeeeee"
DATA, SYNC, TURN = "#333333", "#2166ac", "#b2182b"

# name: (x, y, width, height, colour, text); the first line of a text is bold
BOXES: dict[str, tuple[float, float, float, float, str, str]] = {
    "inputs": (0.0, 6.9, 1.9, 2.6, GLOBAL, "inputs\nQ, K, V, dO\nLSE, dPsum\n(from preprocess)"),
    "load": (2.6, 8.3, 2.6, 1.2, WARP, "LOAD\nwarp 0: TMA"),
    "idle": (5.6, 8.3, 2.2, 1.2, GLOBAL, "warp 3\nnothing to do"),
    "even": (8.2, 8.3, 2.6, 1.2, WARP, "STORE_DQ_EVEN\nwarp 1: even steps"),
    "odd": (12.4, 8.3, 2.6, 1.2, WARP, "STORE_DQ_ODD\nwarp 2: odd steps"),
    "ring_Q": (2.2, 4.7, 1.5, 1.6, RING, f"ring_Q\nsQ, sStats\n{CONFIG.num_stages} stages"),
    "ring_dO": (3.85, 4.7, 1.5, 1.6, RING, f"ring_dO\nsdO\n{CONFIG.num_stages} stages"),
    "ring_KV": (5.5, 4.7, 1.5, 1.6, RING, "ring_KV\nsK, sV\n1 stage"),
    "ring_work": (7.2, 4.7, 1.35, 1.6, RING, "ring_work\nsWork\nwork tiles"),
    "sdS": (8.8, 4.7, 1.4, 1.6, BUFFER, f"sdS\n{NUM_DS_STAGES} stages\nthen dK, dV"),
    "sdQ": (12.4, 4.7, 2.6, 1.6, BUFFER, "sdQ: staging\nfp32 partial, or fp32 sum\nand then 16-bit dQ over it"),
    "mma0": (2.2, 1.0, 5.2, 1.7, WARP, "MMA warpgroup 0\nkeys 0 .. 63 of the tile\nS, dP, dV, dQ, dK"),
    "mma1": (8.2, 1.0, 6.8, 1.7, WARP, "MMA warpgroup 1\nkeys 64 .. 127 of the tile\nS, dP, dV, dQ, dK"),
    "dKV": (0.0, 1.0, 1.6, 1.7, GLOBAL, "dK, dV\nTMA, through\nthe place of sdS"),
    "semaphore": (17.1, 8.6, 2.1, 0.9, GLOBAL, "semaphore\none per dQ tile"),
    "counter": (17.1, 7.3, 2.1, 0.9, GLOBAL, "counter\nwork tiles claimed"),
    "dQaccum": (17.1, 5.3, 2.1, 1.0, GLOBAL, "dQaccum\nfp32, register order"),
    "dQ": (17.1, 3.9, 2.1, 0.9, GLOBAL, "dQ\n16 bit"),
}

# (points, colour, label, label position)
Point = tuple[float, float]
ARROWS: list[tuple[list[Point], str, str, Point]] = [
    ([(1.9, 8.9), (2.6, 8.9)], DATA, "", (0, 0)),
    ([(2.95, 8.3), (2.95, 6.3)], DATA, "full: Q;\nthe first\nwith K", (2.05, 7.3)),
    ([(4.4, 8.3), (4.4, 6.3)], DATA, "full: dO;\nthe first\nwith V", (3.5, 7.3)),
    ([(5.0, 8.3), (5.0, 7.0), (6.25, 7.0), (6.25, 6.3)], DATA, "", (0, 0)),
    ([(2.95, 4.7), (2.95, 2.7)], DATA, "", (0, 0)),
    ([(4.6, 4.7), (4.6, 2.7)], DATA, "", (0, 0)),
    ([(6.1, 4.7), (6.1, 2.7)], DATA, "", (0, 0)),
    ([(3.45, 2.7), (3.45, 4.7)], SYNC, "empty:\nafter dK", (3.55, 3.7)),
    ([(5.1, 2.7), (5.1, 4.7)], SYNC, "empty:\nafter dV", (5.2, 3.7)),
    ([(6.6, 2.7), (6.6, 4.7)], SYNC, "empty: after\nthe last step", (6.7, 3.4)),
    ([(2.2, 1.4), (1.6, 1.4)], DATA, "", (0, 0)),
    ([(8.4, 8.3), (8.4, 6.3)], SYNC, "full: a\nwork tile", (7.4, 7.4)),
    ([(7.85, 4.7), (7.85, 4.2)], SYNC, "to all warps", (7.25, 4.05)),
    ([(9.2, 2.7), (9.2, 4.7)], DATA, "", (0, 0)),
    ([(9.6, 4.7), (9.6, 2.7)], SYNC, "PdS: both\nhalves of\ndS staged", (9.68, 3.75)),
    ([(10.8, 8.7), (12.4, 8.7)], SYNC, "dQFree[parity]:\nbuffer was read", (10.95, 9.2)),
    ([(12.4, 8.5), (10.8, 8.5)], SYNC, "", (0, 0)),
    ([(10.65, 8.3), (10.65, 2.7)], SYNC, "dQEmpty[warpgroup]:\nbuffer is theirs,\nsDuty: what for", (10.75, 4.05)),
    ([(12.85, 6.3), (12.85, 8.3)], SYNC, "dQFull\n[warpgroup][parity]", (11.2, 7.3)),
    ([(13.4, 6.3), (13.4, 8.3)], SYNC, "sums[parity]:\nsum so far is here", (13.48, 7.3)),
    ([(12.75, 2.7), (12.75, 4.7)], DATA, "partial\nor dQ", (12.83, 3.7)),
    ([(13.75, 4.7), (13.75, 2.7)], DATA, "sum so far", (13.83, 3.7)),
    (
        [(15.0, 2.3), (15.55, 2.3), (15.55, 1.4), (15.0, 1.4)],
        SYNC,
        "dQSum[warpgroup]: all\nhave read the sum",
        (15.65, 1.85),
    ),
    ([(15.0, 6.05), (17.1, 6.05)], DATA, "store, add", (15.5, 6.22)),
    ([(17.1, 5.6), (15.0, 5.6)], DATA, "sum so far,\nto the last", (15.5, 5.28)),
    ([(15.0, 4.95), (15.4, 4.95), (15.4, 4.35), (17.1, 4.35)], DATA, "dQ of the last", (15.5, 4.18)),
    (
        [(13.7, 9.5), (13.7, 9.95), (18.15, 9.95), (18.15, 9.5)],
        TURN,
        "wait for the lock value, pass the turn on",
        (13.9, 10.1),
    ),
    ([(9.5, 9.5), (9.5, 10.45), (19.5, 10.45), (19.5, 7.75), (19.2, 7.75)], TURN, "claim (atomic add)", (9.7, 10.6)),
]


def draw() -> Any:
    """The diagram as a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-0.3, 19.7), ylim=(-0.1, 11.0))
    axes.axis("off")
    _draw_frame(axes, (2.35, 8.0, 12.9, 1.85), "producer warpgroup")
    _draw_frame(axes, (2.0, 4.4, 13.25, 2.15), "shared memory")
    _draw_frame(axes, (2.0, 0.55, 13.25, 2.4), "consumer warpgroups")
    for points, color, label, (x, y) in ARROWS:
        _draw_arrow(axes, points, color)
        if label:
            axes.text(x, y, label, color=color, fontsize=8, ha="left", va="center")
    for x, y, width, height, color, text in BOXES.values():
        _draw_box(axes, (x, y, width, height), color, text)
    for x, color, text in (
        (4.4, DATA, "data"),
        (6.0, SYNC, "mbarrier or named barrier"),
        (9.9, TURN, "global counter"),
    ):
        axes.plot((x, x + 0.5), (0.2, 0.2), color=color, linewidth=1.6)
        axes.text(x + 0.6, 0.2, text, fontsize=8.5, va="center", color=color)
    return figure


def _draw_frame(axes: Any, place: tuple[float, float, float, float], title: str) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = place
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="#999999", linestyle=(0, (3, 3)), zorder=0))
    axes.text(x + width - 0.08, y + 0.06, title, fontsize=8.5, color="#777777", ha="right", va="bottom", style="italic")


def _draw_box(axes: Any, place: tuple[float, float, float, float], color: str, text: str) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = place
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="#444444", linewidth=1, zorder=3))
    lines = text.split("\n")
    for i, line in enumerate(lines):
        top = y + height / 2 + 0.32 * (len(lines) - 1) / 2 - 0.32 * i
        weight = "bold" if i == 0 else "normal"
        axes.text(x + width / 2, top, line, fontsize=8.5, weight=weight, ha="center", va="center", zorder=4)


def _draw_arrow(axes: Any, points: list[Point], color: str) -> None:
    """A line through `points` with a head at the last one."""
    xs, ys = zip(*points, strict=True)
    axes.plot(xs[:-1], ys[:-1], color=color, linewidth=1.2, zorder=2)
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=points[-1], xytext=points[-2], arrowprops=style, zorder=2)
