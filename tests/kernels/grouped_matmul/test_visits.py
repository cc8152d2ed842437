"""The steps of the kernel's grid, against tokamax's own list."""

import importlib

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.kernels.grouped_matmul import visits

MODULE = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 3, 8, 13]), min_size=5, max_size=5), st.booleans())
def test_are_those_of_tokamax(sizes, visit_empty_groups):
    how = {"m": 64 + 8, "tm": 8, "start_group": jnp.int32(0), "num_nonzero_groups": 5}
    how |= {"group_sizes": jnp.array(sizes, jnp.int32), "visit_empty_groups": visit_empty_groups}
    ours, count = visits.metadata(**how)
    right, right_count = importlib.import_module(MODULE).make_group_metadata(**how)
    assert int(count) == int(right_count)
    for a, b in zip(ours, right, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a[: count + 1], b[: count + 1])
