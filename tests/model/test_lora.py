"""Adapters: nothing at first, their merged weights later, and no gradient for what is frozen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import Experts, LatentAttention, ModelSpec, load
from slicewise.costs.adapters import Lora
from slicewise.errors import UserError
from slicewise.kernels.attention.api import Tokens
from slicewise.model import lora, transformer
from slicewise.model.loss import Loss, summed_loss
from slicewise.model.params import Weight, mapped
from slicewise.model.quantization import Quantization
from slicewise.parallel.rules import partition

DENSE = load("demo-tiny")
MLA = ModelSpec(
    name="mla", source="test", layers=1, d_model=32, heads=4, kv_heads=4, head_dim=12, d_ff=64, vocab=96,
    latent_attention=LatentAttention(
        kv_lora_rank=16, q_lora_rank=24, nope_head_dim=8, rope_head_dim=4, v_head_dim=8
    ),
    experts=Experts(experts=4, per_token=2, d_ff=16, shared_d_ff=16),
)  # fmt: skip
EXACT = Lora(4, 8.0, base_dtype="float32")


@pytest.fixture(autouse=True)
def exact_products(one_device):
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def frozen_of(spec, how):
    layout = transformer.leaves(transformer.weights(spec))

    @jax.jit
    def make():
        params = transformer.init(spec, jax.random.key(0))
        return mapped(lambda name, x: lora.freeze(name, layout[name], x, how), params)

    return make()


@functools.cache
def adapters_of(spec, how, *, trained):
    """New ones, or with all entries random as after training."""
    tree = lora.adapters(transformer.weights(spec), how)
    if trained:
        tree = jax.tree.map(lambda w: Weight(w.shape, w.dims, std=w.std or 0.1), tree)
    return jax.jit(lambda: transformer.start(tree, jax.random.key(1)))()


def tokens_of(spec):
    tokens = jax.random.randint(jax.random.key(2), (2, 16), 0, spec.vocab)
    tokens = jax.sharding.reshard(tokens, partition("batch", "sequence"))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    positions = jax.sharding.reshard(positions, partition("batch", "sequence"))
    return tokens, Tokens(positions, jnp.ones_like(positions))


@functools.cache
def forward_of(spec, quantization=None):
    tokens, where = tokens_of(spec)
    how = {"dtype": jnp.float32, "quantization": quantization}
    return jax.jit(lambda params: transformer.forward(params, spec, tokens, where, **how)[0])


def logits(params, spec, quantization=None):
    return np.asarray(forward_of(spec, quantization)(params))


def test_new_adapters_change_no_logit_and_trained_ones_as_their_merged_weights():
    frozen = frozen_of(DENSE, EXACT)
    plain = logits(frozen, DENSE)
    new = lora.adapted(frozen, adapters_of(DENSE, EXACT, trained=False), EXACT)
    np.testing.assert_array_equal(logits(new, DENSE), plain)
    ours = assert_merged_equal(DENSE, EXACT)
    assert np.abs(ours - plain).max() > 0.1


def assert_merged_equal(spec, how):
    """The logits of trained adapters, which are those of their merged weights."""
    changed = lora.adapted(frozen_of(spec, how), adapters_of(spec, how, trained=True), how)
    merged = jax.jit(lambda p: lora.merged_params(p, how))(changed)
    ours, theirs = logits(changed, spec), logits(merged, spec)
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * float(np.abs(theirs[..., : spec.vocab]).max()))
    return ours


def test_adapters_are_on_every_dense_matrix_and_on_no_expert_or_router():
    names = set(lora.adapters(transformer.weights(MLA), EXACT))
    latent = {f"latent.{n}" for n in ("wq_a", "wq_b", "wkv_a", "wk_b", "wv_b")} | {"wo"}
    shared = {f"moe.shared.{n}" for n in ("w_gate", "w_up", "w_down")}
    assert names == {f"layers.{n}" for n in latent | shared}


def test_adapters_have_the_dims_of_their_matrix_and_a_rank_that_is_whole():
    found = lora.adapters(transformer.weights(DENSE), EXACT)
    assert found["layers.wo"].lora_a.dims == ("staged_layers", "heads", "head_dim", "lora")
    assert found["layers.wo"].lora_b.dims == ("staged_layers", "lora", "embed")
    assert found["layers.wq"].lora_a.shape == (DENSE.layers, DENSE.d_model, 4)
    assert found["layers.wq"].lora_b.shape == (DENSE.layers, 4, DENSE.heads, DENSE.head_dim)


def test_frozen_weights_in_8_bits_give_the_logits_of_their_rounded_values():
    how = dataclasses.replace(EXACT, base_dtype="int8")
    kept, exact = (transformer.leaves(frozen_of(MLA, h)) for h in (how, EXACT))
    kinds = {name: jax.tree.leaves(leaf)[0].dtype for name, leaf in kept.items()}
    assert kinds["layers.wo"] == kinds["layers.moe.w_up"] == "int8"
    assert kinds["embed"] == kinds["head"] == "bfloat16"
    assert kinds["layers.moe.router"] == kinds["layers.attn_norm.scale"] == "float32"
    for name in ("layers.wo", "layers.moe.w_up"):
        packed = kept[name]
        error = np.abs(lora.unpacked(packed, jnp.dtype("float32")) - exact[name])
        assert (error <= 0.5001 * packed.scale).all(), name
    assert_merged_equal(MLA, how)


def test_adapters_stand_beside_products_in_8_bits():
    frozen = frozen_of(DENSE, EXACT)
    changed = lora.adapted(frozen, adapters_of(DENSE, EXACT, trained=True), EXACT)
    wanted = logits(changed, DENSE)[..., : DENSE.vocab]
    ours = logits(changed, DENSE, Quantization("int8", scaling="axis"))[..., : DENSE.vocab]
    assert 0 < np.abs(ours - wanted).max() < 0.1 * np.abs(wanted).max()


def test_the_backward_pass_multiplies_for_no_gradient_of_a_frozen_weight():
    """Products in the program before any optimisation."""
    tokens, where = tokens_of(DENSE)
    how = dataclasses.replace(EXACT, layers="wq")
    frozen, one = frozen_of(DENSE, how), adapters_of(DENSE, how, trained=False)

    def products(trained, whole, is_frozen):
        def total(trained):
            params = whole(trained)
            x, _ = transformer.hidden_states(params, DENSE, tokens, where, dtype=jnp.float32)
            loss = Loss(DENSE.vocab, DENSE.tied_embeddings, is_frozen=is_frozen)
            return summed_loss(x, transformer.output_matrix(params), tokens, loss)

        return jax.jit(jax.grad(total)).lower(trained).as_text().count("dot_general")

    adapted = products(one, lambda trained: lora.adapted(frozen, trained, how), True)
    plain = products(frozen, lambda trained: trained, False)
    matrices = len("qkvo") + len(("gate", "up", "down")) + len(("output",))
    again = 1  # what attention returns, which only the gradient of wo reads
    adapter = 2 + 1 + 4  # forward, x A once more, and the gradients of x, A, x A and B
    assert adapted == plain - matrices - again + adapter


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("w[", r"lora_layers = 'w\[' is no regular expression"),
        ("wz", "lora_layers = 'wz' matches no matrix of mla; the names are .*wo"),
        (".*w_up", r"names moe\.w_up, and routed experts take no adapters; choose of .*moe\.shared\.w_up"),
        ("attn_norm.*", "matches no matrix of mla"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(layers, message):
    with pytest.raises(UserError, match=message):
        lora.check(Lora(4, layers=layers), MLA, transformer.weights(MLA))
