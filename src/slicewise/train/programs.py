"""The compiled programs of a run: its step, and the one that makes its first state."""

import dataclasses
from typing import Any

import jax

from slicewise.config import RunConfig
from slicewise.parallel.compiling import compile_in_turn, lower
from slicewise.train import choices
from slicewise.train.step import TrainState, TrainStep


def lower_update(config: RunConfig, step: TrainStep) -> jax.stages.Lowered | None:
    """(state, batch) -> (state, metrics), not compiled yet; None where ``config`` names a file that holds it.

    Raises UserError where a kernel that was asked for is not in the program.
    """
    if config.compiler.executable:
        return None
    lowered = lower(step.update, step.abstract_state, step.abstract_batch)
    if expected := choices.expected_kernels(config, step.spec, step.mesh):
        choices.check_kernels(expected, lowered.as_text())
    return lowered


def compile_update(config: RunConfig, step: TrainStep, lowered: jax.stages.Lowered | None) -> Any:
    """What ``lower_update`` gave, compiled, or read from the file that ``config`` names.

    Raises UserError for a file of another config.
    """
    if lowered is None:
        from slicewise.train import executable

        return executable.load(config.compiler.executable, config, step.mesh)
    return compile_in_turn("update", lowered, step.mesh.devices.flat)


def compile_start(step: TrainStep, params: Any) -> jax.stages.Compiled:
    """``init``, or ``begin`` for a run that trains the weights ``params``; from any thread."""
    with jax.set_mesh(step.mesh):  # which belongs to a thread
        lowered = lower(step.init) if params is None or step.lora else lower(step.begin, params)
    return compile_in_turn("start", lowered, step.mesh.devices.flat)


def first_state(compiled: jax.stages.Compiled, step: TrainStep, params: Any) -> TrainState:
    """The state before step 1, from what ``compile_start`` gave for the same ``params``."""
    if params is None:
        return compiled()
    return dataclasses.replace(compiled(), frozen=params) if step.lora else compiled(params)
