"""flash-attn's functions on this package's kernels: the import line is all that changes. Host.

    from cute_dash.flash_attn_interface import flash_attn_func  # was: from flash_attn import flash_attn_func

Names, order of arguments, defaults and return values are those of `flash_attn.flash_attn_interface`, version 2. What
this package cannot do is refused before any launch; nothing is ignored. `deterministic` may be either: gradients always
have the same bits. Each function also takes `schedule`, as `cute_dash.flash_attn_func` does.

With `return_attn_probs=True` the functions return (out, softmax_lse, S_dmask) as flash-attn does: softmax_lse is
(batch, num_heads, seqlen_q), of the varlen functions (num_heads, total_q), fp32, natural logarithm; S_dmask, which
flash-attn fills for dropout only, is empty. Unlike flash-attn's, whose backward ignores it, the gradient of softmax_lse
counts.
"""

from typing import cast

from torch import Tensor

from cute_dash import interface, validation
from cute_dash.interface import _WindowSize
from cute_dash.schedule import Schedule

_Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    schedule: "str | Schedule" = "auto",
) -> _Result:
    """Attention of q (batch, seqlen_q, num_heads, head_dim) on k, v (batch, seqlen_k, num_heads_k, head_dim).

    Raises:
        TypeError, ValueError: as `cute_dash.flash_attn_func`, and for dropout or ALiBi slopes.
    """
    _check_options(dropout_p, alibi_slopes, deterministic, return_attn_probs)
    out, lse = cast(
        tuple[Tensor, Tensor],
        interface.flash_attn_func(
            q, k, v, softmax_scale, causal, window_size, softcap, schedule=schedule, return_lse=True
        ),
    )
    return _result(out, lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    schedule: "str | Schedule" = "auto",
) -> _Result:
    """`flash_attn_func` with k and v stacked: kv is (batch, seqlen_k, 2, num_heads_k, head_dim)."""
    k, v = _unpack("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        schedule=schedule,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    schedule: "str | Schedule" = "auto",
) -> _Result:
    """`flash_attn_func` with q, k and v stacked: qkv is (batch, seqlen, 3, num_heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        schedule=schedule,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    schedule: "str | Schedule" = "auto",
) -> _Result:
    """Attention of sequences of different lengths: q (total_q, num_heads, head_dim), k, v (total_k, num_heads_k, ...).

    Raises:
        TypeError, ValueError: as `cute_dash.flash_attn_varlen_func`, and for dropout, ALiBi slopes or a block table.
    """
    _check_options(dropout_p, alibi_slopes, deterministic, return_attn_probs)
    if block_table is not None:
        raise ValueError(f"block_table is a {type(block_table).__name__}: paged keys are not supported; allowed: None")
    out, lse = cast(
        tuple[Tensor, Tensor],
        interface.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            causal,
            window_size,
            softcap,
            schedule=schedule,
            return_lse=True,
        ),
    )
    return _result(out, lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    schedule: "str | Schedule" = "auto",
) -> _Result:
    """`flash_attn_varlen_func` with k and v stacked: kv is (total_k, 2, num_heads_k, head_dim)."""
    k, v = _unpack("kv", kv, 2, ("total_k",))
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        schedule=schedule,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: _WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    schedule: "str | Schedule" = "auto",
) -> _Result:
    """`flash_attn_varlen_func` with q, k and v stacked: qkv is (total, 3, num_heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 3, ("total",))
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        schedule=schedule,
    )


def _check_options(dropout_p: float, alibi_slopes: Tensor | None, deterministic: bool, return_attn_probs: bool) -> None:
    """The options of flash-attn that `cute_dash.flash_attn_func` does not have."""
    validation.check_dropout(dropout_p)
    if alibi_slopes is not None:
        raise ValueError(f"alibi_slopes is a {type(alibi_slopes).__name__}: ALiBi is not supported; allowed: None")
    validation.check_flag("deterministic", deterministic)
    validation.check_flag("return_attn_probs", return_attn_probs)


def _unpack(name: str, packed: Tensor, count: int, tokens: tuple[str, ...] = ("batch", "seqlen")) -> tuple[Tensor, ...]:
    """The tensors stacked in the dim after `tokens`; autograd stacks their gradients likewise."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; allowed: a torch.Tensor")
    dims = [*tokens, str(count), "num_heads", "head_dim"]
    if packed.ndim != len(dims) or packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; allowed: {len(dims)}-D ({', '.join(dims)})")
    return packed.unbind(dim=-3)


def _result(out: Tensor, lse: Tensor, return_attn_probs: bool) -> _Result:
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
