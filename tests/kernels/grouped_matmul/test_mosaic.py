"""The TPU kernel, interpreted, against the reference; on several devices as experts call it."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from slicewise.errors import UserError
from slicewise.kernels.grouped_matmul import tiles
from slicewise.kernels.grouped_matmul.api import REFERENCE, Kernel, choose, grouped_matmul


def test_equals_the_reference_with_gradients(monkeypatch):
    sizes = [20, 0, 17]  # an empty group, a border within a tile, rows of no group
    monkeypatch.setattr(tiles, "RULE", (16, 128, 128))
    monkeypatch.setattr(
        jax._src.tpu_info, "get_device_kind", lambda: "TPU v5 lite"
    )  # whose layouts it asks for
    x, w, grad = (
        jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.float32)
        for i, s in enumerate(((40, 128), (3, 128, 256), (40, 256)))
    )

    def run(kernel):
        def loss(x, w, grad):
            return (grouped_matmul(x, w, jnp.array(sizes, jnp.int32), kernel) * grad).sum()

        # Each device has rows of its own, as in a mixture of experts.
        mesh = jax.make_mesh(
            (2,), ("x",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,)
        )
        one = jax.shard_map(
            lambda x, w, g: jax.grad(
                lambda x, w: loss(x[0], jax.lax.pcast(w, "x", to="varying"), g[0]), (0, 1)
            )(x, w),
            in_specs=(P("x"), P(), P("x")),
            out_specs=(P("x"), P()),
            mesh=mesh,
        )
        twice = [jnp.stack([a, 2 * a]) for a in (x, grad)]
        with jax.set_mesh(mesh):
            args = (jax.sharding.reshard(twice[0], P("x")), w, jax.sharding.reshard(twice[1], P("x")))
            return jax.jit(one)(*args)

    for got, right in zip(run(Kernel("mosaic", interpret=True)), run(REFERENCE), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-3, rtol=1e-5)


def on(platform):
    return SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform, device_kind="TPU v6 lite")]))


def test_follows_the_devices_of_the_mesh(monkeypatch):
    assert choose(on("cpu")) == REFERENCE
    assert choose(on("tpu"), 65536) == Kernel("mosaic", chip="v6e", vmem_limit_kib=65536)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'slicewise\[tpu\]'"):
        choose(on("tpu"))
