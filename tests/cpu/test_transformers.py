"""transformers with attn_implementation="cute_dash", on small models with random weights, against eager attention."""

import copy
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from cute_dash.integrations import TRANSFORMERS_MIN_VERSION
from tests.extras import require_transformers

transformers = require_transformers()

from transformers import masking_utils  # noqa: E402

from cute_dash.integrations import transformers as integration  # noqa: E402
from cute_dash.interface import last_schedule  # noqa: E402
from cute_dash.testing import assert_bitwise_equal  # noqa: E402

VOCABULARY, SEQLEN = 50, 150
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    use_cache=False,
)
MODELS = pytest.mark.parametrize("family", ["llama", "qwen2"])


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def make_model(family, implementation="cute_dash", dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)


def make_tokens(batch=2, seqlen=SEQLEN):
    return torch.randint(VOCABULARY, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def run(model, **inputs):
    """Logits, and the gradients of a loss over the tokens that are no padding."""
    logits = model(**inputs).logits
    mask = inputs.get("attention_mask")
    real = torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
    (logits[real].square().sum() / 1000).backward()
    return logits.detach()[real], [p.grad for p in model.parameters()]


def assert_as_eager(family, changes=None, **inputs):
    changes = changes or {}
    assert_close(*(run(make_model(family, name, **changes), **inputs) for name in ("cute_dash", "eager")))


def assert_close(actual, expected):
    """Of logits and gradients."""
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    for grad, expected_grad in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-3, atol=1e-4)


@MODELS
def test_logits_and_gradients_are_those_of_eager_attention(family):
    assert_as_eager(family, input_ids=make_tokens())


def test_padding_is_read_anew_in_each_forward_pass():
    """A CUDA graph writes other values into the same tensor, and no version tells."""
    q, k, v = torch.randn(3, 2, 2, 24, 64)
    segments, layer = torch.ones(2, 24, dtype=torch.int32), torch.nn.Module()
    segments[0, 14:] = 0

    def run_once(segments):
        mask = integration.Mask(segments, True, (24, 24), is_given=True)
        first, second = (integration.attention(layer, q, k, v, mask)[0] for _ in range(2))
        assert_bitwise_equal(first, second, "of another layer")
        return first

    before, version = run_once(segments), segments._version
    segments.data.copy_(segments.flip(0))
    assert segments._version == version
    after = run_once(segments)
    assert not torch.equal(before, after)
    assert_bitwise_equal(after, run_once(segments.clone()), "out")


@MODELS
def test_autocast_has_one_dtype_for_the_attention_of_weights_in_fp32(family):
    """Rotary embeddings leave q and k in fp32, beside a v in bf16."""
    tokens, losses = make_tokens(), []
    for implementation in ("cute_dash", "eager"):
        model = make_model(family, implementation)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.parametrize("head_dim", [40, 96, 256])
def test_any_head_dim(head_dim):
    assert_as_eager("llama", dict(head_dim=head_dim), input_ids=make_tokens())


# multi-head latent attention: V has a smaller head dim than Q and K
MLA = dict(
    first_k_dense_replace=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)


def test_multi_head_latent_attention():
    assert_as_eager("deepseek_v3", MLA, input_ids=make_tokens())
    assert_as_eager("deepseek_v3", MLA, input_ids=make_tokens(), attention_mask=make_padding("right"))


@pytest.mark.usefixtures("grouped_queries")
@MODELS
def test_grouped_queries(family):
    assert_as_eager(family, dict(num_key_value_heads=1), input_ids=make_tokens())


@pytest.mark.usefixtures("grouped_queries", "windows")
def test_attention_sinks():
    """gpt-oss: a logit per head that attention learns, and layers with and without a window."""
    changes = dict(
        hidden_size=64,
        intermediate_size=32,
        num_attention_heads=4,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
    )
    assert any(name.endswith("sinks") for name, _ in make_model("gpt_oss", **changes).named_parameters())
    assert_as_eager("gpt_oss", changes, input_ids=make_tokens())
    padding = torch.ones(2, SEQLEN, dtype=torch.int64)
    padding[1, :20] = 0
    assert_as_eager("gpt_oss", changes, input_ids=make_tokens(), attention_mask=padding)


def train(family, steps=3):
    model = make_model(family, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        tokens = make_tokens()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@MODELS
def test_training_twice_gives_the_same_bits(family):
    losses, weights = train(family)
    losses_again, weights_again = train(family)
    assert losses == losses_again and losses[-1] < losses[0]
    for i, (a, b) in enumerate(zip(weights, weights_again, strict=True)):
        assert_bitwise_equal(a, b, f"parameter {i}")
    assert last_schedule().requested == "auto"


@pytest.mark.parametrize("padding", [None, "left"])
def test_compiled_and_checkpointed_models_have_the_same_bits(padding):
    inputs = dict(input_ids=make_tokens(), attention_mask=padding and make_padding(padding))
    logits, grads = run(make_model("llama", num_hidden_layers=1), **inputs)
    checkpointed = make_model("llama", num_hidden_layers=1).train()
    checkpointed.activation_checkpointing_enable()
    for model in (checkpointed, torch.compile(make_model("llama", num_hidden_layers=1), backend="eager")):
        again, grads_again = run(model, **inputs)
        assert_bitwise_equal(logits, again, "logits")
        for i, (a, b) in enumerate(zip(grads, grads_again, strict=True)):
            assert_bitwise_equal(a, b, f"gradient {i}")


def test_a_schedule_has_a_name_of_its_own():
    integration.register("cute_dash_descending", schedule="descending")
    run(make_model("llama", "cute_dash_descending"), input_ids=make_tokens())
    assert last_schedule().name == "descending"
    run(make_model("llama"), input_ids=make_tokens())
    assert last_schedule().requested == "auto"


def test_generation_with_a_cache():
    model, eager = make_model("llama"), make_model("llama", "eager")
    tokens = make_tokens(seqlen=20)
    options = dict(max_new_tokens=8, do_sample=False, use_cache=True, attention_mask=torch.ones_like(tokens))
    assert torch.equal(model.generate(tokens, **options), eager.generate(tokens, **options))


def test_a_config_makes_a_decoder_bidirectional():
    tokens = make_tokens()
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % VOCABULARY
    for is_causal in (True, False):
        model = make_model("llama", is_causal=is_causal)
        with torch.no_grad():
            assert torch.equal(model(tokens).logits[:, 0], model(changed).logits[:, 0]) is is_causal
    assert_as_eager("llama", dict(is_causal=False), input_ids=tokens)


# Sliding windows


WINDOW = dict(use_sliding_window=True, sliding_window=40, max_window_layers=1)  # in the second layer


def test_a_window_as_long_as_the_sequence_is_none():
    changes = dict(use_sliding_window=True, sliding_window=SEQLEN, max_window_layers=1)
    assert_as_eager("qwen2", changes, input_ids=make_tokens())


@pytest.mark.usefixtures("windows")
def test_sliding_window():
    assert_as_eager("qwen2", WINDOW, input_ids=make_tokens())


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("side", ["left", "right"])
def test_sliding_window_with_padding(side):
    assert_as_eager("qwen2", WINDOW, input_ids=make_tokens(), attention_mask=make_padding(side))


@pytest.mark.usefixtures("windows")
@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_with_a_window_and_padding(side):
    """Padding on the right is a hole later on, but one query sees all that a cache of the window has kept."""
    model, eager = make_model("qwen2", **WINDOW), make_model("qwen2", "eager", **WINDOW)
    tokens, mask = make_tokens(seqlen=60), make_padding(side, (60, 50), seqlen=60)
    options = dict(max_new_tokens=4, do_sample=False, use_cache=True, attention_mask=mask)
    assert torch.equal(model.generate(tokens, **options), eager.generate(tokens, **options))


@pytest.mark.usefixtures("windows")
def test_a_window_over_a_hole_is_refused():
    """A window over the tokens that are left is longer than one over all of them. Without a window a hole is fine."""
    mask = torch.ones(2, SEQLEN, dtype=torch.int64)
    mask[1, 70:75] = 0
    inputs = dict(input_ids=make_tokens(), attention_mask=mask)
    message = r"padding between tokens of row 1, .* sliding window; allowed: padding before and behind"
    with pytest.raises(ValueError, match=message):
        make_model("qwen2", **WINDOW)(**inputs)
    assert_as_eager("qwen2", WINDOW | dict(sliding_window=SEQLEN), **inputs)


def make_heads(seqlen_q=30, seqlen_k=30):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 2, length, 64, generator=generator) for length in (seqlen_q, seqlen_k, seqlen_k)]


def attend(mask, q, k, v, module=None, **options):
    return integration.attention(module or torch.nn.Module(), q, k, v, mask, **options)[0]


def attend_eagerly(q, k, v, visible):
    """Of (batch, num_heads, seqlen, head_dim), where a query sees the keys that `visible` has True for."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)


@pytest.mark.usefixtures("windows")
def test_the_mask_decides_on_causality_and_window():
    """As in eager attention, whatever layer and call say; a layer that says another window is refused."""
    q, k, v = make_heads()
    layer = torch.nn.Module()
    layer.is_causal = False
    i, j = torch.arange(30)[:, None], torch.arange(30)
    windowed = masking_utils.sliding_window_causal_mask_function(7)
    for function, visible in (
        (masking_utils.causal_mask_function, j <= i),
        (windowed, (j <= i) & (j > i - 7)),
        (masking_utils.bidirectional_mask_function, (j >= 0).expand(30, -1)),
    ):
        mask = integration.make_mask(2, 30, 30, mask_function=function)
        for options in ({}, dict(is_causal=True), dict(module=layer), dict(module=layer, is_causal=False)):
            torch.testing.assert_close(attend(mask, q, k, v, **options), attend_eagerly(q, k, v, visible))
    mask = integration.make_mask(2, 30, 30, mask_function=windowed)
    assert torch.equal(attend(mask, q, k, v, sliding_window=7), attend(mask, q, k, v))
    with pytest.raises(ValueError, match="sliding_window=8, in a layer whose mask has 7; allowed: the mask's, or None"):
        attend(mask, q, k, v, sliding_window=8)
    with pytest.raises(ValueError, match="sliding_window=7, in a layer whose mask has None"):
        attend(integration.make_mask(2, 30, 30), q, k, v, sliding_window=7)
    attend(integration.make_mask(2, 30, 30), q, k, v, sliding_window=30)


def test_window_of_tokens_that_a_query_sees():
    assert integration._get_window(40, True, 150) == (39, 0)
    assert integration._get_window(None, False, 150) == (-1, -1)
    with pytest.raises(ValueError, match="sliding_window=40 without a causal mask"):
        integration._get_window(40, False, 150)
    with pytest.raises(ValueError, match="sliding_window=0; allowed: keys, at least 1, or None"):
        integration._get_window(0, True, 150)  # a side of -1 would be no limit


# Padding and packed sequences


def make_padding(side, lengths=(150, 100), seqlen=SEQLEN):
    mask = torch.zeros(len(lengths), seqlen, dtype=torch.int64)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(None, length) if side == "right" else slice(seqlen - length, None)] = 1
    return mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    assert_as_eager("llama", input_ids=make_tokens(), attention_mask=make_padding(side))


def test_generation_with_padding():
    model, eager = make_model("llama"), make_model("llama", "eager")
    tokens, mask = make_tokens(seqlen=SEQLEN), make_padding("left")
    options = dict(max_new_tokens=4, do_sample=False, use_cache=True, attention_mask=mask)
    assert torch.equal(model.generate(tokens, **options), eager.generate(tokens, **options))


def test_a_mask_of_ones_is_no_mask():
    assert_as_eager("llama", input_ids=make_tokens(), attention_mask=torch.ones(2, SEQLEN, dtype=torch.int64))


def make_packed_positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_sequences_by_positions(rows):
    """Three sequences in a row: logits and gradients are those of each alone."""
    tokens, lengths = make_tokens(batch=rows), (40, 1, 109)
    positions = make_packed_positions(*lengths).expand(rows, -1)
    assert_as_eager("llama", input_ids=tokens, position_ids=positions)
    model = make_model("llama")
    packed = model(input_ids=tokens, position_ids=positions).logits
    alone = torch.cat([model(input_ids=part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


def test_packed_sequences_beside_a_cache_and_by_lengths():
    """transformers makes no packed mask beside a cache; the positions, or the collator's lengths, say it anyway."""
    tokens, lengths = make_tokens(batch=1), (40, 110)
    positions = make_packed_positions(*lengths)
    model = make_model("llama")
    expected = model(input_ids=tokens, position_ids=positions).logits
    beside_cache = model(input_ids=tokens, position_ids=positions, use_cache=True).logits
    assert torch.equal(beside_cache, expected)
    cu_seqlens = torch.tensor([0, 40, 150], dtype=torch.int32)
    bounds = dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=110, max_length_k=110)
    for use_cache in (False, True):
        packed = model(input_ids=tokens, position_ids=positions, use_cache=use_cache, **bounds)
        assert torch.equal(packed.logits, expected)
    ones = torch.ones_like(tokens)
    packed = model(input_ids=tokens, attention_mask=ones, position_ids=positions, **bounds)
    assert torch.equal(packed.logits, expected)
    padding = torch.ones_like(tokens)
    padding[:, :10] = 0
    with pytest.raises(ValueError, match="max_length_k and a padding mask; allowed: one of the two"):
        model(input_ids=tokens, attention_mask=padding, **bounds)


JUMP = torch.cat([torch.arange(50), torch.arange(200, 300)])[None].expand(2, -1)


@pytest.mark.parametrize("positions", [JUMP, 2 * torch.arange(SEQLEN)[None], make_packed_positions(40, 110)])
def test_positions_beside_a_mask_part_nothing(positions):
    """Whether it has padding or not, so that a row does not depend on another one's."""
    tokens, ones = make_tokens(), torch.ones(2, SEQLEN, dtype=torch.int64)
    for mask in (ones, make_padding("right")):
        assert_as_eager("llama", input_ids=tokens, attention_mask=mask, position_ids=positions)
    model = make_model("llama")
    rows = [
        model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits[0]
        for mask in (ones, make_padding("right"))
    ]
    torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-5)


def test_without_a_mask_positions_part_what_they_part_in_eager_attention():
    """There a jump does; beside a cache, where eager attention parts nothing, only a position of 0."""
    assert_as_eager("llama", input_ids=make_tokens(), position_ids=JUMP)
    assert_as_eager("llama", input_ids=make_tokens(), position_ids=JUMP, use_cache=True)
    packed, jump = make_packed_positions(40, 110), JUMP[:1]
    tokens, model = make_tokens(), make_model("llama")
    both = model(input_ids=tokens, position_ids=torch.cat([packed, jump]), use_cache=True).logits
    alone = [
        model(input_ids=row[None], position_ids=positions, use_cache=True).logits
        for row, positions in zip(tokens, (packed, jump), strict=True)
    ]
    torch.testing.assert_close(both, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_positions_that_change_in_place_are_read_again():
    tokens, positions = make_tokens(batch=1), torch.arange(SEQLEN)[None]
    model = make_model("llama")
    whole = model(input_ids=tokens, position_ids=positions, use_cache=True).logits
    positions[:, 75:] -= 75
    packed = model(input_ids=tokens, position_ids=positions, use_cache=True).logits
    assert not torch.equal(packed[:, 75:], whole[:, 75:])
    assert torch.equal(packed, model(input_ids=tokens, position_ids=positions.clone()).logits)


def test_inference_mode():
    tokens, mask = make_tokens(), make_padding("right")
    model = make_model("llama")
    with torch.inference_mode():
        logits = model(input_ids=tokens, attention_mask=mask).logits
    assert torch.equal(logits, model(input_ids=tokens, attention_mask=mask).logits)


def test_sequences_of_segments():
    """Holes do not part a sequence, rows and numbers do; a row of padding is none."""
    segments = torch.tensor([[1, 0, 1, 2], [0, 0, 0, 0], [2, 2, 2, 2]])
    tokens, cu_seqlens, longest = integration._find_sequences(segments)
    assert (tokens.tolist(), cu_seqlens.tolist(), longest) == ([0, 2, 3, 8, 9, 10, 11], [0, 2, 3, 7], 4)
    tokens, cu_seqlens, longest = integration._find_rows(torch.tensor([[1, 1], [0, 0], [0, 1]]))
    assert (tokens.tolist(), cu_seqlens.tolist(), longest) == ([0, 1, 5], [0, 2, 2, 3], 2)


# Cross-attention


SEQ2SEQ = dict(
    vocab_size=VOCABULARY,
    d_model=128,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    max_position_embeddings=64,
    dropout=0.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)


def make_seq2seq(family, implementation):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SEQ2SEQ)
    options = dict(attn_implementation=implementation, dtype=torch.float32)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, **options)


def run_seq2seq(family, implementation, **inputs):
    model = make_seq2seq(family, implementation)
    logits = model(**inputs).logits
    (logits.square().sum() / 100).backward()
    return logits.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", ["bart", "marian"])
@pytest.mark.parametrize("seqlen", [12, 20, 30])
def test_cross_attention_over_a_padded_encoder(family, seqlen):
    """Fewer, as many and more queries than keys, and only keys are padding."""
    inputs = dict(
        input_ids=make_tokens(seqlen=20),
        attention_mask=make_padding("right", (6, 20), seqlen=20),
        decoder_input_ids=make_tokens(seqlen=seqlen),
    )
    assert_close(*(run_seq2seq(family, name, **inputs) for name in ("cute_dash", "eager")))


def test_generation_over_a_padded_encoder():
    model = make_seq2seq("bart", "cute_dash")
    options = dict(max_new_tokens=6, do_sample=False, attention_mask=make_padding("right", (6, 20), seqlen=20))
    tokens = []
    for implementation in ("cute_dash", "eager"):
        model.set_attn_implementation(implementation)
        tokens.append(model.generate(make_tokens(seqlen=20), **options))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("seqlen_q", [1, 12, 20, 30])
@pytest.mark.parametrize("made", [True, False], ids=["made", "segments"])
def test_queries_that_are_not_the_keys(seqlen_q, made):
    """All of them see all keys but padding; there may be no other keys than padding."""
    q, k, v = make_heads(seqlen_q, 20)
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[0, 14:], padding[1, 3:6] = False, False
    layer = torch.nn.Module()
    layer.is_causal = False
    for tokens in (padding, padding & torch.tensor([[True], [False]])):
        function = masking_utils.bidirectional_mask_function
        mask = integration.make_mask(2, seqlen_q, 20, mask_function=function, attention_mask=tokens) if made else tokens
        torch.testing.assert_close(
            attend(mask, q, k, v, module=layer), attend_eagerly(q, k, v, tokens[:, None, None]), rtol=1e-5, atol=1e-5
        )


# Models with attention of their own


@pytest.mark.parametrize("padding", [None, make_padding("right", (20, 13), seqlen=20)], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["bloom", "xglm", "gpt_neox_japanese", "trocr", "mpt", "megatron-bert"])
def test_a_model_that_does_its_own_attention_raises(family, padding):
    """It asks transformers for a mask, and without one it would see what comes next."""
    sizes = dict(num_attention_heads=2, attention_heads=2, n_heads=2, n_head=2, decoder_attention_heads=2)
    layers = dict(num_hidden_layers=1, num_layers=1, n_layers=1, n_layer=1, decoder_layers=1)
    dims = dict(hidden_size=64, d_model=64, ffn_dim=64, decoder_ffn_dim=64, intermediate_size=64)
    config = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, pad_token_id=0, **sizes, **layers, **dims)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="cute_dash", dtype=torch.float32)
    with pytest.raises((TypeError, AttributeError), match=r"takes the mask for a tensor, .*; allowed: models whose"):
        model.eval()(input_ids=make_tokens(seqlen=20), attention_mask=padding)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask, scores: scores + mask,
        lambda mask, scores: mask + scores,
        lambda mask, scores: 1.0 - mask,
        lambda mask, scores: scores.masked_fill(mask, 0.0),
        lambda mask, scores: torch.where(mask, scores, 0.0),
        lambda mask, scores: torch.nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
        lambda mask, scores: scores * (mask == 0),
        lambda mask, scores: mask[:, :, :, :4],
        lambda mask, scores: ~mask,
        lambda mask, scores: mask.to(torch.float32),
        lambda mask, scores: mask.shape,
        lambda mask, scores: scores if mask else None,
        lambda mask, scores: len(mask),
    ],
)
def test_a_mask_is_no_tensor(use):
    mask = mask_of(masking_utils.causal_mask_function)
    with pytest.raises((TypeError, AttributeError), match="takes the mask for a tensor"):
        use(mask, torch.zeros(1, 1, 4, 4))


def test_a_mask_can_be_handed_on():
    mask = mask_of(masking_utils.causal_mask_function)
    assert {mask: 1}[mask] == 1 and not hasattr(mask, "to")
    assert copy.deepcopy(mask).extents == (4, 4)


# What is refused


def mask_of(function, **changes):
    return integration.make_mask(**{**dict(batch_size=1, q_length=4, kv_length=4, mask_function=function), **changes})


@pytest.mark.parametrize(
    "function",
    [
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == 0),
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 4))),
        masking_utils.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64)),
        masking_utils.sliding_window_bidirectional_mask_function(2),
        masking_utils.and_masks(
            masking_utils.sliding_window_overlay(2), masking_utils.or_masks(masking_utils.causal_mask_function)
        ),
        lambda b, h, q, k: k <= q,
    ],
    ids=["overlay", "blocks", "chunks", "bidirectional window", "nested", "unknown"],
)
def test_mask_functions_that_are_not_known_are_refused(function):
    with pytest.raises(ValueError, match="is not supported; allowed: causal"):
        mask_of(function)


def test_mask_functions_that_are_known():
    ids = torch.tensor([[0, 0, 1, 1]])
    packed = masking_utils.and_masks(
        masking_utils.remap_positions_for_packed_sequence(
            masking_utils.causal_mask_function, torch.tensor([[0, 1, 0, 1]])
        ),
        masking_utils.packed_sequence_mask_function(ids),
    )
    assert mask_of(packed).segments.tolist() == [[1, 1, 2, 2]]
    for function, causal, sliding_window in (
        (masking_utils.causal_mask_function, True, None),
        (masking_utils.sliding_window_causal_mask_function(3), True, 3),
        (masking_utils.bidirectional_mask_function, False, None),
    ):
        mask = mask_of(function)
        assert (mask.segments, mask.causal, mask.sliding_window) == (None, causal, sliding_window)
        assert not mask.is_given and mask_of(function, attention_mask=torch.ones(1, 4)).is_given
        mask = mask_of(function, attention_mask=torch.tensor([[True, True, True, False]]))
        assert (mask.segments.tolist(), mask.causal) == ([[1, 1, 1, 0]], causal)


def test_the_keys_of_a_mask_start_at_their_offset():
    """A cache of a sliding window has dropped those before."""
    padding = torch.tensor([[0, 1, 1, 1, 0]])
    offsets = dict(q_length=1, kv_length=2, kv_offset=2, q_offset=3)
    assert mask_of(masking_utils.causal_mask_function, attention_mask=padding, **offsets).segments is None
    offsets = dict(q_length=1, kv_length=3, kv_offset=2, q_offset=4)
    mask = mask_of(masking_utils.causal_mask_function, attention_mask=padding, **offsets)
    assert mask.segments.tolist() == [[1, 1, 0]]


def test_keys_beyond_the_last_query_are_refused():
    with pytest.raises(ValueError, match=r"keys 0 \.\. 7 for queries 0 \.\. 3; allowed: both end"):
        mask_of(masking_utils.causal_mask_function, kv_length=8)
    mask_of(masking_utils.causal_mask_function, kv_length=8, q_offset=torch.tensor(4))
    mask_of(masking_utils.bidirectional_mask_function, kv_length=8)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        mask_of(masking_utils.causal_mask_function, attention_mask=torch.ones(1, 3))


def test_a_prepared_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 150, 150\) .*allowed: None, or 2-D"):
        make_model("llama")(
            input_ids=make_tokens(), attention_mask=torch.ones(2, 1, SEQLEN, SEQLEN, dtype=torch.bool).tril()
        )


def test_a_static_cache_is_refused():
    tokens = make_tokens(seqlen=20)
    with pytest.raises(ValueError, match="not with a StaticCache"):
        make_model("llama").generate(tokens, max_new_tokens=2, cache_implementation="static", use_cache=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dropout=0.1), "dropout=0.1; allowed: 0"),
        (dict(output_attentions=True), "output_attentions=True"),
        (dict(s_aux=torch.zeros(3)), r"learnable_sink has shape \(3,\); allowed: \(2,\)"),
        (dict(softcap=30.0), "softcap=30.0"),
        (dict(position_bias=torch.zeros(2)), "position_bias is given"),
        (dict(indices=torch.zeros(2)), "indices is given"),
        (dict(block_indices=torch.zeros(2)), "block_indices is given"),
        (dict(sinks=torch.zeros(2)), "sinks is given"),
        (dict(cache=object()), "cache is given"),
        (dict(attention_mask=torch.ones(1, 4)), "attention_mask has shape .* and dtype torch.float32"),
        (dict(key=torch.zeros(1, 2, 4, 32)), "k has shape"),
        (dict(key=torch.zeros(2, 2, 4, 64)), r"key has shape \(2, 2, 4, 64\); allowed: \(1, 2, 4, 64\)"),
        (dict(value=torch.zeros(1, 2, 5, 64)), r"value has shape \(1, 2, 5, 64\); allowed: \(1, 2, 4, 64\)"),
        (
            dict(query=torch.zeros(1, 2, 3, 64)),
            "3 queries and 4 keys, causal, .*; allowed: 4 queries, or 1",
        ),
        (
            dict(query=torch.zeros(1, 2, 3, 64), attention_mask=integration.make_mask(1, 2, 4, 2)),
            "3 queries and 4 keys; allowed: 2 and 4, which the causal mask",
        ),
        (
            dict(is_causal=False, attention_mask=torch.tensor([[1, 1, 2, 2]])),
            "attention_mask has packed sequences, and no causal mask",
        ),
        (
            dict(cu_seq_lens_q=torch.tensor([0, 4]), max_length_q=4),
            "cu_seq_lens_q, max_length_q alone; allowed: all of",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_bad_calls_raise(changes, message):
    x = torch.zeros(1, 2, 4, 64)
    arguments = dict(module=torch.nn.Module(), query=x, key=x, value=x, attention_mask=None)
    with pytest.raises(ValueError, match=message):
        integration.attention(**{**arguments, **changes})


def test_dropout_of_a_config_is_refused_in_training_only():
    model = make_model("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match="attention_dropout"):
        model.train()(input_ids=make_tokens())
    model.eval()(input_ids=make_tokens())


# Versions


def import_anew():
    """The integration's code once more, beside the module that everyone else has."""
    spec = importlib.util.find_spec(integration.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pretend(monkeypatch):
    """Gives the installed library another version."""
    installed = sys.modules["transformers"]  # it puts another module there while it loads models
    return lambda version: monkeypatch.setattr(installed, "__version__", version)


@pytest.mark.parametrize("version", ["4.57.6", "5.3.1", "5.23.0", f"{TRANSFORMERS_MIN_VERSION}.0.dev0"])
def test_an_older_version_is_named_whatever_it_lacks(version, pretend, monkeypatch):
    pretend(version)
    monkeypatch.delattr(masking_utils, "remap_positions_for_packed_sequence")
    monkeypatch.setattr(sys.modules["transformers"], "masking_utils", None)
    message = rf"^transformers {version} is installed; allowed: {TRANSFORMERS_MIN_VERSION} and newer \(pip install "
    with pytest.raises(ImportError, match=message):
        import_anew()


@pytest.mark.parametrize("version", [TRANSFORMERS_MIN_VERSION, f"{TRANSFORMERS_MIN_VERSION}.0", "5.100.0", "10.0.0"])
def test_newer_versions_are_taken(version, pretend):
    pretend(version)
    assert callable(import_anew().register)


def test_tests_of_the_integration_are_skipped_with_an_older_version(pretend):
    pretend("5.3.1")
    with pytest.raises(pytest.skip.Exception, match=rf"5\.3\.1.*required is: '{TRANSFORMERS_MIN_VERSION}'"):
        require_transformers()


def test_the_package_asks_for_the_version_that_the_code_asks_for():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert set(re.findall(r'"transformers(|[<>=!~][^"]*)"', pyproject)) == {f">={TRANSFORMERS_MIN_VERSION}"}
