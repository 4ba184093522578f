"""The life of a work tile as a timeline, from claim to claim. Schematic: lengths are chosen to be readable."""

from typing import Any, NamedTuple

ROWS = ("LOAD", "MMA warpgroups", "STORE_DQ_EVEN", "STORE_DQ_ODD")
NUM_STEPS = 4
STEP = 3.2  # length of a step on the MMA warpgroups
START = 2.4  # when the first Q, dO, K and V have arrived
READ = 0.9  # until what is staged has been read, and the staging buffer goes to the other store warp
HAND_OVER = 1.5  # from then on, until the turn has been passed on
FINISHED = 2  # the step at which this work tile is the last to add
FINISH = 0.8  # add the sum so far, scale, round
CLAIM = 0.65  # take a number, decode it, publish the work tile
EPILOGUE = 1.7  # write dK and dV to shared memory, start their copies
SENT = 0.7  # until these have read it
POLL, WAIT, WORK, PASS_ON, MOVE = "#f2cf8d", "#eeeeee", "#9ecae1", "#fdae6b", "#c7e9c0"


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
    claims = {
        0.0: "claim",
        _get_claim(): "claim of the next tile",
    }
    for time, text in claims.items():
        axes.axvline(time, color="#b2182b", linewidth=1, linestyle=(0, (4, 2)), zorder=0)
        axes.text(time + 0.08, -0.62, text, color="#b2182b", fontsize=8, ha="left", va="center")
    axes.set_yticks(range(len(ROWS)), ROWS, fontsize=8)
    end = _get_end() + EPILOGUE + SENT + 2.5
    axes.set(xlim=(-0.3, end), ylim=(len(ROWS) - 0.5, -0.9), xticks=[], xlabel="time (schematic)")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


def _staged(step: int) -> float:
    """When the dQ partial of a step is in the staging buffer: before the step's dK GEMM is done."""
    return START + (step + 1) * STEP - 0.5


def _get_claim() -> float:
    """When a store warp comes to the last step; the turn is near."""
    return _staged(NUM_STEPS - 3) + READ + HAND_OVER


def _get_end() -> float:
    """When the last step is done."""
    return START + NUM_STEPS * STEP


def _list_load() -> list[Bar]:
    bars = [Bar("LOAD", 0.1, 1.0, MOVE, "Q, dO 0"), Bar("LOAD", 1.0, START, MOVE, "K, V")]
    bars.append(Bar("LOAD", START, START + 1.1, MOVE, "Q, dO 1"))
    for step in range(2, NUM_STEPS):
        start = START + (step - 1) * STEP  # when the step two before is done
        bars.append(Bar("LOAD", start, start + 1.1, MOVE, f"Q, dO {step}"))
    claimed, end = _get_claim() + CLAIM, _get_end()
    bars.append(Bar("LOAD", claimed, claimed + 0.6, MOVE, "K, V\nto L2"))
    room = end - STEP  # when the last step but one is done
    bars.append(Bar("LOAD", room, room + 1.1, MOVE, "next\nQ, dO 0"))
    bars.append(Bar("LOAD", end, end + 1.2, MOVE, "next K, V"))
    return [*bars, Bar("LOAD", end + 1.2, end + 2.6, MOVE, "next Q, dO 1")]


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
    written = _get_end() + EPILOGUE
    bars.append(Bar(row, _get_end(), written, MOVE, "epilogue\ndK, dV"))
    bars.append(Bar(row, written, written + SENT, WAIT, "sent?"))
    return [*bars, Bar(row, written + SENT, written + SENT + 2.4, WORK, "next tile, step 0")]


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
            bars.append(Bar(row, idle, idle + 0.8, POLL, f"turn {step}?"))
            bars.append(Bar(row, idle + 0.8, start, WAIT, "buffer?"))
            bars.append(Bar(row, start, start + 0.7, MOVE, "sum"))
            bars.append(Bar(row, start + 0.7, staged, WAIT, "dQFull?"))
            bars.append(Bar(row, staged, staged + READ, MOVE, "store\ndQ"))
            continue
        if step == NUM_STEPS - 1:
            claim = _get_claim()
            bars.append(Bar(row, claim, claim + CLAIM, MOVE, "claim"))
            idle = claim + CLAIM
        if step:
            bars.append(Bar(row, idle, start, WAIT, "buffer?"))
        bars.append(Bar(row, start, staged, POLL, f"turn {step}?"))
        bars.append(Bar(row, staged, staged + READ, MOVE, f"add {step}"))
        idle_since[step % 2] = staged + READ + HAND_OVER
        bars.append(Bar(row, staged + READ, idle_since[step % 2], PASS_ON, "complete,\nfence, release"))
    return bars
