import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.model.loss import token_losses


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31 - 1), st.floats(0.1, 300))
def test_equals_log_softmax_at_the_target_at_any_scale(seed, scale):
    logits = scale * jax.random.normal(jax.random.key(seed), (2, 3, 7))
    targets = jax.random.randint(jax.random.key(seed + 1), (2, 3), 0, 7)
    expected = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(token_losses(logits, targets), expected, rtol=1e-5, atol=1e-5 * scale)


def test_no_target_no_loss_and_no_gradient():
    logits = jax.random.normal(jax.random.key(0), (1, 2, 5))
    targets = jnp.array([[3, -1]])
    assert token_losses(logits, targets)[0, 1] == 0
    gradient = jax.grad(lambda x: token_losses(x, targets, 0.1).sum())(logits)
    assert np.abs(gradient[0, 1]).max() == 0
    assert np.abs(gradient[0, 0]).max() > 0


def test_z_loss_is_the_squared_normaliser():
    logits = jnp.zeros((1, 1, 8))
    targets = jnp.zeros((1, 1), jnp.int32)
    extra = token_losses(logits, targets, 0.5) - token_losses(logits, targets)
    np.testing.assert_allclose(extra, 0.5 * np.log(8) ** 2, rtol=1e-6)
