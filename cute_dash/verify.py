"""The proof that the bits hold: gradients of one problem, computed again and again under changing conditions, compared.

Host, with torch. The harness knows neither the GPU nor the kernel: it compares what a `Subject` returns, and a
condition says when and how it is asked. Here are the conditions that make sense on any device and those of the CPU
emulator; `cute_dash.verify_gpu` has those of a GPU. Tensors are (batch, seqlen, num_heads, head_dim), and with
sequences of different lengths (1, total tokens, num_heads, head_dim).

A proof needs its negative control: the same harness must see the comparator `unordered` change its bits.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from tabulate import tabulate
from torch import Tensor

from cute_dash import emulator, registry, validation
from cute_dash.config import describe_head_dims
from cute_dash.interface import (
    attention_backward,
    attention_varlen_backward,
    flash_attn_func,
    flash_attn_varlen_func,
)
from cute_dash.problem import ProblemShape
from cute_dash.registry import UnsupportedShapeError
from cute_dash.schedule import Schedule, Selector, needs_one_cta
from cute_dash.testing import as_bits, random_inputs

GRADIENTS = ("dq", "dk", "dv")
CONTROL = "unordered"
LONG = 16384  # tokens: beyond the last row of a selector's table that asks for a length
Gradients = tuple[Tensor, ...]


# Comparison


@dataclass(frozen=True)
class Difference:
    """The first element that differs, in the order batch, row, head, column, and how many do.

    Attributes:
        gradient: dq, dk or dv.
        batch, row, head, column: where: sequence, token (of all, where sequences are packed), head, element of the head
            dim.
        expected, found: the two values.
        count, size: elements of this gradient that differ, and all of them.
    """

    gradient: str
    batch: int
    row: int
    head: int
    column: int
    expected: float
    found: float
    count: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.gradient} differs in {self.count} of {self.size} elements, first at batch {self.batch}, head "
            f"{self.head}, row {self.row}, column {self.column}: {self.expected!r} before, {self.found!r} now"
        )


def find_difference(found: Gradients, expected: Gradients) -> Difference | None:
    """The first difference between the bits of two sets of gradients (dq, dk, dv), or None.

    0.0 and -0.0 differ; equal NaNs do not.

    Raises:
        ValueError: the shapes or dtypes are not the same.
    """
    for name, a, b in zip(GRADIENTS, found, expected, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"{name} is {tuple(a.shape)} {a.dtype}, compared with {tuple(b.shape)} {b.dtype}")
        if torch.equal(as_bits(a), as_bits(b)):
            continue
        differs = as_bits(a) != as_bits(b)
        batch, row, head, column = place = tuple(differs.nonzero()[0].tolist())
        return Difference(
            name, batch, row, head, column, b[place].item(), a[place].item(), int(differs.sum()), a.numel()
        )
    return None


class Sample(NamedTuple):
    """One comparison to be made.

    Attributes:
        found, expected: gradients that must have equal bits.
        in_force: whether the condition was seen to hold while `found` was computed.
        what: what was special about it, for the report of a difference.
    """

    found: Gradients
    expected: Gradients
    in_force: bool = True
    what: str = ""


@dataclass
class Outcome:
    """Comparisons under one condition: how many, how many were equal and how often the condition was in force."""

    runs: int = 0
    equal: int = 0
    in_force: int = 0
    first: Difference | None = None
    where: str = ""

    def add(self, sample: Sample) -> bool:
        """Compares; True if the bits are equal."""
        difference = find_difference(sample.found, sample.expected)
        self.runs += 1
        self.in_force += sample.in_force
        if difference is None:
            self.equal += 1
        elif self.first is None:
            self.first, self.where = difference, f"run {self.runs}" + (f", {sample.what}" if sample.what else "")
        return difference is None

    @property
    def all_equal(self) -> bool:
        return self.equal == self.runs

    def __str__(self) -> str:
        if not self.runs:
            return "-"
        return f"{self.equal}/{self.runs}" + (f" ({self.in_force} held)" if self.in_force < self.runs else "")


# Subjects


class Subject(Protocol):
    """One problem under one schedule, with the gradients that every other run is compared with."""

    @property
    def batch(self) -> int:
        """Sequences."""

    @property
    def batch_invariant(self) -> bool:
        """Whether a sequence's bits must not depend on the batch around it."""

    @property
    def expected(self) -> Gradients:
        """dq, dk, dv of the first run."""

    def backward(self) -> Gradients:
        """dq, dk, dv, computed anew."""

    def select(self, sequences: Sequence[int]) -> "Subject":
        """The problem of some of the sequences, in the given order."""

    def select_gradients(self, sequences: Sequence[int]) -> Gradients:
        """What of `expected` belongs to that problem."""


@dataclass(frozen=True)
class Problem:
    """Inputs of a backward call; on CPU tensors it is the emulator's.

    Attributes:
        dout, q, k, v, out, lse: as `attention_backward` takes them.
        schedule: as asked for; `concrete` is what runs.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    softmax_scale: float
    causal: bool
    window_size: tuple[int, int]
    schedule: "str | Schedule"
    dlse: Tensor | None = None  # gradient of the LSE
    _first: list[Gradients] = field(default_factory=list, compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order in which `attention_backward` takes them."""
        return self.dout, self.q, self.k, self.v, self.out, self.lse

    @property
    def concrete(self) -> Schedule:
        """The schedule that runs.

        Raises:
            ValueError: it cannot implement this problem, or not on this device.
        """
        return validation.resolve_schedule(self.schedule, self.q, self.k, self.causal, self.window_size)

    def run_forward(self) -> "Problem":
        """This problem with the out and LSE of the op.

        Raises:
            ValueError: what the op refuses, before anything is launched.
        """
        _ = self.concrete
        options = self.softmax_scale, self.causal, self.window_size
        out, lse = flash_attn_func(self.q, self.k, self.v, *options, schedule=self.schedule, return_lse=True)
        return replace(self, out=out, lse=lse)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def batch_invariant(self) -> bool:
        return self.concrete.batch_invariant

    @property
    def expected(self) -> Gradients:
        if not self._first:
            self._first.append(self.backward())
        return self._first[0]

    def backward(self) -> Gradients:
        options = self.softmax_scale, self.causal, self.window_size
        return attention_backward(*self.tensors, *options, schedule=self.schedule, dlse=self.dlse)

    def select(self, sequences: Sequence[int]) -> "Problem":
        names = ("dout", "q", "k", "v", "out", "lse", *(["dlse"] if self.dlse is not None else []))
        parts = {name: getattr(self, name)[list(sequences)] for name in names}
        # a selector that does not promise the contrary may choose another schedule for another batch
        schedule = self.schedule if registry.load(self.schedule).batch_invariant else self.concrete
        return replace(self, **parts, schedule=schedule, _first=[])

    def select_gradients(self, sequences: Sequence[int]) -> Gradients:
        return tuple(gradient[list(sequences)] for gradient in self.expected)


@dataclass(frozen=True)
class EmulatedProblem(Problem):
    """The same on the CPU emulator, where every run interleaves the CTAs in another random way."""

    _seeds: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def backward(self) -> Gradients:
        return emulator.backward(
            *self.tensors,
            self.softmax_scale,
            self.causal,
            self.concrete,
            window_size=self.window_size,
            interleaving=next(self._seeds),
            dlse=self.dlse,
        )


@dataclass(frozen=True)
class VarlenProblem(Problem):
    """Sequences of different lengths, one behind the other, and tokens that are nobody's behind them.

    Tensors have a batch dim of 1: (1, total tokens, num_heads, head_dim), LSE (1, num_heads, total_q).

    Attributes:
        lengths: queries and keys of each sequence.
        max_seqlens: the greatest lengths, which choose the kind of mask, and of `auto` the schedule.
    """

    lengths: tuple[tuple[int, int], ...] = ()
    max_seqlens: tuple[int, int] = (0, 0)

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, on the device."""
        starts_q, starts_k = (
            torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32, device=self.q.device)
            for side in zip(*self.lengths, strict=True)
        )
        return starts_q, starts_k

    @property
    def longest(self) -> ProblemShape:
        return validation.get_longest_shape(self.q[0], self.k[0], self.max_seqlens, self.causal, self.window_size)

    @property
    def concrete(self) -> Schedule:
        num_tokens = self.q.shape[1], self.k.shape[1]
        return validation.resolve_varlen_schedule(self.schedule, self.longest, num_tokens, len(self.lengths))

    def run_forward(self) -> "VarlenProblem":
        schedule = registry.load(self.schedule)
        if not isinstance(schedule, Selector) and not needs_one_cta(schedule):
            reason = "may need several resident CTAs, which sequences of different lengths do not allow"
            raise UnsupportedShapeError(schedule.name, self.longest, reason)
        _ = self.concrete
        _, q, k, v, _, _ = self.packed
        out, lse = flash_attn_varlen_func(
            q,
            k,
            v,
            *self.cu_seqlens,
            *self.max_seqlens,
            self.softmax_scale,
            self.causal,
            self.window_size,
            schedule=self.schedule,
            return_lse=True,
        )
        return replace(self, out=out[None], lse=lse[None])

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def batch_invariant(self) -> bool:
        """Under every schedule: each sequence is ordered as a batch of one."""
        return True

    @property
    def packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dout, q, k, v, out and LSE without the batch dim."""
        dout, q, k, v, out, lse = (x[0] for x in self.tensors)
        return dout, q, k, v, out, lse

    def backward(self) -> Gradients:
        grads = attention_varlen_backward(
            *self.packed,
            *self.cu_seqlens,
            *self.max_seqlens,
            self.softmax_scale,
            self.causal,
            self.window_size,
            schedule=self.schedule,
            dlse=None if self.dlse is None else self.dlse[0],
        )
        return tuple(grad[None] for grad in grads)

    def select(self, sequences: Sequence[int]) -> "VarlenProblem":
        """The others' tokens are behind, where they are nobody's: as many in all, so that the kind of mask stays."""
        others = [i for i in range(self.batch) if i not in sequences]
        queries, keys = (self._list_tokens(side, [*sequences, *others]) for side in (0, 1))
        return self._take_tokens(queries, keys, tuple(self.lengths[i] for i in sequences))

    def select_gradients(self, sequences: Sequence[int]) -> Gradients:
        selected = []
        for side, gradient in zip((0, 1, 1), self.expected, strict=True):
            tokens = self._list_tokens(side, sequences)
            part = torch.zeros_like(gradient)
            part[:, : len(tokens)] = gradient[:, tokens]
            selected.append(part)
        return tuple(selected)

    def with_own_longest(self, sequence: int) -> "VarlenProblem":
        """A sequence alone, which then is the longest."""
        return replace(self.select([sequence]), max_seqlens=self.lengths[sequence])

    def with_long_neighbours(self, sequence: int) -> "VarlenProblem":
        """A sequence packed with one of LONG keys and one of LONG queries, made of all tokens again and again."""
        lengths = (self.lengths[sequence], (1, LONG), (LONG, 1))
        queries, keys = (
            torch.cat([self._list_tokens(side, [sequence]), torch.arange(LONG + 1, device=x.device) % x.shape[1]])
            for side, x in enumerate((self.q, self.k))
        )
        return self._take_tokens(queries, keys, lengths, max_seqlens=(LONG, LONG))

    def _take_tokens(
        self, queries: Tensor, keys: Tensor, lengths: tuple[tuple[int, int], ...], **changes: Any
    ) -> "VarlenProblem":
        """The problem of the queries and keys of these indices."""
        parts: dict[str, Any] = {name: getattr(self, name)[:, queries] for name in ("dout", "q", "out")}
        parts |= {name: getattr(self, name)[:, keys] for name in ("k", "v")}
        parts |= {"lse": self.lse[..., queries], "dlse": None if self.dlse is None else self.dlse[..., queries]}
        return replace(self, **parts, lengths=lengths, _first=[], **changes)

    def _list_tokens(self, side: int, sequences: Sequence[int]) -> Tensor:
        """Indices of the queries (side 0) or keys of sequences."""
        starts = self.cu_seqlens[side].tolist()
        ranges = [torch.arange(starts[i], starts[i + 1], device=self.q.device) for i in sequences]
        return torch.cat(ranges)


@dataclass(frozen=True)
class EmulatedVarlenProblem(VarlenProblem):
    """The same on the CPU emulator, in random interleavings."""

    _seeds: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    def backward(self) -> Gradients:
        grads = emulator.backward_varlen(
            *self.packed,
            *self.cu_seqlens,
            self.softmax_scale,
            self.longest.causal,
            self.concrete,
            window=self.longest.window,
            interleaving=next(self._seeds),
            dlse=None if self.dlse is None else self.dlse[0],
        )
        return tuple(grad[None] for grad in grads)


# Conditions


class Condition(Protocol):
    """A way of running a subject; called once per round.

    A condition that does not apply to a subject yields nothing.
    """

    def __call__(self, subject: Subject, num_runs: int) -> Iterator[Sample]:
        """About `num_runs` comparisons."""


def plain(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """One run after the other and nothing else."""
    for _ in range(num_runs):
        yield Sample(subject.backward(), subject.expected)


def other_batches(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """Batch-invariant schedules: the batch reversed, rotated, each sequence alone keep the bits of each sequence."""
    if not subject.batch_invariant or subject.batch < 2:
        return
    everything = list(range(subject.batch))
    batches = [everything[::-1], everything[1:] + everything[:1], *([sequence] for sequence in everything)]
    for sequences in itertools.islice(batches, num_runs):
        expected = subject.select_gradients(sequences)
        yield Sample(subject.select(sequences).backward(), expected, what=f"sequences {sequences}")


def other_longest(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """Batch-invariant schedules, sequences of different lengths: each alone and packed with much longer ones.

    Then the longest, by which a selector might choose, is another. Left out where it is also that of another kind of
    mask, as of a window that hides nothing from the shorter ones: bits are promised under one.
    """
    if not isinstance(subject, VarlenProblem) or not registry.load(subject.schedule).batch_invariant:
        return
    # the longest first: of few tiles a sum is the same in any order
    sequences = sorted(range(subject.batch), key=lambda sequence: subject.lengths[sequence], reverse=True)
    packings = {"alone": subject.with_own_longest, "with much longer ones": subject.with_long_neighbours}
    for sequence, (what, pack) in itertools.islice(itertools.product(sequences, packings.items()), num_runs):
        other = pack(sequence)
        if other.longest.mask == subject.longest.mask:
            both = other.backward(), subject.select_gradients([sequence])
            found, expected = (_take_first(gradients, subject.lengths[sequence]) for gradients in both)
            yield Sample(found, expected, what=f"sequence {sequence} {what}")


def _take_first(gradients: Gradients, lengths: tuple[int, int]) -> Gradients:
    """Those of the first sequence."""
    dq, dk, dv = gradients
    queries, keys = lengths
    return dq[:, :queries], dk[:, :keys], dv[:, :keys]


EMULATOR_CONDITIONS: Mapping[str, tuple[Condition, int]] = {
    "interleavings": (plain, 8),
    "batches": (other_batches, 4),
    "longest": (other_longest, 4),
}


# What is verified


@dataclass(frozen=True)
class Extents:
    """Extents of a problem; lengths in tokens."""

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int


def vary_lengths(extents: Extents) -> tuple[tuple[int, int], ...]:
    """Queries and keys of `batch` sequences of different lengths: all of the extents, and ever less in equal steps."""
    x = extents
    return tuple((-(-x.seqlen_q * i // x.batch), -(-x.seqlen_k * i // x.batch)) for i in range(x.batch, 0, -1))


GPU_EXTENTS = Extents(4, 16, 16, 1024, 1024)
EMULATOR_EXTENTS = Extents(2, 2, 2, 520, 520)


@dataclass(frozen=True)
class Configuration:
    """One row of the report: a schedule on a head dim, a mask and a dtype."""

    schedule: str
    head_dim: int
    mask: str  # full, causal or local
    window_size: tuple[int, int]
    dtype: str
    extents: Extents
    head_dim_v: int | None = None  # that of head_dim
    varlen: bool = False  # sequences of different lengths, see `vary_lengths`
    dlse: bool = False  # with a gradient of the LSE

    def make_problem(self, device: str, seed: int = 0) -> Problem:
        """Random inputs and the forward pass of the op.

        Raises:
            ValueError: what the op refuses, naming it.
        """
        x, dtype = self.extents, getattr(torch, self.dtype)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "head_dim_v": self.head_dim_v}
        lengths = vary_lengths(x) if self.varlen else ()
        batch, seqlen_q, seqlen_k = x.batch, x.seqlen_q, x.seqlen_k
        if lengths:
            batch, (seqlen_q, seqlen_k) = 1, (sum(side) for side in zip(*lengths, strict=True))
        q, _, _, dout = random_inputs(batch, seqlen_q, seqlen_k, x.num_heads, self.head_dim, seed=seed, **options)
        _, k, v, _ = random_inputs(batch, 1, seqlen_k, x.num_heads_kv, self.head_dim, seed=seed + 1, **options)
        causal, scale = self.mask == "causal", self.head_dim**-0.5
        window_size = self.window_size if self.mask == "local" else (-1, -1)
        tensors = dout, q, k, v, torch.empty_like(dout), dout.new_empty(batch, x.num_heads, seqlen_q).float()
        arguments = *tensors, scale, causal, window_size, self.schedule
        problem: Problem
        if lengths:
            kind = VarlenProblem if q.is_cuda else EmulatedVarlenProblem
            problem = kind(*arguments, lengths=lengths, max_seqlens=(x.seqlen_q, x.seqlen_k))
        else:
            problem = (Problem if q.is_cuda else EmulatedProblem)(*arguments)
        problem = problem.run_forward()
        if not self.dlse:
            return problem
        generator = torch.Generator(device).manual_seed(seed + 2)
        return replace(problem, dlse=torch.randn(problem.lse.shape, generator=generator, device=device))

    @property
    def head_dims(self) -> str:
        return describe_head_dims(self.head_dim, self.head_dim_v or self.head_dim)

    def describe(self) -> str:
        x = self.extents
        window = f" {','.join(map(str, self.window_size))}" if self.mask == "local" else ""
        heads = f"{x.num_heads} heads" + (f", {x.num_heads_kv} KV heads" if x.num_heads_kv != x.num_heads else "")
        return (
            f"{self.schedule}, head dim {self.head_dims}, {self.mask}{window}, {self.dtype}, "
            f"batch {x.batch}, {heads}, {'up to ' if self.varlen else ''}{x.seqlen_q} x {x.seqlen_k} tokens"
            f"{', different lengths' if self.varlen else ''}{', gradient of the LSE' if self.dlse else ''}"
        )


@dataclass(frozen=True)
class Selection:
    """What to verify: every combination. `schedules` may hold "all", every schedule that promises bits."""

    schedules: tuple[str, ...]
    head_dims: tuple[int, ...]
    masks: tuple[str, ...]
    window_size: tuple[int, int]
    dtypes: tuple[str, ...]
    extents: Extents
    head_dim_v: int | None = None  # that of each of head_dims
    varlen: bool = False
    dlse: bool = False

    def list_configurations(self) -> list[Configuration]:
        """Every combination, also those that their schedule cannot order."""
        return [
            Configuration(schedule, head_dim, mask, self.window_size, dtype, self.extents, *self._options())
            for head_dim, mask, dtype in itertools.product(self.head_dims, self.masks, self.dtypes)
            for schedule in self._list_schedules()
        ]

    def list_controls(self, extents: Extents) -> list[Configuration]:
        """The comparator on the same kernels, with other extents."""
        return [
            Configuration(CONTROL, head_dim, mask, (extents.seqlen_k // 2, 0), dtype, extents, *self._options())
            for head_dim, mask, dtype in itertools.product(self.head_dims, self.masks, self.dtypes)
        ]

    def _options(self) -> tuple[int | None, bool, bool]:
        return self.head_dim_v, self.varlen, self.dlse

    def _list_schedules(self) -> list[str]:
        """Names in the given order, each once.

        Raises:
            ValueError: unknown, or one that promises no bits.
        """
        names: dict[str, None] = {}
        for name in self.schedules:
            if name == "all":
                loaded, _ = registry.load_all()
                names |= dict.fromkeys(n for n, s in loaded.items() if not isinstance(s, Selector) and s.ordered)
                continue
            schedule = registry.load(name)
            if not isinstance(schedule, Selector) and not schedule.ordered:
                raise ValueError(f"schedule={name!r} promises no bits: it is the control, which runs anyway")
            names[name] = None
        return list(names)


# The proof


@dataclass
class Row:
    """A configuration and what came out of it."""

    configuration: Configuration
    ran: str  # name and version of the schedule that ran
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(outcome.all_equal for outcome in self.outcomes.values())


@dataclass
class Report:
    """The proof so far.

    Attributes:
        rows: one per configuration.
        controls: the comparator's configurations, and the runs until its first difference.
        left_out: configurations that cannot be had, and why.
        environment: what the bits depend on besides.
    """

    environment: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    controls: list[tuple[Configuration, Outcome]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """All bits equal, in at least one run of something, and every control seen to differ."""
        seen = bool(self.controls) and all(outcome.first is not None for _, outcome in self.controls)
        return bool(self.rows) and all(row.passed and row.outcomes for row in self.rows) and seen

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "environment": self.environment,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "rows": [asdict(row) for row in self.rows],
            "controls": [{"configuration": asdict(c), "outcome": asdict(outcome)} for c, outcome in self.controls],
            "left_out": self.left_out,
        }

    def render(self) -> str:
        """The tables and the verdict."""
        conditions = list(dict.fromkeys(name for row in self.rows for name in row.outcomes))
        cells = [
            {
                "schedule": row.configuration.schedule,
                "ran": row.ran,
                "head dim": row.configuration.head_dims,
                "mask": row.configuration.mask,
                "dtype": row.configuration.dtype,
                **{name: str(row.outcomes.get(name, Outcome())) for name in conditions},
                "bits": "equal" if row.passed else "DIFFER",
            }
            for row in self.rows
        ]
        lines = [tabulate(cells, headers="keys", disable_numparse=True)] if cells else []
        lines += ["", *(f"{key}: {value}" for key, value in self.environment.items())]
        if self.rows:
            lines.append(self.rows[0].configuration.describe().split(", ", 4)[4])
        lines += ["equal runs / runs; held: in so many of them the condition was seen to hold throughout", ""]
        lines += [_describe_control(*control) for control in self.controls]
        lines += [f"left out: {line}" for line in self.left_out]
        return "\n".join([*lines, "", *self._verdict()])

    def _verdict(self) -> list[str]:
        lines = []
        for row in self.rows:
            for name, outcome in row.outcomes.items():
                if outcome.first is not None:
                    lines.append(f"FAILED: {row.configuration.describe()}; {name}, {outcome.where}: {outcome.first}")
        lines += [
            f"FAILED: {configuration.describe()}: {outcome.runs} runs and no difference, so the proof proves nothing"
            for configuration, outcome in self.controls
            if outcome.first is None
        ]
        if not self.rows:
            lines.append("FAILED: there was nothing to verify")
        if not lines and self.passed:
            runs = sum(outcome.runs for row in self.rows for outcome in row.outcomes.values())
            lines = [f"All {runs} runs of {len(self.rows)} configurations had the bits of their first."]
        return lines or ["FAILED: no run was made"]


def _describe_control(configuration: Configuration, outcome: Outcome) -> str:
    found = f"after {outcome.runs} runs: {outcome.first}" if outcome.first else f"no difference in {outcome.runs} runs"
    return f"control {configuration.describe()}: {found}"


def verify(
    subject: Subject, conditions: Mapping[str, tuple[Condition, int]], outcomes: dict[str, Outcome]
) -> dict[str, Outcome]:
    """One round: every condition with its number of runs; adds to `outcomes` and returns it."""
    for name, (condition, num_runs) in conditions.items():
        for sample in condition(subject, num_runs):
            outcomes.setdefault(name, Outcome()).add(sample)
    return outcomes


def find_any_difference(subject: Subject, condition: Condition, max_runs: int) -> Outcome:
    """The negative control: runs until the bits differ, at most about `max_runs` times."""
    outcome = Outcome()
    while outcome.runs < max_runs:
        before = outcome.runs
        for sample in condition(subject, min(20, max_runs - outcome.runs)):
            if not outcome.add(sample):
                return outcome
        if outcome.runs == before:
            break
    return outcome


def run(
    report: Report,
    problems: Sequence[tuple[Configuration, Problem]],
    conditions: Mapping[str, tuple[Condition, int]],
    minutes: float,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Rounds over all problems until the time is over; the first round is always complete."""
    start = time.monotonic()
    rows = [Row(c, f"{problem.concrete.name} v{problem.concrete.version}") for c, problem in problems]
    report.rows += rows
    for round_idx in itertools.count(1):
        for row, (configuration, problem) in zip(rows, problems, strict=True):
            if round_idx > 1 and time.monotonic() - start >= 60 * minutes:
                return
            progress(f"round {round_idx}: {configuration.describe()}")
            verify(problem, conditions, row.outcomes)
        if not rows or time.monotonic() - start >= 60 * minutes:
            return


def make_problems(
    configurations: Sequence[Configuration], device: str, report: Report
) -> list[tuple[Configuration, Problem]]:
    """The problems that can be had; the others are said to be left out.

    Raises:
        ValueError: an option that the op refuses whatever the schedule, naming it.
    """
    problems = []
    for configuration in configurations:
        try:
            problems.append((configuration, configuration.make_problem(device)))
        except UnsupportedShapeError as error:
            report.left_out.append(
                f"{configuration.schedule} on head dim {configuration.head_dims}, {configuration.mask}: it "
                f"{error.reason}"
            )
    return problems


def make_selected_problems(selection: Selection, device: str, report: Report) -> list[tuple[Configuration, Problem]]:
    """The problems of a selection.

    Raises:
        ValueError: an option that the op refuses, or no configuration that its schedule can order.
    """
    problems = make_problems(selection.list_configurations(), device, report)
    if not problems:
        raise ValueError(f"there is nothing to verify: {'; '.join(report.left_out)}")
    return problems


def run_emulator(selection: Selection, minutes: float, progress: Callable[[str], None] = lambda text: None) -> Report:
    """The proof on the CPU emulator: every run interleaves the CTAs in another random way, as far as turns let them."""
    start = time.monotonic()
    report = Report({"emulator": "CPU, random interleavings of the CTAs", "torch": torch.__version__})
    problems = make_selected_problems(selection, "cpu", report)
    for configuration, problem in make_problems(selection.list_controls(EMULATOR_EXTENTS), "cpu", report):
        progress(f"control: {configuration.describe()}")
        report.controls.append((configuration, find_any_difference(problem, plain, 100)))
    run(report, problems, EMULATOR_CONDITIONS, minutes, progress)
    report.seconds = time.monotonic() - start
    return report
