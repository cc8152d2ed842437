"""Opening a trained model: from a run's folder or one step of it, to parameters on this job's devices."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from slicewise.checkpoint.store import CheckpointStore
from slicewise.config import AXES, RunConfig, with_overrides
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.mesh import build_mesh
from slicewise.train import initial
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
    directory, number = initial.located(path)
    store = CheckpointStore(directory, keep=1)
    try:
        number = store.latest() if number is None else number
        if number is None:
            raise UserError(f"{path} has no complete checkpoint; train with checkpoint_every > 0 first.")
        config, devices = RunConfig.model_validate(store.read_metadata(number)["config"]), cluster.found()
        config = with_overrides(config, [*_whole_on_each(config, devices.array.size), *overrides])
        step = build_train_step(config, build_mesh(config, devices))
        wanted = dataclasses.replace(step.abstract_state, frozen=None, opt_state=None)
        state = store.restore(number, wanted, partial=True).state
        if step.lora:
            with jax.set_mesh(step.mesh):
                frozen = initial.load(config, step)
            initial.check_base(config, frozen, store.read_metadata(number))
            state = dataclasses.replace(state, frozen=frozen)
    finally:
        store.close()
    return Trained(config, step, step.weights(state), number)


def _whole_on_each(config: RunConfig, devices: int) -> list[str]:
    """Overrides: every device in the data axis, and batches with as many rows as the run's or a few more."""
    keys = [f"{network}_{axis}_parallelism" for network in ("ici", "dcn") for axis in AXES]
    rows = -(-config.data.global_batch_size // devices) * devices
    return [f"{key}={-1 if '_data_' in key else 1}" for key in keys] + [f"global_batch_size={rows}"]
