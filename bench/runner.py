"""The run over the cells: gate every candidate, time those that pass in alternation, write the file after each cell."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from bench.cells import Cell
from bench.gate import Verdict, check_candidate
from bench.implementations import Candidate
from bench.results import FAILED, Key, Record, Results, Untimed
from bench.timing import BurstPlan, Call, Clock, Timing, order_in_round, time_burst, time_sustained

if TYPE_CHECKING:
    from bench.reference import Inputs, Yardstick

Log = Callable[[str], None]


class Device(Protocol):
    """What a run needs of the machine; `bench.device.CudaDevice` is the real one."""

    clock: Clock

    def make_inputs(self, cell: Cell) -> "list[Inputs]":
        """Sets of inputs between which the timed calls rotate."""

    def make_yardstick(self, inputs: "Inputs") -> "Yardstick":
        """What the gradients for these inputs are compared with."""

    def check_alive(self) -> None:
        """Raises if the device has become unusable."""

    def ceilings(self, sustained_s: float | None) -> dict[str, float]:
        """Rates that no candidate can exceed."""


@dataclass(frozen=True)
class Plan:
    """How the cells are measured.

    Attributes:
        bits_runs: runs whose bits are compared.
        burst: the burst regime.
        sustained_s: seconds per candidate in the sustained regime; None leaves it out.
        max_seconds: no cell is started later than this after `started_s`; None: no limit.
        started_s: `time.monotonic()` at the start of the command.
    """

    bits_runs: int = 10
    burst: BurstPlan = BurstPlan()
    sustained_s: float | None = None
    max_seconds: float | None = None
    started_s: float = 0.0

    @property
    def regimes(self) -> tuple[str, ...]:
        return ("burst",) if self.sustained_s is None else ("burst", "sustained")

    def describe(self) -> dict[str, Any]:
        """For the results file, in numbers and words."""
        return {
            "timed": "whole backward call; outputs and workspaces from torch's caching allocator on every call",
            "bits_runs": self.bits_runs,
            "burst": f"median of {self.burst.rounds} rounds, each about {self.burst.round_ms} ms of back-to-back calls "
            "between two CUDA events; candidates alternate, everybody follows everybody else",
            "sustained_s": self.sustained_s,
            "l2": "not flushed; where inputs fit in L2 the calls rotate among several sets of them",
        }


FindCandidates = Callable[[Cell], tuple[list[Candidate], list[Untimed]]]


@dataclass
class Run:
    """One run over cells.

    Attributes:
        device: where it runs.
        find_candidates: candidates of a cell, and those that cannot implement it.
        plan: how cells are measured.
        results: filled cell by cell.
        path: where results are written after each cell; None: nowhere.
        log: takes one progress line at a time.
        now: seconds, monotonic.
    """

    device: Device
    find_candidates: FindCandidates
    plan: Plan
    results: Results
    path: Path | None
    log: Log
    now: Callable[[], float] = monotonic

    def all_cells(self, cells: Sequence[Cell]) -> None:
        """Measures the cells that the results do not have complete, until the time is used up."""
        self._measure_ceilings()
        for cell_idx, cell in enumerate(cells):
            candidates, untimed = self.find_candidates(cell)
            keys = [c.key for c in candidates]
            if keys and self.results.is_complete(cell, keys, self.plan.regimes):
                self.log(f"{cell.label}: already in the file")
                continue
            if self._seconds_left() <= 0:
                self.log(f"--max-seconds is used up: {len(cells) - cell_idx} of {len(cells)} cells not run")
                return
            self._one_cell(cell, cell_idx, candidates, untimed)

    def _one_cell(self, cell: Cell, cell_idx: int, candidates: list[Candidate], untimed: list[Untimed]) -> None:
        inputs = self.device.make_inputs(cell)
        verdicts = {c.key: v for c, v in self._gate(cell, candidates, inputs[0])}
        failed = [Untimed.of(key, cell, FAILED, v.reason) for key, v in verdicts.items() if v.reason is not None]
        passed = [c for c in candidates if verdicts[c.key].passed]
        calls = {c.key: _rotating_call(c, inputs) for c in passed}
        records = []
        for regime, timings in self._time(calls, cell_idx).items():
            records += [make_record(cell, key, regime, timings[key], verdicts[key]) for key in timings]
        records = with_ratios(records)
        self.results.replace_cell(cell, records, [*untimed, *failed])
        self._save()
        self._log_cell(cell, records)

    def _gate(self, cell: Cell, candidates: list[Candidate], inputs: "Inputs") -> list[tuple[Candidate, Verdict]]:
        yardstick = self.device.make_yardstick(inputs)
        outcome = []
        for candidate in candidates:
            # before the first launch, so that a hang or a crash has a name
            self.log(f"{cell.label}: checking {candidate.key.label}")
            verdict = check_candidate(
                partial(candidate.prepare, inputs), yardstick, candidate.deterministic, self.plan.bits_runs
            )
            if not verdict.passed:
                self.log(f"{cell.label}: {candidate.key.label} FAILED, no time: {verdict.reason}")
                self.device.check_alive()
            outcome.append((candidate, verdict))
        return outcome

    def _time(self, calls: dict[Key, Call], cell_idx: int) -> dict[str, dict[Key, Timing]]:
        timings = {"burst": time_burst(calls, self.device.clock, self.plan.burst)}
        if self.plan.sustained_s is not None:
            timings["sustained"] = {
                key: time_sustained(calls[key], self.device.clock, self.plan.sustained_s)
                for key in order_in_round(list(calls), cell_idx)
            }
        return timings

    def _measure_ceilings(self) -> None:
        wanted = {"gemm_tflops_burst", "copy_tb_per_s"}
        if self.plan.sustained_s is not None:
            wanted.add("gemm_tflops_sustained")
        if not wanted <= self.results.ceilings.keys():
            self.results.ceilings.update(self.device.ceilings(self.plan.sustained_s))
            self.log("ceilings: " + ", ".join(f"{name} {x:.4g}" for name, x in self.results.ceilings.items()))
            self._save()

    def _log_cell(self, cell: Cell, records: Sequence[Record]) -> None:
        for regime in self.plan.regimes:
            times = ", ".join(f"{r.key.label} {r.tflops:.0f}" for r in records if r.regime == regime)
            self.log(f"{cell.label}: {regime} TFLOPS: {times or 'nothing passed the gate'}")

    def _seconds_left(self) -> float:
        if self.plan.max_seconds is None:
            return float("inf")
        return self.plan.started_s + self.plan.max_seconds - self.now()

    def _save(self) -> None:
        if self.path is not None:
            self.results.save(self.path)


def make_record(cell: Cell, key: Key, regime: str, timing: Timing, verdict: Verdict) -> Record:
    """The record of one timed candidate, still without its ratio."""
    return Record(
        implementation=key.implementation,
        mode=key.mode,
        schedule=key.schedule,
        head_dim=cell.head_dim,
        head_dim_v=cell.value_dim,
        mask=cell.mask,
        batch=cell.batch,
        seqlen_q=cell.seqlen,
        seqlen_k=cell.seqlen,
        heads=cell.heads,
        kv_heads=cell.num_kv_heads,
        dtype=cell.dtype,
        regime=regime,
        ms_median=round(timing.ms, 5),
        ms_min=round(timing.ms_min, 5),
        ms_max=round(timing.ms_max, 5),
        tflops=round(cell.tflops(timing.ms), 2),
        ratio_to_best_nondet=None,
        max_rel_err=verdict.max_rel_err,
        bitwise_runs=verdict.bitwise_runs,
        varlen=cell.varlen,
    )


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """A cell's records with their ratio to the best non-deterministic one of the same regime filled in."""
    best: dict[str, float] = {}
    for r in records:
        if r.mode == "nondet":
            best[r.regime] = max(best.get(r.regime, 0.0), r.tflops)
    return [
        replace(r, ratio_to_best_nondet=round(r.tflops / best[r.regime], 4)) if r.regime in best else r for r in records
    ]


def _rotating_call(candidate: Candidate, inputs: "Sequence[Inputs]") -> Call:
    """A call that takes the next set of inputs every time."""
    calls = [candidate.prepare(x) for x in inputs]
    if len(calls) == 1:
        return calls[0]
    turns = cycle(calls)
    return lambda: next(turns)()
