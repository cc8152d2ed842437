from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.config import AXES, AxisDegrees, load_config
from slicewise.errors import UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import arrange, build_mesh


def fake(slices, hosts, devices, with_slice_index=False):
    """Device stand-ins: only what grouping reads."""
    made = []
    for s in range(slices):
        for h in range(hosts):
            for d in range(devices):
                process = s * hosts + h
                extra = {"slice_index": s} if with_slice_index else {}
                made.append(
                    SimpleNamespace(
                        id=process * devices + d, process_index=process, platform="cpu", s=s, **extra
                    )
                )
    return made


@given(st.permutations(range(16)))
def test_grouping_ignores_the_order_of_devices(order):
    devices = fake(2, 2, 4, with_slice_index=True)
    grouped = by_slice([devices[i] for i in order])
    assert [[d.id for d in group] for group in grouped.array] == [list(range(8)), list(range(8, 16))]


def test_emulated_slices_are_ranges_of_processes():
    grouped = by_slice(fake(2, 2, 2), emulated=2)
    assert [[d.process_index for d in group] for group in grouped.array] == [[0, 0, 1, 1], [2, 2, 3, 3]]


degree = st.sampled_from([1, 2, 3])


@given(st.tuples(*[degree] * len(AXES)), st.tuples(*[degree] * len(AXES)))
def test_dcn_part_of_every_axis_is_slowest_and_each_block_is_one_slice(ici, dcn):
    slices, per_slice = int(np.prod(dcn)), int(np.prod(ici))
    grouped = by_slice(fake(slices, 1, per_slice, with_slice_index=True))
    degrees = AxisDegrees(dict(zip(AXES, ici, strict=True)), dict(zip(AXES, dcn, strict=True)))
    grid = arrange(grouped, degrees)
    assert grid.shape == tuple(i * d for i, d in zip(ici, dcn, strict=True))
    slice_of = np.vectorize(lambda d: d.s)(grid)
    for index in np.ndindex(grid.shape):
        block = tuple(i // n for i, n in zip(index, ici, strict=True))
        assert slice_of[index] == np.ravel_multi_index(block, dcn)


def test_mesh_axes_carry_the_configured_degrees():
    config = load_config(None, ["ici_tensor_parallelism=2", "ici_fsdp_parallelism=-1"]).config
    mesh = build_mesh(config, by_slice(jax.devices()))
    assert {axis: n for axis, n in mesh.shape.items() if n > 1} == {"fsdp": 4, "tensor": 2}


def test_slices_of_different_size_are_refused_with_their_counts():
    devices = fake(2, 2, 2, with_slice_index=True)[:-1]
    with pytest.raises(UserError, match=r"slice 0: 4, slice 1: 3 devices"):
        by_slice(devices)


def test_absent_slice_is_refused_with_what_was_expected():
    devices = [d for d in fake(3, 1, 2, with_slice_index=True) if d.s != 1]
    with pytest.raises(UserError, match=r"expected slices 0 to 2, found slice 0: 2, slice 2: 2"):
        by_slice(devices)
    with pytest.raises(UserError, match=r"expected slices 0 to 3"):
        by_slice(fake(2, 1, 2, with_slice_index=True), expected=4)


def test_wrong_device_count_is_refused_before_anything_compiles():
    config = load_config(None, ["ici_fsdp_parallelism=3"]).config
    with pytest.raises(UserError, match="ici_fsdp_parallelism=3"):
        build_mesh(config, by_slice(jax.devices()))
