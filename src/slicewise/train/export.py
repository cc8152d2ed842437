"""A trained model as a Hugging Face folder, with the adapters of LoRA merged into its weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from slicewise.config import RunConfig
from slicewise.errors import UserError
from slicewise.model import transformer
from slicewise.model.lora import Adapted, merged, unpacked
from slicewise.train import runtime
from slicewise.train.restore import Trained, open_trained


def export(path: str, folder: str, overrides: list[str]) -> tuple[list[str], int]:
    """Writes the model at ``path``, a run or one step of it, to ``folder``; returns its files and its parameters.

    Raises UserError for a checkpoint that cannot be used, and where there is no config.json to go with the weights.
    """
    from slicewise.interop.export import save_weights  # needs safetensors

    runtime.start()
    if jax.process_count() > 1:
        raise UserError(
            f"slicewise export runs in one process, not in {jax.process_count()}; start it on one host."
        )
    trained = open_trained(path, overrides)
    with jax.set_mesh(trained.mesh):
        written = save_weights(_model(trained.config), folder, lambda name: _weight(trained, name))
    runtime.stop()
    return written


def _model(config: RunConfig) -> Path:
    """The Hugging Face folder whose model the run trains."""
    for given in (config.checkpoint.initial_weights, config.model.model):
        path = Path(given).expanduser()
        if given and (path.name == "config.json" or (path / "config.json").exists()):
            return path.parent if path.name == "config.json" else path
    raise UserError(
        f"neither initial_weights = '{config.checkpoint.initial_weights}' nor model = '{config.model.model}' is a"
        " Hugging Face folder, whose config.json goes with exported weights; add model=FOLDER."
    )


def _weight(trained: Trained, name: str) -> np.ndarray:
    """The weight ``name`` in float32, without what pads the vocabulary."""
    step, leaf = trained.step, transformer.leaves(trained.params)[name]
    if isinstance(leaf, Adapted):
        assert step.lora is not None
        lora = step.lora
        whole = jax.jit(lambda base, adapter: merged(name, base, adapter, lora))(leaf.base, leaf.adapter)
    else:
        whole = unpacked(leaf, jnp.dtype("float32"))
    dims = transformer.leaves(step.layout)[name].dims
    return np.asarray(whole)[tuple(slice(step.spec.vocab if dim == "vocab" else None) for dim in dims)]
