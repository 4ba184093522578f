"""The kernels for torch's flash backend, registered for CPU tensors: torch's autograd calls them as on a GPU."""

import pytest
import torch
import torch.nn.attention

import cute_dash
from cute_dash import sdpa
from cute_dash.interface import last_schedule
from cute_dash.testing import (
    assert_bitwise_equal,
    attention_backward_ref,
    attention_forward_ref,
    random_inputs,
    relative_error,
)

HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")
NAMES = ("dq", "dk", "dv")
MASKS = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@pytest.fixture
def flash():
    """torch's flash attention op, with this package's kernels for CPU tensors."""
    activation = sdpa._activate("CPU")
    yield torch.ops.aten._scaled_dot_product_flash_attention
    activation.remove()


def heads_first(seqlen_q=130, seqlen_k=130, dtype=torch.float32, head_dim=64):
    """q, k, v, dout (batch, num_heads, seqlen, head_dim), contiguous."""
    x = random_inputs(2, seqlen_q, seqlen_k, num_heads=2, head_dim=head_dim, dtype=dtype)
    return [t.transpose(1, 2).contiguous() for t in x]


LAYOUTS = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": lambda x: torch.stack([x.transpose(1, 2)] * 3, dim=2)[:, :, 1].transpose(1, 2),
}


@MASKS
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_and_gradients_are_those_of_attention(layout, head_dim, causal, flash):
    q, k, v, dout = heads_first(head_dim=head_dim)
    leaves = [LAYOUTS[layout](x).detach().requires_grad_() for x in (q, k, v)]
    out, lse, *_ = flash(*leaves, is_causal=causal, scale=0.1)
    grads = torch.autograd.grad(out, leaves, dout)
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    ref_out, ref_lse = attention_forward_ref(q, k, v, 0.1, causal)
    assert relative_error(out.transpose(1, 2), ref_out) < 2e-6
    torch.testing.assert_close(lse.double(), ref_lse, rtol=1e-5, atol=1e-5)
    for grad, ref in zip(grads, attention_backward_ref(dout, q, k, v, 0.1, causal), strict=True):
        assert relative_error(grad.transpose(1, 2), ref) < 2e-6


def test_bits_are_those_of_cute_dash(flash):
    q, k, v, dout = (x.requires_grad_() for x in heads_first(dtype=torch.bfloat16))
    grads = torch.autograd.grad(flash(q, k, v, is_causal=True)[0], (q, k, v), dout)
    out = cute_dash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    expected = torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2))
    for name, a, b in zip(NAMES, grads, expected, strict=True):
        assert_bitwise_equal(a, b, name)
    assert last_schedule().requested == "auto"


def test_queries_and_keys_of_other_lengths_without_a_mask(flash):
    q, k, v, _ = heads_first(40, 150)
    ref, _ = attention_forward_ref(*(x.transpose(1, 2) for x in (q, k, v)), 1 / 8, False)
    assert relative_error(flash(q, k, v)[0].transpose(1, 2), ref) < 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_look_as_torchs_fake_kernels_say(layout, flash):
    q, k, v, _ = (LAYOUTS[layout](x) for x in heads_first(dtype=torch.bfloat16))
    real = flash(q, k, v)
    fake = flash(*(x.to("meta") for x in (q, k, v)))
    dout, (q_meta, k_meta, v_meta) = torch.ones_like(q), (x.to("meta") for x in (q, k, v))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    real_grads = backward(dout, q, k, v, *real[:2], None, None, 130, 130, 0.0, False, *real[6:8])
    fake_grads = backward(
        dout.to("meta"), q_meta, k_meta, v_meta, *fake[:2], None, None, 130, 130, 0.0, False, *fake[6:8]
    )
    for a, b in zip((*real, *real_grads), (*fake, *fake_grads), strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.stride() == b.stride()
        else:
            assert a == b


@pytest.mark.parametrize(
    ("options", "lengths", "message"),
    [
        ({"dropout_p": 0.1}, (8, 8), "dropout_p=0.1"),
        ({"return_debug_mask": True}, (8, 8), "return_debug_mask=True"),
        ({"is_causal": True}, (8, 9), "8 queries and 9 keys"),
        ({"scale": -1.0}, (8, 8), "softmax_scale=-1.0"),
    ],
    ids=["dropout", "debug mask", "causal lengths", "scale"],
)
def test_what_cannot_be_had_is_refused_in_the_forward(options, lengths, message, flash):
    q, k, v, _ = heads_first(*lengths)
    with pytest.raises(ValueError, match=message):
        flash(q, k, v, **options)


def test_removal_takes_the_kernels_out_of_the_dispatcher():
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    q, k, v, _ = heads_first(8, 8)
    activation = sdpa._activate("CPU")
    flash(q, k, v)
    activation.remove()
    with pytest.raises(NotImplementedError):
        flash(q, k, v)


@pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry of flash implementations")
def test_the_implementation_is_registered_and_can_be_activated_and_restored():
    cute_dash.register_sdpa()
    assert sdpa.IMPLEMENTATION in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() is None
    torch.nn.attention.activate_flash_attention_impl(sdpa.IMPLEMENTATION)
    try:
        assert torch.nn.attention.current_flash_attention_impl() == sdpa.IMPLEMENTATION
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert torch.nn.attention.current_flash_attention_impl() is None


def test_a_torch_without_the_registry_is_named(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match="has no torch.nn.attention.register_flash_attention_impl"):
        cute_dash.register_sdpa()
