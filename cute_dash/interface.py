"""The public torch functions. Host; CUDA tensors run on a Hopper GPU, CPU tensors on the emulator.

Tensors are (batch, seqlen, num_heads, head_dim), LSE is (batch, num_heads, seqlen_q) in fp32, natural logarithm. The
causal mask and sliding windows are bottom-right aligned: query i is in line with key i + seqlen_k - seqlen_q. A query
that sees no key has out 0, LSE -inf and dq 0; a key that no query sees has dk and dv 0.
"""

import numbers

import torch
from torch import Tensor

from cute_dash import ops, validation
from cute_dash.naming import name_type
from cute_dash.ops import ScheduleRecord as ScheduleRecord
from cute_dash.ops import last_schedule as last_schedule
from cute_dash.schedule import Schedule

_WindowSize = tuple[int | None, int | None] | None
_OPTIONAL = frozenset(("dout", "dlse", "learnable_sink"))  # tensors that may be None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    *,
    schedule: "str | Schedule" = "auto",
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose gradients have the same bits on every run.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16 (on the CPU also fp32); head_dim a multiple of 8 from
            32 to 256. Any strides with a contiguous last dim are taken as they are if 16-byte aligned, others are
            copied.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), dtype and device of q. num_heads_kv divides num_heads: each KV
            head serves num_heads / num_heads_kv query heads in a row (GQA; MQA with one KV head). v has the head_dim of
            q and k, or 128 where they have 192.
        softmax_scale: factor on Q K^T, above 0; default 1 / sqrt(head_dim).
        causal: bottom-right aligned causal mask: query i sees keys 0 .. i + seqlen_k - seqlen_q.
        window_size: sliding window (left, right) in tokens: query i sees keys i + seqlen_k - seqlen_q - left ..
            i + seqlen_k - seqlen_q + right. -1 or None is no limit on that side; with causal, right is 0 whatever it
            says.
        softcap: only 0.
        schedule: how the backward orders its work: a name (`cute-dash schedules` lists them), "module:ATTR", or a
            schedule object. Part of what the bits depend on; `last_schedule()` tells what ran.
        return_lse: also return LSE. It is differentiable; where it is -inf it is constant, and a gradient is not read.
        learnable_sink: (num_heads,), fp32, bf16 or fp16: for each query head one more logit, not scaled, that takes
            probability but has no value, as in flash-attn-4. LSE is then the one with the sink, and of a query that
            sees no key the sink; its out is 0 as ever. out is rounded twice. The gradient of the sink is a sum over the
            whole batch in an order that depends on the shape alone.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim of v) in the dtype of q, or (out, LSE). With a batch or a length of 0
        there is nothing to compute: out is 0, and so are all gradients.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    tensors = {"q": q, "k": k, "v": v, "learnable_sink": learnable_sink}
    window, spec = _check_options(tensors, softmax_scale, causal, window_size, softcap, schedule)
    validation.check_flag("return_lse", return_lse)
    sink = () if learnable_sink is None else (learnable_sink,)
    out, lse = ops.run_op(ops.attention_forward, q, k, v, softmax_scale, causal, *window, spec, *sink)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    *,
    schedule: "str | Schedule" = "auto",
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention from anyone's out and LSE, as ring attention needs it.

    With those of a call with a learnable sink too; `torch.ops.cute_dash.attention_sink_backward(dout, out, lse,
    learnable_sink, dlse)` is the sink's own.

    Args:
        dout: gradient of out, in its shape and dtype; None if the gradient comes through the LSE alone.
        q, k, v, softmax_scale, causal, window_size, softcap, schedule: as for `flash_attn_func`.
        out: (batch, seqlen_q, num_heads, head_dim of v), dtype of q; finite also for queries that see no key.
        lse: (batch, num_heads, seqlen_q), fp32, natural logarithm.
        dlse: gradient of the LSE, like it; not read where the LSE is -inf. None: the LSE has none.

    Returns:
        dq, dk, dv in the shapes of q, k, v, contiguous, in the input dtype. dk and dv add up over the query heads of
        their KV head in fp32 and are rounded once.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    window, spec = _check_options(tensors, softmax_scale, causal, window_size, softcap, schedule)
    dout, row_gradient = _get_output_gradients(dout, dlse, out)
    options = softmax_scale, causal, *window, spec, *row_gradient
    dq, dk, dv = ops.run_op(ops.attention_backward, dout, q, k, v, out, lse, *options)
    return dq, dk, dv


def _get_output_gradients(dout: Tensor | None, dlse: Tensor | None, out: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """dout, zeros where there is none, and dlse if there is one."""
    if dout is None and dlse is None:
        raise ValueError("dout and dlse are None; allowed: at least one of them a torch.Tensor")
    return torch.zeros_like(out) if dout is None else dout, () if dlse is None else (dlse,)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    *,
    schedule: "str | Schedule" = "auto",
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn_func` for sequences of different lengths, one behind the other.

    Under one schedule and kind of mask the bits of a sequence's gradients depend on the sequence alone, wherever it is
    and whatever is beside it. The greatest lengths choose the schedule of 'auto', but not that of 'auto_invariant', and
    whether a window hides anything at all, which is a matter of the kind of mask. Both may choose another schedule, and
    so other bits, than `flash_attn_func` for the same sequence.

    Args:
        q: (total_q, num_heads, head_dim), dtype and strides as for `flash_attn_func`.
        k, v: (total_k, num_heads_kv, head_dim), head dims as for `flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k: (number of sequences + 1,), int32, on the device of q: from 0, the starts of the
            sequences and the end of the last. A sequence may have other numbers of queries and keys, also none. The
            tensors may be longer: tokens behind the last sequence have out 0, LSE -inf and gradients 0.
        max_seqlen_q, max_seqlen_k: no sequence is longer; an int, or a 0-d tensor, which is read (on the GPU: waited
            for). Of CUDA tensors only the caller knows; nothing else is read back from the device.
        softmax_scale, causal, window_size, softcap, return_lse, learnable_sink: as for `flash_attn_func`; each sequence
            has its own mask. Tokens behind the last sequence see no sink either.
        schedule: as for `flash_attn_func`, but only what needs one resident CTA for every length: 'auto' chooses among
            these, 'auto_invariant' is shortest_first, and shift and symmetric_shift are refused. One that is not
            shipped is proven for each pair of lengths, which are read back from the device.

    Returns:
        out (total_q, num_heads, head_dim of v) in the dtype of q, or (out, LSE) with LSE (num_heads, total_q).

    Raises:
        TypeError, ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    tensors = {"q": q, "k": k, "v": v, "learnable_sink": learnable_sink}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_are_local(tensors)
    window, spec = _check_options(tensors, softmax_scale, causal, window_size, softcap, schedule)
    validation.check_flag("return_lse", return_lse)
    lengths = (_to_int("max_seqlen_q", max_seqlen_q), _to_int("max_seqlen_k", max_seqlen_k))
    sink = () if learnable_sink is None else (learnable_sink,)
    arguments = cu_seqlens_q, cu_seqlens_k, *lengths, softmax_scale, causal, *window, spec, *sink
    out, lse = ops.run_op(ops.attention_varlen_forward, q, k, v, *arguments)
    return (out, lse) if return_lse else out


def attention_varlen_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    *,
    schedule: "str | Schedule" = "auto",
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` for sequences of different lengths, one behind the other.

    Args:
        dout, out: (total_q, num_heads, head_dim of v), dtype of q; finite also for queries that see no key. dout may be
            None as for `attention_backward`.
        lse: (num_heads, total_q), fp32, natural logarithm; dlse likewise.
        q, k, v, cu_seqlens_q and the others: as for `flash_attn_varlen_func`.

    Returns:
        dq, dk, dv in the shapes of q, k, v, contiguous, in the input dtype.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dlse": dlse}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    _check_are_local(tensors)
    window, spec = _check_options(tensors, softmax_scale, causal, window_size, softcap, schedule)
    lengths = (_to_int("max_seqlen_q", max_seqlen_q), _to_int("max_seqlen_k", max_seqlen_k))
    dout, row_gradient = _get_output_gradients(dout, dlse, out)
    arguments = cu_seqlens_q, cu_seqlens_k, *lengths, softmax_scale, causal, *window, spec, *row_gradient
    dq, dk, dv = ops.run_op(ops.attention_varlen_backward, dout, q, k, v, out, lse, *arguments)
    return dq, dk, dv


def _check_are_local(tensors: dict[str, Tensor | None]) -> None:
    """Refuses DTensors, for which the ops with cu_seqlens have no sharding rules."""
    for name, x in tensors.items():
        if type(x) is not Tensor and hasattr(x, "device_mesh"):
            raise TypeError(
                f"{name} is a DTensor; allowed with cu_seqlens: this rank's part, {name}.to_local(); flash_attn_func "
                "and attention_backward take DTensors"
            )


def _to_int(name: str, value: int | Tensor) -> int:
    """A length that may be a 0-d tensor of an integer dtype, or numpy's; at most `MAX_LENGTH`."""
    if isinstance(value, Tensor):
        value = _read_length(name, value)
    elif not isinstance(value, torch.SymInt) and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
        raise TypeError(
            f"{name}={value!r} is a {name_type(value)}; allowed: an int, or a 0-d tensor of an integer dtype"
        )
    value = value if isinstance(value, int | torch.SymInt) else int(value)
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):  # a comparison would make it a constant
        return value
    if value < 0:
        raise ValueError(f"{name}={value}; allowed: at least 0")
    return min(value, validation.MAX_LENGTH)


def _read_length(name: str, value: Tensor) -> int:
    if value.ndim != 0 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(
            f"{name} is a tensor of shape {tuple(value.shape)}, {value.dtype}; allowed: an int, or a 0-d tensor of an "
            "integer dtype"
        )
    if value.device.type == "meta":
        raise ValueError(f"{name} is on {value.device}; allowed: an int, or a 0-d tensor on cpu or cuda, to be read")
    return int(value)


def _check_options(
    tensors: dict[str, Tensor | None],
    softmax_scale: float | None,
    causal: bool,
    window_size: _WindowSize,
    softcap: float,
    schedule: "str | Schedule",
) -> tuple[tuple[int, int], str]:
    """Checks what the ops' schemas cannot express; the rest is checked inside the ops.

    Returns:
        the window's sides and the schedule as the ops take them.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            if x is None and name in _OPTIONAL:
                continue
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
        if x.layout is not torch.strided or x.is_nested:
            layout = f"nested, {x.layout}" if x.is_nested else x.layout
            raise TypeError(f"{name} has layout {layout}; allowed: a dense tensor")
    validation.check_flag("causal", causal)
    window = validation.check_window_size(window_size)
    validation.check_softcap(softcap)
    validation.check_scale(softmax_scale)
    return window, ops.spec_of(schedule)
