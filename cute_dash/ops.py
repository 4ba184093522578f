"""The torch.library custom ops `cute_dash::attention_forward` and `cute_dash::attention_backward`.

Functional ops with CPU (emulator), CUDA (libraries' forward, this package's backward kernel), fake and autograd
registrations. Every implementation validates before it launches anything, so the raw ops are as safe as the functions
in `cute_dash.interface`. An op's schema has no place for a Python object: a schedule travels as a string, see `spec_of`,
and a window as the two ints window_left and window_right, -1 for no limit.
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
    q: Tensor, k: Tensor, softmax_scale: float | None, causal: bool, window_size: tuple[int, int], schedule: str
) -> tuple[float, Schedule]:
    """The softmax scale and the concrete schedule, once the tensors are known to be good."""
    validation.check_device(q.device)
    validation.check_scale(softmax_scale)
    window_size = validation.check_window_size(window_size)
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(q.shape[-1])
    return softmax_scale, validation.resolve_schedule(_schedules.get(schedule, schedule), q, k, causal, window_size)


def _record(requested: str, schedule: Schedule) -> None:
    global _last_record
    _last_record = ScheduleRecord(requested, schedule.name, schedule.version, schedule)


@torch.library.custom_op("cute_dash::attention_forward", mutates_args=(), device_types="cpu")
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim) and LSE (batch, num_heads, seqlen_q); `schedule` is the backward's."""
    validation.check_qkv(q, k, v)
    window_size = window_left, window_right
    scale, _ = _check_options(q, k, softmax_scale, causal, window_size, schedule)
    return emulator.forward(q, k, v, scale, causal, window_size)


@attention_forward.register_kernel("cuda")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
) -> tuple[Tensor, Tensor]:
    validation.check_qkv(q, k, v)
    window_size = window_left, window_right
    scale, _ = _check_options(q, k, softmax_scale, causal, window_size, schedule)
    with torch.cuda.device(q.device):
        return forward.forward(aligned(q), aligned(k), aligned(v), scale, causal, window_size)


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
    window_left: int,
    window_right: int,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous."""
    validation.check_backward_tensors(dout, q, k, v, out, lse)
    window_size = window_left, window_right
    scale, concrete = _check_options(q, k, softmax_scale, causal, window_size, schedule)
    grads = emulator.backward(dout, q, k, v, out, lse, scale, causal, concrete, window_size=window_size)
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
    window_left: int,
    window_right: int,
    schedule: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from cute_dash import launch  # needs the DSL, which a machine without a GPU may lack

    validation.check_backward_tensors(dout, q, k, v, out, lse)
    window_size = window_left, window_right
    scale, concrete = _check_options(q, k, softmax_scale, causal, window_size, schedule)
    dout, q, k, v, out = (aligned(x) for x in (dout, q, k, v, out))
    with torch.cuda.device(q.device):
        grads: tuple[Tensor, Tensor, Tensor] = launch.backward(
            dout, q, k, v, out, lse.contiguous(), scale, causal, concrete, window_size=window_size
        )
    _record(schedule, concrete)
    return grads


@attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_backward_tensors(dout, q, k, v, out, lse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs  # softmax_scale, causal, window_left, window_right, schedule
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)


def _forward_autograd(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, *ctx.options)
    return dq, dk, dv, *(None for _ in ctx.options)


def _backward_autograd(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
    raise RuntimeError("cute_dash::attention_backward has no derivative: double backward is not supported")


attention_forward.register_autograd(_forward_autograd, setup_context=_setup_forward_context)
attention_backward.register_autograd(_backward_autograd)


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
