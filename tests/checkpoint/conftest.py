"""Several JAX processes that run one script together."""

import os
import socket
import subprocess
import sys

import pytest


@pytest.fixture
def ranks_end_well():
    return _ranks_end_well


def _ranks_end_well(script, folder, *, count, devices, timeout_s=120):
    """Runs ``script`` with (address of the coordinator, rank, folder) in ``count`` processes: each prints done last."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_collective_timeout_seconds=60"
    env = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, address, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for output in outputs:
        assert output.endswith("done\n"), output
