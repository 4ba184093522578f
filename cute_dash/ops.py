"""The torch.library custom ops `cute_dash::attention_forward`, `attention_backward` and their `attention_varlen_` kin.

Functional ops with CPU (emulator), CUDA (libraries' forward, this package's backward kernel), fake and autograd
registrations. Every implementation validates before it launches anything, so the raw ops are as safe as the functions
in `cute_dash.interface`. An op's schema has no place for a Python object: a schedule travels as a string, see `spec_of`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_dash import emulator, forward, validation
from cute_dash.schedule import Schedule


class ScheduleRecord(NamedTuple):
    """Which schedule a backward pass ran: with the shapes and options, what its bits depend on.

    Attributes:
        requested: as given: a name, "module:ATTR", or the handle of a schedule object.
        name, version: of the schedule that ran, after `auto` and the like were resolved.
        schedule: that schedule.
    """

    requested: str
    name: str
    version: int
    schedule: Schedule


_last_record: ScheduleRecord | None = None


def last_schedule() -> ScheduleRecord | None:
    """The record of the backward pass launched last in this process, from any thread; None before the first one.

    Process-wide because autograd runs backward passes on threads of its own. Replacing the record is one assignment,
    so a reader never sees half of one. Replaying a CUDA graph launches nothing from here and leaves it unchanged.
    """
    return _last_record


_schedules: dict[str, Schedule] = {}


# under torch.compile this must run while tracing, or the op would look the handle up before it is known
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def spec_of(schedule: "str | Schedule") -> str:
    """A string that names `schedule` to the ops of this process: a string as it is, an object by a handle.

    The handle is made of the class and the fields, so it means the same schedule in every process, or is unknown there.
    """
    if isinstance(schedule, str):
        return schedule
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{schedule=} is a {type(schedule).__name__}; allowed: a name, 'module:ATTR' or a Schedule")
    cls = type(schedule)
    handle = f"{cls.__module__}.{cls.__qualname__}@{sorted(vars(schedule).items())}"
    _schedules[handle] = schedule  # the newest, where a class was defined anew under the same name, as in a notebook
    return handle


def _check_options(
    q: Tensor, k: Tensor, softmax_scale: float | None, causal: bool, schedule: str
) -> tuple[float, Schedule]:
    """The softmax scale and the concrete schedule, once the tensors are known to be good."""
    validation.check_device(q.device)
    validation.check_scale(softmax_scale)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[-1])
    return softmax_scale, validation.resolve_schedule(_schedules.get(schedule, schedule), q, k, causal)


def _record(requested: str, schedule: Schedule) -> None:
    global _last_record
    _last_record = ScheduleRecord(requested, schedule.name, schedule.version, schedule)


@torch.library.custom_op("cute_dash::attention_forward", mutates_args=(), device_types="cpu")
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, schedule: str
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim) and LSE (batch, num_heads, seqlen_q); `schedule` is the backward's."""
    validation.check_qkv(q, k, v)
    scale, _ = _check_options(q, k, softmax_scale, causal, schedule)
    return emulator.forward(q, k, v, scale, causal)


@attention_forward.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, schedule: str
) -> tuple[Tensor, Tensor]:
    validation.check_qkv(q, k, v)
    scale, _ = _check_options(q, k, softmax_scale, causal, schedule)
    with torch.cuda.device(q.device):
        return forward.forward(aligned(q), aligned(k), aligned(v), scale, causal)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    validation.check_qkv(q, k, v)
    batch, seqlen_q, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("cute_dash::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous."""
    validation.check_backward_tensors(dout, q, k, v, out, lse)
    scale, concrete = _check_options(q, k, softmax_scale, causal, schedule)
    grads = emulator.backward(dout, q, k, v, out, lse, scale, causal, concrete)
    _record(schedule, concrete)
    return grads


@attention_backward.register_kernel("cuda")
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None,
    causal: bool,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from cute_dash import launch  # needs the DSL, which a machine without a GPU may lack

    validation.check_backward_tensors(dout, q, k, v, out, lse)
    scale, concrete = _check_options(q, k, softmax_scale, causal, schedule)
    dout, q, k, v, out = (aligned(x) for x in (dout, q, k, v, out))
    with torch.cuda.device(q.device):
        grads: tuple[Tensor, Tensor, Tensor] = launch.backward(
            dout, q, k, v, out, lse.contiguous(), scale, causal, concrete
        )
    _record(schedule, concrete)
    return grads


@attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_backward_tensors(dout, q, k, v, out, lse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _check_varlen_options(
    q: Tensor,
    k: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    max_seqlens: tuple[int, int],
    softmax_scale: float | None,
    causal: bool,
    schedule: str,
) -> tuple[float, Schedule]:
    """`_check_options` with cu_seqlens."""
    validation.check_device(q.device)
    validation.check_scale(softmax_scale)
    validation.check_cu_seqlens(*cu_seqlens, q, k)
    for name, max_seqlen, cu in zip(("max_seqlen_q", "max_seqlen_k"), max_seqlens, cu_seqlens, strict=True):
        validation.check_max_seqlen(name, max_seqlen, cu)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[-1])
    spec = _schedules.get(schedule, schedule)
    return softmax_scale, validation.resolve_varlen_schedule(spec, q, k, cu_seqlens, max_seqlens, causal)


@torch.library.custom_op("cute_dash::attention_varlen_forward", mutates_args=(), device_types=("cpu", "cuda"))
def attention_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    schedule: str,
) -> tuple[Tensor, Tensor]:
    """out (total_q, num_heads, head_dim) and LSE (num_heads, total_q); `schedule` is the backward's."""
    validation.check_varlen_qkv(q, k, v)
    cu_seqlens, max_seqlens = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    scale, _ = _check_varlen_options(q, k, cu_seqlens, max_seqlens, softmax_scale, causal, schedule)
    if q.device.type == "cpu" or 0 in (q.shape[0], k.shape[0], *max_seqlens):
        # on the GPU too where no query meets a key: without a sequence that has both, this launches fills only
        cu_seqlens = (cu_seqlens_q, cu_seqlens_k) if q.device.type == "cpu" else _NO_SEQUENCES
        return emulator.forward_varlen(q, k, v, *cu_seqlens, scale, causal)
    with torch.cuda.device(q.device):
        cu_seqlens = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        return forward.forward_varlen(aligned(q), aligned(k), aligned(v), cu_seqlens, max_seqlens, scale, causal)


_NO_SEQUENCES = (torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))


@attention_varlen_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    validation.check_varlen_qkv(q, k, v)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("cute_dash::attention_varlen_backward", mutates_args=(), device_types=("cpu", "cuda"))
def attention_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous."""
    validation.check_varlen_backward_tensors(dout, q, k, v, out, lse)
    cu_seqlens, max_seqlens = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    scale, concrete = _check_varlen_options(q, k, cu_seqlens, max_seqlens, softmax_scale, causal, schedule)
    grads: tuple[Tensor, Tensor, Tensor]
    if q.device.type == "cpu":
        grads = emulator.backward_varlen(dout, q, k, v, out, lse, *cu_seqlens, scale, causal, concrete)
    elif 0 in (q.shape[0], k.shape[0]):
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        grads = dq, dk, dv
    else:
        from cute_dash import launch  # needs the DSL, which a machine without a GPU may lack

        dout, q, k, v, out = (aligned(x) for x in (dout, q, k, v, out))
        cu_seqlens = (cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous())
        with torch.cuda.device(q.device):
            grads = launch.backward_varlen(dout, q, k, v, out, lse.contiguous(), *cu_seqlens, scale, causal, concrete)
    _record(schedule, concrete)
    return grads


@attention_varlen_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_varlen_backward_tensors(dout, q, k, v, out, lse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_varlen_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)
    ctx.mark_non_differentiable(lse)


def _varlen_autograd(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = attention_varlen_backward(dout, *ctx.saved_tensors, *ctx.options)
    return dq, dk, dv, *[None] * (2 + len(ctx.options))


def _setup_forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.schedule = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)


def _forward_autograd(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, ctx.softmax_scale, ctx.causal, ctx.schedule)
    return dq, dk, dv, None, None, None


def _backward_autograd(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise RuntimeError("cute_dash's attention backward has no derivative: double backward is not supported")


attention_forward.register_autograd(_forward_autograd, setup_context=_setup_forward_context)
attention_backward.register_autograd(_backward_autograd)
attention_varlen_forward.register_autograd(_varlen_autograd, setup_context=_setup_varlen_context)
attention_varlen_backward.register_autograd(_backward_autograd)


def aligned(x: Tensor) -> Tensor:
    """`x` itself if TMA can read it, else a contiguous copy.

    TMA wants a 16-byte aligned address, a contiguous last dim, and the other strides positive multiples of 16 bytes.
    The copy is a clone: `contiguous` would return a tensor whose only flaw is its address or the stride of an extent 1.
    """
    *outer, last = x.stride()
    strides_fit = last == 1 and all(s > 0 and s * x.element_size() % 16 == 0 for s in outer)
    if strides_fit and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
