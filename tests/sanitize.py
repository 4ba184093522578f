"""compute-sanitizer on the backward kernels: `python -m tests.sanitize`, or `make sanitize`.

Runs a small matrix of tiny problems under memcheck, racecheck and synccheck, each problem in a process of its own, and
prints what each found, per problem: which warps did what to which buffer, at which line. Needs a Hopper GPU and
compute-sanitizer (CUDA toolkit, or pip install nvidia-cuda-sanitizer-api for CUDA 13, ...-api-cu12 for CUDA 12). Exit
status: 0 every problem was seen to its end and all that was found is explained, 1 it was not, or a tool did not see the
fault that it must see, 2 not available here.

A finding that has been understood and does no harm is explained in `EXPLANATIONS`, by what it is, not by where it was
seen. All that are explained now are orders of the main kernel that go over two barriers in a row. For each there is a
control with the same barriers and nothing else, which is right (`sanitizer_control.Chain`), and an explanation counts
only in a run in which racecheck reports that control, too: where it sees the order of the control, it is unexplained.
Versions differ in that: since 2024.4 the tool follows "indirect barrier dependencies", and its release notes list false
positives of barriers on Hopper that were mended in 2025.4, 2026.1 and 2026.3. So look for a newer one first.
The other forms of a control say what a report is worth: one barrier less, also right, and a race. Where the tool
reports the right form and the race alike, it cannot tell them apart in the main kernel either, and a barrier that is
missing there would have to be noticed elsewhere: by test_barrier_protocol.py or in the bits.

A problem that did not come to its end is never clean, whatever was found until then: synccheck and memcheck end the
process with the first launch that they find something in, so that what they find must be mended, not explained.

What a finding would mean in a kernel of TMA copies, mbarriers and named barriers:

memcheck    An access outside its allocation (the caching allocator is off, so that tensors have bounds). Of LOAD, the
            epilogues and finished dQ it is the TMA's coordinates or its descriptor: rows beyond the sequence are
            clipped by it, so nothing may be reported for ragged lengths. Of the store warps it is the offset into
            dQaccum (m_block, stream) or the workspace's size; of the preprocess kernel, the row statistics. Old
            versions took operands of wgmma for larger than they are (compute-sanitizer-samples #19): "Invalid
            __shared__ ?" with an address near the end of the CTA's memory is that, if it comes with every shape.
racecheck   Two threads on one shared-memory address without an order between them: for the generic accesses, sStats and
            sOnes, sWork, the staging of dQ, dK, dV. An arrival orders what its own thread did before: the classic fault
            is that all lanes write and one elected lane arrives without a sync_warp between. A hazard that names sdQ is
            a dQFull, dQEmpty, dQFree or, within a warpgroup, dQSum barrier; sdS, PdS or Epilogue; sK or sV, Epilogue.
            Copies by the TMA and operands of wgmma belong to the async proxy, which the tool knows in part only: no
            finding proves nothing for them, and a finding that has a TMA on one side is to be held against its mbarrier
            (expect_bytes, wait_full, arrive_empty) before it is believed.
            Global memory is not looked at, so the turnstile and dQaccum are not covered: bits and test_turnstile.py do
            that.
synccheck   Barriers used wrongly: an mbarrier that is waited for without having been initialised, or left with arrivals
            that nobody waited for when the CTA ends ("Missing wait"); divergent threads at a named barrier, or another
            number of threads than it was told. A ring that nobody drains at its end is a finding of this kind and
            harmless only if no copy is still on its way into the CTA's memory. An arrival count that is too small would
            show as a hang instead.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from cute_dash.compile import cache_dir
from cute_dash.config import get_config
from cute_dash.kernels.roles import WarpRole
from cute_dash.testing import why_no_hopper
from cute_dash.verify import Configuration, Extents
from cute_dash.verify_gpu import describe_environment
from tests.processes import Ended, Program, run_all
from tests.sanitizer_output import UNPARSED, Buffer, Output, Row, announce, list_buffers, read_output

TOOLS = ("memcheck", "racecheck", "synccheck")
PACKAGES = ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu13", "nvidia-cuda-sanitizer-api-cu12")
KERNELS = "kns=flash_bwd"  # all that have this in their names; not those of torch
OPTIONS = {
    "racecheck": ("--racecheck-report", "all"),
    # torch asks the driver for what may not be there; a launch that fails raises in the process
    "memcheck": ("--report-api-errors", "no"),
}
SILENCE_S = 120  # a problem takes seconds under a tool
FIRST_PORT, NUM_PORTS = 49152, 10  # the tool's defaults; processes side by side get ports of their own
OK, FOUND, UNAVAILABLE = 0, 1, 2
CONTROLS = {"memcheck": "past the end", "racecheck": "race"}  # tool -> the fault that it must see
DONE = "done"
RIGHT = ("whole", "direct", "sync_warp")  # forms of a chain that are no race
FILLER = "warp 0 of control"  # whose access is the later one in a chain


class Finding(NamedTuple):
    """What an explanation is about; the fields are those of `sanitizer_output.Key`, the roles in order of time."""

    tool: str
    kind: str
    buffer: str
    roles: tuple[str, ...]


class Chain(NamedTuple):
    """A control with the order that the main kernel has on `buffer`, in a form of `sanitizer_control.Chain`."""

    buffer: str
    form: str

    @property
    def name(self) -> str:
        return f"{self.buffer} {self.form}"


CHAINS = (
    *(Chain(buffer, form) for buffer in ("sDuty", "sdQ", "sStats") for form in ("whole", "direct", "broken")),
    Chain("sStats", "sync_warp"),
)

_HANDED_ON = (
    "before it arrives at dQFull; the store warp of the step waits there, sends and arrives at dQFree, where the other "
    "one waits before it loads the sum: two named barriers in a row"
)
_STORE_DQ = (WarpRole.STORE_DQ_EVEN.name, WarpRole.STORE_DQ_ODD.name)


def _after_mma(kind: str, buffer: str, others: Sequence[str], reason: str) -> dict[Finding, str]:
    """For what others do to a buffer after either MMA warpgroup."""
    roles = [(f"MMA warpgroup {i}", other) for i in range(2) for other in others]
    return {Finding("racecheck", kind, buffer, pair): reason for pair in roles}


# each with the reason why it does no harm, which a reviewer has held against the code; they count where the tool
# reports the control of the buffer, see `find_limits`
EXPLANATIONS = {
    **_after_mma(
        "WAR",
        "sDuty",
        _STORE_DQ,
        "an MMA thread reads it before it arrives at dQFull; the store warp of the step waits there, sends and arrives "
        "at dQFree, where the other store warp waits before it writes: two named barriers in a row",
    ),
    **_after_mma("WAW", "sdQ", _STORE_DQ, f"an MMA thread stages its part {_HANDED_ON}"),
    **_after_mma("WAR", "sdQ", _STORE_DQ, f"an MMA thread reads the sum so far {_HANDED_ON}"),
    **_after_mma(
        "WAR",
        "sStats",
        (WarpRole.LOAD.name,),
        "all MMA threads meet at PdS behind their reads; only then does one lane of each warp arrive on ring_Q's "
        "empty, for which LOAD waits before it copies: a named barrier and an mbarrier in a row",
    ),
}


class Task(NamedTuple):
    """What runs in a process under a tool: a problem, or a control.

    Attributes:
        name: which it announces when all before the backward is done.
        arguments: the command line.
        buffers: of its main kernel; none for a control.
    """

    name: str
    arguments: tuple[str, ...]
    buffers: list[Buffer]


@dataclass
class Result:
    """What a tool said of a task.

    Attributes:
        failure: why there may be more than `rows`; "": there is not.
        limits: kinds and buffers of what the tool reports although it is right, as `find_limits` found.
    """

    tool: str
    task: str
    rows: list[Row] = field(default_factory=list)
    failure: str = ""
    limits: frozenset[tuple[str, str]] = frozenset()

    def explain(self, row: Row) -> str | None:
        """Why a finding does no harm, if that is known and the control shows it."""
        if (row.key.kind, row.key.buffer) not in self.limits:
            return None
        return EXPLANATIONS.get(_get_finding(self.tool, row))

    @property
    def passed(self) -> bool:
        return not self.failure and all(self.explain(row) for row in self.rows)

    @property
    def cell(self) -> str:
        counts = {"found": 0, "explained": 0}
        for row in self.rows:
            counts["explained" if self.explain(row) else "found"] += row.count
        text = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if self.failure:
            return f"at least {text}" if text else "not finished"
        return text or "clean"

    def describe(self) -> list[str]:
        """Everything but the clean cell, in lines."""
        lines = []
        for row in self.rows:
            lines.append(row.describe())
            if reason := self.explain(row):
                lines.append(f"  explained: {reason}")
            elif _get_finding(self.tool, row) in EXPLANATIONS:
                lines.append(f"  not explained: the tool does not report the control {row.key.buffer} whole")
            if row.key.kind.startswith(UNPARSED):
                lines += [f"  | {line}" for line in row.lines]
        lines += [f"not finished: {self.failure}"] * bool(self.failure)
        return [f"{self.tool}, {self.task}:", *(f"  {line}" for line in lines)] if lines else []

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{**row.as_dict(), "explanation": self.explain(row)} for row in self.rows]
        return {"task": self.task, "result": self.cell, "failure": self.failure, "rows": rows}


def _get_finding(tool: str, row: Row) -> Finding:
    return Finding(tool, row.key.kind, row.key.buffer, row.key.roles)


@dataclass
class Run:
    """A tool over all problems.

    Attributes:
        control: what it said of the fault made for it, if there is one.
        chains: what it said of `CHAINS`, if it is racecheck.
    """

    tool: str
    results: list[Result]
    control: Result | None = None
    chains: Mapping[Chain, Result] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def blind(self) -> bool:
        """Whether the control proves that nothing found means nothing: none of its rows is of a known form."""
        return self.control is not None and all(row.key.kind.startswith(UNPARSED) for row in self.control.rows)

    @property
    def passed(self) -> bool:
        return bool(self.results) and all(result.passed for result in self.results) and not self.blind

    def describe_control(self) -> list[str]:
        if self.control is None:
            return []
        if self.blind:
            return [f"control: {self.tool} does not see a fault made for it", *self.control.describe()]
        return [f"control: {self.tool} sees a fault made for it: {self.control.rows[0].describe()}"]

    def describe_chains(self) -> list[str]:
        lines = []
        for chain, result in self.chains.items():
            text = f"reported in CTAs {_list_ctas(result)}" if result.rows else result.cell
            lines.append(f"control {chain.name}, {'right' if chain.form in RIGHT else 'a race'}: {text}")
            lines += [f"  {line}" for line in [row.describe() for row in result.rows[:1]]]
            lines += [f"  not finished: {result.failure}"] * bool(result.failure)
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tool": self.tool,
            "passed": self.passed,
            "seconds": round(self.seconds, 1),
            "results": [result.as_dict() for result in self.results],
            "control": self.control and {**self.control.as_dict(), "seen": not self.blind},
            "chains": [
                {**chain._asdict(), "right": chain.form in RIGHT, "ctas": _list_ctas(result), **result.as_dict()}
                for chain, result in self.chains.items()
            ],
        }


def _list_ctas(result: Result) -> list[int]:
    """In which a control was reported."""
    return sorted({int(block[0]) for row in result.rows for block in row.blocks})


def list_problems() -> list[Configuration]:
    """Every mask of the tuned head dims, and one of each other kind of build.

    Ragged lengths of a few tiles; a tool slows them down by up to 1000 times.
    """
    extents, window = Extents(1, 2, 2, 200, 300), (90, 20)
    kernels = [("shortest_first", mask) for mask in ("full", "causal", "local")]
    kernels += [("shift", "full"), ("symmetric_shift", "causal")]
    problems = [
        Configuration(schedule, head_dim, mask, window, "bfloat16", extents)
        for head_dim in (64, 128)
        for schedule, mask in kernels
    ]
    one = Configuration("shortest_first", 128, "causal", window, "bfloat16", extents)
    grouped, several = replace(extents, num_heads_kv=1), replace(extents, batch=3, seqlen_k=200)
    return [
        *problems,
        replace(one, extents=grouped),
        replace(one, extents=several, varlen=True),
        replace(one, extents=replace(several, num_heads_kv=1), mask="local", varlen=True, dlse=True),
        replace(one, dlse=True),
        replace(one, head_dim=96),
        replace(one, head_dim=192),
        replace(one, head_dim=192, head_dim_v=128),
        replace(one, head_dim=256, mask="full"),
    ]


def list_tasks() -> list[Task]:
    """The problems as processes."""
    tasks = []
    for number, problem in enumerate(list_problems()):
        config = get_config(problem.head_dim, problem.mask == "causal", problem.mask == "local", problem.head_dim_v)
        arguments = _run_inside("problem", "--number", str(number))
        tasks.append(Task(problem.describe(), arguments, list_buffers(config, problem.dtype)))
    return tasks


def _run_inside(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.sanitize", "--inside", *arguments)


# Inside: what runs under the tool


def run_problem(number: int) -> None:
    """One problem, with marks before and after it."""
    configuration = list_problems()[number]
    problem = configuration.make_problem("cuda")
    torch.cuda.synchronize()
    announce(configuration.describe())
    problem.backward()
    torch.cuda.synchronize()
    announce(DONE)


def run_control(name: str) -> None:
    """A kernel of which it is known what is to be found; its fault may take the context with it."""
    from tests.gpu import sanitizer_control

    kernels = {fault: sanitizer_control.Faulty(fault == CONTROLS["memcheck"]) for fault in CONTROLS.values()}
    kernels |= {chain.name: sanitizer_control.Chain(*chain) for chain in CHAINS}
    announce(name)
    sanitizer_control.compile_control(kernels[name])(torch.zeros(sanitizer_control.NUM_ELEMENTS, device="cuda"))
    torch.cuda.synchronize()
    announce(DONE)


# Outside


@dataclass(frozen=True)
class Setting:
    """How tasks are run.

    Attributes:
        folder: where the output of each process goes.
        jobs: processes at a time.
        limit: how many findings the tool may print for a task; 0: all.
        environment: of the processes, beside this one's.
    """

    sanitizer: Path
    folder: Path
    jobs: int
    limit: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def make_environment(cache: Path) -> dict[str, str]:
    """For allocations with bounds, and for kernels with line numbers, which are the same code but kept apart."""
    return {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONUNBUFFERED": "1",
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DASH_CACHE": "1",
        "CUTE_DASH_CACHE_DIR": str(cache / "line_info"),
    }


def compile_all(setting: Setting, tasks: Sequence[Task]) -> dict[str, str]:
    """Runs the tasks without a tool, so that nothing is compiled under one; what failed and why."""
    ended = _run(setting, "compile", [(task, task.arguments) for task in tasks])
    results = (_read_result(setting, "compile", task, end) for task, end in zip(tasks, ended, strict=True))
    return {result.task: result.failure for result in results if result.failure}


def run_tool(setting: Setting, tool: str, tasks: Sequence[Task], broken: Mapping[str, str]) -> Run:
    """Each task and the controls under a tool; `broken`: tasks that fail without one, and why."""
    begin = time.monotonic()
    chains = {chain.name: chain for chain in CHAINS if tool == "racecheck"}
    controls = [Task(name, _run_inside(name), []) for name in [*filter(None, [CONTROLS.get(tool)]), *chains]]
    running = [task for task in [*tasks, *controls] if task.name not in broken]
    commands = [(task, _make_command(setting, tool, task, i)) for i, task in enumerate(running)]
    ended = _run(setting, tool, commands)
    results = {task.name: _read_result(setting, tool, task, end) for task, end in zip(running, ended, strict=True)}
    for name, reason in broken.items():
        results[name] = Result(tool, name, failure=f"it fails without the tool: {reason}")
    of_chains = {chain: results[name] for name, chain in chains.items()}
    limits = find_limits(of_chains)
    return Run(
        tool,
        [replace(results[task.name], limits=limits) for task in tasks],
        results.get(CONTROLS.get(tool, "")),
        of_chains,
        time.monotonic() - begin,
    )


def find_limits(chains: Mapping[Chain, Result]) -> frozenset[tuple[str, str]]:
    """Kinds and buffers of the orders that the main kernel has and the tool does not see, by the controls."""
    return frozenset(
        (row.key.kind, chain.buffer)
        for chain, result in chains.items()
        if chain.form == "whole" and not result.failure
        for row in result.rows
        if row.key.roles[1:] == (FILLER,)
    )


def _make_command(setting: Setting, tool: str, task: Task, number: int) -> tuple[str, ...]:
    options = ["--tool", tool, "--kernel-name", KERNELS, "--print-limit", str(setting.limit)]
    options += ["--show-backtrace", "device", "--port", str(FIRST_PORT + number * NUM_PORTS), *OPTIONS.get(tool, ())]
    return (str(setting.sanitizer), *options, *task.arguments)


def _run(setting: Setting, tool: str, commands: Sequence[tuple[Task, tuple[str, ...]]]) -> list[Ended]:
    programs = [Program(command, *_get_files(setting, tool, task), setting.environment) for task, command in commands]
    return run_all(programs, setting.jobs, SILENCE_S)


def _get_files(setting: Setting, tool: str, task: Task) -> tuple[Path, Path]:
    """Of a process's output and errors, with the task in their names."""
    stem = setting.folder / f"{tool}-{re.sub(r'[^0-9A-Za-z]+', '_', task.name)}"
    return stem.with_suffix(".txt"), stem.with_suffix(".err")


def _read_result(setting: Setting, tool: str, task: Task, ended: Ended) -> Result:
    text, errors = _get_files(setting, tool, task)
    with text.open(errors="replace") as lines:
        output = read_output(lines, task.buffers)
    failure = find_failure(output, ended, task.name, is_under_tool=tool != "compile")
    if failure:
        last_words = errors.read_text(errors="replace").strip()[-500:]
        failure = "; ".join(filter(None, [failure, *output.of_process, last_words and f"its last words: {last_words}"]))
    return Result(tool, task.name, output.rows, failure)


def find_failure(output: Output, ended: Ended, name: str, is_under_tool: bool = True) -> str:
    """Why there may be more findings than were read; "": there are none."""
    if ended.status is None:
        return f"it said nothing for {SILENCE_S} s"
    if output.marks != [name, DONE]:
        place = "the backward was launched" if output.marks else "there was a backward to launch"
        return f"it ended with status {ended.status} {'after' if output.marks else 'before'} {place}"
    if ended.status:
        return f"it ended with status {ended.status}"
    if is_under_tool and output.num_reported is None:
        return "the tool did not come to its summary"
    if output.cut:
        return f"the tool did not print all: {output.cut}"
    if (output.num_reported or 0) > output.num_records:
        return f"the tool says that it printed {output.num_reported} findings, {output.num_records} were read"
    return ""


def report(runs: Sequence[Run]) -> str:
    """The table with the findings below it."""
    cells: dict[str, dict[str, str]] = {}
    for run in runs:
        for result in run.results:
            cells.setdefault(result.task, {"problem": result.task})[run.tool] = result.cell
    lines = [tabulate(list(cells.values()), headers="keys", disable_numparse=True)]
    for run in runs:
        lines += [line for result in run.results for line in result.describe()]
    lines += [line for run in runs for line in (*run.describe_control(), *run.describe_chains())]
    return "\n".join([*lines, ", ".join(f"{run.tool} {run.seconds:.0f} s" for run in runs)])


def as_dict(runs: Sequence[Run], environment: Mapping[str, str]) -> dict[str, Any]:
    """For JSON."""
    return {"environment": dict(environment), "runs": [run.as_dict() for run in runs]}


def find_sanitizer() -> Path | None:
    """compute-sanitizer: of the path, the toolkit, or a pip package."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [shutil.which("compute-sanitizer"), *(f"{home}/bin/compute-sanitizer" for home in homes if home)]
    for package in PACKAGES:
        try:
            listed = files(package) or []
        except PackageNotFoundError:
            continue
        candidates += [str(file.locate()) for file in listed if file.name == "compute-sanitizer"]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


def get_version(sanitizer: Path) -> str:
    """As the tool states it; which hazards are false differs between its versions."""
    done = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"^Version (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else "unknown"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description="compute-sanitizer on the backward kernels; see the module's text."
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="default: all")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 8), help="processes at a time; default here: %(default)s"
    )
    parser.add_argument("--limit", type=int, default=0, help="findings printed per problem; default: 0, all")
    parser.add_argument("--json", metavar="FILE", help="also write the whole result there")
    parser.add_argument("--raw", metavar="FOLDER", help="keep there what every process printed")
    controls = (*CONTROLS.values(), *(chain.name for chain in CHAINS))
    parser.add_argument("--inside", choices=("problem", *controls), help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)  # of the problem
    args = parser.parse_args(argv)
    if args.inside == "problem":
        run_problem(args.number)
    elif args.inside:
        run_control(args.inside)
    if args.inside:
        return OK
    if reason := why_no_hopper():
        print(f"nothing was run: {reason}", file=sys.stderr)
        return UNAVAILABLE
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(f"nothing was run: no compute-sanitizer; it is in the CUDA toolkit and in {PACKAGES[0]}", file=sys.stderr)
        return UNAVAILABLE
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.raw or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        environment = make_environment(cache_dir() or Path(scratch))
        runs = run_tools(Setting(sanitizer, folder.resolve(), args.jobs, args.limit, environment), args.tool)
    print(report(runs))
    if args.json:
        versions = {**describe_environment(), "compute-sanitizer": get_version(sanitizer)}
        Path(args.json).write_text(json.dumps(as_dict(runs, versions), indent=1) + "\n")
    return OK if all(run.passed for run in runs) else FOUND


def run_tools(setting: Setting, tools: Sequence[str]) -> list[Run]:
    """All problems under each tool."""
    tasks = list_tasks()
    broken = compile_all(setting, tasks)
    return [run_tool(setting, tool, tasks, broken) for tool in tools]


if __name__ == "__main__":
    sys.exit(main())
