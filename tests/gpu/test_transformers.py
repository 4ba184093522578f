"""transformers with attn_implementation="cute_dash" on the GPU: small models with random weights, trained twice."""

import pytest
import torch

from tests.extras import require_transformers

transformers = require_transformers()

from cute_dash.integrations import transformers as integration  # noqa: E402
from cute_dash.interface import last_schedule  # noqa: E402
from cute_dash.testing import assert_bitwise_equal, relative_error  # noqa: E402

DEVICE = "cuda"
VOCABULARY, BATCH, SEQLEN, STEPS = 512, 2, 640, 5  # five KV tiles: the order of a sum shows in its bits from three on
PACKED = (300, 1, 339)
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=1024,
    use_cache=False,
)
GROUPED = dict(num_key_value_heads=2)
WINDOW = dict(use_sliding_window=True, sliding_window=200, max_window_layers=1)  # in the second layer
CASES = pytest.mark.parametrize(
    ("family", "changes", "packed"),
    [
        pytest.param("llama", {}, False, id="llama"),
        pytest.param("llama", GROUPED, False, id="llama-gqa"),
        pytest.param("llama", GROUPED, True, id="llama-gqa-packed"),
        pytest.param("qwen2", GROUPED, False, id="qwen2-gqa"),
        pytest.param("qwen2", GROUPED | WINDOW, False, id="qwen2-gqa-window"),
        pytest.param("qwen2", GROUPED | WINDOW, True, id="qwen2-gqa-window-packed"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


@pytest.fixture
def strict():
    """torch raises where it would run a kernel whose bits may change."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_model(family, changes, implementation="cute_dash", dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype)
    return model.to(DEVICE)


def make_inputs(packed, seed=1):
    tokens = torch.randint(VOCABULARY, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    if not packed:
        return dict(input_ids=tokens)
    positions = torch.cat([torch.arange(length) for length in PACKED])[None].expand(BATCH, -1).to(DEVICE)
    return dict(input_ids=tokens, position_ids=positions)


def train(model, packed):
    """Losses of the steps, and the weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        inputs = make_inputs(packed, seed=step % 2)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


def assert_same_training(run):
    losses, weights = run()
    losses_again, weights_again = run()
    assert losses == losses_again and losses[-1] < losses[0]
    for name, weight in weights.items():
        assert_bitwise_equal(weight.detach(), weights_again[name].detach(), name)


@CASES
def test_training_twice_gives_the_same_bits(family, changes, packed, strict):
    assert_same_training(lambda: train(make_model(family, changes), packed))
    assert last_schedule().requested == "auto"


def test_a_compiled_model_trains_twice_to_the_same_bits(strict):
    """Without the strict mode Inductor's backward of the embedding would add with atomics."""
    pytest.importorskip("triton")

    def run():
        model = make_model("llama", GROUPED | dict(num_hidden_layers=1))
        model.compile()
        return train(model, packed=False)

    assert_same_training(run)


def get_gradients(model, inputs):
    """Of a function of the logits of all tokens that are no padding."""
    logits = model(**inputs).logits
    if "attention_mask" in inputs:
        logits = logits * inputs["attention_mask"][..., None]
    (logits.square().sum() / 1000).backward()
    grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    return grads


@CASES
def test_gradients_are_those_of_eager_attention(family, changes, packed):
    """Both in bf16, against eager attention in fp32."""
    inputs = make_inputs(packed)
    ref = get_gradients(make_model(family, changes, "eager", torch.bfloat16).float(), inputs)
    eager = get_gradients(make_model(family, changes, "eager"), inputs)
    ours = get_gradients(make_model(family, changes), inputs)
    for name, grad in ours.items():
        assert relative_error(grad, ref[name]) <= 2 * relative_error(eager[name], ref[name]), name


def make_padded_inputs(lengths):
    inputs = make_inputs(packed=False)
    mask = torch.arange(SEQLEN, device=DEVICE)[None] < torch.tensor(lengths, device=DEVICE)[:, None]
    return inputs | dict(attention_mask=mask.long())


def test_cuda_graphs_of_a_compiled_model_see_the_padding_of_each_batch():
    """A graph that is replayed finds the masks of all batches in the same memory."""
    pytest.importorskip("triton")
    models = {
        "ref": make_model("llama", GROUPED, "eager").float(),
        "eager": make_model("llama", GROUPED, "eager"),
        "ours": make_model("llama", GROUPED),
    }
    models["ours"].compile(mode="reduce-overhead")
    for lengths in ((640, 500), (129, 640), (640, 640), (640, 500), (17, 1)):
        inputs = make_padded_inputs(lengths)
        torch.compiler.cudagraph_mark_step_begin()
        grads = {name: get_gradients(model, inputs) for name, model in models.items()}
        for name, ref in grads["ref"].items():
            bound = 2 * relative_error(grads["eager"][name], ref)
            assert relative_error(grads["ours"][name], ref) <= bound, (lengths, name)
