import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.kernels.attention.api import Tokens, attention, visible
from slicewise.parallel.rules import partition

pytestmark = pytest.mark.usefixtures("one_device")


def by_heads(x):
    """[B, T, N, H], laid out as the model has it."""
    return jax.sharding.reshard(jnp.asarray(x), partition("batch", "sequence", "heads", "head_dim"))


def by_loops(q, k, v, queries, keys, window, scale, softcap):
    """The definition, one query and head at a time."""
    B, T, N, H = q.shape
    out = np.zeros((B, T, N, H))
    group = N // k.shape[2]
    for b, t, n in np.ndindex(B, T, N):
        distance = queries[0][b, t] - keys[0][b]
        seen = (queries[1][b, t] == keys[1][b]) & (distance >= 0)
        if window is not None:
            seen &= distance < window
        scores = k[b, seen, n // group] @ q[b, t, n] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
    return out


@settings(deadline=None, max_examples=15)
@given(
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (2, 2)]),
    window=st.sampled_from([None, 1, 3, 100]),
    softcap=st.sampled_from([None, 2.0]),
    cut=st.integers(1, 9),
)
def test_equals_the_definition(heads, window, softcap, cut):
    N, K = heads
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 10, n, 8)).astype(np.float32) for n in (N, K, K))
    positions = np.tile(np.concatenate([np.arange(cut), np.arange(10 - cut)]), (2, 1))
    segments = np.tile(np.repeat([1, 2], [cut, 10 - cut]), (2, 1))
    where = Tokens(jnp.asarray(positions), jnp.asarray(segments))
    got = attention(*map(by_heads, (q, k, v)), where, where, window=window, scale=0.3, softcap=softcap)
    expected = by_loops(q, k, v, (positions, segments), (positions, segments), window, 0.3, softcap)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_order_of_tokens_is_data():
    """A permutation of keys and values, with their positions, changes nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 6, 2, 8)).astype(np.float32) for _ in range(3))
    where = Tokens(jnp.arange(6)[None], jnp.ones((1, 6), jnp.int32))
    order = np.array([3, 0, 5, 1, 4, 2])
    moved = Tokens(where.positions_BT[:, order], where.segments_BT)
    plain = attention(*map(by_heads, (q, k, v)), where, where, window=None, scale=1.0)
    other = map(by_heads, (q, k[:, order], v[:, order]))
    np.testing.assert_allclose(attention(*other, where, moved, window=None, scale=1.0), plain, atol=1e-6)


def test_window_counts_the_token_itself():
    where = Tokens(jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32))
    assert visible(where, where, 2)[0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
