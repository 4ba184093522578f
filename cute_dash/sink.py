"""A learnable sink: one more logit per query head, which takes probability but has no value. Host, with torch.

With the LSE and out of attention without a sink,

    LSE' = logaddexp(LSE, sink)      out' = out * exp(LSE - LSE')

and from these two the backward pass is that of attention: P = exp(S - LSE') are the probabilities of the keys, and
dPsum = rowsum(dO * out') sums over keys alone, because the sink's value is 0. So the sink's own dP is 0 likewise:

    dsink[head] = sum over batch and queries of exp(sink - LSE') * (dLSE' - dPsum)
"""

import math

import torch
from torch import Tensor


def add_sink(
    out: Tensor, lse: Tensor, learnable_sink: Tensor, num_tokens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out' and LSE'. `out` is overwritten.

    Args:
        out: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim).
        lse: (batch, num_heads, seqlen_q), or (num_heads, total_q), fp32.
        learnable_sink: (num_heads,).
        num_tokens: 0-d, with sequences of different lengths: tokens behind these belong to no sequence and see no sink.
    """
    total = torch.logaddexp(lse, learnable_sink.float()[:, None])
    if num_tokens is not None:
        is_behind = torch.arange(lse.shape[-1], device=lse.device) >= num_tokens
        total = total.masked_fill(is_behind, -math.inf)
    # -inf - -inf: neither a key nor a sink
    share = torch.exp(lse - total).masked_fill(total == -math.inf, 0.0)
    return out.mul_(share.transpose(-1, -2).unsqueeze(-1)), total


def get_sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, learnable_sink: Tensor, dlse: Tensor | None) -> Tensor:
    """dsink (num_heads,) in the dtype of the sink, summed in fp32 in an order that depends on the shape alone.

    Args:
        dout, out, lse, learnable_sink: as for `add_sink`; out and lse are its results.
        dlse: gradient of lse, or None.
    """
    products = out.to(torch.float32, copy=True, memory_format=torch.contiguous_format).mul_(dout)
    dpsum = products.sum(dim=-1).transpose(-1, -2)
    if dlse is not None:
        dpsum = dpsum - dlse
    probability = torch.exp(learnable_sink.float()[:, None] - lse)
    # a token of no sequence, whose dout and dlse nobody reads
    shares = (probability * dpsum).masked_fill(lse == -math.inf, 0.0).contiguous()
    others = [dim for dim in range(shares.ndim) if dim != shares.ndim - 2]
    return (0.0 - shares.sum(dim=others)).to(learnable_sink.dtype)  # of nothing 0, where a sign would make it -0
