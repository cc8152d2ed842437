import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from slicewise.config import load_config
from slicewise.model.loss import Loss, summed_loss
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition

LAYOUTS = {
    "one device": (1, []),
    "data x fsdp x tensor": (8, [f"ici_{axis}_parallelism=2" for axis in ("data", "fsdp", "tensor")]),
    "tensor": (8, ["ici_tensor_parallelism=8"]),
}
B, T, D, V = 4, 6, 8, 288  # so many columns that their gradient is summed in several parts


@pytest.fixture(scope="module", params=LAYOUTS)
def mesh(request):
    count, overrides = LAYOUTS[request.param]
    config = load_config(None, overrides).config
    with jax.set_mesh(build_mesh(config, by_slice(jax.devices()[:count]))):
        yield


def plain(x_BTD, weight_DV, targets_BT, loss):
    """The definition, on full logits."""
    logits_BTV = x_BTD @ weight_DV
    if loss.softcap:
        logits_BTV = loss.softcap * jnp.tanh(logits_BTV / loss.softcap)
    logits_BTV = logits_BTV[..., : loss.vocab]
    chosen_BT = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], -1)[..., 0]
    normaliser_BT = jax.nn.logsumexp(logits_BTV, -1)
    losses_BT = normaliser_BT - chosen_BT + loss.z_loss_weight * normaliser_BT**2
    return jnp.where(targets_BT >= 0, losses_BT, 0).sum()


def arrays(seed, scale=1.0, T=T):
    keys = jax.random.split(jax.random.key(seed), 3)
    x_BTD = scale * jax.random.normal(keys[0], (B, T, D))
    return x_BTD, jax.random.normal(keys[1], (D, V)), jax.random.randint(keys[2], (B, T), -1, 27)


def on_mesh(x_BTD, weight, targets_BT, loss):
    dims = ("vocab", "embed") if loss.tied else ("embed", "vocab")
    return (
        jax.device_put(x_BTD, partition("batch", "sequence", "activation")),
        jax.device_put(weight, partition(*dims)),
        jax.device_put(targets_BT, partition("batch", "sequence")),
    )


def off_mesh(x):
    return np.asarray(jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim)))


@pytest.mark.parametrize(
    ("loss", "length"),
    [
        (Loss(vocab=V, chunk_tokens=2), T),
        (
            Loss(27, tied=True, softcap=3.0, z_loss_weight=0.1, chunk_tokens=5),
            T,
        ),  # 5 does not divide the tokens
        (Loss(vocab=27, softcap=3.0), T),
        (Loss(vocab=27), 2111),  # several blocks on each device
        (Loss(vocab=27, tied=True), 2111),
    ],
)
def test_equals_the_definition_with_its_gradients_in_every_layout(mesh, loss, length):
    x, weight, targets = (np.asarray(a) for a in arrays(0, T=length))
    expected, grads = jax.value_and_grad(plain, (0, 1))(x, weight, targets, loss)
    stored = weight.T if loss.tied else weight
    run = jax.jit(jax.value_and_grad(lambda x, w, t: 0.5 * summed_loss(x, w, t, loss), (0, 1)))
    got, (x_grad, w_grad) = run(*on_mesh(x, stored, targets, loss))
    w_grad = off_mesh(w_grad)
    np.testing.assert_allclose(2 * got, expected, rtol=1e-5)
    np.testing.assert_allclose(2 * off_mesh(x_grad), grads[0], atol=1e-5)
    w_grad = 2 * (w_grad.T if loss.tied else w_grad)
    np.testing.assert_allclose(w_grad, grads[1], atol=1e-5 * max(1, np.abs(grads[1]).max()))
    alone = jax.jit(lambda x, w, t: summed_loss(x, w, t, loss))(*on_mesh(x, stored, targets, loss))
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31 - 1), st.floats(0.1, 300))
def test_equals_the_definition_at_any_scale(seed, scale):
    loss = Loss(vocab=27, chunk_tokens=7)
    with jax.set_mesh(build_mesh(load_config(None).config, by_slice(jax.devices()[:1]))):
        x, weight, targets = arrays(seed, scale)
        got = jax.jit(summed_loss, static_argnums=3)(*on_mesh(x, weight, targets, loss), loss)
        np.testing.assert_allclose(got, plain(x, weight, targets, loss), rtol=1e-5, atol=1e-5 * scale)


def test_no_target_no_loss_and_no_gradient(one_device):
    x, weight, _ = arrays(0)
    targets = jnp.full((B, T), -1).at[0, 0].set(3)
    gradient = jax.grad(summed_loss)(*on_mesh(x, weight, targets, Loss(vocab=V)), Loss(V, z_loss_weight=0.1))
    assert np.abs(gradient[0, 0]).max() > 0
    assert np.abs(gradient).sum() == np.abs(gradient[0, 0]).sum()


def test_full_logits_are_never_held(one_device):
    d_model, vocab = 32, 4096
    dims = [("batch", "sequence", "activation"), ("embed", "vocab"), ("batch", "sequence")]
    mesh = jax.sharding.get_mesh()

    def temporary_bytes(tokens):
        shapes = [
            ((4, tokens // 4, d_model), jnp.float32),
            ((d_model, vocab), jnp.float32),
            ((4, tokens // 4), jnp.int32),
        ]
        args = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, partition(*names)))
            for names, (shape, dtype) in zip(dims, shapes, strict=True)
        ]
        run = jax.jit(jax.grad(lambda x, w, t: summed_loss(x, w, t, Loss(vocab=vocab)), (0, 1)))
        return run.lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(16384) < 4 * 16384 * vocab / 2
    assert temporary_bytes(32768) - temporary_bytes(16384) < 0.02 * 4 * 16384 * vocab
