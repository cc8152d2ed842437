"""What decides a compiled program besides its config: libraries, and the sources that build it. Imports no JAX."""

import functools
import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

# A change of any of these is another program.
SOURCES = ("model", "kernels", "parallel", "train", "catalog")
RULES = (
    "adapters.py",
    "batch.py",
    "layout.py",
    "memory.py",
    "pipeline.py",
    "remat.py",
)  # of costs, by which a step is built
PACKAGES = ("jax", "jaxlib", "libtpu", "optax", "tokamax", "qwix")


@functools.cache
def versions() -> dict[str, str]:
    """Those of PACKAGES that are installed."""
    return {name: version(name) for name in PACKAGES if importlib.util.find_spec(name)}


@functools.cache
def source_digest() -> str:
    """Of all that a step is built by."""
    root = Path(__file__).parents[1]
    paths = [root / "costs" / name for name in RULES]
    for folder in SOURCES:
        paths += sorted((root / folder).rglob("*.py")) + sorted((root / folder).rglob("*.toml"))
    return digest_of(paths)


def digest_of(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
