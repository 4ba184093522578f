"""The life of a work tile as a timeline, from claim to claim. Schematic: lengths are chosen to be readable."""

from typing import Any, NamedTuple

ROWS = ("LOAD", "MMA warpgroups", "STORE_DQ_EVEN", "STORE_DQ_ODD", "CONVERT_DQ")
NUM_STEPS = 4
STEP = 3.0  # length of a step on the MMA warpgroups
START = 2.4  # when the first Q, K and V have arrived
POLL, WAIT, WORK, HAND_OVER, MOVE = "#f2cf8d", "#eeeeee", "#9ecae1", "#fdae6b", "#c7e9c0"


class Bar(NamedTuple):
    """A stretch of one row's time."""

    row: str
    start: float
    end: float
    color: str
    text: str


def draw() -> Any:
    """The timeline as a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.9), layout="constrained")
    axes = figure.add_subplot()
    for bar in [*_list_load(), *_list_mma(), *_list_stores(), *_list_conversions()]:
        y = ROWS.index(bar.row)
        axes.barh(y, bar.end - bar.start, left=bar.start, height=0.66, color=bar.color, edgecolor="#444444", lw=0.6)
        axes.text((bar.start + bar.end) / 2, y, bar.text, ha="center", va="center", fontsize=7)
    claim = _staged(NUM_STEPS - 1) + 0.35
    for time, text in ((0.0, "claim"), (claim, "claim of the next tile")):
        axes.axvline(time, color="#b2182b", linewidth=1, linestyle=(0, (4, 2)))
        axes.text(time + 0.08, -0.62, text, color="#b2182b", fontsize=8, ha="left", va="center")
    axes.set_yticks(range(len(ROWS)), ROWS, fontsize=8)
    axes.set(xlim=(-0.3, claim + 6.3), ylim=(len(ROWS) - 0.5, -0.9), xticks=[], xlabel="time (schematic)")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


def _staged(step: int) -> float:
    """When the dQ partial of a step is in the staging buffer: before the step's dK GEMM is done."""
    return START + (step + 1) * STEP - 0.5


def _list_load() -> list[Bar]:
    bars = [Bar("LOAD", 0.1, 1.0, MOVE, "Q, LSE 0"), Bar("LOAD", 1.0, 1.7, MOVE, "K, V")]
    bars += [Bar("LOAD", 1.7, 2.4, MOVE, "dO 0"), Bar("LOAD", 2.4, 3.5, MOVE, "Q, dO 1")]
    for step in range(2, NUM_STEPS):
        start = START + (step - 1) * STEP
        bars.append(Bar("LOAD", start, start + 1.2, MOVE, f"Q, dO {step}"))
    claim = _staged(NUM_STEPS - 1) + 0.4
    epilogue_end = START + NUM_STEPS * STEP + 1.7
    bars += [Bar("LOAD", claim, claim + 0.9, MOVE, "next Q 0"), Bar("LOAD", claim + 0.9, epilogue_end, WAIT, "ring_KV")]
    return [*bars, Bar("LOAD", epilogue_end, epilogue_end + 1.6, MOVE, "next K, V, dO 0")]


def _list_mma() -> list[Bar]:
    row, bars = "MMA warpgroups", []
    for step in range(NUM_STEPS):
        start = START + step * STEP
        bars.append(Bar(row, start, start + STEP, WORK, f"step {step}\nS, dP, dV, dQ, dK"))
    end = START + NUM_STEPS * STEP
    bars.append(Bar(row, end, end + 1.7, MOVE, "epilogue\ndK, dV"))
    return [*bars, Bar(row, end + 3.3, end + 5.6, WORK, "next tile, step 0")]


def _list_stores() -> list[Bar]:
    """Each store warp waits for its turn, adds what is staged, and hands the turn on behind the other's step."""
    bars: list[Bar] = []
    for step in range(NUM_STEPS):
        row = ("STORE_DQ_EVEN", "STORE_DQ_ODD")[step % 2]
        ready = 0.3 if step < 2 else _staged(step - 2) + 2.9
        add = _staged(step)
        bars.append(Bar(row, ready, add, POLL, f"turn {step}?" if step > 1 else f"wait for the turn of step {step}"))
        bars.append(Bar(row, add, add + 1.1, MOVE, f"add {step}"))
        bars.append(Bar(row, add + 1.1, add + 2.9, HAND_OVER, "complete,\nfence, release"))
    return bars


def _list_conversions() -> list[Bar]:
    """As if this work tile were the last to add at steps 1 and 3."""
    bars = []
    for step in (1, 3):
        start = _staged(step) + 3.0
        bars.append(Bar("CONVERT_DQ", start, start + 2.6, WORK, f"dQ tile of step {step}\nto the output dtype"))
    return bars
