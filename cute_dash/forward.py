"""Attention forward on CUDA through torch's libraries, brought to this package's semantics.

Host. cuDNN where it applies, else FlashAttention-2; both give LSE in fp32, natural logarithm. Some
things differ between them and from the contract:

* causal with seqlen_q != seqlen_k: cuDNN aligns the mask top-left; FlashAttention-2, from version 2.1 on and when
  called below `scaled_dot_product_attention`, bottom-right, which is the contract. So unequal causal lengths go to the
  latter.
* sliding windows: cuDNN has none through torch. FlashAttention-2 has them, aligned bottom-right, but takes a side of
  seqlen_k or more for no limit, and no limit on one side for a limit of seqlen_k where the other side has one. Both are
  wrong for some queries if there are more queries than keys: those go to it in parts, see `_split_queries`.
* called with a batch of equal lengths, FlashAttention-2 may split the keys among CTAs by how many blocks the batch has
  and how many SMs the device: the bits of a sequence's out would depend on both. Called with cumulative lengths it does
  not.
* FlashAttention-2 counts in 64 bits; of cuDNN this is not known, so tensors of 2**31 elements and more do not go to it.
* for a single query cuDNN splits the keys likewise: short sequences go to FlashAttention-2.
* head dims above 128: cuDNN has them from versions on about which torch's own checks have changed, but 192 for Q and K
  with 128 for V from 9.11 on. The others go to FlashAttention-2, which has up to 256, but wants V like Q and K: it gets
  V with zeros behind it.
* sequences of different lengths go to FlashAttention-2; with windows too, but see `forward_varlen`.
* queries that see no key (the first seqlen_q - seqlen_k - right): their out and LSE are undefined or +inf there; the
  contract says out 0 and LSE -inf.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_dash.config import UNEQUAL_HEAD_DIMS
from cute_dash.problem import Window, normalize_mask

_CUDNN_MIN_VERSION = 90100
_CUDNN_MIN_VERSION_UNEQUAL = 91100  # with `UNEQUAL_HEAD_DIMS`
_CUDNN_MAX_HEAD_DIM = 128
_CUDNN_MIN_SEQLEN = 128
_CUDNN_MAX_ELEMENTS = 2**31 - 1  # of a tensor; untested beyond
_FLASH_MAX_SEQUENCES = 2**16 - 1  # blocks in a grid's second dim
_FLASH_MAX_TOKENS = 2**31 - 1  # starts of sequences are int32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Attention forward on the current stream of the tensors' device.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16 or fp16, CUDA.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), same dtype and device; num_heads_kv divides num_heads. v may
            have another head dim, see `config.UNEQUAL_HEAD_DIMS`.
        softmax_scale: factor on Q K^T, above 0.
        causal: bottom-right aligned causal mask.
        window_size: sliding window (left, right), -1 for no limit.

    Returns:
        out (batch, seqlen_q, num_heads, head dim of v), contiguous, dtype of q, and LSE (batch, num_heads, seqlen_q),
        fp32.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    causal, window = normalize_mask(causal, window_size, seqlen_q, seqlen_k)
    if window is not None:
        out, lse = _local_forward(q, k, v, softmax_scale, window)
    else:
        run = _cudnn_forward if _cudnn_applies(q, k, v, causal) else _flash_forward
        out, lse = run(q, k, v, softmax_scale, causal)
    right = 0 if causal else seqlen_q if window is None else window.right
    num_blind_queries = max(seqlen_q - seqlen_k - right, 0)
    if num_blind_queries:
        out[:, :num_blind_queries].zero_()
        lse[:, :, :num_blind_queries].fill_(-math.inf)
    return out, lse


class QueryRange(NamedTuple):
    """Queries start .. stop - 1, which FlashAttention-2 can run with all keys and this mask; -1 is no limit."""

    start: int
    stop: int
    causal: bool
    window_left: int
    window_right: int


def _split_queries(seqlen_q: int, seqlen_k: int, window: Window) -> list[QueryRange]:
    """Parts of the queries for which FlashAttention-2's reading of a window is the contract's; mostly one.

    With no more queries than keys, and whenever right < seqlen_k, the two agree. Else three parts: queries that the
    right side limits, which the left one, reaching seqlen_k further back, does not; queries that no side limits; and
    the last ones, fewer than seqlen_k, which the left side limits.
    """
    left, right = window
    if seqlen_q <= seqlen_k or right < seqlen_k:
        return [QueryRange(0, seqlen_q, False, left, right)]
    # the last query of a part is in line with the last key: part by part the window moves over
    see_last_key = seqlen_q - right if right < seqlen_q - 1 else 0
    see_first_key = min(seqlen_q - seqlen_k + left + 1, seqlen_q)
    parts = [
        QueryRange(0, see_last_key, True, -1, -1),
        QueryRange(see_last_key, see_first_key, False, -1, -1),
        QueryRange(see_first_key, seqlen_q, False, left, -1),
    ]
    return [part for part in parts if part.start < part.stop]


def _local_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, window: Window) -> tuple[Tensor, Tensor]:
    parts = [
        _flash_forward(q[:, start:stop], k, v, softmax_scale, causal, (left, right))
        for start, stop, causal, left, right in _split_queries(q.shape[1], k.shape[1], window)
    ]
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def _cudnn_applies(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """A function of shapes and of the installed libraries alone, like the choice of a schedule.

    Not `torch.backends.cuda.can_use_cudnn_attention`: what that says depends on switches that must not change bits
    (`sdpa_kernel`, `torch.use_deterministic_algorithms`).
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if (causal and seqlen_q != seqlen_k) or min(seqlen_q, seqlen_k) < _CUDNN_MIN_SEQLEN:
        return False
    if max(q.numel(), k.numel()) > _CUDNN_MAX_ELEMENTS:
        return False
    unequal = (q.shape[-1], v.shape[-1]) == UNEQUAL_HEAD_DIMS
    if q.shape[-1] > _CUDNN_MAX_HEAD_DIM and not unequal:
        return False
    cudnn: Any = torch.backends.cudnn  # untyped in torch
    min_version = _CUDNN_MIN_VERSION_UNEQUAL if unequal else _CUDNN_MIN_VERSION
    return bool(cudnn.is_available() and cudnn.version() >= min_version)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, compute_log_sumexp=True, is_causal=causal, scale=softmax_scale
    )
    lse = lse.view(q.shape[:3])  # cuDNN's (batch, num_heads, seqlen_q, 1)
    return out.transpose(1, 2).contiguous(), lse


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_k = k.shape[1]
    _check_flash_limits(batch, batch * max(seqlen_q, seqlen_k))
    window_left, window_right = (None if side < 0 else side for side in window_size)
    if seqlen_q == 1:
        # for a single query FlashAttention-2 would take the query heads of a group for queries, and may split the keys
        k, v = (x.repeat_interleave(num_heads // x.shape[2], dim=2) for x in (k, v))
    cum_seq_q = _cumulative(batch, seqlen_q, q.device)
    out, lse = _run_flash(
        *(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)),
        cum_seq_q=cum_seq_q,
        cum_seq_k=cum_seq_q if seqlen_k == seqlen_q else _cumulative(batch, seqlen_k, q.device),  # a launch less
        max_q=seqlen_q,
        max_k=seqlen_k,
        is_causal=causal,
        scale=softmax_scale,
        window_size_left=window_left,
        window_size_right=window_right,
    )
    if lse.dim() == 2:  # older torch: (batch, num_heads, seqlen_q)
        lse = _batch_first(lse, batch)
    return out.view(batch, seqlen_q, num_heads, -1), lse


def _batch_first(lse: Tensor, batch: int) -> Tensor:
    """(num_heads, batch * seqlen_q) as (batch, num_heads, seqlen_q), contiguous."""
    num_heads = len(lse)
    if 1 in (batch, num_heads):  # the order is the same: nothing to copy
        return lse.view(batch, num_heads, -1)
    return lse.view(num_heads, batch, -1).transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _run_flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 on (total tokens, num_heads, head_dim): out (total_q, num_heads, head dim of v) and its LSE."""
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if head_dim_v < head_dim:
        v = torch.nn.functional.pad(v, (0, head_dim - head_dim_v))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, dropout_p=0.0, return_debug_mask=False, **options)
    if head_dim_v < head_dim:
        out = out.narrow(-1, 0, head_dim_v).clone(memory_format=torch.contiguous_format)
    return out, lse


def _check_flash_limits(num_sequences: int, num_tokens: int) -> None:
    if num_sequences > _FLASH_MAX_SEQUENCES or num_tokens > _FLASH_MAX_TOKENS:
        raise ValueError(
            f"{num_sequences} sequences of together {num_tokens} tokens; allowed in a forward pass: at most "
            f"{_FLASH_MAX_SEQUENCES} sequences and {_FLASH_MAX_TOKENS} tokens"
        )


def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: tuple[Tensor, Tensor],
    max_seqlens: tuple[int, int],
    softmax_scale: float,
    causal: bool,
    window: Window | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention forward of sequences of different lengths, by FlashAttention-2; does not synchronise with the device.

    Args:
        q: (total_q, num_heads, head_dim), bf16 or fp16, CUDA; k, v: (total_k, num_heads_kv, head_dim), as for
            `forward`.
        cu_seqlens: of queries and of keys, (number of sequences + 1,), int32.
        max_seqlens: no sequence has more queries or keys.
        causal, window: `normalize_mask` of max_seqlens.

    Returns:
        out (total_q, num_heads, head dim of v), contiguous, and LSE (num_heads, total_q), fp32; 0 and -inf of queries
        that see no key or belong to no sequence.
    """
    _check_flash_limits(len(cu_seqlens[0]) - 1, max(len(q), len(k)))
    if max_seqlens[0] <= 1:
        # as in `_flash_forward`
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    max_seqlen_q, max_seqlen_k = max_seqlens
    if window is not None:
        # a side of max_k or more would be taken for no limit, which is wrong for sequences of more queries than keys
        max_seqlen_k = max(max_seqlen_k, window.right + 1)
    window_left, window_right = window or (None, None)
    out, lse = _run_flash(
        q,
        k,
        v,
        cum_seq_q=cu_seqlens[0],
        cum_seq_k=cu_seqlens[1],
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        is_causal=causal,
        scale=softmax_scale,
        window_size_left=window_left,
        window_size_right=window_right,
    )
    sequence, position = _find_tokens(cu_seqlens[0], q.shape[0])
    if lse.dim() == 3:  # older torch: (number of sequences, num_heads, max_seqlen_q)
        lse = lse.transpose(1, 2)[sequence, position.clamp(max=lse.shape[2] - 1)].T
    right = 0 if causal else None if window is None else window.right
    blind = _is_blind(sequence, position, cu_seqlens, right)
    out = out.masked_fill(blind[:, None, None], 0.0)
    return out.contiguous(), lse.masked_fill(blind, -math.inf).contiguous()


def _find_tokens(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token and its place in it; tokens behind the last sequence count on in that."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).clamp(max=len(cu_seqlens) - 2)
    return sequence, tokens - cu_seqlens[sequence]


def _is_blind(sequence: Tensor, position: Tensor, cu_seqlens: tuple[Tensor, Tensor], right: int | None) -> Tensor:
    """Which queries see no key, `right` keys beyond their own at most, or are behind the last sequence."""
    seqlens_q, seqlens_k = (cu.diff()[sequence] for cu in cu_seqlens)
    num_visible = seqlens_k if right is None else position + 1 + seqlens_k - seqlens_q + right
    return (num_visible <= 0) | (seqlens_k == 0) | (position >= seqlens_q)


def _cumulative(batch: int, seqlen: int, device: torch.device) -> Tensor:
    """Starts of `batch` sequences of `seqlen` tokens and the end of the last, int32."""
    return torch.arange(0, (batch + 1) * seqlen, seqlen, dtype=torch.int32, device=device)
