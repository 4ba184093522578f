"""The proof that the bits hold on a Hopper GPU: the conditions that a GPU can be in. Host; uses the current device.

Every condition that can fail to come about says of each run whether it was seen to hold. No condition can hang by
itself: whatever keeps the kernel waiting ends by itself after a bounded time, and a `Watchdog` ends the process if a
call does not come back.

`python -m cute_dash.verify_gpu FILE` is what a fresh process runs, see `fresh_processes`.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import cute_dash
from cute_dash import verify
from cute_dash.device import num_sms
from cute_dash.verify import (
    Condition,
    Configuration,
    Extents,
    Gradients,
    Outcome,
    Problem,
    Report,
    Sample,
    Subject,
    VarlenProblem,
)

STUCK_S = 300.0  # without a sign of life, compiling included, before a run is given up
MAX_HOLD_MS = 250.0  # for which SMs are kept from the kernel
FILLS = (0xFF, 0x7F, 0x00)  # bytes: NaN and -1; 3.4e38 (fp16: NaN) and 2139062143; zeros
CONTROL_EXTENTS = Extents(4, 16, 16, 2048, 2048)
CONTROL_RUNS = 500
PROCESS_TIMEOUT_S = 600.0
STUCK = 1  # exit status


class ProcessError(RuntimeError):
    """A fresh process did not do what it was started for."""


class Watchdog:
    """Ends the process, saying where it was, if `alive` is not called for `limit_s` seconds.

    A kernel that hangs keeps every later call of CUDA waiting, and nothing in the process can stop it: ending the
    process does.
    """

    def __init__(self, limit_s: float = STUCK_S, end: Callable[[int], Any] = os._exit) -> None:
        self.limit_s = limit_s
        self._end = end
        self._place = "the start"
        self._seen = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def alive(self, place: str | None = None) -> None:
        """A sign of life; `place` says what is done next."""
        self._place = place or self._place
        self._seen = time.monotonic()

    def __enter__(self) -> "Watchdog":
        self.alive()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(self.limit_s / 10, 1.0)):
            if time.monotonic() - self._seen > self.limit_s:
                print(f"cute-dash: STUCK for {self.limit_s:.0f} s at {self._place}", file=sys.stderr, flush=True)
                self._end(STUCK)
                return


# Conditions


def poisoned(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """Memory that outputs and workspace are about to get is filled first; held: the outputs were in filled memory."""
    _ = subject.expected  # allocated before
    sizes = list_allocations(subject.backward)
    fill_free_memory(sizes, FILLS[0])  # what has to be allocated anew for it is there for the runs
    for run in range(num_runs):
        fill = FILLS[run % len(FILLS)]
        filled = fill_free_memory(sizes, fill)
        gradients = subject.backward()
        in_force = all(gradient.data_ptr() in filled for gradient in gradients)
        yield Sample(gradients, subject.expected, in_force, f"memory full of 0x{fill:02X}")


def list_allocations(backward: Callable[[], Gradients]) -> list[int]:
    """Bytes of what a call allocates: its outputs, in order, and the rest in one piece."""

    def requested(which: str) -> int:
        return int(torch.cuda.memory_stats().get(f"requested_bytes.all.{which}", 0))

    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    outputs = [gradient.nbytes for gradient in backward()]
    rest = requested("peak") - before - sum(outputs)
    return [*outputs, *([rest] if rest > 0 else [])]


def fill_free_memory(sizes: Sequence[int], byte: int) -> set[int]:
    """Fills what the caching allocator hands out next for these sizes with a byte; returns the addresses."""
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for block in blocks:
        block.fill_(byte)
    return {block.data_ptr() for block in blocks}


def busy_neighbour(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """Matmuls run on another stream; held: they were still running when the gradients were complete.

    They are a graph: launched one by one they might end as fast as a slow host launches them.
    """
    a = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    product = torch.mm(a, a)  # the set-up of the library, which cannot be recorded
    neighbour, matmuls = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # a matmul takes at least 20 us and the backward, beside it, may take several times as long as alone
    num_matmuls = min(4 + int(4 * _measure_ms(subject) / 0.02), 2000)
    with torch.cuda.graph(matmuls, stream=neighbour):
        for _ in range(num_matmuls):
            torch.mm(a, a, out=product)
    for _ in range(num_runs):
        with torch.cuda.stream(neighbour):
            matmuls.replay()
            done = torch.cuda.Event()
            done.record()
        gradients = subject.backward()
        in_force = _finish() and not done.query()
        done.synchronize()
        yield Sample(gradients, subject.expected, in_force)


def two_streams(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """Two streams run the subject at once; held: each had ended its first call before the other had ended its last."""
    calls = 3
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = subject.expected
    for _ in range(max(num_runs // (2 * calls), 1)):
        torch.cuda.synchronize()
        results: list[Gradients] = []
        ends: list[list[torch.cuda.Event]] = [[], []]
        torch.cuda._sleep(1_000_000)  # both streams start behind it, when the host has queued everything
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(calls):
            for stream, ended in zip(streams, ends, strict=True):
                with torch.cuda.stream(stream):
                    results.append(subject.backward())
                    ended.append(torch.cuda.Event(enable_timing=True))
                    ended[-1].record()
        torch.cuda.synchronize()
        in_force = ends[0][0].elapsed_time(ends[1][-1]) > 0 and ends[1][0].elapsed_time(ends[0][-1]) > 0
        for gradients in results:
            yield Sample(gradients, expected, in_force)


def fewer_sms(subject: Subject, num_runs: int) -> Iterator[Sample]:
    """A kernel keeps SMs from the backward; held: it did until the gradients were complete.

    Alternately half of the SMs and as many as leave the backward time to finish. A schedule that needs one resident CTA
    must finish on what is left. The others are launched cooperatively: they wait for all the SMs that they need, which
    they get when the holding kernel ends, and then nothing was held from them.
    """
    device_sms = num_sms(torch.cuda.current_device())
    alone_ms = _measure_ms(subject)
    # twice the time that the share of the SMs explains
    fewest = min(max(-(-int(2 * alone_ms * device_sms) // int(MAX_HOLD_MS)), 1), device_sms // 2)
    for run in range(num_runs):
        free = fewest if run % 2 else device_sms // 2
        hold_ms = min(4 * alone_ms * device_sms / free + 10.0, MAX_HOLD_MS)
        with hold_sms(device_sms - free, hold_ms) as ended:
            gradients = subject.backward()
            in_force = _finish() and not ended.query()
        yield Sample(gradients, subject.expected, in_force, f"{free} of {device_sms} SMs free")


@contextmanager
def hold_sms(count: int, hold_ms: float) -> Iterator[torch.cuda.Event]:
    """Keeps `count` SMs of the idle current device busy, for `hold_ms` and no longer; waits for their end on leaving.

    Yields:
        an event that is complete when they are free again; at once where they could not all be had, as on a GPU that
        other processes use.
    """
    torch.cuda.synchronize()
    held = torch.zeros(count, dtype=torch.int32, device="cuda")
    holder, watcher = torch.cuda.Stream(), torch.cuda.Stream()
    holder.wait_stream(torch.cuda.current_stream())
    ended = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(holder):
        _hold_kernel()(held, int(hold_ms * 1e6), count)
        ended.record()
    num_held = 0
    while num_held < count and not ended.query():
        with torch.cuda.stream(watcher):
            num_held = len(set(held.tolist()) - {0})  # a copy, beside the kernel
    if num_held < count:
        ended.synchronize()
    try:
        yield ended
    finally:
        ended.synchronize()


@lru_cache
def _hold_kernel() -> Callable[..., None]:
    from cute_dash.kernels.hold_sms import compile_hold_sms

    return compile_hold_sms()  # type: ignore[no-any-return]


def _finish() -> bool:
    """Waits for the current stream alone; True."""
    torch.cuda.current_stream().synchronize()
    return True


def _measure_ms(subject: Subject) -> float:
    """One call on the idle GPU, with what its launch costs."""
    _ = subject.expected
    torch.cuda.synchronize()
    begin = time.perf_counter()
    subject.backward()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


CONDITIONS: Mapping[str, tuple[Condition, int]] = {
    "plain": (verify.plain, 100),
    "poisoned memory": (poisoned, 30),
    "busy neighbour": (busy_neighbour, 20),
    "two streams": (two_streams, 24),
    "fewer SMs": (fewer_sms, 4),
    "other batches": (verify.other_batches, 4),
    "other longest": (verify.other_longest, 4),
}


# Fresh processes


def fresh_processes(
    problems: Sequence[Problem], environments: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[int, Sample]]:
    """Computes every problem once in a new process per environment.

    Args:
        environments: what to call a process, and its further environment variables.

    Yields:
        (index of the problem, what that process got); the process hands back the gradients only where their digest is
        not the expected one.

    Raises:
        ProcessError: a process failed, with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for index, problem in enumerate(problems):
            tensors = [*problem.tensors, *([] if problem.dlse is None else [problem.dlse])]
            torch.save([x.cpu() for x in tensors], Path(folder) / f"{index}.in")
            jobs.append(
                {
                    "tensors": str(Path(folder) / f"{index}.in"),
                    "device": str(problem.q.device),
                    "strides": [list(x.stride()) for x in tensors],
                    "options": [problem.softmax_scale, problem.causal, problem.window_size],
                    "schedule": problem.schedule,
                    "lengths": [problem.lengths, problem.max_seqlens] if isinstance(problem, VarlenProblem) else [],
                    "digest": get_digest(problem.expected),
                    "result": str(Path(folder) / f"{index}.out"),
                }
            )
        (Path(folder) / "jobs.json").write_text(json.dumps(jobs))
        for name, variables in environments.items():
            _run_process(Path(folder) / "jobs.json", {**os.environ, **variables})
            for index, (problem, job) in enumerate(zip(problems, jobs, strict=True)):
                found = problem.expected
                if (result := Path(str(job["result"]))).exists():
                    found = tuple(x.to(problem.q.device) for x in torch.load(result, weights_only=True))
                    result.unlink()
                yield index, Sample(found, problem.expected, what=name)


PROCESSES: Mapping[str, Mapping[str, str]] = {
    "a fresh process": {},
    "a fresh process without the caching allocator": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
}


def _run_process(jobs: Path, environment: dict[str, str]) -> None:
    root = str(Path(cute_dash.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "cute_dash.verify_gpu", str(jobs)]
    options: dict[str, Any] = {"env": {**environment, "PYTHONPATH": path}, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=PROCESS_TIMEOUT_S, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise ProcessError(f"a fresh process was not done after {PROCESS_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        raise ProcessError(f"a fresh process failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    if done.stdout.split()[-1:] != [str(len(json.loads(jobs.read_text())))]:
        raise ProcessError(f"a fresh process did not say how much it did: {done.stdout.strip()[-2000:]!r}")


def get_digest(gradients: Gradients) -> str:
    """SHA-256 of shapes, dtypes and bits."""
    digest = hashlib.sha256()
    for gradient in gradients:
        digest.update(f"{tuple(gradient.shape)} {gradient.dtype}".encode())
        digest.update(gradient.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(argv: Sequence[str]) -> int:
    """What a fresh process does: computes the problems of a file, keeps gradients with unexpected digests."""
    jobs = json.loads(Path(argv[0]).read_text())
    for job in jobs:
        tensors = torch.load(job["tensors"], weights_only=True)
        tensors = [
            _copy_with_strides(x, stride, job["device"]) for x, stride in zip(tensors, job["strides"], strict=True)
        ]
        gradients = _make_problem(job, tensors).backward()
        if get_digest(gradients) != job["digest"]:
            torch.save([gradient.cpu() for gradient in gradients], job["result"])
    print(len(jobs))
    return 0


def _make_problem(job: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Problem:
    scale, causal, (left, right) = job["options"]
    dout, q, k, v, out, lse, *rest = tensors
    dlse = rest[0] if rest else None
    problem = Problem(dout, q, k, v, out, lse, scale, causal, (left, right), job["schedule"], dlse)
    if not job["lengths"]:
        return problem
    lengths, (max_seqlen_q, max_seqlen_k) = job["lengths"]
    shared = {field.name: getattr(problem, field.name) for field in fields(problem)}
    return VarlenProblem(**shared, lengths=tuple(map(tuple, lengths)), max_seqlens=(max_seqlen_q, max_seqlen_k))


def _copy_with_strides(x: torch.Tensor, strides: Sequence[int], device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, list(strides), dtype=x.dtype, device=device).copy_(x)


# The proof


def run(selection: verify.Selection, minutes: float, progress: Callable[[str], None] = lambda text: None) -> Report:
    """The proof on the current GPU.

    Raises:
        ValueError: an option that the op refuses.
    """
    start = time.monotonic()
    report = Report(describe_environment())
    with Watchdog() as watchdog:

        def say(text: str) -> None:
            watchdog.alive(text)
            progress(text)

        say("making the problems")
        problems = verify.make_selected_problems(selection, "cuda", report)
        for configuration, problem in problems:
            say(f"first run: {configuration.describe()}")
            _ = problem.expected
        _run_controls(selection, report, say)
        say("fresh processes")
        watchdog.limit_s += len(PROCESSES) * PROCESS_TIMEOUT_S
        in_processes = [Outcome() for _ in problems]
        for index, sample in fresh_processes([problem for _, problem in problems], PROCESSES):
            in_processes[index].add(sample)
        watchdog.limit_s -= len(PROCESSES) * PROCESS_TIMEOUT_S
        verify.run(report, problems, _with_sign_of_life(CONDITIONS, watchdog), minutes, say)
        for row, outcome in zip(report.rows, in_processes, strict=True):
            row.outcomes["processes"] = outcome
    report.seconds = time.monotonic() - start
    return report


def _run_controls(selection: verify.Selection, report: Report, say: Callable[[str], None]) -> None:
    controls: list[tuple[Configuration, Problem]] = verify.make_problems(
        selection.list_controls(CONTROL_EXTENTS), "cuda", report
    )
    for configuration, problem in controls:
        say(f"control: {configuration.describe()}")
        report.controls.append((configuration, verify.find_any_difference(problem, busy_neighbour, CONTROL_RUNS)))


def _with_sign_of_life(
    conditions: Mapping[str, tuple[Condition, int]], watchdog: Watchdog
) -> dict[str, tuple[Condition, int]]:
    """The conditions, each of whose samples tells the watchdog that there is progress."""

    def watch(name: str, condition: Condition) -> Condition:
        def watched(subject: Subject, num_runs: int) -> Iterator[Sample]:
            for sample in condition(subject, num_runs):
                watchdog.alive()
                yield sample

        return watched

    return {name: (watch(name, condition), num_runs) for name, (condition, num_runs) in conditions.items()}


def describe_environment() -> dict[str, str]:
    """What the bits depend on and where they were computed."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "GPU": f"{properties.name}, {properties.multi_processor_count} SMs",
        "cute-dash": cute_dash.__version__,
        "CuTe DSL": metadata.version("nvidia-cutlass-dsl"),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
