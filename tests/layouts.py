"""Layouts that callers give tensors (batch, seqlen, num_heads, head_dim) or (tokens, num_heads, head_dim) in."""

import torch


def _fused(x):
    """The middle one of three in a projection."""
    return torch.stack([torch.full_like(x, float("nan")), x, torch.full_like(x, float("nan"))], dim=-3).unbind(-3)[1]


def _wide(x, before, after):
    """The middle of wider heads."""
    head_dim = x.shape[-1]
    wide = x.new_full((*x.shape[:-1], before + head_dim + after), float("nan"))
    wide[..., before : before + head_dim] = x
    return wide[..., before : before + head_dim]


def _moved(x, num_elements):
    """Behind `num_elements` others."""
    return torch.cat([x.new_full((num_elements,), float("nan")), x.flatten()])[num_elements:].view(x.shape)


def _swapped(x, *dims):
    return x.transpose(*dims).contiguous().transpose(*dims)


def _restrided(x, stride):
    """With another stride for the extents that are 1, which torch does not care about."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x.as_strided(x.shape, [stride if size == 1 else old for size, old in sizes])


# name -> a tensor of the same shape, in the layout; expanded ones have other values
LAYOUTS = {
    "a projection's part": _fused,
    "heads first": lambda x: _swapped(x, -3, -2),
    "head dim first": lambda x: _swapped(x, -3, -1),
    "every other token": lambda x: x.repeat_interleave(2, dim=-3).unflatten(-3, (-1, 2)).select(-3, 0),
    "wider heads": lambda x: _wide(x, 8, 8),
    "wider heads, 8 bytes off": lambda x: _wide(x, 4, 4),
    "rows of an odd length": lambda x: _wide(x, 0, 1),
    "one element off": lambda x: _moved(x, 1),
    "16 bytes off": lambda x: _moved(x, 8),
    "expanded heads": lambda x: x[..., :1, :].expand(x.shape),
    "expanded tokens": lambda x: x.narrow(-3, 0, 1).expand(x.shape),
    "expanded head dim": lambda x: x[..., :1].expand(x.shape),
    "an expanded scalar": lambda x: x.flatten()[0].expand(x.shape),
    "extents of 1 by 3": lambda x: _restrided(x, 3),
    "extents of 1 by 0": lambda x: _restrided(x, 0),
    "extents of 1 by 2**36": lambda x: _restrided(x, 2**36),
}
# that TMA reads as they are
KEPT = {"a projection's part", "heads first", "every other token", "wider heads", "16 bytes off"}
