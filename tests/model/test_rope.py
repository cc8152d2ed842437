import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.catalog.model import RopeScaling
from slicewise.model import rope


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 200))
def test_scores_depend_only_on_the_distance(query, key, shift):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(a, b):
        def turn(x, position):
            angles = jnp.full((1, 1), position)[..., None] * rope.frequencies(16, 1e4, None).astype(
                np.float32
            )
            return rope.rotate(x, (jnp.cos(angles), jnp.sin(angles)))

        return float((turn(q, a) * turn(k, b)).sum())

    np.testing.assert_allclose(score(query, key), score(query + shift, key + shift), atol=5e-3)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = RopeScaling(kind="llama3", factor=8, original_context=8192)
    plain, scaled = rope.frequencies(128, 5e5, None), rope.frequencies(128, 5e5, scaling)
    np.testing.assert_allclose(scaled[0], plain[0])
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8)
    assert np.all(np.diff(scaled) < 0)


def test_yarn_keeps_fast_dims_and_stretches_slow_ones():
    scaling = RopeScaling(kind="yarn", factor=32, original_context=4096)
    plain, scaled = rope.frequencies(64, 1.5e5, None), rope.frequencies(64, 1.5e5, scaling)
    np.testing.assert_allclose(scaled[0], plain[0])
    np.testing.assert_allclose(scaled[-1], plain[-1] / 32)


def test_linear_scaling_divides_all():
    scaling = RopeScaling(kind="linear", factor=4)
    np.testing.assert_allclose(rope.frequencies(64, 1e4, scaling) * 4, rope.frequencies(64, 1e4, None))
