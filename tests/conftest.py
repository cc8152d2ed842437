"""Every test sees eight CPU devices; the variables must be set before JAX is imported."""

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    " --xla_backend_optimization_level=0"  # compiles three times as fast; the arithmetic stays float32
)


@pytest.fixture
def one_device():
    """The mesh of a lone device is in force."""
    import jax

    from slicewise.config import RunConfig
    from slicewise.parallel.cluster import by_slice
    from slicewise.parallel.mesh import build_mesh

    with jax.set_mesh(build_mesh(RunConfig(), by_slice(jax.devices()[:1]))):
        yield
