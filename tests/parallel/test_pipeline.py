"""The schedule of a pipeline: who works on what when, and where layers and microbatches go."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from slicewise.config import load_config
from slicewise.costs.parallelism import pipeline_bubble
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.pipeline import AXIS, Pipeline, pipelined, place, ticks
from slicewise.parallel.rules import partition


@settings(max_examples=12)
@given(stages=st.integers(2, 5), groups=st.integers(1, 4), repeats=st.integers(1, 3))
def test_a_microbatch_passes_every_stage_in_order_one_tick_apart_and_no_stage_idles_between(
    stages, groups, repeats
):
    how = Pipeline(stages * groups, repeats)
    count = ticks(stages, how)
    found = [place(np.arange(count), stage, stages, how) for stage in range(stages)]
    seen = {}
    for stage, at in enumerate(found):
        real = np.asarray(at.is_real)
        assert real.sum() == how.microbatches * repeats
        assert np.diff(np.flatnonzero(real)).max(initial=1) == 1
        for tick in np.flatnonzero(real):
            seen[int(at.microbatch[tick]), int(at.round_[tick]), stage] = tick
    for microbatch in range(how.microbatches):
        path = [seen[microbatch, r, stage] for r in range(repeats) for stage in range(stages)]
        assert np.diff(path).tolist() == [1] * (len(path) - 1)
    idle = 1 - how.microbatches * repeats / count
    assert idle == pytest.approx(pipeline_bubble(stages, how.microbatches, repeats))


def mesh_of(stages):
    return build_mesh(
        load_config(None, [f"ici_pipeline_parallelism={stages}", "ici_fsdp_parallelism=1"]).config,
        by_slice(jax.devices()[:stages]),
    )


@pytest.mark.parametrize(
    ("stages", "repeats", "microbatches"), [(2, 1, 2), (2, 3, 4), (3, 2, 9), (4, 2, 4), (4, 4, 8), (4, 6, 4)]
)
def test_every_layer_sees_every_row_in_order_once(stages, repeats, microbatches):
    """x -> 2 x + layer is not commutative, so a layer out of its place shows."""
    layers, rows = 2 * stages * repeats, 2 * microbatches
    mesh, how = mesh_of(stages), Pipeline(microbatches, repeats)

    def stage(weights, round_, x_B, rows_B):
        def layer(x_B, w):
            w = w if repeats == 1 else w[round_]
            return jnp.mod(2 * x_B + w, 1009), (x_B * (rows_B > 0)).sum()

        return jax.lax.scan(layer, x_B, weights)

    with jax.set_mesh(mesh):
        w_L = jax.device_put(np.arange(layers, dtype=np.float32), partition("staged_layers"))
        x_B = jax.device_put(np.arange(rows, dtype=np.float32), partition("batch"))
        run = functools.partial(
            pipelined,
            stage,
            how=how,
            narrowed=lambda w: w,
            prepare=lambda w: w,
            idle=lambda rows, is_real: rows * is_real,
        )
        out_B, sums_L = jax.jit(lambda w, x, ones: run(w, x, ones))(w_L, x_B, jnp.ones_like(x_B))
    x, sums = np.arange(rows), []
    for layer in range(layers):
        sums.append(x.sum())
        x = (2 * x + layer) % 1009
    np.testing.assert_array_equal(out_B, x)
    np.testing.assert_array_equal(sums_L, sums)
    assert out_B.sharding.spec == partition("batch")


def test_the_pipeline_axis_divides_staged_layers_or_else_the_batch_and_what_fsdp_divides():
    assert partition("staged_layers", "embed", "mlp") == PartitionSpec(
        AXIS, ("fsdp", "expert", "context"), "tensor"
    )
    assert partition("embed", "vocab") == PartitionSpec((AXIS, "fsdp", "expert", "context"), "tensor")
    assert partition("layers", "experts", "expert_embed") == PartitionSpec(
        None, "expert", (AXIS, "fsdp", "context")
    )
    assert partition("batch", "sequence") == PartitionSpec((AXIS, "data", "fsdp", "expert"), "context")


def test_gradients_of_narrow_weights_are_summed_over_microbatches_in_float32():
    """Of 512 microbatches with a gradient of 2 each; bfloat16 cannot add 2 to 512."""
    with jax.set_mesh(mesh_of(2)):
        w_L = jax.device_put(jnp.zeros(2), partition("staged_layers"))
        x_B = jax.device_put(jnp.zeros(1024, jnp.bfloat16), partition("batch"))

        def total(w_L):
            def stage(weights, round_, x_B, _):
                return jax.lax.scan(lambda x_B, w: (x_B + w, None), x_B, weights)

            out_B, _ = pipelined(
                stage,
                w_L,
                x_B,
                None,
                Pipeline(512),
                narrowed=lambda w: w.astype(jnp.bfloat16),
                prepare=lambda w: w,
                idle=lambda rows, is_real: rows,
            )
            return out_B.astype(jnp.float32).sum()

        assert jax.jit(jax.grad(total))(w_L).tolist() == [1024, 1024]
