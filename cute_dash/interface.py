"""The public torch functions. Host; CUDA tensors run on a Hopper GPU, CPU tensors on the emulator.

Tensors are (batch, seqlen, num_heads, head_dim), LSE is (batch, num_heads, seqlen_q) in fp32, natural logarithm. The
causal mask and sliding windows are bottom-right aligned: query i is in line with key i + seqlen_k - seqlen_q. A query that
sees no key has out 0, LSE -inf and dq 0; a key that no query sees has dk and dv 0.
"""

from torch import Tensor

from cute_dash import ops, validation
from cute_dash.ops import ScheduleRecord as ScheduleRecord
from cute_dash.ops import last_schedule as last_schedule
from cute_dash.schedule import Schedule

_WindowSize = tuple[int | None, int | None] | None


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose gradients have the same bits on every run.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16 (on the CPU also fp32); head_dim 64 or 128. Any strides
            with a contiguous last dim are taken as they are if 16-byte aligned, others are copied.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), dtype and device of q. num_heads_kv divides num_heads: each KV head
            serves num_heads / num_heads_kv query heads in a row (GQA; MQA with one KV head).
        softmax_scale: factor on Q K^T, above 0; default 1 / sqrt(head_dim).
        causal: bottom-right aligned causal mask: query i sees keys 0 .. i + seqlen_k - seqlen_q.
        window_size: sliding window (left, right) in tokens: query i sees keys i + seqlen_k - seqlen_q - left ..
            i + seqlen_k - seqlen_q + right. -1 or None is no limit on that side; with causal, right is 0 whatever it says.
        softcap: only 0.
        schedule: how the backward orders its work: a name (`cute-dash schedules` lists them), "module:ATTR", or a
            schedule object. Part of what the bits depend on; `last_schedule()` tells what ran.
        return_lse: also return LSE, which is not differentiable.

    Returns:
        out in the shape and dtype of q, or (out, LSE).

    Raises:
        TypeError, ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    window, spec = _check_options({"q": q, "k": k, "v": v}, softmax_scale, causal, window_size, softcap, schedule)
    out, lse = ops.run_op(ops.attention_forward, q, k, v, softmax_scale, causal, *window, spec)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention from anyone's out and LSE, as ring attention needs it.

    Args:
        dout: gradient of out, shape and dtype of q.
        q, k, v, softmax_scale, causal, window_size, softcap, schedule: as for `flash_attn_func`.
        out: (batch, seqlen_q, num_heads, head_dim), dtype of q; finite also for queries that see no key.
        lse: (batch, num_heads, seqlen_q), fp32, natural logarithm.

    Returns:
        dq, dk, dv in the shapes of q, k, v, contiguous, in the input dtype. dk and dv add up over the query heads of their
        KV head in fp32 and are rounded once.

    Raises:
        TypeError, ValueError: before any launch, naming the argument, its value and what is allowed.
    """
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    window, spec = _check_options(tensors, softmax_scale, causal, window_size, softcap, schedule)
    dq, dk, dv = ops.run_op(ops.attention_backward, dout, q, k, v, out, lse, softmax_scale, causal, *window, spec)
    return dq, dk, dv


def _check_options(
    tensors: dict[str, Tensor],
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
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
    validation.check_causal(causal)
    window = validation.check_window_size(window_size)
    validation.check_softcap(softcap)
    validation.check_scale(softmax_scale)
    return window, ops.spec_of(schedule)
