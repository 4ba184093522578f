"""The CUDA side of a run: clock, inputs, ceilings, environment. The only module that needs a GPU."""

import math
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import cute_dash
from bench.cells import Cell
from bench.implementations import PEERS
from bench.reference import Inputs, Yardstick, make_cu_seqlens, make_yardstick
from bench.timing import BurstPlan, Call, Clock, Timing, time_burst, time_sustained
from cute_dash.forward import forward, forward_varlen
from cute_dash.problem import normalize_mask

GEMM_EXTENT = 8192
COPY_BYTES = 1 << 30
MAX_INPUT_SETS = 16
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CudaClock:
    """The current stream's time line, marked with CUDA events."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))


class CudaDevice:
    """The current CUDA device, as the runner uses it."""

    def __init__(self) -> None:
        self.properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.clock: Clock = CudaClock()

    def make_inputs(self, cell: Cell) -> list[Inputs]:
        """Sets of inputs between which the timed calls rotate, the first seeded with 0."""
        num_sets = num_input_sets(cell.input_bytes, self.properties.L2_cache_size)
        return [random_inputs(cell, seed) for seed in range(num_sets)]

    def make_yardstick(self, inputs: Inputs) -> Yardstick:
        return make_yardstick(inputs)

    def check_alive(self) -> None:
        """Raises if an earlier launch has broken the context, after which nothing can be measured any more."""
        torch.cuda.synchronize()

    def ceilings(self, sustained_s: float | None) -> dict[str, float]:
        """Rates of a large bf16 GEMM (TFLOPS, both regimes) and of a device copy (TB/s, read plus written)."""
        a, b = (torch.randn(GEMM_EXTENT, GEMM_EXTENT, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        source = torch.empty(COPY_BYTES, device="cuda", dtype=torch.uint8)
        target = torch.empty_like(source)
        calls: dict[str, Call] = {"gemm": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}
        burst = time_burst(calls, self.clock, BurstPlan())
        ceilings = {
            "gemm_tflops_burst": _gemm_tflops(burst["gemm"]),
            "copy_tb_per_s": 2 * COPY_BYTES / burst["copy"].ms * 1e-9,
        }
        if sustained_s is not None:
            sustained = time_sustained(calls["gemm"], self.clock, sustained_s)
            ceilings["gemm_tflops_sustained"] = _gemm_tflops(sustained)
        return ceilings

    def environment(self) -> dict[str, Any]:
        """GPU, SM count, driver, versions, commit, date, and which peers are missing."""
        return {
            "gpu": self.properties.name,
            "sm_count": self.properties.multi_processor_count,
            "l2_bytes": self.properties.L2_cache_size,
            "driver": _driver_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "dsl": _version("nvidia-cutlass-dsl"),
            "cute_dash": cute_dash.__version__,
            "commit": _commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "peers": {p.name: _version(p.distribution) for p in PEERS.values() if p.missing() is None},
            "missing": {p.name: p.missing() for p in PEERS.values() if p.missing() is not None},
        }


def num_input_sets(input_bytes: int, l2_bytes: int) -> int:
    """1 if a call's inputs exceed the L2 cache, else so many (2 to 16) that together they are twice as large.

    With that a set has left the cache when its turn comes again; at 16 sets of a very small shape it may not have.
    """
    if input_bytes > l2_bytes:
        return 1
    return min(MAX_INPUT_SETS, max(2, math.ceil(2 * l2_bytes / input_bytes)))


def random_inputs(cell: Cell, seed: int) -> Inputs:
    """Normal q, k, v, dout on the GPU; out and LSE from torch's flash forward, or ours where it lacks arguments."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads: int, head_dim: int) -> torch.Tensor:
        tokens = (sum(cell.lengths),) if cell.varlen else (cell.batch, cell.seqlen)
        extents = (*tokens, heads, head_dim)
        return torch.randn(extents, generator=generator, device="cuda", dtype=_DTYPES[cell.dtype])

    q, k = normal(cell.heads, cell.head_dim), normal(cell.num_kv_heads, cell.head_dim)
    v, dout = normal(cell.num_kv_heads, cell.value_dim), normal(cell.heads, cell.value_dim)
    scale = 1 / math.sqrt(cell.head_dim)
    if cell.varlen:
        out, lse = _varlen_forward(cell, q, k, v, scale)
        return Inputs(q, k, v, out, dout, lse, scale, cell.causal, cell.window_size, cell.lengths)
    if cell.window_size != (-1, -1) or cell.value_dim != cell.head_dim:
        out, lse = forward(q, k, v, scale, cell.causal, cell.window_size)
        return Inputs(q, k, v, out, dout, lse, scale, cell.causal, cell.window_size)
    # the functional form returns the LSE, which scaled_dot_product_attention keeps to itself
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), 0.0, cell.causal, False, scale=scale
    )
    lse = lse[:, :, : cell.seqlen].contiguous()
    return Inputs(q, k, v, out.transpose(1, 2).contiguous(), dout, lse, scale, cell.causal)


def _varlen_forward(
    cell: Cell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    cu_seqlens, longest = make_cu_seqlens(cell.lengths, q.device), max(cell.lengths)
    causal, window = normalize_mask(cell.causal, cell.window_size, longest, longest)
    return forward_varlen(q, k, v, (cu_seqlens, cu_seqlens), (longest, longest), scale, causal, window)


def _gemm_tflops(timing: Timing) -> float:
    return 2 * GEMM_EXTENT**3 / timing.ms * 1e-9


def _driver_version() -> str:
    lines = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()
    return lines[0] if lines else "unknown"


def _commit() -> str:
    """The checkout's commit, with '-dirty' if files differ from it; 'unknown' outside a git checkout."""
    root = str(Path(__file__).resolve().parent.parent)
    return _output(["git", "-C", root, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]) or "unknown"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
