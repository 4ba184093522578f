"""What the gate compares with: fp64 gradients of some streams, and torch's own flash backward as the error's yardstick.

A stream is one (batch, KV head) with its query heads. Gradients of a whole cell in fp64 would take gigabytes, so only a
few streams are computed, in chunks of query rows; the yardstick covers all streams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Grads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
GRAD_NAMES = ("dq", "dk", "dv")
NUM_REFERENCE_STREAMS = 4
# error of a candidate over that of torch's flash backward, on the streams with a reference
ERROR_RATIO = 2.0
# distance of a candidate from the flash backward over the latter's error, on every stream: by the triangle inequality
# 1 + ERROR_RATIO, and some more because streams differ in their error
DISTANCE_RATIO = 4.0
# below this root mean square a gradient counts as zero: its relative error would be that of rounding noise
TINY_RMS = 1e-3


@dataclass(frozen=True)
class Inputs:
    """What a backward call gets.

    Attributes:
        q, out, dout: (B, S, H, D), bf16 or fp16; out and dout have the head dim of v.
        k, v: (B, S, H_kv, D), likewise; H_kv divides H.
        lse: (B, H, S), fp32, natural log.
        softmax_scale: factor of the logits.
        causal: the mask; query and key lengths are equal.
        window_size: sliding window (left, right) in tokens, -1 for no limit.
        lengths: tokens of each sequence of a varlen cell, whose tensors are packed: (T, H, D), lse (H, T).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    causal: bool
    window_size: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] | None = None

    @property
    def num_streams(self) -> int:
        return (len(self.lengths) if self.lengths else self.k.shape[0]) * self.k.shape[-2]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[-2] // self.k.shape[-2]


@dataclass(frozen=True)
class Yardstick:
    """The right gradients of some streams, the flash backward's of all, and the errors that are allowed.

    Attributes:
        streams: stream indices (batch_idx * kv_heads + head_idx) with a reference.
        reference: dq (len(streams) * group_size, S, D), dk and dv (len(streams), S, D) of these streams, fp64.
        flash: dq, dk, dv of the flash backward, each (B, S, H, D), or packed.
        budgets: allowed relative error of dq, dk, dv against `reference`.
        distances: allowed relative distance of dq, dk, dv from `flash`, for each head of each sequence.
        lengths: tokens of each packed sequence, as in `Inputs`; S above is the longest's, with zeros behind others.
    """

    streams: list[int]
    reference: Grads
    flash: Grads
    budgets: tuple[float, float, float]
    distances: tuple[float, float, float]
    lengths: tuple[int, ...] | None = None

    def errors(self, grads: Grads) -> tuple[float, float, float]:
        """Greatest relative error over the streams with a reference, of dq, dk and dv."""
        dq, dk, dv = _errors_of_streams(grads, self.reference, self.streams, self.lengths)
        return dq, dk, dv

    def find_error(self, grads: Grads) -> str | None:
        """What is wrong with a candidate's gradients, in words; None if nothing is."""
        for name, grad, flash in zip(GRAD_NAMES, grads, self.flash, strict=True):
            if grad.shape != flash.shape or grad.dtype != flash.dtype:
                have, want = (f"{tuple(t.shape)} {t.dtype}" for t in (grad, flash))
                return f"{name} is {have}, not {want}"
        for name, error, budget in zip(GRAD_NAMES, self.errors(grads), self.budgets, strict=True):
            if not error <= budget:  # also true for NaN
                return f"error of {name} is {error:.2e} against fp64, allowed are {budget:.2e}"
        for name, grad, flash, allowed in zip(GRAD_NAMES, grads, self.flash, self.distances, strict=True):
            distance = _stream_errors(_streams(grad, self.lengths), _streams(flash, self.lengths))
            if not distance <= allowed:
                return f"{name} is {distance:.2e} from torch's flash backward in some stream, allowed are {allowed:.2e}"
        return None


def make_cu_seqlens(lengths: Sequence[int], device: "torch.device | str") -> torch.Tensor:
    """Starts of packed sequences and the end of the last, int32."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_yardstick(inputs: Inputs, flash_backward: Callable[[Inputs], Grads] | None = None) -> Yardstick:
    """Computes the reference and the flash backward once for all candidates of a cell.

    The budget is twice the flash backward's error, and at least the input dtype's unit roundoff.
    """
    streams = choose_streams(inputs.num_streams)
    if inputs.lengths:
        # from the shortest sequence to the longest: errors differ with the length
        by_length = [length for length in inputs.lengths for _ in range(inputs.k.shape[-2])]
        order = sorted(range(inputs.num_streams), key=by_length.__getitem__)
        streams = [order[place] for place in streams]
    flash = (flash_backward or torch_flash_backward)(inputs)
    reference = reference_gradients(inputs, streams)
    roundoff = torch.finfo(inputs.q.dtype).eps / 2
    errors = _errors_of_streams(flash, reference, streams, inputs.lengths)
    dq, dk, dv = (max(ERROR_RATIO * e, roundoff) for e in errors)
    far_dq, far_dk, far_dv = (max(DISTANCE_RATIO * e, roundoff) for e in errors)
    return Yardstick(streams, reference, flash, (dq, dk, dv), (far_dq, far_dk, far_dv), inputs.lengths)


def choose_streams(num_streams: int, count: int = NUM_REFERENCE_STREAMS) -> list[int]:
    """`count` streams spread evenly from the first to the last; all of them if there are no more."""
    if num_streams <= count:
        return list(range(num_streams))
    return [i * (num_streams - 1) // (count - 1) for i in range(count)]


def reference_gradients(inputs: Inputs, streams: Sequence[int], chunk_rows: int = 1024) -> Grads:
    """Gradients in fp64 from q, k, v and dout alone, so that a wrong forward is noticed too.

    Per row chunk: S = scale Q K^T, P = softmax(S), O = P V, dP = dO V^T, dS = P (dP - rowsum(dO O)), dQ = scale dS K,
    dK = scale dS^T Q, dV = P^T dO.

    Args:
        inputs: (B, S, H, D) tensors, or packed ones.
        streams: which (batch, KV head) pairs.
        chunk_rows: query rows at a time; memory is a few (chunk_rows, S) fp64 matrices.
    Returns:
        dq (len(streams) * group_size, S, D), dk and dv (len(streams), S, D), fp64; zeros behind shorter sequences.
    """
    size = inputs.group_size
    per_head = [
        [_head_gradients(inputs, stream, stream * size + member, chunk_rows) for member in range(size)]
        for stream in streams
    ]
    dq = torch.stack([grads[0] for group in per_head for grads in group])
    dk, dv = (torch.stack([torch.stack([g[i] for g in group]).sum(0) for group in per_head]) for i in (1, 2))
    return dq, dk, dv


def _head_gradients(inputs: Inputs, stream: int, query_stream: int, chunk_rows: int) -> Grads:
    """dq of one (batch, query head), and its part of dk and dv, each (S, D) fp64."""
    q, dout = (_streams(t, inputs.lengths)[query_stream].double() for t in (inputs.q, inputs.dout))
    k, v = (_streams(t, inputs.lengths)[stream].double() for t in (inputs.k, inputs.v))
    scale, seqlen = inputs.softmax_scale, q.shape[0]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if inputs.lengths:
        seqlen = inputs.lengths[stream // inputs.k.shape[-2]]
        k, v = k[:seqlen], v[:seqlen]
    keys = torch.arange(seqlen, device=q.device)
    for start in range(0, seqlen, chunk_rows):
        rows = slice(start, min(start + chunk_rows, seqlen))
        s = scale * (q[rows] @ k.T)  # (rows, S)
        left, right = inputs.window_size
        if inputs.causal:
            s.masked_fill_(keys > keys[rows, None], float("-inf"))
        if left >= 0:
            s.masked_fill_(keys < keys[rows, None] - left, float("-inf"))
        if right >= 0:
            s.masked_fill_(keys > keys[rows, None] + right, float("-inf"))
        p = torch.softmax(s, dim=-1)
        dp = dout[rows] @ v.T
        d_psum = (dout[rows] * (p @ v)).sum(-1, keepdim=True)
        ds = p * (dp - d_psum)
        dq[rows] = scale * (ds @ k)
        dk[:seqlen] += scale * (ds.T @ q[rows])
        dv[:seqlen] += p.T @ dout[rows]
    return dq, dk, dv


def torch_flash_backward(inputs: Inputs) -> Grads:
    """dq, dk, dv of torch's own flash attention in the input dtype, in the shapes of q, k, v, contiguous."""
    head_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    if value_dim < head_dim:
        # it wants one head dim: zeros behind v change nothing, and dout has nothing to say there
        v, dout = (torch.nn.functional.pad(t, (0, head_dim - value_dim)) for t in (inputs.v, inputs.dout))
        dq, dk, dv = torch_flash_backward(replace(inputs, v=v, dout=dout))
        return dq, dk, dv[..., :value_dim].contiguous()
    if inputs.window_size != (-1, -1) or inputs.lengths:
        return _torch_flash_backward_packed(inputs)
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = scaled_dot_product_attention(
            q, k, v, is_causal=inputs.causal, scale=inputs.softmax_scale, enable_gqa=inputs.group_size > 1
        )
        grads = torch.autograd.grad(out, (q, k, v), inputs.dout.transpose(1, 2))
    dq, dk, dv = (g.transpose(1, 2).contiguous() for g in grads)
    return dq, dk, dv


def _torch_flash_backward_packed(inputs: Inputs) -> Grads:
    """The same with a window or lengths, which scaled_dot_product_attention has no arguments for."""
    x, lengths = inputs, inputs.lengths or (inputs.q.shape[1],) * inputs.q.shape[0]
    starts = make_cu_seqlens(lengths, x.q.device)
    where = (starts, starts, max(lengths), max(lengths))
    left, right = (None if side < 0 else side for side in x.window_size)
    options: dict[str, Any] = dict(scale=x.softmax_scale, window_size_left=left, window_size_right=right)
    q, k, v, dout = (t.reshape(-1, *t.shape[-2:]) for t in (x.q, x.k, x.v, x.dout))
    out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, *where, 0.0, x.causal, False, **options
    )
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, *where, 0.0, x.causal, rng_state, unused, **options
    )
    dq, dk, dv = (g.reshape(t.shape) for g, t in zip(grads, (x.q, x.k, x.v), strict=True))
    return dq, dk, dv


def _errors_of_streams(
    grads: Grads, reference: Grads, streams: list[int], lengths: tuple[int, ...] | None
) -> list[float]:
    """Greatest relative error of dq, dk and dv over these streams."""
    size = len(reference[0]) // len(streams)
    query_streams = [stream * size + member for stream in streams for member in range(size)]
    picks = (query_streams, streams, streams)
    zipped = zip(grads, reference, picks, strict=True)
    return [_stream_errors(_streams(g, lengths)[pick], ref) for g, ref, pick in zipped]


def _streams(x: torch.Tensor, lengths: tuple[int, ...] | None) -> torch.Tensor:
    """(B, S, H, D), or packed (T, H, D) -> (B * H, S, D), with zeros behind packed sequences but the longest."""
    if lengths:
        x = torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)
    return x.transpose(1, 2).flatten(0, 1)


def _stream_errors(x: torch.Tensor, ref: torch.Tensor) -> float:
    """Greatest over the streams of |x - ref| / |ref| in the 2-norm; x and ref are (streams, S, D). NaN stays NaN."""
    dtype = torch.promote_types(ref.dtype, torch.float32)
    norm = torch.linalg.vector_norm(ref.to(dtype), dim=(1, 2))
    error = torch.linalg.vector_norm(x.to(dtype) - ref.to(dtype), dim=(1, 2))
    tiny = TINY_RMS * (ref.shape[1] * ref.shape[2]) ** 0.5
    return float((error / norm.clamp_min(tiny)).max())
