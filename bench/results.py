"""The results file: environment, method, ceilings, one record per timed candidate, and who was not timed and why.

Host only. The file is replaced as a whole after every cell, so an interrupted run keeps what it had.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from bench.cells import Cell

FORMAT = 1
REGIMES = ("burst", "sustained")
# a file may be continued, and two runs belong together, only where these agree
IDENTITY = ("gpu", "sm_count", "driver", "torch", "dsl", "commit")
FAILED = "failed"
NOT_APPLICABLE = "not applicable"


class Key(NamedTuple):
    """Who: an implementation in one of its modes, ours with the schedule that ran."""

    implementation: str
    mode: str
    schedule: str | None

    @property
    def label(self) -> str:
        return f"{self.implementation} {self.schedule or self.mode}"


@dataclass(frozen=True)
class Record:
    """One timed candidate in one cell and regime; its gradients and bits were checked in the same run.

    Attributes:
        implementation: 'cute-dash', 'flash-attn-4' or 'cudnn'; versions are in the environment.
        mode: 'det' or 'nondet'.
        schedule: name of the schedule that ran, for cute-dash only.
        regime: 'burst' or 'sustained'.
        ms_median: ms per call. Burst: median over the rounds. Sustained: mean after the first second.
        ms_min, ms_max: least and greatest round (burst) or batch of calls (sustained).
        tflops: from ms_median.
        ratio_to_best_nondet: tflops over the best non-deterministic candidate's, same cell and regime; None without
            one.
        max_rel_err: greatest relative error of dq, dk, dv against fp64, over the streams that were checked.
        bitwise_runs: runs whose dq, dk and dv had the bits of the first run, itself included.
        varlen: sequences of different lengths, see `bench.cells.draw_lengths`; seqlen_q and seqlen_k are their mean.
    """

    implementation: str
    mode: str
    schedule: str | None
    head_dim: int
    head_dim_v: int
    mask: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    dtype: str
    regime: str
    ms_median: float
    ms_min: float
    ms_max: float
    tflops: float
    ratio_to_best_nondet: float | None
    max_rel_err: float
    bitwise_runs: int
    varlen: bool = False

    @property
    def key(self) -> Key:
        return Key(self.implementation, self.mode, self.schedule)

    @property
    def cell(self) -> Cell:
        kv_heads = None if self.kv_heads == self.heads else self.kv_heads
        head_dim_v = None if self.head_dim_v == self.head_dim else self.head_dim_v
        extents = self.seqlen_q, self.batch, self.heads
        return Cell(self.head_dim, self.mask, *extents, self.dtype, kv_heads, head_dim_v, self.varlen)


@dataclass(frozen=True)
class Untimed:
    """A candidate that has no time in a cell.

    Attributes:
        verdict: 'failed' (the gate refused it) or 'not applicable' (it does not implement the shape).
        reason: in words.
    """

    implementation: str
    mode: str
    schedule: str | None
    head_dim: int
    mask: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    dtype: str
    verdict: str
    reason: str
    kv_heads: int | None = None
    head_dim_v: int | None = None
    varlen: bool = False

    @classmethod
    def of(cls, key: Key, cell: Cell, verdict: str, reason: str) -> "Untimed":
        return cls(
            implementation=key.implementation,
            mode=key.mode,
            schedule=key.schedule,
            head_dim=cell.head_dim,
            mask=cell.mask,
            batch=cell.batch,
            seqlen_q=cell.seqlen,
            seqlen_k=cell.seqlen,
            heads=cell.heads,
            dtype=cell.dtype,
            verdict=verdict,
            reason=reason,
            kv_heads=cell.kv_heads,
            head_dim_v=cell.head_dim_v,
            varlen=cell.varlen,
        )

    @property
    def key(self) -> Key:
        return Key(self.implementation, self.mode, self.schedule)

    @property
    def cell(self) -> Cell:
        extents = self.seqlen_q, self.batch, self.heads
        return Cell(self.head_dim, self.mask, *extents, self.dtype, self.kv_heads, self.head_dim_v, self.varlen)


@dataclass
class Results:
    """Everything a results file holds.

    Attributes:
        environment: gpu, sm_count, driver, torch, dsl, commit, date, command; also peers' versions and who is missing.
        method: how it was timed, in numbers and words.
        ceilings: 'gemm_tflops_burst', 'gemm_tflops_sustained', 'copy_tb_per_s', those that were measured.
        records, untimed: one entry per cell, candidate (and regime).
    """

    environment: dict[str, Any]
    method: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    untimed: list[Untimed] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """Cells in the order of their first entry."""
        return list(dict.fromkeys([*(r.cell for r in self.records), *(u.cell for u in self.untimed)]))

    def replace_cell(self, cell: Cell, records: Iterable[Record], untimed: Iterable[Untimed]) -> None:
        """Puts a cell's entries in place of those it had."""
        self.records = [r for r in self.records if r.cell != cell] + list(records)
        self.untimed = [u for u in self.untimed if u.cell != cell] + list(untimed)

    def is_complete(self, cell: Cell, keys: Collection[Key], regimes: Iterable[str]) -> bool:
        """Whether every candidate has a record in each regime, or a reason for having none."""
        settled = {u.key for u in self.untimed if u.cell == cell}
        timed = {(r.key, r.regime) for r in self.records if r.cell == cell}
        return all(key in settled or (key, regime) in timed for regime in regimes for key in keys)

    def save(self, path: Path) -> None:
        """Writes the file, in one step for whoever reads it meanwhile."""
        content = {
            "format": FORMAT,
            "environment": self.environment,
            "method": self.method,
            "ceilings": self.ceilings,
            "records": [asdict(r) for r in self.records],
            "untimed": [asdict(u) for u in self.untimed],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        draft.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Reads a file that `save` wrote.

        Raises:
            ValueError: not such a file, naming what is wrong.
        """
        try:
            content = json.loads(path.read_text())
        except ValueError as error:  # neither JSON nor, perhaps, text
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a results file of format {FORMAT}")
        if missing := sorted({f.name for f in fields(cls)} - content.keys()):
            raise ValueError(f"{path} has no {', '.join(missing)}")
        return cls(
            content["environment"],
            content["method"],
            content["ceilings"],
            [_from_dict(Record, entry, path) for entry in content["records"]],
            [_from_dict(Untimed, entry, path) for entry in content["untimed"]],
        )


def check_same_environment(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the difference, if a run in `new` must not continue a file made in `old`."""
    for name in IDENTITY:
        if old.get(name) != new.get(name):
            raise ValueError(f"the file was made with {name}={old.get(name)!r}, this run has {new.get(name)!r}")


def merge(files: Iterable[Results]) -> Results:
    """One Results from several; a cell comes whole from the last file that has it, so that ratios stay within a run."""
    files = list(files)
    merged = Results(files[-1].environment, files[-1].method, files[-1].ceilings)
    for results in files:
        for cell in results.cells():
            merged.replace_cell(
                cell,
                [r for r in results.records if r.cell == cell],
                [u for u in results.untimed if u.cell == cell],
            )
    return merged


Entry = TypeVar("Entry", Record, Untimed)


def _from_dict(kind: type[Entry], entry: Mapping[str, Any], path: Path) -> Entry:
    expected = {f.name for f in fields(kind)}
    required = {f.name for f in fields(kind) if f.default is MISSING}
    if not required <= entry.keys() <= expected:
        wrong = sorted((required - entry.keys()) | (entry.keys() - expected))
        raise ValueError(f"{path}: a {kind.__name__.lower()} has missing or unknown fields: {', '.join(wrong)}")
    return kind(**entry)
