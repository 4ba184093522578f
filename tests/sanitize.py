"""compute-sanitizer on the backward kernels: `python -m tests.sanitize`, or `make sanitize`.

Runs a small matrix of tiny problems under memcheck, racecheck and synccheck and prints what each found, per problem.
Needs a Hopper GPU and compute-sanitizer (CUDA toolkit, or pip install nvidia-cuda-sanitizer-api for CUDA 13,
...-api-cu12 for CUDA 12). Exit status: 0 nothing found, 1 something found, or a tool did not see the fault that it must
see, 2 not available here.

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
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from tabulate import tabulate

from cute_dash.registry import UnsupportedShapeError
from cute_dash.testing import why_no_hopper
from cute_dash.verify import Configuration, Extents

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck")
PACKAGES = ("nvidia-cuda-sanitizer-api", "nvidia-cuda-sanitizer-api-cu13", "nvidia-cuda-sanitizer-api-cu12")
KERNELS = "kns=flash_bwd"  # all that have this in their names; not those of torch
TIMEOUT_S = 420  # per tool; an uninstrumented run takes seconds
OK, FOUND, UNAVAILABLE = 0, 1, 2
CONTROLS = {"memcheck": True, "racecheck": False}  # tool -> the fault that it must see, see `sanitizer_control`

_FINDING = re.compile(
    r"^========= (?:Error: |Warning: )?(Invalid |Race reported|Barrier error|.*hazard detected|Misaligned)"
)
_PROBLEM = re.compile(r"^== (.+)$")


@dataclass
class Result:
    """What one tool said.

    Attributes:
        findings: per problem, the first lines of its findings.
        failure: why it said nothing, if it did not finish.
    """

    tool: str
    findings: dict[str, list[str]] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.failure and not any(self.findings.values())


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
        replace(one, head_dim=192, head_dim_v=128),
        replace(one, head_dim=256, mask="full"),
    ]


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


# Inside: what runs under the tool


def run_problems() -> None:
    """Each problem once, announced, so that what the tool prints can be told apart."""
    for configuration in list_problems():
        try:
            problem = configuration.make_problem("cuda")
        except UnsupportedShapeError:
            continue
        torch.cuda.synchronize()
        print(f"== {configuration.describe()}", flush=True)
        problem.backward()
        torch.cuda.synchronize()


def run_control(past_the_end: bool) -> None:
    """A kernel with a fault; last in its process, whose context may not survive it."""
    from tests.gpu.sanitizer_control import NUM_ELEMENTS, compile_faulty

    print("== control", flush=True)
    compile_faulty(past_the_end)(torch.zeros(NUM_ELEMENTS, device="cuda"))
    torch.cuda.synchronize()


# Outside


def run_tool(sanitizer: Path, tool: str, *inside: str) -> Result:
    """This module with `inside` as its arguments, under a tool."""
    command = [str(sanitizer), "--tool", tool, "--kernel-regex", KERNELS, "--print-limit", "200"]
    command += ["--racecheck-report", "all"] * (tool == "racecheck")
    command += [sys.executable, "-m", "tests.sanitize", *inside]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    result = Result(tool)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        result.findings = read_findings(done.stdout)
        if not result.findings or (done.returncode and result.clean):
            result.failure = f"status {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
    except subprocess.TimeoutExpired:
        result.failure = f"not finished after {TIMEOUT_S} s"
    result.seconds = time.monotonic() - begin
    return result


def read_findings(output: str) -> dict[str, list[str]]:
    """Per problem that was announced, the first line of each finding."""
    findings: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in output.splitlines():
        if announced := _PROBLEM.match(line):
            current = findings.setdefault(announced[1], [])
        elif current is not None and _FINDING.match(line):
            current.append(line.removeprefix("=========").strip())
    return findings


def report(results: list[Result], controls: list[Result]) -> tuple[str, int]:
    """The table with the findings below it, and the exit status."""
    problems = list(dict.fromkeys(name for result in results for name in result.findings))
    rows = [
        {"problem": name, **{result.tool: _cell(result, name) for result in results}}
        for name in [*problems, *([] if problems else ["none"])]
    ]
    lines = [tabulate(rows, headers="keys")]
    for result in results:
        if result.failure:
            lines.append(f"{result.tool} did not finish: {result.failure}")
        for name, found in result.findings.items():
            lines += [f"{result.tool}, {name}: {text}" for text in found[:5]]
            lines += [f"{result.tool}, {name}: and {len(found) - 5} more"] * (len(found) > 5)
    blind = [control for control in controls if not any(control.findings.values())]
    for control in controls:
        seen = "does not see" if control in blind else "sees"
        lines.append(
            f"control: {control.tool} {seen} a fault made for it"
            + (f" ({control.failure})" if control in blind else "")
        )
    lines.append(", ".join(f"{result.tool} {result.seconds:.0f} s" for result in results))
    clean = all(result.clean for result in results) and not blind
    return "\n".join(lines), OK if clean else FOUND


def _cell(result: Result, name: str) -> str:
    if name not in result.findings:
        return "-"
    return f"{len(result.findings[name])} found" if result.findings[name] else "clean"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description="compute-sanitizer on the backward kernels; see the module's text."
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS, help="default: all")
    parser.add_argument("--inside", choices=("compile", "problems", "past the end", "race"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside in ("compile", "problems"):
        run_problems()
    elif args.inside:
        run_control(args.inside == "past the end")
    if args.inside:
        return OK
    if reason := why_no_hopper():
        print(f"nothing was run: {reason}", file=sys.stderr)
        return UNAVAILABLE
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(f"nothing was run: no compute-sanitizer; it is in the CUDA toolkit and in {PACKAGES[0]}", file=sys.stderr)
        return UNAVAILABLE
    # without a tool first, so that nothing is compiled under one
    subprocess.run([sys.executable, "-m", "tests.sanitize", "--inside", "compile"], cwd=ROOT, check=True)
    results = [run_tool(sanitizer, tool, "--inside", "problems") for tool in args.tool]
    controls = [
        run_tool(sanitizer, tool, "--inside", "past the end" if CONTROLS[tool] else "race")
        for tool in args.tool
        if tool in CONTROLS
    ]
    text, status = report(results, controls)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
