"""Checkpoints of a run: asynchronous, sharded, verified, the newest few kept."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from slicewise.checkpoint import backend
from slicewise.checkpoint import manifest as layout
from slicewise.checkpoint.digest import digests
from slicewise.checkpoint.manifest import Leaf, Manifest, complete_steps, is_complete, read_manifest
from slicewise.errors import ExitCode, UserError, did_you_mean

RESUME_ADVICE = "resume with the config that saved it, or choose another run_name"


@dataclass(frozen=True)
class Restored:
    state: Any  # of the structure and shardings asked for
    data_state: np.ndarray  # int64 [rows, 2]
    metadata: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints below one directory: a local path that all processes share, or any URL Orbax writes (gs://).

    Every process of the run makes the same calls in the same order, from its main thread. Arrays are stored
    flat under their path in the tree ("params.embedding"), so the format knows no Python classes. Every
    failure of the storage is a UserError with ``code=ExitCode.INTERNAL``.
    """

    def __init__(self, directory: str, *, keep: int):
        """``keep``: newest complete steps that stay; older ones are deleted after each save."""
        assert keep >= 1
        self.directory = directory if "://" in directory else str(epath.Path(directory).absolute())
        self._keep = keep
        self._is_open = False
        self._pending: Future[None] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._orbax = backend.Orbax()

    def latest(self) -> int | None:
        """The newest complete step. Unfinished, empty and foreign directories are ignored.

        Raises UserError when processes see different steps, that is when they do not share the directory.
        """
        newest = max(complete_steps(self.directory), default=-1)
        if jax.process_count() > 1:
            seen = multihost_utils.process_allgather(np.int32(newest)).tolist()
            if len(set(seen)) > 1:
                raise self._not_shared(f"process {seen.index(min(seen))} sees fewer checkpoints than others")
        return None if newest < 0 else newest

    def read_metadata(self, step: int) -> dict[str, Any]:
        """The metadata given to ``save``. Raises UserError for a step that is not complete or is damaged."""
        return dict(read_manifest(self.directory, step).metadata)

    def save(
        self,
        step: int,
        state: Any,
        *,
        data_state: np.ndarray,
        metadata: Mapping[str, Any],
        overwrite: bool = False,
    ) -> bool:
        """Starts writing one step, which becomes complete, at once, when all of it is durable.

        Blocks for a previous save that still runs and for the copy off the devices; the arrays may be donated
        afterwards. Unless ``overwrite``, a step that is already complete is left alone and False is returned.
        state: pytree of jax.Array. data_state: int64 [rows, 2], equal on every process. metadata: JSON-able.
        Raises UserError when this save cannot start or the previous one failed.
        """
        assert step >= 0, step
        assert data_state.shape == (len(data_state), 2), data_state.shape
        self.wait()
        if not overwrite and is_complete(self.directory, step):
            return False
        arrays = flatten(state)
        leaves = {
            path: Leaf(arrays[path].shape, str(arrays[path].dtype), digest)
            for path, digest in digests(arrays).items()
        }
        content = Manifest(leaves, data_state.astype(np.int64, casting="safe"), metadata).to_json()
        try:
            self._prepare(step)
            response = self._orbax.start_save(self._path(step), arrays, content)
        except Exception as e:
            raise self._save_error(step, e) from e
        self._pending = self._background.submit(self._finish, step, response)
        return True

    def restore(
        self, step: int, abstract_state: Any, *, partial: bool = False, advice: str = RESUME_ADVICE
    ) -> Restored:
        """Loads one step and verifies every array against its digest.

        abstract_state: pytree of jax.ShapeDtypeStruct with shardings; mesh and process count may differ from
        those of the save. With ``partial`` it may leave out stored arrays, such as the optimiser's. ``advice`` is what
        to do where an array has another shape.
        Raises UserError, which names the array, when tree, shape or dtype differ (before anything is loaded),
        or when the data are damaged.
        """
        self.wait()
        manifest = read_manifest(self.directory, step)
        wanted = flatten(abstract_state)
        self._check_same(step, manifest.leaves, wanted, partial, advice)
        try:
            arrays = self._orbax.load(self._path(step), wanted)
        except backend.ReadError as e:
            raise self._damaged(step, f"cannot be read: {e}") from e
        for path, digest in digests(arrays).items():
            if digest != (stored := manifest.leaves[path].digest):
                raise self._damaged(step, f"is damaged: {path} has digest {digest}, saved was {stored}")
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in wanted])
        return Restored(state, manifest.data_state, manifest.metadata)

    def wait(self) -> None:
        """Returns when no save runs. Raises UserError when the last one failed, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits like ``wait`` and ends the background threads."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self._orbax.close()

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, step: int) -> epath.Path:
        return epath.Path(self.directory) / str(step)

    def _prepare(self, step: int) -> None:
        """Makes the directory ready, and removes what interrupted saves left in it."""
        root = epath.Path(self.directory)
        if not self._is_open:
            root.mkdir(parents=True, exist_ok=True)
            self._check_shared(root)
            self._is_open = True
        parts = layout.names(self._path(step))
        if parts and layout.STATE not in parts and layout.MANIFEST not in parts:
            raise UserError(f"{self._path(step)} is no checkpoint but in the way of one: move it elsewhere.")
        if jax.process_index() == 0:
            for name in layout.unfinished(self.directory):
                (root / name).rmtree(missing_ok=True)

    def _check_shared(self, root: epath.Path) -> None:
        """Writes a file on process 0 and looks for it on all: a save would never end without."""
        if jax.process_count() == 1:
            return
        token = multihost_utils.broadcast_one_to_all(np.random.default_rng().integers(2**31, dtype=np.int32))
        probe = root / f".probe-{int(token):08x}"
        if jax.process_index() == 0:
            probe.write_text("")
        multihost_utils.sync_global_devices("checkpoint-probe")
        seen = multihost_utils.process_allgather(np.int32(probe.exists())).tolist()
        if jax.process_index() == 0:
            probe.unlink()
        if not all(seen):
            raise self._not_shared(f"process {seen.index(0)} does not see what process 0 writes")

    def _finish(self, step: int, response: Any) -> None:
        """In the background: waits until the step is complete, then deletes the oldest."""
        try:
            response.result()
            if jax.process_index() == 0:
                for old in complete_steps(self.directory)[: -self._keep]:
                    (self._path(old) / layout.WRITTEN_MARK).unlink()  # first: half of it is not complete
                    self._path(old).rmtree()
        except Exception as e:
            raise self._save_error(step, e) from e

    def _check_same(
        self,
        step: int,
        stored: Mapping[str, Leaf],
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        partial: bool,
        advice: str,
    ) -> None:
        where = f"checkpoint of step {step} in {self.directory}"
        for path, leaf in wanted.items():
            expected = Leaf(tuple(leaf.shape), str(leaf.dtype), "")
            if path not in stored:
                near = did_you_mean(path, stored)
                raise UserError(f"the {where} has no {path} (expected {expected}).{near}")
            if str(stored[path]) != str(expected):
                raise UserError(f"{path} is {stored[path]} in the {where}, but {expected} here: {advice}.")
        if not partial and (extra := sorted(stored.keys() - wanted.keys())):
            raise UserError(f"the {where} also has {extra[0]} ({stored[extra[0]]}), which has no place here.")

    def _damaged(self, step: int, what: str) -> UserError:
        advice = layout.advice(self.directory, step)
        message = f"the checkpoint of step {step} in {self.directory} {what}. {advice}"
        return UserError(message, code=ExitCode.INTERNAL)

    def _not_shared(self, what: str) -> UserError:
        return UserError(
            f"checkpoints in {self.directory}: {what}."
            " output_directory must be on storage that all workers share, such as a gs:// bucket."
        )

    def _save_error(self, step: int, error: Exception) -> Exception:
        if isinstance(error, UserError):
            return error
        cause = backend.reason(error)
        message = f"the checkpoint of step {step} could not be written to {self.directory}: {cause}."
        if backend.is_environment(error):
            return UserError(message, code=ExitCode.INTERNAL)
        return RuntimeError(message)


def flatten(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a pytree in its order; a path is such as "opt_state.0.mu.embedding"."""
    pairs = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    assert len(flat) == len(pairs), "two leaves have the same path"
    assert "" not in flat, "the tree is a single leaf"
    return flat
