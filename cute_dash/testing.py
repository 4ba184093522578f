"""What tests, the demo and the benchmark measure against: fp64 references, error budgets, bit comparison, inputs.

Host, with torch; works on tensors of any device. The references are written from the formulas of attention and its
gradient, whole matrices at once: no tiles, no schedule, no autograd, so that they share nothing with what they judge.
Lengths are in tokens; tensors are (batch, seqlen, num_heads, head_dim), k and v with num_heads_kv heads, which divides
num_heads; LSE is (batch, num_heads, seqlen_q).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cute_dash.traced_int import TracedInt as TracedInt


class AttentionInputs(NamedTuple):
    """Random q, k, v and dout of one problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def random_inputs(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    head_dim: int,
    *,
    num_heads_kv: int | None = None,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: "torch.device | str" = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """Standard normal q, dout (batch, seqlen_q, num_heads, head_dim) and k, v (batch, seqlen_k, num_heads_kv, ...).

    num_heads_kv is num_heads unless given, and head_dim_v, that of v and dout, head_dim.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(seqlen: int, heads: int, columns: int) -> Tensor:
        return torch.randn(batch, seqlen, heads, columns, generator=generator, device=device).to(dtype)

    heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    columns_v = head_dim if head_dim_v is None else head_dim_v
    q, k = normal(seqlen_q, num_heads, head_dim), normal(seqlen_k, heads_kv, head_dim)
    v = normal(seqlen_k, heads_kv, columns_v)
    return AttentionInputs(q, k, v, dout=normal(seqlen_q, num_heads, columns_v))


def attention_forward_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in fp64: out = softmax(scale * Q K^T) V with the bottom-right causal mask and window.

    learnable_sink (num_heads,) is one more logit of each query, without a value.

    Returns:
        out (batch, seqlen_q, num_heads, head dim of v) and LSE (batch, num_heads, seqlen_q), both fp64. A query that
        sees no key has out 0 and LSE -inf, or the sink.
    """
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    p, lse = _softmax(q.double(), k, softmax_scale, causal, window_size, learnable_sink)
    return torch.einsum("bhmn,bnhd->bmhd", p, v), lse


def attention_backward_ref(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    *,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention in fp64, from q, k, v alone (nothing rounded is taken from a forward pass).

    With P = softmax(S) the Jacobian of a row is diag(P) - P P^T, so dS = P * (dP - rowsum(P * dP)). That of the LSE is
    P, which with its gradient dlse (batch, num_heads, seqlen_q) adds P * dlse.

    Returns:
        dq, dk, dv in the shapes of q, k, v, fp64; rows of dq whose query sees no key are 0.
    """
    num_heads_kv = k.shape[2]
    dout, q, k, v = dout.double(), q.double(), _repeat_heads(k, q), _repeat_heads(v, q)
    p, _ = _softmax(q, k, softmax_scale, causal, window_size, learnable_sink)
    dp = torch.einsum("bmhd,bnhd->bhmn", dout, v)
    ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True))
    if dlse is not None:
        ds = ds + p * dlse.double()[..., None]
    return _gradients(p, ds * softmax_scale, dout, q, k, num_heads_kv)


def sink_gradient_ref(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    learnable_sink: Tensor,
    dlse: Tensor | None = None,
) -> Tensor:
    """Gradient (num_heads,) of a sink in fp64: over all queries, its probability times dlse - rowsum(P * dP)."""
    dout, q, k, v = dout.double(), q.double(), _repeat_heads(k, q), _repeat_heads(v, q)
    p, lse = _softmax(q, k, softmax_scale, causal, window_size, learnable_sink)
    dpsum = (p * torch.einsum("bmhd,bnhd->bhmn", dout, v)).sum(dim=-1)
    row = -dpsum if dlse is None else dlse.double() - dpsum
    return (torch.exp(learnable_sink.double()[:, None] - lse) * row).sum(dim=(0, 2))


def attention_backward_rounded(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    *,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The comparator of an error budget: fp64 but for the roundings that a kernel with 16-bit GEMM inputs must make.

    Out, P and dS are rounded to the input dtype, and so are the results. Its error against `attention_backward_ref` is
    what the dtype costs; a kernel may be a small factor worse.

    Returns:
        dq, dk, dv in the shapes of q, k, v and the input dtype.
    """
    dtype, num_heads_kv = q.dtype, k.shape[2]
    dout, q, k, v = dout.double(), q.double(), _repeat_heads(k, q), _repeat_heads(v, q)
    p, _ = _softmax(q, k, softmax_scale, causal, window_size, learnable_sink)
    out = torch.einsum("bhmn,bnhd->bmhd", p, v).to(dtype).double()
    dpsum = (dout * out).sum(dim=-1).transpose(1, 2)  # (batch, num_heads, seqlen_q)
    if dlse is not None:
        dpsum = dpsum - dlse.double()
    ds = p * (torch.einsum("bmhd,bnhd->bhmn", dout, v) - dpsum[..., None])
    dq, dk, dv = _gradients(p.to(dtype).double(), ds.to(dtype).double(), dout, q, k, num_heads_kv)
    return (dq * softmax_scale).to(dtype), (dk * softmax_scale).to(dtype), dv.to(dtype)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """k or v in fp64 with a head of its own for each query head."""
    return x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _softmax(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """P (batch, num_heads, seqlen_q, seqlen_k) and LSE; a row without a visible key is 0 and -inf, or the sink."""
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * softmax_scale
    seqlen_q, seqlen_k = scores.shape[-2:]
    left, right = window_size
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if causal or right >= 0:
        hidden |= torch.ones_like(hidden).triu(seqlen_k - seqlen_q + (0 if causal else right) + 1)
    if left >= 0:
        hidden |= torch.ones_like(hidden).tril(seqlen_k - seqlen_q - left - 1)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if learnable_sink is not None:
        lse = torch.logaddexp(lse, learnable_sink.double()[:, None])
    p = torch.exp(scores - lse[..., None])
    return torch.where(lse[..., None] == -math.inf, torch.zeros_like(p), p), lse


def _gradients(
    p: Tensor, ds: Tensor, dout: Tensor, q: Tensor, k: Tensor, num_heads_kv: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ = dS K, dK = dS^T Q, dV = P^T dO; dK and dV summed over the query heads of each KV head."""
    dq = torch.einsum("bhmn,bnhd->bmhd", ds, k)
    dk = torch.einsum("bhmn,bmhd->bnhd", ds, q)
    dv = torch.einsum("bhmn,bmhd->bnhd", p, dout)
    dk, dv = (x.unflatten(2, (num_heads_kv, -1)).sum(dim=3) for x in (dk, dv))  # type: ignore[no-untyped-call]
    return dq, dk, dv


def relative_error(x: Tensor, ref: Tensor) -> float:
    """||x - ref|| / ||ref|| in fp64 (Frobenius); ||x|| where ref is 0. NaN in either tensor gives NaN."""
    x, ref = x.detach().double(), ref.detach().double()
    norm = float(ref.norm())
    return float((x - ref).norm()) / (norm if norm != 0 else 1.0)


def assert_accurate(actual: Tensor, ref: Tensor, comparator: Tensor, name: str, factor: float = 2.0) -> float:
    """Asserts that the error of `actual` against `ref` is at most `factor` times that of `comparator`.

    Both errors are relative Frobenius norms. Where both are below the unit roundoff of the dtype (a result that is
    almost exactly representable), the budget is that roundoff.

    Returns:
        the ratio of the two errors (0 if both are 0).

    Raises:
        AssertionError: with both errors; also if `actual` holds a NaN or an infinity.
    """
    assert torch.isfinite(actual).all(), f"{name} holds {(~torch.isfinite(actual)).sum().item()} NaN or infinite values"
    error, allowed = relative_error(actual, ref), relative_error(comparator, ref)
    budget = max(factor * allowed, torch.finfo(actual.dtype).eps / 2)
    assert error <= budget, f"{name}: relative error {error:.3e}, allowed {budget:.3e} ({factor} x {allowed:.3e})"
    return error / allowed if allowed else 0.0


def assert_bitwise_equal(a: Tensor, b: Tensor, name: str) -> None:
    """Asserts that two tensors have the same shape, dtype and bits; equal NaNs are equal, 0.0 and -0.0 are not.

    Raises:
        AssertionError: with the number of differing elements and the first of them: coordinate and both values.
    """
    assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
    differs = as_bits(a) != as_bits(b)
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {differs.sum().item()} of {a.numel()} elements differ, first at {first}: "
            f"{a[first].item()!r} against {b[first].item()!r}"
        )


def as_bits(x: Tensor) -> Tensor:
    """The bits of a tensor as integers of its element size, for comparisons that tell 0.0 from -0.0 and NaNs apart."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integer)


def why_no_hopper() -> str | None:
    """None where the GPU tests can run, else the reason why they cannot."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability}, the kernel needs (9, 0)"
    return None
