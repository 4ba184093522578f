"""The life of a work tile as a timeline, from claim to claim. Schematic: lengths are chosen to be readable."""

from typing import Any, NamedTuple

ROWS = ("LOAD", "MMA warpgroups", "STORE_DQ_EVEN", "STORE_DQ_ODD")
NUM_STEPS = 4
STEP = 3.0  # length of a step on the MMA warpgroups
START = 2.4  # when the first Q, K and V have arrived
READ = 0.9  # until what is staged has been read, and the staging buffer goes to the other store warp
FINISHED = 2  # the step at which this work tile is the last to add
FINISH = 0.8  # add the sum so far, scale, round
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

    figure = Figure(figsize=(12, 3.3), layout="constrained")
    axes = figure.add_subplot()
    for bar in [*_list_load(), *_list_mma(), *_list_stores()]:
        y = ROWS.index(bar.row)
        axes.barh(y, bar.end - bar.start, left=bar.start, height=0.66, color=bar.color, edgecolor="#444444", lw=0.6)
        axes.text((bar.start + bar.end) / 2, y, bar.text, ha="center", va="center", fontsize=7)
    claim = _staged(NUM_STEPS - 1) + 0.1
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
    claim = _staged(NUM_STEPS - 1) + 0.15
    epilogue_end = START + NUM_STEPS * STEP + 1.7
    bars += [Bar("LOAD", claim, claim + 0.9, MOVE, "next Q 0"), Bar("LOAD", claim + 0.9, epilogue_end, WAIT, "ring_KV")]
    return [*bars, Bar("LOAD", epilogue_end, epilogue_end + 1.6, MOVE, "next K, V, dO 0")]


def _list_mma() -> list[Bar]:
    row, bars = "MMA warpgroups", []
    for step in range(NUM_STEPS):
        start = START + step * STEP
        if step == FINISHED:
            ends = (_staged(step) - FINISH, _staged(step), start + STEP)
            bars.append(Bar(row, start, ends[0], WORK, f"step {step}\nS, dP, dV, dQ"))
            bars.append(Bar(row, ends[0], ends[1], MOVE, "finish\ndQ"))
            bars.append(Bar(row, ends[1], ends[2], WORK, "dK"))
        else:
            bars.append(Bar(row, start, start + STEP, WORK, f"step {step}\nS, dP, dV, dQ, dK"))
    end = START + NUM_STEPS * STEP
    bars.append(Bar(row, end, end + 1.7, MOVE, "epilogue\ndK, dV"))
    return [*bars, Bar(row, end + 3.3, end + 5.6, WORK, "next tile, step 0")]


def _list_stores() -> list[Bar]:
    """A store warp gets the staging buffer from the other, waits for its turn, adds, and hands over behind its step."""
    bars: list[Bar] = []
    idle_since = {0: 0.3, 1: 0.3}  # of each parity
    for step in range(NUM_STEPS):
        row = ("STORE_DQ_EVEN", "STORE_DQ_ODD")[step % 2]
        staged = _staged(step)
        start = _staged(step - 1) + READ if step else 0.3
        idle = idle_since[step % 2]
        if step == FINISHED:
            bars.append(Bar(row, idle, idle + 0.7, POLL, f"turn {step}?"))
            bars.append(Bar(row, idle + 0.7, start, WAIT, "buffer?"))
            bars.append(Bar(row, start, start + 0.7, MOVE, "sum"))
            bars.append(Bar(row, start + 0.7, staged, WAIT, "dQFull?"))
            bars.append(Bar(row, staged, staged + READ, MOVE, "store\ndQ"))
            continue
        if step:
            bars.append(Bar(row, idle, start, WAIT, "buffer?"))
        bars.append(Bar(row, start, staged, POLL, f"turn {step}?"))
        bars.append(Bar(row, staged, staged + READ, MOVE, f"add {step}"))
        idle_since[step % 2] = staged + READ + 1.6
        bars.append(Bar(row, staged + READ, staged + READ + 1.6, HAND_OVER, "complete,\nfence, release"))
    return bars
