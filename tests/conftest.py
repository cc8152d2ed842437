"""Every test sees eight CPU devices; the variables must be set before JAX is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "64"  # threads enough for the collectives of eight devices: see launch/targets/local.py
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


class SlicewiseCommand:
    """The real command in processes of its own, with one device each unless told otherwise."""

    def __init__(self, cache: Path):
        self._cache = cache

    def popen(
        self, *arguments: str, devices: int = 1, env: dict[str, str] | None = None, prefix=(), **options
    ):
        flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
        environment = {"JAX_COMPILATION_CACHE_DIR": str(self._cache), "XLA_FLAGS": flags, "COLUMNS": "300"}
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "slicewise", *map(str, arguments)],
            env=os.environ | environment | (env or {}),
            stdin=subprocess.DEVNULL,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    def run(self, *arguments: str, timeout_s: float = 120, **options) -> subprocess.CompletedProcess:
        with self.popen(*arguments, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    return SlicewiseCommand(tmp_path_factory.mktemp("compiled"))
