"""Attention over rows that the context axis divides, against whole rows; see also tests/train/test_layouts.py."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.kernels.attention import chunked
from slicewise.kernels.attention.api import REFERENCE, Kernel, Tokens, attention, choose
from slicewise.parallel import context
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import STAGE_AXES, partition

B, T, N, K, H, V = 1, 512, 2, 1, 16, 8
WINDOW = 150
LENGTHS = (30, 300, 142, 40)  # of documents; the last is padding


def computed(kernel: Kernel, ways: int, *, in_stage: bool = False) -> list[np.ndarray]:
    """The context and all gradients of two layers, the second without its window, of packed rows in order; where a
    program says, or where the code of a pipeline's stage does."""
    config = load_config(None, [f"ici_context_parallelism={ways}"]).config
    mesh = build_mesh(config, by_slice(jax.devices()[:ways]))
    order = context.order(T, ways, kernel.strategy)
    order = np.arange(T) if order is None else order
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2, 3, 0]], LENGTHS, axis=1)
    positions = np.concatenate([np.arange(n) for n in LENGTHS])[None]
    with jax.set_mesh(mesh):

        def placed(x: np.ndarray, *dims: str) -> jax.Array:
            return jax.device_put(x[:, order], jax.NamedSharding(mesh, partition("batch", "sequence", *dims)))

        shapes = ((N, H), (K, H), (K, V), (N, V))
        values = [rng.normal(size=(B, T, *shape)).astype(np.float32) for shape in shapes]
        q, k, v, grad = (placed(x, "heads", "head_dim") for x in values)
        sinks = jax.device_put(
            rng.normal(size=N).astype(np.float32), jax.NamedSharding(mesh, partition("heads"))
        )
        where = Tokens(placed(positions), placed(segments))

        @jax.jit
        def run(q, k, v, sinks, is_global):
            def attend(q, k, v, sinks, where, is_global):
                how = {"window": WINDOW, "scale": H**-0.5, "softcap": 3.0, "is_global": is_global}
                return attention(q, k, v, where, where, sinks_N=sinks, kernel=kernel, **how)

            row, whole = PartitionSpec(STAGE_AXES[:-1], "context"), PartitionSpec()
            mapped = {"axis_names": {*STAGE_AXES}, "check_vma": False}
            if in_stage:
                specs = (row, row, row, whole, row, whole)
                attend = jax.shard_map(attend, in_specs=specs, out_specs=row, **mapped)
            found, pull = jax.vjp(lambda *operands: attend(*operands, where, is_global), q, k, v, sinks)
            return found, *pull(grad)

        layers = [run(q, k, v, sinks, jnp.asarray(is_global)) for is_global in (False, True)]
    *by_token, dsinks = (np.stack(parts) for parts in zip(*layers, strict=True))
    return [x[:, :, np.argsort(order)] for x in by_token] + [dsinks]


@functools.cache
def whole() -> list[np.ndarray]:
    return computed(REFERENCE, 1)


@pytest.mark.parametrize(
    ("name", "strategy", "ways", "in_stage"),
    [
        ("splash", "all_gather", 2, False),
        ("splash", "all_gather", 2, True),
        ("splash", "ring", 2, False),
        ("xla_chunked", "ring", 4, False),
    ],
)
def test_divided_rows_give_what_whole_rows_do(name, strategy, ways, in_stage, monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK", 64)
    kernel = Kernel(name, strategy=strategy, interpret=True)
    parts = ("context", "q", "k", "v", "sinks")
    for part, got, right in zip(parts, computed(kernel, ways, in_stage=in_stage), whole(), strict=True):
        np.testing.assert_allclose(got, right, atol=3e-5, err_msg=part)


@pytest.mark.parametrize(
    ("asked", "platform", "length", "strategy", "message"),
    [
        ("auto", "tpu", 1024, "all_gather", None),
        ("auto", "tpu", 768, "all_gather", "not a multiple of 512, .* over context parallelism 4; use 1024"),
        ("auto", "tpu", 1536, "ring", "not a multiple of 1024, .* over context parallelism 4; use 2048"),
        ("auto", "cpu", 1031, "ring", "sequence_length = 1031 has no divisor from 64 to 512"),
        ("auto", "cpu", 1031, "all_gather", None),
    ],
)
def test_kernels_need_whole_blocks_on_every_device(asked, platform, length, strategy, message):
    device = SimpleNamespace(platform=platform, device_kind={"tpu": "TPU v6 lite", "cpu": "cpu"}[platform])
    mesh = SimpleNamespace(devices=np.array([device]), shape={"context": 4})
    if message is None:
        assert choose(asked, mesh, length, strategy=strategy).strategy == strategy
        return
    with pytest.raises(UserError, match=message):
        choose(asked, mesh, length, strategy=strategy)
