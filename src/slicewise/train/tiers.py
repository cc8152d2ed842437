"""The local tier of a run: whether it has one, and from which step it and the shared storage let a run start."""

import contextlib
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from etils import epath

from slicewise.checkpoint.exchange import gathered
from slicewise.checkpoint.manifest import complete_steps
from slicewise.checkpoint.tiers import LocalTier, host_directory
from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError
from slicewise.parallel.cluster import SliceDevices
from slicewise.train.progress import Sink

if TYPE_CHECKING:
    from slicewise.checkpoint.store import CheckpointStore

IDENTITY = "run.id"  # in the run's folder: a folder that was deleted and made again is another run


def opened(config: RunConfig, slices: SliceDevices, report: Sink) -> LocalTier | None:
    """None without local checkpoints. Raises UserError when one of their two keys lacks the other."""
    directory, every = config.checkpoint.local_checkpoint_directory, config.checkpoint.local_checkpoint_every
    if bool(directory) != bool(every):
        raise UserError(
            f"local_checkpoint_directory = '{directory}' and local_checkpoint_every = {every}: local checkpoints"
            " need both, or neither."
        )
    if not directory:
        return None
    place = os.environ.get("SLICEWISE_PLACE", f"process-{jax.process_index()}")
    return LocalTier(
        host_directory(directory, config.directory, place),
        gathered(_identity(config))[0],  # of process 0
        slices.array,
        say=lambda text: report({"event": "text", "text": text}),
        done=lambda step: report({"event": "checkpoint", "step": step, "tier": "local"}),
    )


def _identity(config: RunConfig) -> str:
    """Empty when the shared storage cannot be reached."""
    if jax.process_index():
        return ""
    path = epath.Path(config.directory) / IDENTITY
    with contextlib.suppress(OSError, ImportError):  # which listing its checkpoints will report
        if config.checkpoint.resume == "auto" and path.exists():
            return path.read_text().strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made := secrets.token_hex(8))
        return made
    return ""


def start(store: "CheckpointStore | None", tier: LocalTier | None, say: Callable[[str], None]) -> int:
    """The newest step of either; 0 when there is none. The same on every process.

    Raises UserError when the shared storage cannot be reached and the local tier has nothing either.
    """
    if tier is None:
        return (store and store.latest()) or 0
    problem = next(filter(None, gathered(_problem(store))), "")
    shared = 0 if problem else ((store and store.latest()) or 0)
    picked = tier.pick(shared)
    if problem and picked is None:
        raise UserError(problem, code=ExitCode.INTERNAL)
    if problem:
        say(f"warning: {problem} The local checkpoint of step {picked} serves.")
    return shared if picked is None else picked


def _problem(store: "CheckpointStore | None") -> str:
    """Why the shared storage cannot be listed from here."""
    try:
        if store:
            complete_steps(store.directory)
    except UserError as error:
        return str(error)
    return ""
