import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition
from slicewise.train.accumulate import accumulated, check


def test_sums_over_microbatches_are_those_of_the_batch_and_nothing_moves():
    mesh = build_mesh(load_config(None, ["ici_fsdp_parallelism=4"]).config, by_slice(jax.devices()[:4]))
    with jax.set_mesh(mesh):
        batch = {"x": jax.device_put(jnp.arange(96.0).reshape(16, 6), partition("batch", "sequence"))}
        weight = jnp.ones((6,))

        def loss(weight, part):
            assert part["x"].shape == (4, 6)
            return (part["x"] * weight).sum()

        run = jax.jit(lambda weight, batch: accumulated(jax.value_and_grad(loss), weight, batch, 4))
        total, gradient = run(weight, batch)
        assert float(total) == np.arange(96.0).sum()
        np.testing.assert_array_equal(gradient, np.arange(96.0).reshape(16, 6).sum(0))
        assert gradient.sharding.spec == PartitionSpec(None)
        text = run.lower(weight, batch).compile().as_text()
        assert not [kind for kind in ("all-gather", "all-to-all", "collective-permute") if kind in text]


def test_a_microbatch_below_one_sequence_is_refused():
    degrees = {"data": 2, "pipeline": 1, "fsdp": 2, "expert": 1}
    check(16, 4, degrees)
    with pytest.raises(UserError, match="= 3 does not divide the 4 sequences a step of each of 4 .* 1, 2, 4"):
        check(16, 3, degrees)
