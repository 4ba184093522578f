"""`torch.nn.functional.scaled_dot_product_attention` on this package's kernels. Host.

    cute_dash.register_sdpa()
    torch.nn.attention.activate_flash_attention_impl("cute-dash")
    with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ...  # models that call scaled_dot_product_attention

While active, the CUDA kernels of torch's flash backend for dense tensors are replaced, forward and backward, until
`torch.nn.attention.restore_flash_attention_impl()`. Which backend torch takes stays torch's choice: name it, as above,
or another one may run. What this package does not support raises in the forward; nothing falls back. Not replaced:
nested tensors and `torch.nn.attention.varlen`.

Tensors are (batch, num_heads, seqlen, head_dim) here, as torch has them; LSE is (batch, num_heads, seqlen_q).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.library import Library

from cute_dash import interface, validation

IMPLEMENTATION = "cute-dash"


def register_sdpa() -> None:
    """Makes `torch.nn.attention.activate_flash_attention_impl("cute-dash")` known; activates nothing by itself.

    Raises:
        RuntimeError: torch has no registry of flash implementations.
    """
    register = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; "
            "call cute_dash.flash_attn_func, or update torch"
        )
    register(IMPLEMENTATION, register_fn=_activate)


@dataclass
class _Activation:
    """Keeps the kernels in torch's dispatcher until `remove`, which torch calls."""

    library: Library | None

    def remove(self) -> None:
        self.library = None  # a Library takes its registrations with it


def _activate(dispatch_key: str = "CUDA") -> _Activation:
    library = Library("aten", "IMPL", dispatch_key)  # type: ignore[no-untyped-call]
    for name, kernel in (
        ("_scaled_dot_product_flash_attention", _forward),
        ("_scaled_dot_product_flash_attention_backward", _backward),
    ):
        library.impl(name, torch.compiler.disable(kernel))  # type: ignore[no-untyped-call]
    return _Activation(library)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """What `aten::_scaled_dot_product_flash_attention` returns; state of a random generator is not needed and 0."""
    validation.check_dropout(dropout_p)
    if return_debug_mask:
        raise ValueError(f"{return_debug_mask=} is not supported; allowed: False")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"{is_causal=} with {query.shape[-2]} queries and {key.shape[-2]} keys: torch aligns the mask top-left, "
            "this package bottom-right; allowed: equal lengths, or call cute_dash.flash_attn_func"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = interface.flash_attn_func(q, k, v, scale, is_causal, return_lse=True)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return (
        _in_layout_of(query, out),
        lse,
        None,
        None,
        query.shape[-2],
        key.shape[-2],
        rng_state,
        rng_state.new_zeros(()),
        query.new_empty(0),
    )


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """What `aten::_scaled_dot_product_flash_attention_backward` returns; `_forward` has refused what cannot be had."""
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = interface.attention_backward(dout, q, k, v, o, logsumexp, scale, is_causal)
    return tuple(_in_layout_of(x, grad) for x, grad in zip((query, key, value), grads, strict=True))


def _in_layout_of(like: Tensor, x: Tensor) -> Tensor:
    """`x` (batch, seqlen, num_heads, head_dim) with heads first, in the strides that torch expects: those of `like`.

    Mostly a view: models make heads first by a transposition too.
    """
    x = x.transpose(1, 2)
    strides = torch.empty_like(like, device="meta").stride()
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)
