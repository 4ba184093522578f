"""softcap: no forward pass here has one, so that every function that has the argument refuses it by name."""

import pytest
import torch

import cute_dash
from cute_dash import flash_attn_interface

Q = torch.zeros(1, 8, 2, 64)
TOKENS = torch.zeros(8, 2, 64)
CU_SEQLENS = torch.tensor([0, 8], dtype=torch.int32)
LENGTHS = (CU_SEQLENS, CU_SEQLENS, 8, 8)
LSE = torch.zeros(1, 2, 8)
CALLS = {
    "flash_attn_func": (cute_dash.flash_attn_func, (Q, Q, Q)),
    "flash_attn_varlen_func": (cute_dash.flash_attn_varlen_func, (TOKENS, TOKENS, TOKENS, *LENGTHS)),
    "attention_backward": (cute_dash.attention_backward, (Q, Q, Q, Q, Q, LSE)),
    "attention_varlen_backward": (cute_dash.attention_varlen_backward, (*5 * [TOKENS], LSE[0], *LENGTHS)),
    "flash-attn's func": (flash_attn_interface.flash_attn_func, (Q, Q, Q)),
    "flash-attn's kvpacked": (flash_attn_interface.flash_attn_kvpacked_func, (Q, torch.stack([Q, Q], 2))),
    "flash-attn's qkvpacked": (flash_attn_interface.flash_attn_qkvpacked_func, (torch.stack([Q, Q, Q], 2),)),
    "flash-attn's varlen": (flash_attn_interface.flash_attn_varlen_func, (TOKENS, TOKENS, TOKENS, *LENGTHS)),
    "flash-attn's varlen kvpacked": (
        flash_attn_interface.flash_attn_varlen_kvpacked_func,
        (TOKENS, torch.stack([TOKENS, TOKENS], 1), *LENGTHS),
    ),
    "flash-attn's varlen qkvpacked": (
        flash_attn_interface.flash_attn_varlen_qkvpacked_func,
        (torch.stack([TOKENS, TOKENS, TOKENS], 1), CU_SEQLENS, 8),
    ),
}
every_call = pytest.mark.parametrize(("function", "arguments"), CALLS.values(), ids=CALLS.keys())


@every_call
@pytest.mark.parametrize("softcap", [30.0, -1.0, 1, float("inf"), float("nan")], ids=str)
def test_is_refused(function, arguments, softcap):
    with pytest.raises(ValueError, match=f"softcap={softcap}: a softcap is not there yet; allowed: 0"):
        function(*arguments, softcap=softcap)


@every_call
@pytest.mark.parametrize("softcap", [None, True, "0"], ids=repr)
def test_is_a_number(function, arguments, softcap):
    with pytest.raises(TypeError, match=f"softcap={softcap!r} is a {type(softcap).__name__}; allowed: the number 0"):
        function(*arguments, softcap=softcap)


@every_call
def test_zero_is_none(function, arguments):
    results = function(*arguments, softcap=0.0)
    expected = function(*arguments)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (results, expected)), strict=True):
        assert torch.equal(a, b)
