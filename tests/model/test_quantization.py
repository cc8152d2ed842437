import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import load
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.model import quantization, transformer
from slicewise.model.linear import linear
from slicewise.model.quantization import Marked, Quantization, Stored, marked
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import gathered, partition

INTO = ("embed", "heads", "head_dim")
OUT_OF = ("heads", "head_dim", "embed")
BY_HEAD = ("batch", "sequence", "heads", "head_dim")
WHOLE = ("batch", "sequence", "activation")


@pytest.fixture(scope="module")
def mesh():
    config = load_config(None, ["ici_tensor_parallelism=2"]).config
    with jax.set_mesh(build_mesh(config, by_slice(jax.devices()[:4]))) as mesh:
        yield mesh


def normal(seed: int, dims: tuple[str, ...], shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    x = scale * np.random.default_rng(seed).normal(size=shape)
    return jax.sharding.reshard(jnp.asarray(x, jnp.bfloat16), partition(*dims))


def cosine(a: jax.Array, b: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


KINDS = [
    Quantization("fp8"),
    Quantization("fp8_e4m3", scaling="axis"),
    Quantization("fp8", scaling="tile", tile=10),
    Quantization("fp8", fixed_range=8.0),
    Quantization("fp8", stochastic=True),
    Quantization("int8", stochastic=True, scaling="axis"),
]


@pytest.mark.parametrize(
    ("how", "into"), [(how, i % 2 == 0) for i, how in enumerate([*KINDS, KINDS[0]])], ids=str
)
def test_product_and_gradients_point_the_way_of_bfloat16(how, into, mesh):
    x_dims, w_dims, out_dims = (WHOLE, INTO, BY_HEAD) if into else (BY_HEAD, OUT_OF, WHOLE)
    x = normal(0, x_dims, (4, 8, 64) if into else (4, 8, 4, 16))
    w = normal(1, w_dims, (64, 4, 16) if into else (4, 16, 64), 0.1)
    grad = normal(2, out_dims, (4, 8, 4, 16) if into else (4, 8, 64), 1e-6)
    out, contract = partition(*out_dims), 1 if into else 2

    def both(weight):
        def product(x, w):
            return linear(x, weight(w), out, contract=contract)

        y, pull_back = jax.jit(lambda x, w: jax.vjp(product, x, w))(x, w)
        return y, *pull_back(grad)

    got = both(lambda w: Stored(w, w_dims, how))
    right = both(lambda w: gathered(w, *w_dims))
    for a, b in zip(got, right, strict=True):
        assert a.dtype == b.dtype
        assert a.sharding.spec == b.sharding.spec
        assert cosine(a, b) >= 0.995


@pytest.mark.parametrize(("name", "room"), [("int8", 1.0), ("fp8", 2.0), ("fp8_e4m3", 2.0)])
def test_what_a_calibration_found_serves_every_type_with_its_own_room(name, room, mesh):
    """So a run may be resumed in another one: int8 has no levels to give away."""
    x, w = normal(0, WHOLE, (4, 8, 64)), normal(1, INTO, (64, 4, 16))

    @jax.jit
    def of_part(x, w, part):
        range_2, out = part * jnp.stack([jnp.abs(x).max(), jnp.abs(w).max()]), partition(*BY_HEAD)
        return linear(x, Stored(w, INTO, Quantization(name, calibrated=True), range_2), out)

    right = jax.jit(lambda x, w: linear(x, gathered(w, *INTO), partition(*BY_HEAD)))(x, w)
    assert cosine(of_part(x, w, 1 / room), right) >= (0.9998 if name == "int8" else 0.998)
    assert cosine(of_part(x, w, 0.5 / room), right) < 0.99  # the largest values are cut


def test_weights_are_gathered_in_8_bits(mesh):
    x, w = normal(0, WHOLE, (4, 8, 64)), normal(1, INTO, (64, 4, 16))

    def loss(x, w):
        return linear(x, Stored(w, INTO, Quantization("int8")), partition(*BY_HEAD)).sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, w).compile().as_text()
    gathers = re.findall(r"= (\w+)\[[^\]]*\]\S* all-gather\(", text)
    assert gathers
    assert set(gathers) == {"s8"}


@pytest.mark.parametrize("into", [True, False])
def test_devices_scale_their_own_part_and_share_a_scale_where_they_gather(into, mesh):
    """The rows of some are a hundred thousand times smaller than those of others."""
    x_dims, w_dims, out_dims = (WHOLE, INTO, BY_HEAD) if into else (BY_HEAD, OUT_OF, WHOLE)
    rows = jax.sharding.reshard(jnp.array([1, 1, 1e-5, 1e-5]), partition("batch"))
    x = normal(0, x_dims, (4, 8, 64) if into else (4, 8, 4, 16))
    x = x * rows.reshape(4, *[1] * (x.ndim - 1)).astype(x.dtype)
    w = normal(1, w_dims, (64, 4, 16) if into else (4, 16, 64))
    out, contract = partition(*out_dims), 1 if into else 2

    def product(weight):
        return jax.jit(lambda x, w: linear(x, weight(w), out, contract=contract))(x, w)

    got = np.asarray(product(lambda w: Stored(w, w_dims, Quantization("int8"))))
    right = np.asarray(product(lambda w: gathered(w, *w_dims)))
    for row in range(4):
        assert cosine(got[row], right[row]) >= 0.999


@pytest.mark.parametrize(("dtype", "value"), [("float8_e5m2", 1.1), ("float8_e4m3fn", 2e-3), ("int8", 5.3)])
def test_stochastic_rounding_is_right_on_average(dtype, value, one_device):
    import qwix

    x = jnp.full((200, 200), value, jnp.float32)
    array = qwix.quantize(
        x, jnp.dtype(dtype), calibration_method=f"fixed,{-_largest(dtype)},{_largest(dtype)}"
    )
    rounded = quantization._rounded_at_random(x, array, jnp.dtype(dtype)).astype(jnp.float32)
    assert len(np.unique(rounded)) == 2
    assert np.mean(rounded) == pytest.approx(value, rel=0.01)
    assert abs(np.mean(array.qvalue.astype(jnp.float32)) - value) > 0.01 * value  # to the nearest is not


def _largest(dtype: str) -> float:
    return 127.0 if dtype == "int8" else float(jnp.finfo(dtype).max)


def names(how: Quantization, model: str) -> set[str]:
    layers = marked(transformer.weights(load(model)).layers, how)
    found = jax.tree_util.tree_leaves_with_path(layers, is_leaf=lambda leaf: isinstance(leaf, Marked))
    return {".".join(k.name for k in path) for path, leaf in found if isinstance(leaf, Marked)}


def test_default_is_every_dense_matrix_and_no_other():
    mlp, own = {"w_gate", "w_up", "w_down"}, {"wq", "wk", "wv", "wo"}
    assert names(Quantization("fp8"), "llama3-8b") == mlp | own
    assert names(Quantization("fp8", layers="w_.*"), "llama3-8b") == mlp


def test_a_pattern_without_a_matrix_is_refused():
    layers = transformer.weights(load("llama3-8b")).layers
    with pytest.raises(UserError, match="'mlp' matches no matrix; the names are wq, wk, wv, wo, w_gate"):
        quantization.check(Quantization("fp8", layers="mlp"), layers)
    with pytest.raises(UserError, match="is no regular expression"):
        quantization.check(Quantization("fp8", layers="("), layers)


@pytest.mark.parametrize("fixed", [1e-30, 1e300])
def test_a_fixed_range_whose_scales_no_float32_could_hold_is_refused(fixed):
    with pytest.raises(UserError, match=r"quantization_fixed_range = 1e.*expected 1e-06 to 1e\+06"):
        quantization.check(Quantization("fp8", fixed_range=fixed), None)


def test_needs_qwix(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'slicewise\[quantization\]'"):
        quantization.check(Quantization("fp8"), None)
