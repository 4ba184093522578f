"""Attention forward on CUDA through torch's libraries, brought to this package's semantics.

Host. cuDNN where torch says that it applies, else FlashAttention-2; both give LSE in fp32, natural logarithm. Some
things differ between them and from the contract:

* causal with seqlen_q != seqlen_k: cuDNN aligns the mask top-left; FlashAttention-2, from version 2.1 on and when called
  below `scaled_dot_product_attention`, bottom-right, which is the contract. So unequal causal lengths go to the latter.
* called with a batch of equal lengths, FlashAttention-2 may split the keys among CTAs by how many blocks the batch has and
  how many SMs the device: the bits of a sequence's out would depend on both. Called with cumulative lengths it does not.
* sequences of different lengths go to FlashAttention-2.
* queries that see no key (causal, the first seqlen_q - seqlen_k): their out and LSE are undefined or +inf there; the
  contract says out 0 and LSE -inf.
"""

import math
from typing import Any

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention forward on the current stream of the tensors' device.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16, CUDA.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), same dtype and device; num_heads_kv divides num_heads.
        softmax_scale: factor on Q K^T, above 0.
        causal: bottom-right aligned causal mask.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim), contiguous, dtype of q, and LSE (batch, num_heads, seqlen_q), fp32.
    """
    run = _cudnn_forward if _cudnn_applies(q, k, v, causal) else _flash_forward
    out, lse = run(q, k, v, softmax_scale, causal)
    num_blind_queries = max(q.shape[1] - k.shape[1], 0) if causal else 0
    if num_blind_queries:
        out[:, :num_blind_queries].zero_()
        lse[:, :, :num_blind_queries].fill_(-math.inf)
    return out, lse


def _cudnn_applies(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    if causal and q.shape[1] != k.shape[1]:
        return False
    make_params: Any = torch.backends.cuda.SDPAParams  # torch declares other parameters than this C++ class takes
    heads_first = (x.detach().transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return torch.backends.cuda.can_use_cudnn_attention(make_params(*heads_first, None, 0.0, causal, grouped))


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=softmax_scale
    )
    lse = lse.view(q.shape[:3])  # cuDNN's (batch, num_heads, seqlen_q, 1)
    return out.transpose(1, 2).contiguous(), lse


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    if seqlen_q == 1:
        # for a single query FlashAttention-2 would take the query heads of a group for queries, and may split the keys
        k, v = (x.repeat_interleave(num_heads // x.shape[2], dim=2) for x in (k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
        cum_seq_q=_cumulative(batch, seqlen_q, q.device),
        cum_seq_k=_cumulative(batch, k.shape[1], q.device),
        max_q=seqlen_q,
        max_k=k.shape[1],
        dropout_p=0.0,
        is_causal=causal,
        return_debug_mask=False,
        scale=softmax_scale,
    )
    if lse.dim() == 2:  # (num_heads, batch * seqlen_q); older torch: (batch, num_heads, seqlen_q)
        lse = lse.view(num_heads, batch, seqlen_q).transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return out.view(q.shape), lse


def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    max_seqlens: tuple[int, int],
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention forward of sequences of different lengths, by FlashAttention-2; does not synchronise with the device.

    Args:
        q: (total_q, num_heads, head_dim), bf16 or fp16, CUDA; k, v: (total_k, num_heads_kv, head_dim).
        cu_seqlens: of queries and of keys, (number of sequences + 1,), int32.
        max_seqlens: no sequence has more queries or keys.

    Returns:
        out (total_q, num_heads, head_dim), contiguous, and LSE (num_heads, total_q), fp32; 0 and -inf of queries that see
        no key or belong to no sequence.
    """
    if max_seqlens[0] <= 1:
        # as in `_flash_forward`
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cum_seq_q=cu_seqlens[0],
        cum_seq_k=cu_seqlens[1],
        max_q=max_seqlens[0],
        max_k=max_seqlens[1],
        dropout_p=0.0,
        is_causal=causal,
        return_debug_mask=False,
        scale=softmax_scale,
    )
    sequence, position = _find_tokens(cu_seqlens[0], q.shape[0])
    if lse.dim() == 3:  # older torch: (number of sequences, num_heads, max_seqlen_q)
        lse = lse.transpose(1, 2)[sequence, position.clamp(max=lse.shape[2] - 1)].T
    blind = _is_blind(sequence, position, cu_seqlens, causal)
    out = out.masked_fill(blind[:, None, None], 0.0)
    return out.contiguous(), lse.masked_fill(blind, -math.inf).contiguous()


def _find_tokens(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token and its place in it; tokens behind the last sequence count on in that."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).clamp(max=len(cu_seqlens) - 2)
    return sequence, tokens - cu_seqlens[sequence]


def _is_blind(sequence: Tensor, position: Tensor, cu_seqlens: tuple[Tensor, Tensor], causal: bool) -> Tensor:
    """Which queries see no key or are behind the last sequence."""
    seqlens_q, seqlens_k = (cu.diff()[sequence] for cu in cu_seqlens)
    num_visible = position + 1 + seqlens_k - seqlens_q if causal else seqlens_k
    return (num_visible <= 0) | (seqlens_k == 0) | (position >= seqlens_q)


def _cumulative(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Starts of `batch` sequences of `seqlen` tokens and the end of the last, int32."""
    return torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=device)
