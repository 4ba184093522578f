"""Attention in the dtype of its inputs by torch's operations alone, whose autograd tests compare gradients with."""

import math

import torch


def attend(q, k, v, softmax_scale, causal=False, window_size=(-1, -1), learnable_sink=None):
    """out (batch, seqlen_q, num_heads, head_dim), LSE (batch, num_heads, seqlen_q), one softmax over keys and sink."""
    group_size = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * softmax_scale
    batch, num_heads, seqlen_q, seqlen_k = scores.shape
    rows = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    columns = torch.arange(seqlen_k, device=q.device)[None]
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= columns < rows - left
    if right >= 0:
        hidden |= columns > rows + right
    scores = scores.masked_fill(hidden, -math.inf)
    if learnable_sink is not None:
        sink = learnable_sink.to(q.dtype)[None, :, None, None].expand(batch, num_heads, seqlen_q, 1)
        scores = torch.cat([scores, sink], dim=-1)
    blind = (scores == -math.inf).all(dim=-1, keepdim=True)
    # the gradient of a row of -inf would be NaN
    lse = scores.masked_fill(blind, 0.0).logsumexp(dim=-1).masked_fill(blind[..., 0], -math.inf)
    p = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)[..., :seqlen_k]
    return torch.einsum("bhmn,bnhd->bmhd", p, v), lse
