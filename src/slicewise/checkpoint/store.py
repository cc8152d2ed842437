"""Checkpoints of a run: asynchronous, sharded, verified, the newest few and the best kept."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from etils import epath

from slicewise.checkpoint import backend, together
from slicewise.checkpoint import manifest as layout
from slicewise.checkpoint.digest import compile_for, digests
from slicewise.checkpoint.manifest import (
    DamagedStep,
    Leaf,
    Manifest,
    complete_steps,
    is_complete,
    read_manifest,
)
from slicewise.checkpoint.retention import Retention
from slicewise.checkpoint.writing import Writing, save_error
from slicewise.errors import ExitCode, UserError, did_you_mean

RESUME_ADVICE = "resume with the config that saved it, or choose another run_name"


@dataclass(frozen=True)
class Restored:
    step: int
    state: Any  # of the structure and shardings asked for
    data_state: np.ndarray  # int64 [rows, 2]
    metadata: Mapping[str, Any]


class Unfit(UserError):
    """A step is good, but its arrays are not those that were asked for."""


class CheckpointStore:
    """The checkpoints below one directory: a local path that all processes share, or any URL Orbax writes (gs://).

    Every process of the run makes the same calls in the same order, from its main thread. Arrays are stored
    flat under their path in the tree ("params.embedding"), so the format knows no Python classes. Every
    failure of the storage is a UserError with ``code=ExitCode.INTERNAL``; what fails on one process fails on all.
    """

    def __init__(self, directory: str, *, keep: int, keep_every: int = 0, keep_best: int = 0):
        """What stays when others are deleted, after each save: see ``Retention``. A step is as good as the
        "held_out_loss" of its metadata is low."""
        self.directory = directory if "://" in directory else str(epath.Path(directory).absolute())
        self._retention = Retention(keep, keep_every, keep_best)
        self._losses: dict[int, float] = {}
        self._is_open = False
        self._compiling: Future[None] | None = None
        self._pending: Future[int] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._orbax = backend.Orbax()

    def latest(self) -> int | None:
        """The newest complete step. Unfinished, empty and foreign directories are ignored.

        Raises UserError when processes see different steps, that is when they do not share the directory.
        """
        return max(self._steps(), default=None)

    def _steps(self) -> list[int]:
        """The complete ones as process 0 sees them, ascending. Raises UserError when another one lacks the newest."""
        seen = [
            json.loads(found)
            for found in together.gather("steps", json.dumps(complete_steps(self.directory)))
        ]
        newest = [max(steps, default=-1) for steps in seen]
        if len(set(newest)) > 1:
            fewest = newest.index(min(newest))
            raise self._not_shared(f"process {fewest} sees fewer checkpoints than others")
        return seen[0]

    def prepare(self, abstract_state: Any) -> None:
        """Compiles in the background what saves and restores of such a state run on the devices."""
        self._compiling = self._background.submit(compile_for, flatten(abstract_state))

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
        if not self._prepare(step, overwrite):
            return False
        arrays = flatten(state)
        leaves = {
            path: Leaf(arrays[path].shape, str(arrays[path].dtype), digest)
            for path, digest in self._digests(arrays).items()
        }
        content = Manifest(leaves, data_state.astype(np.int64, casting="safe"), metadata).to_json()
        writing, response, failure = Writing(self.directory, step), None, None
        try:
            response = self._orbax.start_save(self._path(step), arrays, content)
        except Exception as error:
            failure = save_error(self.directory, step, error)
        self._pending = self._background.submit(self._finish, writing, response, failure)
        if failure:
            self.wait()
        return True

    def restore(
        self, step: int, abstract_state: Any, *, partial: bool = False, advice: str = RESUME_ADVICE
    ) -> Restored:
        """Loads one step and verifies every array against its digest.

        abstract_state: pytree of jax.ShapeDtypeStruct with shardings; mesh and process count may differ from
        those of the save. With ``partial`` it may leave out stored arrays, such as the optimiser's. ``advice`` is what
        to do where an array has another shape.
        Raises UserError, which names the array: Unfit when tree, shape or dtype differ (before anything is
        loaded), DamagedStep when the data are damaged.
        """
        self.wait()
        wanted = flatten(abstract_state)

        def opened() -> Manifest:
            manifest = read_manifest(self.directory, step)
            self._check_same(step, manifest.leaves, wanted, partial, advice)
            return manifest

        def loaded() -> dict[str, jax.Array]:
            try:
                return self._orbax.load(self._path(step), wanted)
            except backend.ReadError as e:
                what = f"cannot be read: {e}"
                raise (self._damaged(step, what) if e.is_damage else self._unreadable(step, what)) from e

        manifest = _on_all("open", opened)
        arrays = _on_all("load", loaded)
        for path, digest in self._digests(arrays).items():  # the same on all processes
            if digest != (stored := manifest.leaves[path].digest):
                raise self._damaged(step, f"is damaged: {path} has digest {digest}, saved was {stored}")
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in wanted])
        return Restored(step, state, manifest.data_state, manifest.metadata)

    def restore_newest(
        self, abstract_state: Any, say: Callable[[str], None], *, at_most: int | None = None
    ) -> Restored | None:
        """The newest step that is good, not beyond ``at_most``; None when there is no complete one.

        Newer ones that are damaged, or do not fit where an older one does, are quarantined; ``say`` is told so,
        and of everything newer that looks like a checkpoint and is incomplete. Raises UserError when there
        are steps and none is good (what is wrong with the newest), or when the storage cannot be read.
        """
        bad: dict[int, DamagedStep | Unfit] = {}
        for step in reversed(self._steps()):
            if at_most is not None and step > at_most:
                continue
            try:
                restored = self.restore(step, abstract_state)
            except (DamagedStep, Unfit) as error:
                bad[step] = error
                continue
            for newer, why in bad.items():
                reason = why.what if isinstance(why, DamagedStep) else f"{why}"
                say(f"{reason} It is quarantined, and step {step} used.")
                self._by_first("quarantine", lambda: layout.quarantine(self.directory, newer, reason))  # noqa: B023
            for line in layout.passed_over(self.directory, step) if at_most is None else ():
                if not any(f"/{newer} " in line for newer in bad):
                    say(line)
            return restored
        if bad:
            raise self._none_is_good(bad)
        return None

    def _none_is_good(self, bad: Mapping[int, DamagedStep | Unfit]) -> UserError:
        """What is wrong with the newest, without the advice to go on from one that is as bad."""
        newest, *older = sorted(bad, reverse=True)
        found = bad[newest]
        if not older or not all(isinstance(error, DamagedStep) for error in bad.values()):
            return found
        steps = f"step{'s' * (len(older) > 1)} {', '.join(map(str, older))}"
        return DamagedStep(
            cast(DamagedStep, found).what,
            f"No older one is good either ({steps}): delete {self.directory}, and the run starts anew.",
        )

    def drop_after(self, step: int) -> None:
        """Deletes newer steps: a run that went back to ``step`` takes another way from there."""
        self.wait()
        for newer in [found for found in self._steps() if found > step]:
            self._by_first("drop", lambda: self._delete(newer))  # noqa: B023

    def wait(self) -> int | None:
        """Returns when no save runs: the step that has become durable since the last call, if one has.

        Raises UserError when the last save failed, once.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    @property
    def is_writing(self) -> bool:
        """Whether a save runs: ``wait`` would not return at once."""
        return self._pending is not None and not self._pending.done()

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

    def _digests(self, arrays: Mapping[str, jax.Array]) -> dict[str, str]:
        compiling, self._compiling = self._compiling, None
        if compiling:
            compiling.result()
        return digests(arrays)

    def _by_first(self, name: str, action: Callable[[], None]) -> None:
        """``action`` on process 0, and done when this returns on any."""

        def acted() -> None:
            if jax.process_index() == 0:
                action()

        _on_all(name, acted)

    def _path(self, step: int) -> epath.Path:
        return epath.Path(self.directory) / str(step)

    def _prepare(self, step: int, overwrite: bool) -> bool:
        """Makes the directory ready on process 0, and removes what interrupted saves left in it; all learn how it went.

        False when the step is complete already.
        """

        def prepared() -> bool:
            if jax.process_index() != 0:
                return True
            try:
                if not overwrite and is_complete(self.directory, step):
                    return False
                self._make_room(step)
                return True
            except Exception as error:
                raise save_error(self.directory, step, error) from error

        outcome = _on_all("prepare", prepared, told_by=0)
        if outcome and not self._is_open:
            self._check_shared(epath.Path(self.directory))
            self._is_open = True
        return outcome

    def _make_room(self, step: int) -> None:
        root = epath.Path(self.directory)
        root.mkdir(parents=True, exist_ok=True)
        parts = layout.names(self._path(step))
        if parts and layout.STATE not in parts and layout.MANIFEST not in parts:
            raise UserError(f"{self._path(step)} is no checkpoint but in the way of one: move it elsewhere.")
        for name in layout.unfinished(self.directory):
            (root / name).rmtree(missing_ok=True)

    def _check_shared(self, root: epath.Path) -> None:
        """Writes a file on process 0 and looks for it on all: a save would never end without."""
        if jax.process_count() == 1:
            return
        probe = root / ".probe"
        if jax.process_index() == 0:
            probe.write_text("")
        together.gather("probe", "")
        seen = together.gather("probe", str(probe.exists()))
        if jax.process_index() == 0:
            probe.unlink()
        if "False" in seen:
            raise self._not_shared(f"process {seen.index('False')} does not see what process 0 writes")

    def _finish(self, writing: Writing, response: Any, failure: Exception | None) -> int:
        """In the background: returns when the step is complete everywhere, and the superfluous ones are deleted."""
        writing.finish(response, failure)
        try:
            if jax.process_index() == 0:
                for old in self._superfluous():
                    self._delete(old)
        except Exception as e:
            message = f"old checkpoints in {self.directory} could not be deleted: {backend.reason(e)}."
            raise UserError(message, code=ExitCode.INTERNAL) from e
        return writing.step

    def _superfluous(self) -> list[int]:
        steps = complete_steps(self.directory)
        if self._retention.best:
            for step in steps:
                if step not in self._losses:
                    loss = read_manifest(self.directory, step).metadata.get("held_out_loss")
                    self._losses[step] = float("nan") if loss is None else float(loss)
        return self._retention.to_delete(steps, self._losses)

    def _delete(self, step: int) -> None:
        self._losses.pop(step, None)
        (self._path(step) / layout.WRITTEN_MARK).unlink()  # first: half of it is not complete
        self._path(step).rmtree()

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
                raise Unfit(f"the {where} has no {path} (expected {expected}): {advice}.{near}")
            if str(stored[path]) != str(expected):
                raise Unfit(f"{path} is {stored[path]} in the {where}, but {expected} here: {advice}.")
        if not partial and (extra := sorted(stored.keys() - wanted.keys())):
            raise Unfit(
                f"the {where} also has {extra[0]} ({stored[extra[0]]}), which has no place here: {advice}."
            )

    def _damaged(self, step: int, what: str) -> UserError:
        message = f"the checkpoint of step {step} in {self.directory} {what}."
        return DamagedStep(message, layout.advice(self.directory, step))

    def _unreadable(self, step: int, what: str) -> UserError:
        return UserError(f"the checkpoint of step {step} in {self.directory} {what}.", code=ExitCode.INTERNAL)

    def _not_shared(self, what: str) -> UserError:
        return UserError(
            f"checkpoints in {self.directory}: {what}."
            " output_directory must be on storage that all workers share, such as a gs:// bucket."
        )


_KINDS: Mapping[str, Callable[[str], Exception]] = {  # of failures, the gravest first
    "defect": RuntimeError,
    "storage": lambda message: UserError(message, code=ExitCode.INTERNAL),
    "user": UserError,
    "damaged": DamagedStep,
    "unfit": Unfit,
}


def _kind(error: Exception) -> str:
    if isinstance(error, DamagedStep | Unfit):
        return "damaged" if isinstance(error, DamagedStep) else "unfit"
    if isinstance(error, UserError):
        return "user" if error.code == ExitCode.USER else "storage"
    return "defect"


def _on_all[T](name: str, action: Callable[[], T], *, told_by: int | None = None) -> T:
    """``action()`` of this process when it failed on none; else all raise the gravest failure.

    ``told_by``: the process whose result, which JSON can hold, all get. Every process calls it, in the same order.
    """
    own: Exception | None = None
    told: dict[str, Any] = {}
    try:
        result = action()
        if told_by == jax.process_index():
            told = {"result": result}
    except Exception as error:
        own, told = error, {"kind": _kind(error), "message": str(error)}
    outcomes = [json.loads(outcome) for outcome in together.gather(name, json.dumps(told))]
    failures = [outcome for outcome in outcomes if "kind" in outcome]
    if failures:
        worst = min(failures, key=lambda failure: list(_KINDS).index(failure["kind"]))
        if own is not None and told["kind"] == worst["kind"]:
            raise own
        raise _KINDS[worst["kind"]](worst["message"])
    return result if told_by is None else outcomes[told_by]["result"]


def flatten(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a pytree in its order; a path is such as "opt_state.0.mu.embedding"."""
    pairs = jax.tree.leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in pairs}
    assert len(flat) == len(pairs), "two leaves have the same path"
    assert "" not in flat, "the tree is a single leaf"
    return flat
