import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from slicewise.checkpoint.digest import array_digest, digests


def expected_digest(x: np.ndarray) -> int:
    """The definition, one element at a time."""
    width = min(x.dtype.itemsize, 4)
    words = x.astype(np.uint32).ravel() if x.dtype == bool else np.frombuffer(x.tobytes(), f"<u{width}")
    total = 0
    for position, word in enumerate(words.tolist()):
        h = word ^ (position * 0x9E3779B9) % 2**32
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        total += h ^ h >> 16
    return total % 2**32


floats = st.lists(st.floats(width=32), min_size=12, max_size=12)


@given(floats)
@settings(max_examples=50, deadline=None)
def test_digest_of_floats_follows_its_definition(values):
    x = np.array(values, np.float32).reshape(3, 4)
    assert int(array_digest(x)) == expected_digest(x)


@pytest.mark.parametrize(
    "dtype",
    [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int32, np.int8, np.uint16, bool],
)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 4), (0,)])
def test_digest_of_every_dtype_and_rank_follows_its_definition(dtype, shape):
    x = (np.random.default_rng(0).normal(size=shape) * 9).astype(np.float32).astype(dtype)
    assert int(array_digest(x)) == expected_digest(np.asarray(x))


def test_digest_of_eight_byte_elements_follows_its_definition():
    with jax.enable_x64(True):
        for x in (np.array([1.5, -2.0, 1e300]), np.array([[2**40, -1]])):
            assert int(array_digest(x)) == expected_digest(x)


@given(floats, st.integers(0, 11), st.integers(0, 31))
@settings(max_examples=50, deadline=None)
def test_one_flipped_bit_always_changes_the_digest(values, index, bit):
    x = np.array(values, np.float32).reshape(3, 4)
    y = x.copy()
    y.view(np.uint32).reshape(-1)[index] ^= np.uint32(1 << bit)
    assert int(array_digest(x)) != int(array_digest(y))


def test_order_matters():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 4)).astype(np.float32)
    seen = {int(array_digest(rng.permuted(x.ravel()).reshape(3, 4))) for _ in range(50)}
    assert len(seen) == 50
    assert int(array_digest(x.reshape(12))) == int(array_digest(x)), "only the order of the elements counts"


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(
    "spec", [P(), P("a"), P(("a", "b")), P("a", "b"), P(None, None, "b"), P("b", None, "a")]
)
def test_digest_does_not_depend_on_the_sharding(axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type, axis_type))
    x = jax.random.normal(jax.random.key(0), (8, 4, 12)).astype(jnp.bfloat16)
    assert digests({"x": jax.device_put(x, NamedSharding(mesh, spec))}) == {
        "x": f"{expected_digest(np.asarray(x)):08x}"
    }
