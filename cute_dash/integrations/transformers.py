"""Hugging Face transformers: `attn_implementation="cute_dash"`, once `register()` has been called.

Host, with torch and transformers; with one older than `TRANSFORMERS_MIN_VERSION` the import raises ImportError. Two
functions are registered: the attention of a layer, and the one that makes the mask of a forward pass. What a model asks
for and cannot be had is refused in either: nothing is dropped, nothing falls back to another implementation.

What the second makes is a `Mask`, which the first knows what to do with and nothing else does. So a model that asks
transformers for a mask, but does the attention itself, raises: without a mask it would see the future.

Sequences of different lengths in one tensor, by a padding mask or packed behind each other, are run by
`flash_attn_varlen_func`. The mask describes them by *segments*, int (batch, seqlen_k): 0 for padding, and another
number for each sequence of a row. A padding mask of ones and zeros is already that.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from packaging.version import Version  # transformers needs it, too
from torch import Tensor, nn

from cute_dash.integrations import TRANSFORMERS_MIN_VERSION
from cute_dash.interface import flash_attn_func, flash_attn_varlen_func
from cute_dash.schedule import Schedule

if Version(transformers.__version__) < Version(TRANSFORMERS_MIN_VERSION):
    raise ImportError(
        f"transformers {transformers.__version__} is installed; allowed: {TRANSFORMERS_MIN_VERSION} and newer "
        f"(pip install 'transformers>={TRANSFORMERS_MIN_VERSION}')"
    )
# not by `from transformers import`: an older version, which lacks names, would fail above the check
masking_utils = transformers.masking_utils

# arguments of other attention functions, which change what is computed
_REFUSED = (
    *("position_bias", "attention_bias", "alibi", "head_mask", "layer_head_mask"),
    *("indices", "block_indices"),  # the keys that a sparse layer chose
    "sinks",  # one for each query, not one for each head
    *("cache", "block_table", "k_cache", "v_cache"),  # paged
)
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def register(name: str = "cute_dash", *, schedule: "str | Schedule" = "auto") -> None:
    """Makes this package's attention known to transformers.

    Afterwards `AutoModel.from_pretrained(..., attn_implementation=name)`, `from_config` and
    `model.set_attn_implementation` take it. Registering a name again replaces it, also in models that use it already.

    Args:
        name: what models ask for.
        schedule: of the backward pass, as for `flash_attn_func`; another schedule needs another name.
    """
    transformers.AttentionInterface.register(name, partial(attention, schedule=schedule))
    transformers.AttentionMaskInterface.register(name, make_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Mask | Tensor | None",
    *,
    schedule: "str | Schedule" = "auto",
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer; without a mask its `is_causal` and its config's decide, unless `is_causal` is given.
        query: (batch, num_heads, seqlen_q, head_dim).
        key, value: (batch, num_heads_kv, seqlen_k, head_dim); value may have head_dim 128 where the others have 192.
        attention_mask: what `make_mask` made, which decides what is causal and what a window is, as in eager attention;
            None, or segments (batch, seqlen_k) from a model that does not ask for masks.
        sliding_window: keys that a query sees, itself among them; causal only, and not another one than the mask's.
        s_aux: (num_heads,), logits of attention sinks, see `flash_attn_func`'s learnable_sink.
        position_ids: (1 or batch, seqlen_q), read only if the model was given no attention mask, neither padding nor
            ones, and there are no other keys than those of the queries: where they go back to 0, the next packed
            sequence starts. Not read if kwargs has the sequences' lengths (cu_seq_lens_q, ... max_length_k).

    Returns:
        out (batch, seqlen_q, num_heads, head_dim of value) and no weights; padding among causal queries has out 0.

    Raises:
        TypeError, ValueError: naming what is not supported, and what is.
    """
    _refuse_unsupported(dropout, kwargs)
    _check_extents(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in _autocast(query, key, value))
    if isinstance(attention_mask, Mask):
        mask = attention_mask
        _check_mask(mask, q.shape[1], k.shape[1], sliding_window)
    else:
        causal = _is_causal(module) if is_causal is None else bool(is_causal)
        mask = _wrap(attention_mask, causal, q.shape[1], k.shape[1], sliding_window)
    window_size = _get_window(mask.sliding_window, mask.causal, k.shape[1])
    options: dict[str, Any] = dict(
        softmax_scale=scaling,
        causal=mask.causal,
        window_size=window_size,
        softcap=softcap or 0.0,
        schedule=schedule,
        learnable_sink=s_aux,
    )
    lengths = _get_lengths(q, k, mask, window_size != (-1, -1), position_ids, kwargs)
    if lengths is not None:
        return _run_varlen(q, k, v, lengths, options), None
    out = flash_attn_func(q, k, v, **options)
    assert isinstance(out, Tensor)  # LSE was not asked for
    return out, None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast does for torch's attention: rotary embeddings leave q and k in fp32 there, beside a v of 16 bits."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) for x in tensors)


def _refuse_unsupported(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout != 0:
        raise ValueError(f"{dropout=}; allowed: 0, such as attention_dropout=0.0 in the model's config")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions=True: attention weights are never formed; allowed: False")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} is given, which attention here does not have; allowed: None")


def _check_extents(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Of what `_run_varlen` makes one dim of, so that nothing below could tell."""
    for name, x in (("key", key), ("value", value)):
        allowed = query.shape[0], *x.shape[1:2], key.shape[2], *x.shape[3:]
        if tuple(x.shape) != allowed:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {allowed}")


def _check_mask(mask: "Mask", seqlen_q: int, seqlen_k: int, sliding_window: int | None) -> None:
    """That a layer's call is the one which its mask was made for."""
    asked = _get_window(sliding_window, mask.causal, seqlen_k)
    if sliding_window is not None and asked != _get_window(mask.sliding_window, mask.causal, seqlen_k):
        raise ValueError(
            f"{sliding_window=}, in a layer whose mask has {mask.sliding_window}; allowed: the mask's, or None"
        )
    if mask.causal and (seqlen_q, seqlen_k) != mask.extents:
        raise ValueError(
            f"{seqlen_q} queries and {seqlen_k} keys; allowed: {mask.extents[0]} and {mask.extents[1]}, which the "
            "causal mask was made for"
        )


def _wrap(
    attention_mask: Tensor | None, causal: bool, seqlen_q: int, seqlen_k: int, sliding_window: int | None
) -> "Mask":
    """Nothing says then which keys the queries belong to, but for all of them or the last one."""
    if causal and seqlen_q not in (1, seqlen_k):
        raise ValueError(
            f"{seqlen_q} queries and {seqlen_k} keys, causal, without a mask of make_mask; allowed: "
            f"{seqlen_k} queries, or 1"
        )
    return Mask(attention_mask, causal, (seqlen_q, seqlen_k), sliding_window, is_given=True)


def _is_causal(module: nn.Module) -> bool:
    """A config's is_causal=False makes a decoder bidirectional, whatever its layers say."""
    return bool(getattr(module, "is_causal", True)) and getattr(getattr(module, "config", None), "is_causal", True)


def _get_window(sliding_window: int | None, causal: bool, seqlen_k: int) -> tuple[int, int]:
    if sliding_window is None:
        return -1, -1
    if sliding_window < 1:  # 0 would make a side of -1, which is no limit
        raise ValueError(f"{sliding_window=}; allowed: keys, at least 1, or None")
    if causal and sliding_window >= seqlen_k:
        return -1, -1
    if not causal:
        raise ValueError(f"{sliding_window=} without a causal mask; allowed: None")
    return sliding_window - 1, 0


# Masks


class Mask:
    """What a query sees, for `attention` alone: no tensor, and whatever is done to it as to one raises.

    Args:
        segments: (batch, seqlen_k), int or bool, or None: nothing but causality and window is masked.
        causal: a query sees no key after its own, where the last query is in line with the last key.
        extents: (seqlen_q, seqlen_k), those of the calls; of a mask that is not causal, `attention` asks for neither.
        sliding_window: keys that a query sees, itself among them, or None.
        is_given: the caller gave the model an attention mask, so that position_ids mark no packed sequences.
    """

    def __init__(
        self,
        segments: Tensor | None,
        causal: bool,
        extents: tuple[int, int],
        sliding_window: int | None = None,
        *,
        is_given: bool,
    ):
        self.segments = segments
        self.causal = causal
        self.extents = extents
        self.sliding_window = sliding_window
        self.is_given = is_given
        self.found: dict[Any, tuple[Tensor, _Lengths | None]] = {}  # see `_once_per_forward`

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(_describe_misuse(name))  # no other error: hasattr has to say no

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise TypeError(_describe_misuse(getattr(function, "__name__", str(function))))

    __hash__ = object.__hash__  # which a class with __eq__ has not


def _describe_misuse(use: str) -> str:
    return (
        f"{use}: this model's code takes the mask for a tensor, but only cute-dash's attention knows what is in it; "
        "allowed: models whose layers hand the mask on to transformers' AttentionInterface as it is, or another "
        "attn_implementation, such as 'eager'"
    )


def _refuse(operator: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise TypeError(_describe_misuse(operator))

    return refuse


# torch is asked second, or never
for _operator in (
    *("add radd iadd sub rsub isub mul rmul imul truediv rtruediv matmul rmatmul and rand or ror xor rxor".split()),
    *("eq ne lt le gt ge neg invert bool int float len iter contains getitem setitem".split()),
):
    setattr(Mask, f"__{_operator}__", _refuse(f"__{_operator}__"))


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: "int | Tensor" = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    device: "torch.device | str" = "cpu",
    **kwargs: Any,
) -> Mask:
    """The mask of a forward pass, as transformers asks for it.

    Args:
        batch_size, q_length, kv_length: extents; queries start at q_offset, keys at kv_offset.
        mask_function: which keys a query sees. Causal, causal with a sliding window (which the layers are told again),
            and everything; each of the first two also with packed sequences.
        attention_mask: (batch, kv_offset + kv_length or more), False or 0 for padding.
        device: of the mask.

    Raises:
        ValueError: another mask function, or keys beyond the last query.
    """
    structure = _describe(mask_function)
    packed = structure in _PACKED
    if not (packed or structure in _PLAIN):
        raise ValueError(
            f"mask_function={mask_function.__qualname__} is not supported; allowed: causal, causal with a sliding "
            "window, both with packed sequences, and bidirectional without a window; no overlays, chunks or "
            "bidirectional blocks"
        )
    causal = mask_function is not masking_utils.bidirectional_mask_function
    if causal:
        _check_alignment(q_length, kv_length, int(q_offset), kv_offset)
    segments = (
        _get_packed_segments(mask_function, batch_size, q_length, torch.device(device))
        if packed  # only where there is no attention_mask
        else _get_padding(attention_mask, batch_size, kv_length, kv_offset)
    )
    sliding_window = next(_list_ints(mask_function), None)
    return Mask(segments, causal, (q_length, kv_length), sliding_window, is_given=attention_mask is not None)


def _get_padding(attention_mask: Tensor | None, batch_size: int, kv_length: int, kv_offset: int) -> Tensor | None:
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length]
    if padding.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; allowed: {(batch_size, kv_offset + kv_length)}, "
            "one value for each key"
        )
    return None if padding.all() else padding.to(torch.int32)


def _check_alignment(q_length: int, kv_length: int, q_offset: int, kv_offset: int) -> None:
    """The causal mask here is bottom-right aligned: the last query is in line with the last key."""
    if q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"keys {kv_offset} .. {kv_offset + kv_length - 1} for queries {q_offset} .. {q_offset + q_length - 1}; "
            "allowed: both end at the same token, as with a DynamicCache or no cache, but not with a StaticCache"
        )


def _describe(x: Any) -> Any:
    """The structure of a mask function: which functions it is made of, but not the values that they hold."""
    parts = tuple(map(_describe, _list_parts(x)))
    if isinstance(x, tuple):
        return parts
    if not _is_function(x):
        return None
    return getattr(x, "__module__", None), getattr(x, "__qualname__", x), *parts


def _list_ints(x: Any) -> Iterator[int]:
    """Which a mask function holds: the window, in those that attention here can honour."""
    if isinstance(x, int):
        yield x
    for part in _list_parts(x):
        yield from _list_ints(part)


def _list_parts(x: Any) -> tuple[Any, ...]:
    """What a tuple holds, or the closure of a function."""
    if isinstance(x, tuple):
        return x
    cells = (getattr(x, "__closure__", None) or ()) if _is_function(x) else ()
    return tuple(cell.cell_contents for cell in cells)


def _is_function(x: Any) -> bool:
    return callable(x) and not isinstance(x, Tensor)


def _list_structures() -> tuple[list[Any], list[Any]]:
    """Of the mask functions that attention here can honour: without and with packed sequences."""
    u, any_ids = masking_utils, torch.zeros(1, 1, dtype=torch.int64)
    causal = [u.causal_mask_function, u.sliding_window_causal_mask_function(1)]
    packed = [
        u.and_masks(
            u.remap_positions_for_packed_sequence(function, any_ids),
            u.packed_sequence_mask_function(any_ids),
        )
        for function in causal
    ]
    plain = [*causal, u.bidirectional_mask_function]
    return [_describe(function) for function in plain], [_describe(function) for function in packed]


_PLAIN, _PACKED = _list_structures()


def _get_packed_segments(
    mask_function: Callable[..., Tensor], batch_size: int, seqlen: int, device: torch.device
) -> Tensor:
    """A sequence starts where a query does not see the key before its own."""
    batch_idx = torch.arange(batch_size, device=device)[:, None]
    queries = torch.arange(1, seqlen, device=device)[None]
    starts = ~mask_function(batch_idx, torch.zeros_like(batch_idx), queries, queries - 1)
    segments = torch.ones(batch_size, seqlen, dtype=torch.int32, device=device)
    segments[:, 1:] += starts.cumsum(dim=1, dtype=torch.int32)
    return segments


# Sequences of different lengths


class _Lengths(NamedTuple):
    """Sequences behind each other in (batch * seqlen) tokens without the padding, for `flash_attn_varlen_func`."""

    tokens_q: Tensor | None  # which of the batch * seqlen_q are no padding; None: all
    tokens_k: Tensor | None
    cu_seqlens_q: Tensor  # int32: starts of the sequences among these tokens, and the end of the last
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def _get_lengths(
    q: Tensor, k: Tensor, mask: Mask, has_window: bool, position_ids: Tensor | None, kwargs: dict[str, Any]
) -> _Lengths | None:
    """None if all sequences are as long as the tensors."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    lengths = _get_given_lengths(kwargs)
    if lengths is not None:
        if mask.is_given and mask.segments is not None:
            raise ValueError(f"{', '.join(_VARLEN)} and a padding mask; allowed: one of the two")
    elif mask.segments is not None:
        segments = mask.segments
        if segments.shape != (q.shape[0], seqlen_k) or segments.is_floating_point():
            raise ValueError(
                f"attention_mask has shape {tuple(segments.shape)} and dtype {segments.dtype}; allowed: None, or 2-D "
                f"{(q.shape[0], seqlen_k)} with 0 for padding"
            )
        segments = segments.to(q.device)  # layers may be on different GPUs
        if mask.causal:
            lengths = _once_per_forward(mask, _from_segments, segments, seqlen_q, has_window)
        else:
            lengths = _once_per_forward(mask, _from_keys, segments, seqlen_q)
    elif position_ids is not None and position_ids.ndim == 2 and mask.causal and not mask.is_given:
        if seqlen_q == seqlen_k > 1:
            lengths = _once_per_forward(mask, _from_positions, position_ids, q.shape[0])
    return lengths


def _get_given_lengths(kwargs: dict[str, Any]) -> _Lengths | None:
    given = {name: kwargs[name] for name in _VARLEN if kwargs.get(name) is not None}
    if len(given) == len(_VARLEN):
        cu_seqlens_q, cu_seqlens_k, *longest = given.values()
        return _Lengths(None, None, cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32), *map(int, longest))
    if given:
        raise ValueError(f"{', '.join(given)} alone; allowed: all of {', '.join(_VARLEN)}, or none")
    return None


# values of tensors decide what is run, which a graph cannot hold
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _once_per_forward(mask: Mask, find: Callable[..., _Lengths | None], x: Tensor, *arguments: int) -> Any:
    """`find(x, *arguments)`, which reads values of `x` on the host, once for all layers that get the same mask.

    Kept with the mask, which is made anew in each forward pass. A tensor may be the same in the next one, with other
    values and no new version, where a CUDA graph wrote it.
    """
    asked = find, id(x), arguments
    if asked not in mask.found:
        mask.found[asked] = x, find(x, *arguments)  # with x, so that no other has its id
    return mask.found[asked][1]


def _from_positions(position_ids: Tensor, batch_size: int) -> _Lengths | None:
    starts = position_ids[:, 1:] == 0
    if not starts.any():
        return None
    segments = torch.nn.functional.pad(starts.cumsum(dim=1), (1, 0)) + 1
    return _from_segments(segments.expand(batch_size, -1), segments.shape[1], False)


def _from_segments(segments: Tensor, seqlen_q: int, has_window: bool) -> _Lengths | None:
    """Of causal attention, where queries are the last of the keys."""
    if _is_whole(segments):  # transformers calls that packed, too, while torch.compile traces it
        return None
    if has_window:
        _refuse_holes(segments)
    if seqlen_q == segments.shape[1]:
        tokens, cu_seqlens, longest = _find_sequences(segments)
        return _Lengths(tokens, tokens, cu_seqlens, cu_seqlens, longest, longest)
    if segments.max() > 1:
        raise ValueError("attention_mask has packed sequences, and keys of a cache; allowed: one of the two")
    tokens_q, cu_seqlens_q, longest_q = _find_rows(segments[:, -seqlen_q:])
    tokens_k, cu_seqlens_k, longest_k = _find_rows(segments)
    return _Lengths(tokens_q, tokens_k, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k)


def _from_keys(segments: Tensor, seqlen_q: int) -> _Lengths | None:
    """Of attention that is not causal: all queries see the keys that are no padding.

    Queries may be other tokens than the keys, also if there are as many.
    """
    if _is_whole(segments):
        return None
    if segments.max() > 1:
        raise ValueError("attention_mask has packed sequences, and no causal mask; allowed: one of the two")
    tokens_k, cu_seqlens_k, longest_k = _find_rows(segments)
    cu_seqlens_q = torch.arange(len(segments) + 1, dtype=torch.int32, device=segments.device) * seqlen_q
    return _Lengths(None, tokens_k, cu_seqlens_q, cu_seqlens_k, seqlen_q, longest_k)


def _is_whole(segments: Tensor) -> bool:
    """Each row is one sequence without padding."""
    return bool(((segments != 0) & (segments == segments[:, :1])).all())


def _refuse_holes(segments: Tensor) -> None:
    """A window counts the tokens that are left, but transformers the padding among them, too."""
    tokens = segments.flatten().nonzero().squeeze(1)
    rows, numbers = tokens // segments.shape[1], segments.flatten()[tokens]
    holes = (tokens.diff() != 1) & (rows.diff() == 0) & (numbers.diff() == 0)
    if holes.any():
        row = int(rows[1:][holes][0])
        raise ValueError(
            f"attention_mask has padding between tokens of row {row}, and the layer has a sliding window; allowed: "
            "padding before and behind the tokens of a row, or no window"
        )


_Sequences = tuple[Tensor | None, Tensor, int]  # tokens, cu_seqlens and the longest


def _find_sequences(segments: Tensor) -> _Sequences:
    """Tokens of one row and one number are a sequence, also if there is padding among them."""
    tokens = segments.flatten().nonzero().squeeze(1)
    rows, numbers = tokens // segments.shape[1], segments.flatten()[tokens]
    starts = (rows.diff() != 0) | (numbers.diff() != 0)
    ends = torch.tensor([0, len(tokens)], device=segments.device)
    cu_seqlens = torch.cat([ends[:1], starts.nonzero().squeeze(1) + 1, ends[1:]]).to(torch.int32)
    return _drop_if_all(tokens, segments), cu_seqlens, int(cu_seqlens.diff().max())


def _find_rows(segments: Tensor) -> _Sequences:
    """Each row is one sequence, maybe an empty one, so that queries and keys have as many."""
    tokens = segments.flatten().nonzero().squeeze(1)
    lengths = segments.ne(0).sum(dim=1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return _drop_if_all(tokens, segments), cu_seqlens, int(lengths.max())


def _drop_if_all(tokens: Tensor, segments: Tensor) -> Tensor | None:
    return None if len(tokens) == segments.numel() else tokens


def _run_varlen(q: Tensor, k: Tensor, v: Tensor, lengths: _Lengths, options: dict[str, Any]) -> Tensor:
    tokens_q, tokens_k = lengths.tokens_q, lengths.tokens_k
    shape = *q.shape[:-1], v.shape[-1]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (batch * seqlen, num_heads, head_dim)
    if tokens_q is not None:
        q = q[tokens_q]
    if tokens_k is not None:
        k, v = k[tokens_k], v[tokens_k]
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        lengths.max_seqlen_q,
        lengths.max_seqlen_k,
        **options,
    )
    assert isinstance(out, Tensor)  # LSE was not asked for
    if tokens_q is not None:
        out = out.new_zeros(shape[0] * shape[1], *shape[2:]).index_copy(0, tokens_q, out)
    return out.view(shape)
