"""The compiled programs of a run: its step, and the one that makes its first state."""

import dataclasses
from typing import Any

import jax

from slicewise.config import RunConfig
from slicewise.parallel.compiling import compile_in_turn
from slicewise.train import choices
from slicewise.train.step import TrainState, TrainStep


def compile_update(config: RunConfig, step: TrainStep) -> Any:
    """(state, batch) -> (state, metrics), compiled here or read from the file that ``config`` names.

    Raises UserError for a file of another config, and where a kernel that was asked for is not in the program.
    """
    if path := config.compiler.executable:
        from slicewise.train import executable

        return executable.load(path, config, step.mesh)
    lowered = step.update.lower(step.abstract_state, step.abstract_batch)
    if expected := choices.expected_kernels(config, step.spec, step.mesh):
        choices.check_kernels(expected, lowered.as_text())
    return compile_in_turn("update", lowered, step.mesh.devices.flat)


def compile_start(step: TrainStep, params: Any) -> jax.stages.Compiled:
    """``init``, or ``begin`` for a run that trains the weights ``params``; from any thread."""
    with jax.set_mesh(step.mesh):  # which belongs to a thread
        lowered = step.init.lower() if params is None or step.lora else step.begin.lower(params)
    return compile_in_turn("start", lowered, step.mesh.devices.flat)


def first_state(compiled: jax.stages.Compiled, step: TrainStep, params: Any) -> TrainState:
    """The state before step 1, from what ``compile_start`` gave for the same ``params``."""
    if params is None:
        return compiled()
    return dataclasses.replace(compiled(), frozen=params) if step.lora else compiled(params)
