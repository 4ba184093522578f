"""The torch.library custom ops `cute_dash::attention_forward`, `attention_backward` and their `attention_varlen_` kin.

Functional ops with CPU (emulator), CUDA (libraries' forward, this package's backward kernel), fake and autograd
registrations. Every implementation validates before it launches anything, so the raw ops are as safe as the functions
in `cute_dash.interface`. An op's schema has no place for a Python object: a schedule travels as a string, see
`spec_of`, and a window as the two ints window_left and window_right, -1 for no limit.

Short attention calls are bound by what the host does for each, so that is kept small: the ops are defined with
`torch.library.Library` (`custom_op` wraps each implementation in further checks), arguments that look like those of an
earlier call are not checked again, and `run_op` leaves autograd out where no gradient is asked for.
"""

import itertools
import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_dash import emulator, forward, launch, validation
from cute_dash.check import check_value_object
from cute_dash.device import on_device
from cute_dash.naming import is_found_by_name
from cute_dash.problem import ProblemShape
from cute_dash.registry import find_loaded, missing_members
from cute_dash.schedule import CompileTimeHandle, Schedule
from cute_dash.sink import add_sink, get_sink_gradient
from cute_dash.validation import SHIPPED_SCHEDULES

_Op: TypeAlias = "torch._ops.OpOverload[..., Any]"
_ALIGNMENT = 16  # bytes, of what TMA reads
_MAX_STRIDE = 2**35  # bytes: `varlen.WRAP_STRIDE`, and within the 2**40 of TMA
_MAX_CHECKED = 4096


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


_schedules: dict[str, Schedule] = {}  # by handle
_alike: dict[str, list[tuple[Schedule, str]]] = {}  # objects of one class name and fields, with their handles
_numbers = itertools.count(1)
_PROCESS = secrets.token_hex(4)


def spec_of(schedule: "str | Schedule") -> str:
    """A string that names `schedule` to the ops of this process: a string as it is, an object by a handle.

    The handle means this object or an equal one, whatever else takes the name of its class later; a string means what
    it names when an op runs. A handle is made of the class and the fields, so it means the same schedule in every
    process, or is unknown there: of a class that its name does not lead to, or no longer, it has a number and a mark of
    this process.
    """
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, CompileTimeHandle):
        return schedule._get_handle()
    handle: str = make_handle(schedule)
    return handle


# under torch.compile this must run while tracing, or the op would look the handle up before it is known
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def make_handle(schedule: Schedule) -> str:
    """The handle of a schedule object, which is remembered."""
    if isinstance(schedule, type) or not isinstance(schedule, Schedule):
        raise TypeError(f"{_describe(schedule)}; allowed: a name, 'module:ATTR' or a Schedule")
    cls = type(schedule)
    plain = f"{cls.__module__}.{cls.__qualname__}@{sorted(vars(schedule).items())}"
    alike = _alike.setdefault(plain, [])
    for known, handle in alike:
        if known is schedule:
            return handle
    check_value_object(schedule)  # before its equality is asked for
    for known, handle in alike:
        if type(known) is cls and known == schedule:
            return handle
    handle = plain
    # the class may be a function's own or have been defined anew, as in a notebook, and a field may show itself alike
    if not is_found_by_name(cls) or _schedules.setdefault(plain, schedule) is not schedule:
        handle = f"{plain}#{_PROCESS}.{next(_numbers)}"
        _schedules[handle] = schedule
    alike.append((schedule, handle))
    return handle


def _describe(schedule: object) -> str:
    """What is wrong with an object that is no schedule."""
    if isinstance(schedule, type):
        return f"schedule is the class {schedule.__name__}, not an instance of it"
    missing = missing_members(schedule)
    lacks = f", which lacks {', '.join(missing)}" if "get_lock_value" not in missing else ""
    return f"{schedule=} is a {type(schedule).__name__}{lacks}"


@dataclass
class _Checked:
    """What the options of a call come to, once everything has been checked.

    Attributes:
        strides_fit: the strides of all tensors but the LSE and its gradient are such as TMA can read.
        has_pairs: there is a query and a key.
        loaded: `registry.find_loaded` of the schedule's string at that time; None for what is shipped.
        plan: of the backward kernel, from the first launch on.
    """

    softmax_scale: float
    record: ScheduleRecord
    strides_fit: bool
    has_pairs: bool
    loaded: object
    plan: launch.Plan | None = None


_checked: dict[tuple[Any, ...], _Checked] = {}
_get_metadata = attrgetter("shape", "dtype", "device")


def _check(
    check_tensors: Callable[..., None],
    tensors: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    schedule: str,
) -> _Checked:
    """Checks the arguments of an op, unless arguments of the same metadata and options have passed before.

    Args:
        check_tensors: takes `tensors`.
        tensors: all of the op, a LSE and its gradient or a sink last.
    """
    loaded = None if schedule in SHIPPED_SCHEDULES else find_loaded(schedule)
    key = (*map(_get_metadata, tensors), *map(Tensor.stride, tensors), softmax_scale, causal, window_size, schedule)
    known = _checked.get(key)
    if known is not None and known.loaded is loaded:
        return known
    check_tensors(*tensors)
    validation.check_device(q.device)
    validation.check_scale(softmax_scale)
    window_size = validation.check_window_size(window_size)
    concrete = validation.resolve_schedule(_schedules.get(schedule, schedule), q, k, causal, window_size)
    has_pairs = 0 not in (q.shape[0], q.shape[1], k.shape[1])
    checked = _Checked(*_conclude(tensors, q, softmax_scale, schedule, concrete), has_pairs, loaded)
    _remember(_checked, key, checked)
    return checked


def _conclude(
    tensors: tuple[Tensor, ...], q: Tensor, softmax_scale: float | None, requested: str, concrete: Schedule
) -> tuple[float, ScheduleRecord, bool]:
    """softmax_scale, record and strides_fit of arguments that are good."""
    return (
        1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale,
        ScheduleRecord(requested, concrete.name, concrete.version, concrete),
        all(_strides_fit(x) for x in tensors[:5]),
    )


class _Lengths(NamedTuple):
    """What an op gets for sequences of different lengths."""

    cu_seqlens: tuple[Tensor, Tensor]
    max_seqlens: tuple[int, int]


class _CheckedVarlen(NamedTuple):
    """What `_Checked` is, with sequences of different lengths.

    Attributes:
        longest: a sequence of the greatest lengths, with the mask that is compiled in for all.
        loaded: as in `_Checked`.
    """

    softmax_scale: float
    record: ScheduleRecord
    strides_fit: bool
    longest: ProblemShape
    loaded: object


_checked_varlen: dict[tuple[Any, ...], _CheckedVarlen] = {}


def _check_varlen(
    check_tensors: Callable[..., None],
    tensors: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    lengths: _Lengths,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    schedule: str,
) -> _CheckedVarlen:
    """`_check` with sequences of different lengths.

    What is known of CPU tensors only, the values of cu_seqlens, is checked every time, as is a schedule that is not
    shipped.
    """
    cu_seqlens, max_seqlens = lengths
    loaded = None if schedule in SHIPPED_SCHEDULES else find_loaded(schedule)
    metadata = (*map(_get_metadata, tensors), *map(Tensor.stride, tensors), *map(_get_metadata, cu_seqlens))
    key = (*metadata, max_seqlens, softmax_scale, causal, window_size, schedule)
    checked = _checked_varlen.get(key)
    if checked is None or checked.loaded is not loaded:
        check_tensors(*tensors)
        validation.check_device(q.device)
        validation.check_scale(softmax_scale)
        validation.check_cu_seqlens(cu_seqlens, max_seqlens, q)
        window_size = validation.check_window_size(window_size)
        longest = validation.get_longest_shape(q, k, max_seqlens, causal, window_size)
        spec = _schedules.get(schedule, schedule)
        concrete = validation.resolve_varlen_schedule(spec, longest, (len(q), len(k)), len(cu_seqlens[0]) - 1)
        checked = _CheckedVarlen(*_conclude(tensors, q, softmax_scale, schedule, concrete), longest, loaded)
        _remember(_checked_varlen, key, checked)
    if q.device.type == "cpu":
        validation.check_lengths(cu_seqlens, max_seqlens, (len(q), len(k)))
    if not validation.is_tested(checked.record.schedule):
        validation.prove_lengths(checked.record.schedule, checked.longest, cu_seqlens)
    return checked


_T = TypeVar("_T")


def _remember(known: dict[tuple[Any, ...], _T], key: tuple[Any, ...], checked: _T) -> None:
    if len(known) >= _MAX_CHECKED:  # of a training run with ever new lengths
        known.clear()
    known[key] = checked


def _record(record: ScheduleRecord) -> None:
    global _last_record
    _last_record = record


_library = torch.library.Library("cute_dash", "DEF")  # type: ignore[no-untyped-call]


def _define(cpu: Callable[..., Any]) -> _Op:
    """Defines an op with the name and the signature of its CPU implementation."""
    name = cpu.__name__
    schema = name + torch.library.infer_schema(cpu, mutates_args=())
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
    _implement(name, "CPU")(cpu)
    op: _Op = getattr(torch.ops.cute_dash, name).default
    return op


def _implement(name: str, dispatch_key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as an op's implementation, which torch.compile must not look into."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, torch.compiler.disable(function), dispatch_key)  # type: ignore[no-untyped-call]
        return function

    return register


def run_op(op: _Op, *arguments: Any) -> Any:
    """`op(*arguments)`, past its autograd kernel (10 us) where no gradient is asked for."""
    if torch.compiler.is_compiling() or _asks_for_gradient(arguments) or _is_transformed():
        return op(*arguments)
    with torch._C._AutoDispatchBelowAutograd():  # written out: a call with as many arguments takes 0.3 us
        return op(*arguments)


def _run_below_autograd(op: _Op, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def _asks_for_gradient(arguments: Iterable[Any]) -> bool:
    if torch.is_grad_enabled():
        for x in arguments:  # no generator, which takes half as long again
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def _has_tangent(arguments: Iterable[Any]) -> bool:
    return forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and torch._unpack_dual(x, forward_ad._current_level)[1] is not None for x in arguments
    )


def _is_transformed() -> bool:
    """Whether a transform of torch.func is at work, whose wrappers hide that a gradient is asked for."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@_define
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads, head_dim of v), LSE (batch, num_heads, seqlen_q); `schedule`: the backward's."""
    window_size = window_left, window_right
    tensors = _given(q, k, v, learnable_sink)
    checked = _check(validation.check_qkv, tensors, q, k, softmax_scale, causal, window_size, schedule)
    if not checked.has_pairs:
        out, lse = _see_nothing(q, v)
    else:
        out, lse = emulator.forward(q, k, v, checked.softmax_scale, causal, window_size)
    return (out, lse) if learnable_sink is None else add_sink(out, lse, learnable_sink)


@_implement("attention_forward", "CUDA")
def _forward_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    window_size = window_left, window_right
    tensors = _given(q, k, v, learnable_sink)
    checked = _check(validation.check_qkv, tensors, q, k, softmax_scale, causal, window_size, schedule)
    if not checked.has_pairs:
        out, lse = _see_nothing(q, v)
    else:
        q, k, v = _aligned(checked, q, k, v)
        with on_device(q.device):
            out, lse = forward.forward(q, k, v, checked.softmax_scale, causal, window_size)
    return (out, lse) if learnable_sink is None else add_sink(out, lse, learnable_sink)


def _given(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors without the last one, which is optional, if that is None."""
    given: Any = tensors if tensors[-1] is not None else tensors[:-1]
    return given  # type: ignore[no-any-return]


def _see_nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and LSE of queries without keys."""
    batch, seqlen_q, num_heads, _ = q.shape
    out = q.new_zeros((batch, seqlen_q, num_heads, v.shape[-1]))
    return out, q.new_full((batch, num_heads, seqlen_q), -math.inf, dtype=torch.float32)


def _zeros(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Gradients of what no pair of a query and a key is in."""
    return tuple(x.new_zeros(x.shape) for x in tensors)


@torch.library.register_fake(attention_forward, lib=_library)  # type: ignore[untyped-decorator]
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    validation.check_qkv(q, k, v, learnable_sink)
    batch, seqlen_q, num_heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, num_heads, v.shape[-1]))
    return out, q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)


@_define
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
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous."""
    window_size = window_left, window_right
    tensors = _given(dout, q, k, v, out, lse, dlse)
    checked = _check(validation.check_backward_tensors, tensors, q, k, softmax_scale, causal, window_size, schedule)
    grads: Any
    if not checked.has_pairs:
        grads = _zeros(q, k, v)
    else:
        options = checked.softmax_scale, causal, checked.record.schedule
        grads = emulator.backward(dout, q, k, v, out, lse, *options, window_size=window_size, dlse=dlse)
    _record(checked.record)
    return grads  # type: ignore[no-any-return]


@_implement("attention_backward", "CUDA")
def _backward_cuda(
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
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    window_size = window_left, window_right
    tensors = _given(dout, q, k, v, out, lse, dlse)
    checked = _check(validation.check_backward_tensors, tensors, q, k, softmax_scale, causal, window_size, schedule)
    grads: Any
    if not checked.has_pairs:
        grads = _zeros(q, k, v)
    else:
        if checked.plan is None:
            options = causal, checked.record.schedule
            checked.plan = launch.plan_backward(q, k, v, *options, window_size=window_size, dlse=dlse is not None)
        dout, q, k, v, out = _aligned(checked, dout, q, k, v, out)
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        grads = launch.run(checked.plan, dout, q, k, v, out, lse, checked.softmax_scale, dlse=dlse)
    _record(checked.record)
    return grads  # type: ignore[no-any-return]


@torch.library.register_fake(attention_backward, lib=_library)  # type: ignore[untyped-decorator]
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
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_backward_tensors(dout, q, k, v, out, lse, dlse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_define
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
    window_left: int,
    window_right: int,
    schedule: str,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (total_q, num_heads, head dim of v) and LSE (num_heads, total_q); `schedule` is the backward's."""
    lengths = _Lengths((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    options = softmax_scale, causal, (window_left, window_right), schedule
    tensors = _given(q, k, v, learnable_sink)
    checked = _check_varlen(validation.check_varlen_qkv, tensors, q, k, lengths, *options)
    out, lse = emulator.forward_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, checked.softmax_scale, causal, (window_left, window_right)
    )
    return (out, lse) if learnable_sink is None else add_sink(out, lse, learnable_sink, cu_seqlens_q[-1])


@_implement("attention_varlen_forward", "CUDA")
def _varlen_forward_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    lengths = _Lengths((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    options = softmax_scale, causal, (window_left, window_right), schedule
    tensors = _given(q, k, v, learnable_sink)
    checked = _check_varlen(validation.check_varlen_qkv, tensors, q, k, lengths, *options)
    scale, longest = checked.softmax_scale, checked.longest
    if 0 in (len(q), len(k), *lengths.max_seqlens):  # no query meets a key: this launches fills only
        out, lse = emulator.forward_varlen(q, k, v, *_NO_SEQUENCES, scale, causal)
    else:
        q, k, v = _aligned(checked, q, k, v)
        cu_seqlens = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        max_seqlens = longest.seqlen_q, longest.seqlen_k
        with on_device(q.device):
            out, lse = forward.forward_varlen(q, k, v, cu_seqlens, max_seqlens, scale, longest.causal, longest.window)
    return (out, lse) if learnable_sink is None else add_sink(out, lse, learnable_sink, cu_seqlens_q[-1])


_NO_SEQUENCES = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


@torch.library.register_fake(attention_varlen_forward, lib=_library)  # type: ignore[untyped-decorator]
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_left: int,
    window_right: int,
    schedule: str,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    validation.check_varlen_qkv(q, k, v, learnable_sink)
    validation.check_kind_of_cu_seqlens((cu_seqlens_q, cu_seqlens_k), q)
    total_q, num_heads, _ = q.shape
    out = q.new_empty((total_q, num_heads, v.shape[-1]))
    return out, q.new_empty((num_heads, total_q), dtype=torch.float32)


@_define
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
    window_left: int,
    window_right: int,
    schedule: str,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, contiguous."""
    lengths = _Lengths((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    options = softmax_scale, causal, (window_left, window_right), schedule
    tensors = _given(dout, q, k, v, out, lse, dlse)
    checked = _check_varlen(validation.check_varlen_backward_tensors, tensors, q, k, lengths, *options)
    scale, record, _, longest, _ = checked
    arguments = *lengths.cu_seqlens, scale, longest.causal, record.schedule
    grads = emulator.backward_varlen(dout, q, k, v, out, lse, *arguments, window=longest.window, dlse=dlse)
    _record(record)
    return grads


@_implement("attention_varlen_backward", "CUDA")
def _varlen_backward_cuda(
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
    window_left: int,
    window_right: int,
    schedule: str,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = _Lengths((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    options = softmax_scale, causal, (window_left, window_right), schedule
    tensors = _given(dout, q, k, v, out, lse, dlse)
    checked = _check_varlen(validation.check_varlen_backward_tensors, tensors, q, k, lengths, *options)
    scale, record, _, longest, _ = checked
    grads: Any
    if 0 in (len(q), len(k)):  # nothing to launch a kernel for
        grads = _zeros(q, k, v)
    else:
        dout, q, k, v, out = _aligned(checked, dout, q, k, v, out)
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        arguments = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), scale, longest.causal, record.schedule
        grads = launch.backward_varlen(dout, q, k, v, out, lse, *arguments, window=longest.window, dlse=dlse)
    _record(record)
    return grads  # type: ignore[no-any-return]


@torch.library.register_fake(attention_varlen_backward, lib=_library)  # type: ignore[untyped-decorator]
def _(
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
    window_left: int,
    window_right: int,
    schedule: str,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    validation.check_varlen_backward_tensors(dout, q, k, v, out, lse, dlse)
    validation.check_kind_of_cu_seqlens((cu_seqlens_q, cu_seqlens_k), q)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@_define
def attention_sink_backward(
    dout: Tensor, out: Tensor, lse: Tensor, learnable_sink: Tensor, dlse: Tensor | None = None
) -> Tensor:
    """dsink (num_heads,), from the out and LSE of a forward pass with a sink, with or without a batch dim."""
    validation.check_sink_tensors(dout, out, lse, learnable_sink, dlse)
    return get_sink_gradient(dout, out, lse, learnable_sink, dlse)


@_implement("attention_sink_backward", "CUDA")
def _sink_backward_cuda(
    dout: Tensor, out: Tensor, lse: Tensor, learnable_sink: Tensor, dlse: Tensor | None = None
) -> Tensor:
    validation.check_sink_tensors(dout, out, lse, learnable_sink, dlse)
    return get_sink_gradient(dout, out, lse, learnable_sink, dlse)


@torch.library.register_fake(attention_sink_backward, lib=_library)  # type: ignore[untyped-decorator]
def _(dout: Tensor, out: Tensor, lse: Tensor, learnable_sink: Tensor, dlse: Tensor | None = None) -> Tensor:
    validation.check_sink_tensors(dout, out, lse, learnable_sink, dlse)
    return torch.empty_like(learnable_sink, memory_format=torch.contiguous_format)


class CuteDashAttention(torch.autograd.Function):
    """The forward op with its derivative, under the name that profilers show."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None,
        causal: bool,
        window_left: int,
        window_right: int,
        schedule: str,
        learnable_sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        options = softmax_scale, causal, window_left, window_right, schedule
        out, lse = _run_below_autograd(attention_forward, q, k, v, *options, learnable_sink)
        ctx.save_for_backward(q, k, v, out, lse, learnable_sink)
        ctx.options = options
        ctx.set_materialize_grads(False)  # else torch fills a dlse of zeros
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *grads, dsink = _get_gradients(ctx, attention_backward, dout, dlse)
        return *grads, *(None for _ in ctx.options), dsink


class CuteDashVarlenAttention(torch.autograd.Function):
    """`CuteDashAttention` of sequences of different lengths."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        causal: bool,
        window_left: int,
        window_right: int,
        schedule: str,
        learnable_sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        cu_seqlens = cu_seqlens_q, cu_seqlens_k
        options = max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_left, window_right, schedule
        out, lse = _run_below_autograd(attention_varlen_forward, q, k, v, *cu_seqlens, *options, learnable_sink)
        ctx.save_for_backward(q, k, v, out, lse, learnable_sink, *cu_seqlens)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *grads, dsink = _get_gradients(ctx, attention_varlen_backward, dout, dlse)
        return *grads, None, None, *(None for _ in ctx.options), dsink


def _get_gradients(ctx: Any, op: _Op, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and dsink of what a forward pass saved, None where nothing or nobody asks."""
    if dout is None and dlse is None:
        return None, None, None, None
    q, k, v, out, lse, learnable_sink, *cu_seqlens = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    # not None: arguments that are not given do not appear in a graph
    given = _given(dlse)
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if any(ctx.needs_input_grad[:3]):
        grads = run_op(op, dout, q, k, v, out, lse, *cu_seqlens, *ctx.options, *given)
    dsink = None
    if learnable_sink is not None and ctx.needs_input_grad[-1]:
        dsink = run_op(attention_sink_backward, dout, out, lse, learnable_sink, *given)
    return *grads, dsink


_NO_DERIVATIVE = "cute_dash's attention backward has no derivative: double backward is not supported"


class CuteDashAttentionGradients(torch.autograd.Function):
    """The backward op, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _run_below_autograd(attention_backward, *arguments)
        return dq, dk, dv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(_NO_DERIVATIVE)


class CuteDashVarlenAttentionGradients(torch.autograd.Function):
    """The backward op of sequences of different lengths, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _run_below_autograd(attention_varlen_backward, *arguments)
        return dq, dk, dv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(_NO_DERIVATIVE)


class CuteDashSinkGradient(torch.autograd.Function):
    """The backward op of a sink, which has no derivative."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        dsink: Tensor = _run_below_autograd(attention_sink_backward, *arguments)
        return dsink

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(_NO_DERIVATIVE)


def _implement_autograd(op: _Op, function: type[torch.autograd.Function]) -> None:
    """Registers `function` as what an op does where a gradient is asked for."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(*arguments: Any) -> Any:
        if torch._C._are_functorch_transforms_active() or _has_tangent(arguments):
            raise RuntimeError(
                f"{op._schema.name} has no derivative for torch.func or forward-mode AD; "
                "allowed: torch.autograd's backward, torch.func.vmap"
            )
        if _asks_for_gradient(arguments):
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        return _run_below_autograd(op, *arguments)

    _library.impl(op, run, "Autograd")  # type: ignore[no-untyped-call]


_implement_autograd(attention_forward, CuteDashAttention)
_implement_autograd(attention_backward, CuteDashAttentionGradients)
_implement_autograd(attention_varlen_forward, CuteDashVarlenAttention)
_implement_autograd(attention_varlen_backward, CuteDashVarlenAttentionGradients)
_implement_autograd(attention_sink_backward, CuteDashSinkGradient)


def _aligned(checked: _Checked | _CheckedVarlen, *tensors: Tensor) -> Iterable[Tensor]:
    """The tensors as TMA can read them."""
    for x in tensors:  # no generator, which takes half as long again
        if not checked.strides_fit or x.data_ptr() % _ALIGNMENT:
            return map(aligned, tensors)
    return tensors


def aligned(x: Tensor) -> Tensor:
    """`x` itself if TMA can read it, else a contiguous copy.

    TMA wants a 16-byte aligned address, a contiguous last dim, and the other strides multiples of 16 bytes, positive
    and not too large, as that of an extent 1 may be.
    The copy is a clone: `contiguous` would return a tensor whose only flaw is its address or the stride of an extent 1.
    """
    if _strides_fit(x) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides_fit(x: Tensor) -> bool:
    *outer, last = (stride * x.element_size() for stride in x.stride())
    return last == x.element_size() and all(0 < stride < _MAX_STRIDE and stride % _ALIGNMENT == 0 for stride in outer)
