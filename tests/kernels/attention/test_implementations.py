"""Every implementation against the reference in float32, forward and backward, on a mesh that shards rows and heads."""

import dataclasses
import functools
import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.kernels.attention import chunked
from slicewise.kernels.attention.api import REFERENCE, Kernel, Tokens, attention, choose, visible
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition

B, T = 2, 256
KERNELS = {
    "xla_chunked": Kernel("xla_chunked"),
    "splash": Kernel("splash", interpret=True),
    "splash with a constant maximum": Kernel("splash", max_logit=4.0, interpret=True),
}


@dataclasses.dataclass(frozen=True)
class Case:
    heads: tuple[int, int]  # of queries, of keys
    dims: tuple[int, int]  # of queries and keys, of values
    window: int | None = None
    softcap: float | None = None
    is_global: tuple[bool, ...] = ()  # what a scan says of its layers
    sinks: bool = False


CASES = {
    "grouped queries": Case((4, 2), (32, 32)),
    "windows in some layers of a scan, capped logits": Case((2, 2), (16, 16), 40, 3.0, (False, True)),
    "sinks, latent attention's head dims, one window": Case((2, 2), (192, 128), 100, sinks=True),
}


@pytest.fixture(scope="module")
def mesh():
    config = load_config(None, ["ici_tensor_parallelism=2"]).config
    with jax.set_mesh(build_mesh(config, by_slice(jax.devices()[:4]))) as mesh:
        yield mesh


@functools.cache
def packed() -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of rows of several documents, the last part of one of them padding."""
    segments = np.stack([np.repeat([1, 2, 3], [30, 150, 76]), np.repeat([1, 2, 0], [128, 68, 60])])
    positions = np.stack(
        [np.concatenate([np.arange((row == s).sum()) for s in dict.fromkeys(row)]) for row in segments]
    )
    return positions, segments


def computed(kernel: Kernel, case: Case) -> list[np.ndarray]:
    """The context, and its gradients with respect to queries, keys, values and sinks."""
    (N, K), (H, V) = case.heads, case.dims
    rng = np.random.default_rng(0)

    def normal(*dims: str, shape: tuple[int, ...]) -> jax.Array:
        return jax.sharding.reshard(jnp.asarray(rng.normal(size=shape), jnp.float32), partition(*dims))

    by_head = ("batch", "sequence", "heads", "head_dim")
    q, k, v, grad = (normal(*by_head, shape=(B, T, n, h)) for n, h in ((N, H), (K, H), (K, V), (N, V)))
    sinks = normal("heads", shape=(N,))
    where = Tokens(*(jax.sharding.reshard(jnp.asarray(x), partition("batch", "sequence")) for x in packed()))

    @jax.jit
    def run(q, k, v, sinks, is_global):
        def attend(q, k, v, sinks):
            return attention(
                q,
                k,
                v,
                where,
                where,
                window=case.window,
                scale=H**-0.5,
                softcap=case.softcap,
                sinks_N=sinks if case.sinks else None,
                is_global=is_global if case.is_global else None,
                kernel=kernel,
            )

        context, pull_back = jax.vjp(attend, q, k, v, sinks)
        return context, *pull_back(grad)

    layers = [run(q, k, v, sinks, jnp.asarray(is_global)) for is_global in case.is_global or (False,)]
    return [np.stack(parts) for parts in zip(*layers, strict=True)]


LATENT = "sinks, latent attention's head dims, one window"
PAIRS = [(kernel, case) for kernel in ("xla_chunked", "splash") for case in CASES]


@pytest.mark.parametrize(("kernel", "case"), [*PAIRS, ("splash with a constant maximum", LATENT)])
def test_equals_the_reference_with_gradients(kernel, case, mesh, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", 64)
    names = ("context", "q", "k", "v", "sinks")
    for name, got, right in zip(names, computed(KERNELS[kernel], CASES[case]), reference(case), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-5, err_msg=name)


@functools.cache
def reference(case: str) -> list[np.ndarray]:
    return computed(REFERENCE, CASES[case])


@pytest.mark.parametrize(
    ("window", "is_global", "softcap"), [(None, False, None), (40, False, 2.0), (40, True, None)]
)
def test_the_gradient_of_a_probe_counts_the_logits_above_the_estimate(
    window, is_global, softcap, mesh, monkeypatch
):
    monkeypatch.setattr(chunked, "BLOCK", 64)
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(B, T, n, 8)).astype(np.float32) for n in (4, 2))
    where = Tokens(*(jax.sharding.reshard(jnp.asarray(x), partition("batch", "sequence")) for x in packed()))
    by_head = partition("batch", "sequence", "heads", "head_dim")
    q_BTNH, k_BTKH = (jax.sharding.reshard(jnp.asarray(x), by_head) for x in (q, k))

    def loss(probe):
        kernel = Kernel("xla_chunked", max_logit=1.5, probe=probe)
        how = {"window": window, "scale": 1.0, "softcap": softcap, "is_global": jnp.array(is_global)}
        return attention(q_BTNH, k_BTKH, k_BTKH, where, where, kernel=kernel, **how).sum() * 0

    logits = np.einsum("btngh,bsnh->bngts", q.reshape(B, T, 2, 2, 8), k)
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    seen = np.asarray(visible(where, where, None if is_global else window))
    assert jax.jit(jax.grad(loss))(0.0) == (seen[:, None, None] & (logits > 1.5)).sum()


class Device:
    """As much of a device as a choice of kernel looks at."""

    def __init__(self, platform: str, device_kind: str):
        self.platform, self.device_kind = platform, device_kind


def choice(asked: str, platform: str, length: int = 256, max_logit: float = 0.0) -> Kernel:
    kind = {"tpu": "TPU v6 lite", "cpu": "cpu"}[platform]
    return choose(
        asked,
        SimpleNamespace(devices=np.array([Device(platform, kind)]), shape={"context": 1}),
        length,
        max_logit,
    )


def test_auto_follows_the_devices_of_the_mesh():
    assert choice("auto", "cpu", max_logit=5.0) == Kernel("reference", max_logit=5.0)
    assert choice("auto", "tpu", max_logit=5.0) == Kernel("splash", "v6e", max_logit=5.0)
    assert choice("xla_chunked", "tpu") == Kernel("xla_chunked", "v6e")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("splash", "cpu"), "needs TPU devices, found cpu"),
        (("auto", "tpu", 200), "sequence_length = 200 is not a multiple of 128.*use 256"),
        (("xla_chunked", "cpu", 1031), "sequence_length = 1031 has no divisor from 64 to 512"),
    ],
)
def test_refuses_what_cannot_run(arguments, message):
    with pytest.raises(UserError, match=message):
        choice(*arguments)


def test_splash_needs_tokamax(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'slicewise\[tpu\]'"):
        choice("splash", "tpu")
