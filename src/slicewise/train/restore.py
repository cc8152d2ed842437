"""Opening a trained model: from a run's folder or one step of it, to parameters on this job's devices."""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import jax
from jax.sharding import Mesh

from slicewise.checkpoint.store import CheckpointStore
from slicewise.config import AXES, RunConfig, with_overrides
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.mesh import build_mesh
from slicewise.train.step import TrainStep, build_train_step


@dataclass(frozen=True)
class Trained:
    """A model ready to use, in the layout of this job."""

    config: RunConfig  # of the run, with this job's parallelism
    step: TrainStep
    params: Any
    number: int  # optimiser steps taken

    @property
    def mesh(self) -> Mesh:
        return self.step.mesh


def open_trained(path: str, overrides: list[str]) -> Trained:
    """Restores the parameters of ``path``: a run's folder (its newest checkpoint) or RUN/checkpoints/STEP.

    The layout is whole parameters on every device unless ``overrides`` say another. Raises UserError when there is
    no complete checkpoint, or when it does not fit the overrides.
    """
    directory, number = _locate(path)
    store = CheckpointStore(directory, keep=1)
    try:
        number = store.latest() if number is None else number
        if number is None:
            raise UserError(f"{path} has no complete checkpoint; train with checkpoint_every > 0 first.")
        config = RunConfig.model_validate(store.read_metadata(number)["config"])
        config = with_overrides(config, [*_one_layout(), *overrides])
        step = build_train_step(config, build_mesh(config, cluster.found()))
        params = store.restore(number, {"params": step.abstract_state.params}, partial=True).state["params"]
    finally:
        store.close()
    return Trained(config, step, params, number)


def _locate(path: str) -> tuple[str, int | None]:
    """(checkpoints directory, step or None for the newest)."""
    name = PurePosixPath(path).name
    if name.isdigit():
        return path.rstrip("/").removesuffix(f"/{name}"), int(name)
    return (path if name == "checkpoints" else f"{path.rstrip('/')}/checkpoints"), None


def _one_layout() -> list[str]:
    """Every device in the data axis."""
    keys = [f"{network}_{axis}_parallelism" for network in ("ici", "dcn") for axis in AXES]
    return [f"{key}={-1 if '_data_' in key else 1}" for key in keys]
