import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import load
from slicewise.costs import remat
from slicewise.interop.huggingface import spec_from_config
from slicewise.interop.weights import load_weights
from slicewise.kernels.attention.api import Tokens
from slicewise.model import transformer
from slicewise.model.loss import Loss, summed_loss
from slicewise.parallel.rules import partition

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
DENSE = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2"]
SPARSE = ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss"]
# How far the stored logits and gradient are from the same model in float64, where that exceeds the tolerance.
REFERENCE_ERROR = {"deepseek_v2": (3.7e-5, 6.6e-6)}


@pytest.fixture(autouse=True)
def exact_products(one_device):
    with jax.default_matmul_precision("highest"):
        yield


def params_of(family):
    spec = spec_from_config(FIXTURES / family / "config.json")
    stored = load_weights(FIXTURES / family)
    layout = transformer.weights(spec)
    named = transformer.leaves(layout)
    assert stored.keys() == named.keys()
    rows = transformer.padded_vocab(spec) - spec.vocab
    stored["embed"] = np.pad(stored["embed"], ((0, rows), (0, 0)))
    if "head" in stored:
        stored["head"] = np.pad(stored["head"], ((0, 0), (0, rows)))
    leaves = [jnp.asarray(stored[name]) for name in named]
    return spec, jax.tree.unflatten(jax.tree.structure(layout), leaves)


def by_row(x):
    """[B, T], laid out as the model has it."""
    return jax.sharding.reshard(jnp.asarray(x, jnp.int32), partition("batch", "sequence"))


def row_tokens(tokens):
    positions = by_row(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))
    return Tokens(positions, jnp.ones_like(positions))


def next_token_loss(params, spec, states_BTD, tokens):
    """Summed over all tokens but the last of each row."""
    targets = jnp.concatenate([tokens[:, 1:], jnp.full_like(tokens[:, :1], -1)], axis=1)
    how = Loss(spec.vocab, spec.tied_embeddings, spec.logits_softcap)
    return summed_loss(states_BTD, transformer.output_matrix(params), targets, how)


@functools.cache
def logits_of(family):
    """Of the stored tokens, in one pass."""
    spec, params = params_of(family)
    tokens = by_row(np.load(FIXTURES / family / "expected.npz")["input_ids"])
    where = row_tokens(tokens)
    run = jax.jit(lambda p: transformer.forward(p, spec, tokens, where, dtype=jnp.float32)[0])
    return np.asarray(run(params))


@pytest.mark.parametrize("family", DENSE + SPARSE)
def test_logits_loss_and_gradient_equal_the_reference_implementation(family):
    spec, params = params_of(family)
    expected = np.load(FIXTURES / family / "expected.npz")
    tokens = by_row(expected["input_ids"])

    def mean_loss(embed):
        p = dataclasses.replace(params, embed=embed)
        states, _ = transformer.hidden_states(p, spec, tokens, row_tokens(tokens), dtype=jnp.float32)
        return next_token_loss(p, spec, states, tokens) / tokens[:, 1:].size

    loss, gradient = jax.jit(jax.value_and_grad(mean_loss))(params.embed)
    logits_error, gradient_error = REFERENCE_ERROR.get(family, (0.0, 0.0))
    scale = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(
        logits_of(family)[..., : spec.vocab], expected["logits"], atol=5e-6 * scale + logits_error
    )
    np.testing.assert_allclose(loss, expected["loss"], rtol=2e-6)
    wanted = expected["embedding_gradient"]
    atol = 5e-6 * np.abs(wanted).max() + gradient_error
    np.testing.assert_allclose(gradient[: len(wanted)], wanted, atol=atol)


@pytest.mark.parametrize("family", DENSE + SPARSE)
def test_decoding_token_by_token_gives_the_logits_of_the_whole(family):
    spec, params = params_of(family)
    tokens = by_row(np.load(FIXTURES / family / "expected.npz")["input_ids"][:, :24])
    whole = logits_of(family)
    cache = transformer.empty_cache(spec, len(tokens), 32, jnp.float32)
    step = jax.jit(
        lambda cache, t, where: transformer.forward(params, spec, t, where, dtype=jnp.float32, cache=cache)
    )
    prefill, cache = step(cache, tokens[:, :9], row_tokens(tokens[:, :9]))
    np.testing.assert_allclose(prefill, whole[:, :9], atol=2e-5)
    for i in range(9, 24):
        here = by_row(np.full((len(tokens), 1), i))
        logits, cache = step(cache, tokens[:, i : i + 1], Tokens(here, jnp.ones_like(here)))
        np.testing.assert_allclose(logits[:, 0], whole[:, i], atol=2e-5)


def test_documents_of_a_row_do_not_see_each_other():
    spec = load("demo-tiny")
    params = transformer.init(spec, jax.random.key(0))
    tokens = by_row(jax.random.randint(jax.random.key(1), (1, 20), 0, spec.vocab))
    first, second = tokens[:, :8], tokens[:, 8:]
    positions = np.concatenate([np.arange(8), np.arange(12)])[None]
    segments = np.repeat([1, 2], [8, 12])[None]
    where = Tokens(by_row(positions), by_row(segments))
    run = jax.jit(
        lambda tokens, where: transformer.forward(params, spec, tokens, where, dtype=jnp.float32)[0]
    )
    packed = run(tokens, where)
    for part, got in ((first, packed[:, :8]), (second, packed[:, 8:])):
        np.testing.assert_allclose(got, run(part, row_tokens(part)), atol=1e-5)


def test_remat_and_layers_of_a_round_change_no_gradient():
    spec = load("demo-tiny")
    params = transformer.init(spec, jax.random.key(0))
    tokens = by_row(jax.random.randint(jax.random.key(1), (2, 16), 0, spec.vocab))

    def loss(params, policy, layers=1):
        how = {"remat": policy, "layers_per_round": layers}
        states, _ = transformer.hidden_states(
            params, spec, tokens, row_tokens(tokens), dtype=jnp.float32, **how
        )
        return next_token_loss(params, spec, states, tokens) / tokens.size

    moved = remat.custom({"decoder_layer_input": "offload", "mlpwi_0": "offload", "context": "device"})
    none, *others = (
        jax.jit(jax.grad(lambda p, policy=policy: loss(p, policy)))(params)
        for policy in (remat.POLICIES["none"], remat.POLICIES["minimal"], remat.POLICIES["full"], moved)
    )
    assert spec.layers % 3  # so that the last round has fewer
    others.append(jax.jit(jax.grad(lambda p: loss(p, remat.POLICIES["full"], 3)))(params))
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), none, other)


def test_padded_vocabulary_is_never_likely():
    spec = load("demo-tiny")
    params = transformer.init(spec, jax.random.key(0))
    tokens = jnp.zeros((1, 4), jnp.int32)
    logits, _ = transformer.forward(params, spec, tokens, row_tokens(tokens), dtype=jnp.bfloat16)
    assert logits.shape[-1] == transformer.padded_vocab(spec) > spec.vocab
    assert logits[..., spec.vocab :].max() < -1e29


@pytest.mark.parametrize(
    "model",
    [
        "llama3-8b",
        "llama3-405b",
        "gpt3-175b",
        "gemma3-27b",
        "qwen3-8b",
        "mistral-7b",
        "mixtral-8x7b",
        "qwen3-235b-a22b",
        "deepseek-v2-lite",
        "deepseek-v3",
        "gpt-oss-20b",
    ],
)
def test_weights_of_a_catalog_model_count_its_parameters(model):
    from slicewise.costs.params import parameter_count

    spec = load(model)
    sizes = {k: int(np.prod(w.shape)) for k, w in transformer.leaves(transformer.weights(spec)).items()}
    prediction = sum(size for name, size in sizes.items() if name.startswith("prediction."))
    rows = transformer.padded_vocab(spec) - spec.vocab
    padding = rows * spec.d_model * (1 if spec.tied_embeddings else 2)
    count = parameter_count(spec)
    assert (sum(sizes.values()) - padding - prediction, prediction) == (count.total, count.prediction)
