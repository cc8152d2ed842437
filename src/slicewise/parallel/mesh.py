"""The hybrid device mesh: one mesh axis for each kind of parallelism, its DCN part slowest, its ICI part fastest."""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from slicewise.config import AXES, AxisDegrees, RunConfig, resolve_degrees
from slicewise.parallel.cluster import SliceDevices


def build_mesh(config: RunConfig, devices: SliceDevices) -> Mesh:
    """The mesh of AXES over ``devices`` with the degrees that ``config`` asks for.

    Raises UserError when the degrees do not multiply to the cluster's shape.
    """
    degrees = resolve_degrees(
        config, num_slices=devices.num_slices, devices_per_slice=devices.devices_per_slice
    )
    return Mesh(arrange(devices, degrees), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def arrange(devices: SliceDevices, degrees: AxisDegrees) -> np.ndarray:
    """Devices as an array with one dim for each axis, of size dcn degree x ici degree, DCN part slowest."""
    ici = tuple(degrees.ici[axis] for axis in AXES)
    dcn = tuple(degrees.dcn[axis] for axis in AXES)
    slices = np.stack([_arrange_slice(list(group), ici) for group in devices.array])
    grid = slices.reshape(*dcn, *ici)
    n = len(AXES)
    interleaved = grid.transpose([dim for axis in range(n) for dim in (axis, n + axis)])
    return interleaved.reshape([d * i for d, i in zip(dcn, ici, strict=True)])


def _arrange_slice(devices: list[jax.Device], shape: tuple[int, ...]) -> np.ndarray:
    """One slice's devices in ``shape``, axes laid along the physical torus where there is one."""
    if devices[0].platform == "tpu":
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape)
