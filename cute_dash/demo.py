"""What the project does, shown on the machine at hand: one row per mask and schedule.

Everywhere: the schedule in the DAG model of an H200, and its gradients from the CPU emulator, which replays the
kernel's arithmetic while the CTAs run in random order. On a Hopper GPU also the kernel itself. The sizes are chosen so
that all of it takes less than a minute on two cores; for measurements there is the bench.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from tabulate import tabulate

from cute_dash import analysis, emulator, registry
from cute_dash.check import METHOD_ERRORS, ScheduleError, check, describe_failure
from cute_dash.config import get_config
from cute_dash.problem import ProblemShape
from cute_dash.registry import UnsupportedShapeError
from cute_dash.schedule import Schedule, Selector
from cute_dash.testing import (
    AttentionInputs,
    attention_backward_ref,
    attention_backward_rounded,
    random_inputs,
    relative_error,
    why_no_hopper,
)

MASKS = ("full", "causal")
NUM_RUNS = 20  # interleavings on the CPU, launches on the GPU
ERROR_FACTOR = 2.0  # times the error that rounding to bf16 alone makes


@dataclass(frozen=True)
class Size:
    """One self-attention problem; lengths in tokens."""

    batch: int
    num_heads: int
    seqlen: int
    head_dim: int

    def shape(self, causal: bool) -> ProblemShape:
        """The problem in the kernel's tiles."""
        return get_config(self.head_dim, causal).make_shape(self.batch, self.num_heads, self.seqlen, self.seqlen)

    def flops(self, causal: bool) -> float:
        """Five matmuls of 2*S*S*D each per head; half of it under the causal mask."""
        full = 5 * 2 * self.batch * self.num_heads * self.seqlen**2 * self.head_dim
        return full / 2 if causal else full


MODEL = Size(batch=1, num_heads=8, seqlen=4096, head_dim=128)
EMULATOR = Size(batch=1, num_heads=2, seqlen=700, head_dim=64)  # 6 x 6 tiles, the last ones partly filled
KERNEL = Size(batch=4, num_heads=16, seqlen=4096, head_dim=128)

# the modelled GPU: an H200, where adding to dQ takes about a quarter of a step's matmuls
NUM_SMS, COMPUTE, REDUCE = 132, 1.0, 0.25


@dataclass(frozen=True)
class KernelResult:
    """The kernel on this GPU: ms per call, gradient error against fp64, how many of NUM_RUNS had the first's bits."""

    ms: float
    tflops: float
    ratio_to_unordered: float
    equal_runs: int


@dataclass(frozen=True)
class Row:
    """One schedule on one mask.

    Attributes:
        critical_path, stall_share: of the DAG model; times in units of one step's compute.
        gradient_error: the largest of dQ's, dK's and dV's relative error (Frobenius norm) against fp64.
        error_budget: what it may be.
        equal_interleavings: how many of NUM_RUNS random interleavings gave the bits of the first.
        kernel: None without a Hopper GPU.
    """

    mask: str
    schedule: str
    ordered: bool
    critical_path: float
    stall_share: float
    gradient_error: float
    error_budget: float
    equal_interleavings: int
    kernel: KernelResult | None = None

    @property
    def passed(self) -> bool:
        """Right gradients and, where the schedule promises it, equal bits."""
        if not self.gradient_error <= self.error_budget:
            return False
        runs = [self.equal_interleavings] + ([self.kernel.equal_runs] if self.kernel else [])
        return not self.ordered or all(run == NUM_RUNS for run in runs)


@dataclass(frozen=True)
class Result:
    """What the demo shows.

    Attributes:
        rows: one per mask and schedule.
        selected: what a selector such as `auto` stood for, a line for each mask and selector.
        left_out: which schedules cannot order a mask, and why.
        broken: schedules that cannot be loaded or break a rule, and why; they have no row.
    """

    rows: tuple[Row, ...]
    selected: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Something was shown, and all of it is right."""
        return bool(self.rows) and not self.broken and all(row.passed for row in self.rows)


def run(progress: Callable[[str], None]) -> Result:
    """Fills the table; `progress` is told what is done next."""
    plan = _Plan()
    rows = []
    jobs = plan.jobs
    with one_thread():
        emulated = {mask: _EmulatedProblem(mask == "causal") for mask in MASKS}
        for number, (mask, schedule) in enumerate(jobs, start=1):
            progress(f"[{number}/{len(jobs)}] {mask} mask, {schedule.name}: model and emulator")
            rows.append(_describe(schedule, mask, emulated[mask]))
    if why_no_hopper() is None:
        rows = _add_kernel(rows, progress)
    return Result(tuple(rows), tuple(plan.selected), tuple(plan.left_out), tuple(plan.broken))


def report(result: Result) -> str:
    """The table with what its columns mean, and the verdict."""
    rows = result.rows
    with_kernel = any(row.kernel for row in rows)
    lines = [
        tabulate([_cells(row, with_kernel) for row in rows], headers="keys", disable_numparse=True),
        "",
        f"critical path, stalls: DAG model, {_name(MODEL)}, {NUM_SMS} SMs; time of one step's matmuls = {COMPUTE:g}, "
        f"of one dQ addition = {REDUCE:g}",
        f"gradient error: CPU emulator of the kernel against fp64, {_name(EMULATOR)}, bf16, worst of dQ, dK and dV",
        f"same bits: of {NUM_RUNS} runs that interleave the CTAs at random, those with the bits of the first",
    ]
    if with_kernel:
        lines.append(f"kernel: this GPU, {_name(KERNEL)}, bf16; GPU bits: of {NUM_RUNS} launches")
    else:
        lines.append(f"The kernel itself was not run: {why_no_hopper()}.")
    lines += result.selected
    lines += [f"left out: {line}" for line in result.left_out]
    return "\n".join([*lines, *_verdict(result)])


def _verdict(result: Result) -> list[str]:
    failed = [f"{row.schedule} ({row.mask})" for row in result.rows if not row.passed]
    lines = [f"FAILED: {line}" for line in result.broken]
    if failed:
        lines.append(f"FAILED: {', '.join(failed)}")
    if not result.rows:
        lines.append("FAILED: there was no schedule to show")
    return lines or ["All gradients right; every ordered schedule repeats its bits."]


def _name(size: Size) -> str:
    return f"batch {size.batch}, {size.num_heads} heads, {size.seqlen} tokens, head dim {size.head_dim}"


def _cells(row: Row, with_kernel: bool) -> dict[str, str]:
    cells = {
        "mask": row.mask,
        "schedule": row.schedule,
        "critical path": f"{row.critical_path:.2f}",
        "stalls": f"{row.stall_share:.1%}",
        "gradient error": f"{row.gradient_error:.1e}",
        "same bits": f"{row.equal_interleavings}/{NUM_RUNS}",
    }
    if with_kernel:
        kernel = row.kernel
        cells["kernel ms"] = f"{kernel.ms:.3f}" if kernel else "-"
        cells["TFLOPS"] = f"{kernel.tflops:.0f}" if kernel else "-"
        cells["x unordered"] = f"{kernel.ratio_to_unordered:.2f}" if kernel else "-"
        cells["GPU bits"] = f"{kernel.equal_runs}/{NUM_RUNS}" if kernel else "-"
    return cells


class _Plan:
    """Which schedules are shown on which mask, and why others are not."""

    def __init__(self) -> None:
        self.jobs: list[tuple[str, Schedule]] = []
        self.selected: list[str] = []
        self.left_out: list[str] = []
        schedules, broken = registry.load_all()
        self.broken = list(broken.values())
        # those that choose among the others last
        in_order = sorted(schedules.values(), key=lambda schedule: isinstance(schedule, Selector))
        for mask in MASKS:
            for schedule in in_order:
                self._add(mask, schedule)

    def _add(self, mask: str, schedule: Schedule) -> None:
        shapes = {"model": MODEL, "emulator": EMULATOR, "kernel": KERNEL}
        try:
            names = {
                what: registry.resolve(schedule, size.shape(mask == "causal")).name for what, size in shapes.items()
            }
            for size in (EMULATOR, replace(MODEL, num_heads=1)):
                check(schedule, size.shape(mask == "causal"))
        except UnsupportedShapeError as error:
            self.left_out.append(f"{schedule.name} on the {mask} mask: it {error.reason}")
        except ScheduleError as error:
            self.broken.append(f"{schedule.name} on the {mask} mask: {error}")
        except METHOD_ERRORS as error:
            self.broken.append(f"{schedule.name} on the {mask} mask: {describe_failure(error, schedule)}")
        else:
            self.jobs.append((mask, schedule))
            if isinstance(schedule, Selector):
                chosen = ", ".join(f"{name} ({what})" for what, name in names.items())
                self.selected.append(f"{schedule.name} on the {mask} mask: {chosen}")


# Without a GPU


@contextmanager
def one_thread() -> Iterator[None]:
    """The emulator's matmuls are too small to share: threads that wait for each other can cost 100x."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class _EmulatedProblem:
    """Inputs, forward results and fp64 gradients of one mask."""

    def __init__(self, causal: bool) -> None:
        size = EMULATOR
        self.causal = causal
        self.scale = size.head_dim**-0.5
        self.inputs = random_inputs(size.batch, size.seqlen, size.seqlen, size.num_heads, size.head_dim)
        q, k, v, dout = self.inputs
        self.out, self.lse = emulator.forward(q, k, v, self.scale, causal)
        self.exact = attention_backward_ref(dout, q, k, v, self.scale, causal)
        rounded = attention_backward_rounded(dout, q, k, v, self.scale, causal)
        self.error_budget = ERROR_FACTOR * self.error(rounded)

    def gradients(self, schedule: Schedule, interleaving: int) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv when the CTAs interleave as this seed says."""
        q, k, v, dout = self.inputs
        return emulator.backward(
            dout, q, k, v, self.out, self.lse, self.scale, self.causal, schedule, interleaving=interleaving
        )

    def error(self, gradients: Sequence[torch.Tensor]) -> float:
        """The largest relative error of dq, dk and dv."""
        return _worst_error(gradients, self.exact)


def _worst_error(gradients: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return max(relative_error(gradient, ref) for gradient, ref in zip(gradients, exact, strict=True))


def _count_equal(runs: Sequence[Sequence[torch.Tensor]]) -> int:
    """How many runs have the bits of the first in dq, dk and dv (16-bit floats)."""
    bits = [[gradient.view(torch.int16) for gradient in run] for run in runs]
    return sum(all(torch.equal(a, b) for a, b in zip(run, bits[0], strict=True)) for run in bits)


def _describe(schedule: Schedule, mask: str, emulated: _EmulatedProblem) -> Row:
    shape = MODEL.shape(mask == "causal")
    timeline = analysis.simulate(schedule, shape, NUM_SMS, COMPUTE, REDUCE)
    runs = [emulated.gradients(schedule, interleaving=seed) for seed in range(NUM_RUNS)]
    return Row(
        mask=mask,
        schedule=schedule.name,
        ordered=schedule.ordered,
        critical_path=analysis.critical_path(schedule, shape, COMPUTE, REDUCE),
        stall_share=timeline.stall_share,
        gradient_error=emulated.error(runs[0]),
        error_budget=emulated.error_budget,
        equal_interleavings=_count_equal(runs),
    )


# On a Hopper GPU


def _add_kernel(rows: Sequence[Row], progress: Callable[[str], None]) -> list[Row]:
    """The rows with the kernel's figures; per mask, `unordered` is what the others are compared with."""
    measured = []
    for mask in MASKS:
        problem = _KernelProblem(mask == "causal")
        progress(f"{mask} mask: compiling and timing the kernel without an order, to compare with")
        unordered_ms = problem.measure_ms("unordered")
        for row in rows:
            if row.mask == mask:
                progress(f"{mask} mask, {row.schedule}: compiling and timing the kernel")
                measured.append(replace(row, kernel=problem.measure(row.schedule, unordered_ms)))
    return measured


class _KernelProblem:
    """Inputs and forward results of one mask on the current GPU."""

    def __init__(self, causal: bool) -> None:
        size = KERNEL
        self.causal = causal
        self.scale = size.head_dim**-0.5
        self.inputs: AttentionInputs = random_inputs(
            size.batch, size.seqlen, size.seqlen, size.num_heads, size.head_dim, device="cuda"
        )
        from cute_dash.interface import flash_attn_func

        q, k, v, _ = self.inputs
        out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
        self.out: torch.Tensor = out
        self.lse: torch.Tensor = lse

    def gradients(self, schedule: str) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv of one launch."""
        from cute_dash.interface import attention_backward

        q, k, v, dout = self.inputs
        return attention_backward(dout, q, k, v, self.out, self.lse, self.scale, self.causal, schedule=schedule)

    def measure(self, schedule: str, unordered_ms: float) -> KernelResult:
        """Bits first, then time."""
        equal_runs = _count_equal([self.gradients(schedule) for _ in range(NUM_RUNS)])
        ms = self.measure_ms(schedule)
        return KernelResult(ms, KERNEL.flops(self.causal) / ms * 1e-9, unordered_ms / ms, equal_runs)

    def measure_ms(self, schedule: str) -> float:
        """Median time of a backward call in ms, over NUM_RUNS calls after five that warm up."""
        for _ in range(5):
            self.gradients(schedule)
        times = []
        for _ in range(NUM_RUNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            self.gradients(schedule)
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
        return median(times)
