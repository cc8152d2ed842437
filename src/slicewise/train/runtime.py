"""What every verb that computes does first and last in a process: the cluster and the compiled-program cache."""

import os
from pathlib import Path

import jax

from slicewise.parallel import cluster


def start() -> None:
    """Joins the cluster and turns on JAX's persistent compilation cache, so that a second start compiles nothing.

    The cache lies in $JAX_COMPILATION_CACHE_DIR, by default ~/.cache/slicewise/compiled.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "slicewise" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    cluster.initialize()


def stop() -> None:
    """Leaves the cluster once every process got here."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
