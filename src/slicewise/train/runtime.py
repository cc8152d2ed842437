"""What every verb that computes does first and last in a process: the cluster and the compiled-program cache."""

import glob
import os
import sys
from pathlib import Path

import jax

from slicewise.parallel import cluster, compiling


def start() -> None:
    """Joins the cluster and turns on JAX's persistent compilation cache, so that a second start compiles nothing.

    The cache lies in $JAX_COMPILATION_CACHE_DIR, by default ~/.cache/slicewise/compiled.
    """
    if "JAX_PLATFORMS" not in os.environ and not _has_accelerator():
        # The compiler's package would look for a TPU, and complain in many lines that there is none.
        jax.config.update("jax_platforms", "cpu")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "slicewise" / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    cluster.initialize()
    compiling.share_cache()
    compiling.mend_cache()


def _has_accelerator() -> bool:
    """Whether this Linux has device files of TPUs or GPUs; other systems may have some."""
    return sys.platform != "linux" or any(
        glob.glob(f"/dev/{name}") for name in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
    )


def stop() -> None:
    """Leaves the cluster once every process got here."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
