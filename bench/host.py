"""What a call costs the host: microseconds of Python and C++ from the call to its return, the device not waited for.

A short attention call is over on the device before the host has launched the next one, so this bounds how fast a model
of short sequences trains. The calls of torch's `scaled_dot_product_attention` are timed beside ours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from bench.timing import Call

if TYPE_CHECKING:
    from torch import Tensor

BATCHES = 100
CALLS_PER_BATCH = 20  # few enough that the device's queue never fills, which would make the host wait


@dataclass(frozen=True)
class HostTime:
    """Microseconds per call: the median batch is the figure to quote, the least one what an idle host can do."""

    us: float
    us_min: float


def time_host(calls: Mapping[str, Call], synchronize: Callable[[], object]) -> dict[str, HostTime]:
    """Times batches of calls, all calls in turn; `synchronize` empties the device's queue before each batch."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BATCHES):
        for name, call in calls.items():
            call()  # untimed: brings back the caches that the synchronization has let go
            synchronize()
            start = perf_counter()
            for _ in range(CALLS_PER_BATCH):
                call()
            samples[name].append((perf_counter() - start) / CALLS_PER_BATCH * 1e6)
    return {name: HostTime(median(us), min(us)) for name, us in samples.items()}


def make_calls(device: str = "cuda") -> dict[str, Call]:
    """The calls of this package on a problem so small that the host is the slower side, and torch's for comparison."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from cute_dash import attention_backward, flash_attn_func
    from cute_dash.testing import random_inputs

    x = random_inputs(1, 64, 64, 1, 64, dtype=torch.bfloat16, device=device)
    out, lse = flash_attn_func(x.q, x.k, x.v, causal=True, return_lse=True)
    leaves = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out_of_leaves = flash_attn_func(*leaves, causal=True)
    heads_first = [t.transpose(1, 2) for t in leaves]
    out_of_torch = scaled_dot_product_attention(*heads_first, is_causal=True)
    dout_of_torch = x.dout.transpose(1, 2)
    arguments = x.dout, x.q, x.k, x.v, out, lse
    parts = make_parts(*arguments) if device == "cuda" else {}
    return {
        "attention_backward": lambda: attention_backward(*arguments, causal=True),
        **parts,
        "backward by autograd": lambda: torch.autograd.grad(out_of_leaves, leaves, x.dout, retain_graph=True),
        "backward of torch's own": lambda: torch.autograd.grad(
            out_of_torch, heads_first, dout_of_torch, retain_graph=True
        ),
        "flash_attn_func": lambda: flash_attn_func(x.q, x.k, x.v, causal=True),
        "flash_attn_func with gradients": lambda: flash_attn_func(*leaves, causal=True),
        "forward of torch's own": lambda: scaled_dot_product_attention(*heads_first, is_causal=True),
    }


def make_parts(dout: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor") -> dict[str, Call]:
    """What a causal backward call cannot do without: its allocations and its launch, each alone."""
    from cute_dash import launch
    from cute_dash.validation import resolve_schedule

    plan = launch.plan_backward(q, k, v, True, resolve_schedule("auto", q, k, True))
    launched: list[object] = []
    recording = replace(plan, kernel=lambda *arguments: launched.extend(arguments))
    launch.run(recording, dout, q, k, v, out, lse, q.shape[-1] ** -0.5)
    return {
        "  its four allocations": lambda: launch.allocate(q, k, v, lse, plan.workspace_elements),
        "  its launch": lambda: plan.kernel(*launched),
    }


def format_times(times: Mapping[str, HostTime]) -> str:
    """A line per call."""
    width = max(map(len, times))
    lines = [f"{name:{width}}  {t.us:6.1f}  {t.us_min:6.1f}" for name, t in times.items()]
    return "\n".join([f"{'us of the host per call':{width}}  median   least", *lines])
