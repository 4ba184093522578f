"""Runs the backward kernels on CUDA tensors: workspace, outputs, launch. Host only.

Inputs are trusted here; `cute_dash.validation` is where they are checked. Nothing synchronises with the device except
the debug calls.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cute_dash.compile import CompiledBackward, CompileKey, get_backward
from cute_dash.config import BwdConfig, get_config
from cute_dash.device import num_sms, on_device
from cute_dash.kernels.workspace import WorkspaceLayout, get_num_tiles
from cute_dash.problem import Window, normalize_mask
from cute_dash.schedule import Schedule

_fill_settings: Any = torch.utils.deterministic  # a module with a property, of which its types do not tell
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class StuckError(RuntimeError):
    """A CTA gave up waiting for its turn (debug launches only)."""


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: Schedule,
    config: BwdConfig | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """dQ, dK, dV of attention on a Hopper GPU.

    Args:
        dout, q, out: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16; strides TMA can use: last one 1, others
            multiples of 8 elements, pointers 16-byte aligned. dout and out have the head dim of v.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), likewise; num_heads_kv divides num_heads. v may have another
            head dim, see `config.UNEQUAL_HEAD_DIMS`.
        lse: (batch, num_heads, seqlen_q), fp32, natural log; -inf for rows that see no key.
        schedule: a concrete schedule (`registry.resolve`).
        config: for experiments, another configuration than `get_config` says, with other tiles other bits too.
        window_size: sliding window (left, right), -1 for no limit.
        dlse: gradient of the LSE, like it; not read where the LSE is -inf.
    Returns:
        (dq, dk, dv), contiguous, of the inputs' shapes and dtype.
    """
    plan = plan_backward(q, k, v, causal, schedule, config, window_size=window_size, dlse=dlse is not None)
    return run(plan, dout, q, k, v, out, lse, softmax_scale, dlse=dlse)


def backward_varlen(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: Schedule,
    *,
    window: Window | None = None,
    dlse: torch.Tensor | None = None,
) -> Gradients:
    """dQ, dK, dV of sequences of different lengths, one behind the other.

    Args:
        dout, q, out: (total_q, num_heads, head_dim), k, v: (total_k, num_heads_kv, head_dim), as for `backward`; both
            totals at least 1.
        lse: (num_heads, total_q), fp32; dlse, if given: likewise.
        cu_seqlens_q, cu_seqlens_k: (number of sequences + 1,), int32, contiguous.
        causal, window: `normalize_mask` of the greatest lengths.
        schedule: a concrete schedule that needs one resident CTA (`schedule.needs_one_cta`).
    Returns:
        (dq, dk, dv), contiguous, of the inputs' shapes and dtype; 0 behind the last sequence.
    """
    config = get_config(q.shape[-1], causal, window is not None, v.shape[-1])
    dout, q, k, v, out, lse = (x.unsqueeze(0) for x in (dout, q, k, v, out, lse))
    dlse = None if dlse is None else dlse.unsqueeze(0)
    plan = _make_plan(q, k, config, window, schedule, num_sequences=len(cu_seqlens_q) - 1, dlse=dlse is not None)
    dq, dk, dv = run(plan, dout, q, k, v, out, lse, softmax_scale, (cu_seqlens_q, cu_seqlens_k), dlse=dlse)
    return dq[0], dk[0], dv[0]


def record_order(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: Schedule,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Gradients, torch.Tensor]:
    """`backward` in a debug build: records the order of additions and bounds every wait.

    Returns:
        ((dq, dk, dv), order): order is int32 (batch, num_heads, num_m_blocks, num_n_blocks), the n_blocks that added to
        each dQ tile in the order in which they did, padded with -1.

    Raises:
        StuckError: a wait was given up; names batch, head, m_block, n_block and lock value.
    """
    causal, window = normalize_mask(causal, window_size, q.shape[1], k.shape[1])
    config = get_config(q.shape[-1], causal, window is not None, v.shape[-1])
    shape = config.make_shape_of(q.shape, k.shape, window)
    size = (shape.batch * shape.num_query_heads, shape.num_m_blocks, shape.num_n_blocks + 1)
    record = torch.full(size, -1, dtype=torch.int32, device=q.device)
    record[..., 0] = 0
    stuck = torch.zeros(8, dtype=torch.int32, device=q.device)
    plan = _make_plan(q, k, config, window, schedule, debug=True)
    gradients = run(plan, dout, q, k, v, out, lse, softmax_scale, debug=(record, stuck))
    count, batch_idx, head_idx, m_block, n_block, lock_value, seen, _ = stuck.tolist()
    if count:
        raise StuckError(
            f"schedule {schedule.name!r}: {count} waits were given up, first the one of KV tile {n_block=} for its "
            f"turn on dQ tile {m_block=} of {batch_idx=}, {head_idx=}: {lock_value=}, but the semaphore stayed at "
            f"{seen}"
        )
    return gradients, record[..., 1:].view(shape.batch, shape.num_query_heads, shape.num_m_blocks, shape.num_n_blocks)


@dataclass(frozen=True)
class Plan:
    """What a launch needs besides its tensors and the scale, the same for all calls of a shape."""

    kernel: CompiledBackward
    workspace_elements: int
    window: tuple[int, int]  # a kernel without a window reads no sides
    num_ctas: int


def plan_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    schedule: Schedule,
    config: BwdConfig | None = None,
    *,
    window_size: tuple[int, int] = (-1, -1),
    dlse: bool = False,
) -> Plan:
    """The plan of a call of `backward` with these arguments, from memory for those of an earlier call.

    Args:
        dlse: whether there is one.
    """
    causal, window = normalize_mask(causal, window_size, q.shape[1], k.shape[1])
    config = config or get_config(q.shape[-1], causal, window is not None, v.shape[-1])
    return _make_plan(q, k, config, window, schedule, dlse=dlse)


def _make_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    config: BwdConfig,
    window: Window | None,
    schedule: Schedule,
    *,
    debug: bool = False,
    num_sequences: int | None = None,
    dlse: bool = False,
) -> Plan:
    shapes = q.shape, k.shape, q.dtype
    options = q.device.index, debug, num_sequences, dlse
    return _plan(config, window, schedule, *shapes, *options)  # type: ignore[arg-type]  # a protocol cannot promise a hash


@lru_cache(maxsize=1024)
def _plan(
    config: BwdConfig,
    window: Window | None,
    schedule: Schedule,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: torch.dtype,
    device_index: int,
    debug: bool,
    num_sequences: int | None,
    dlse: bool,
) -> Plan:
    shape = config.make_shape_of(q_shape, k_shape, window)
    num_m_blocks, num_work_tiles = shape.num_m_blocks, shape.num_work_tiles
    if num_sequences is not None:
        num_m_blocks = get_num_tiles(shape.seqlen_q, num_sequences, config.tile_m)
        num_work_tiles = get_num_tiles(shape.seqlen_k, num_sequences, config.tile_n) * shape.num_heads
    layout = WorkspaceLayout(shape.batch * shape.num_query_heads, num_m_blocks, config)
    key = CompileKey(
        config,
        schedule,
        dtype="bfloat16" if dtype is torch.bfloat16 else "float16",
        cooperative=num_sequences is None and schedule.min_resident_ctas(shape) > 1,
        grouped=shape.group_size > 1,
        varlen=num_sequences is not None,
        debug=debug,
        dlse=dlse,
    )
    return Plan(get_backward(key), layout.size, window or (0, 0), min(num_sms(device_index), num_work_tiles))


def allocate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, workspace_elements: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv, contiguous in the shapes of q, k, v, and the flat workspace in the dtype of lse, all uninitialised.

    Under `torch.use_deterministic_algorithms` torch fills new tensors with NaN. The kernels write every element, so
    that would only cost its bandwidth; a tensor made of a storage is not filled, but takes the host 3 us longer.
    """
    if torch.are_deterministic_algorithms_enabled() and _fill_settings.fill_uninitialized_memory:
        return *(_make_unfilled(x, x.shape) for x in (q, k, v)), _make_unfilled(lse, (workspace_elements,))  # type: ignore[return-value]
    contiguous = torch.contiguous_format
    dq = torch.empty_like(q, memory_format=contiguous)
    dk = torch.empty_like(k, memory_format=contiguous)
    dv = torch.empty_like(v, memory_format=contiguous)
    return dq, dk, dv, lse.new_empty(workspace_elements)


def _make_unfilled(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """An uninitialised contiguous tensor of the dtype and on the device of another one, in deterministic mode too."""
    storage = torch.UntypedStorage(math.prod(shape) * like.itemsize, device=like.device)  # type: ignore[no-untyped-call]
    return like.new_empty(0).set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def run(
    plan: Plan,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    *,
    dlse: torch.Tensor | None = None,
    debug: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Gradients:
    """`backward` of tensors for which `plan` was made.

    Args:
        debug: of a debug build, the record of the order and the report of waits given up.
    """
    dq, dk, dv, workspace = allocate(q, k, v, lse, plan.workspace_elements)
    optional = *debug, *cu_seqlens, dlse
    with on_device(q.device):
        plan.kernel(
            dout, q, k, v, out, lse, dq, dk, dv, workspace, *optional, softmax_scale, *plan.window, plan.num_ctas
        )
    return dq, dk, dv
