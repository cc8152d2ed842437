"""What a checkpoint holds, in one checksummed JSON file a step, and which steps of a directory are complete.

Reads directories without JAX and Orbax. Layout of a step, written by Orbax: <step>/state/ (the arrays),
<step>/manifest/data.json, and at the end of a save <step>/_CHECKPOINT_METADATA and <step>/commit_success.txt.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from slicewise.errors import ExitCode, UserError

FORMAT = 1
STATE, MANIFEST = "state", "manifest"
WRITTEN_MARK = "_CHECKPOINT_METADATA"  # after all else is durable
COMMIT_MARK = "commit_success.txt"  # last; object stores, which cannot rename, have no other sign
QUARANTINE_MARK = "quarantined.txt"  # ours, with the reason why the step is never restored
UNFINISHED_INFIX = ".orbax-checkpoint-tmp"


class DamagedStep(UserError):
    """A step is complete by its marks, and its content is not what was saved."""

    def __init__(self, what: str, advice: str = ""):
        super().__init__(f"{what} {advice}".rstrip(), code=ExitCode.INTERNAL)
        self.what = what


@dataclass(frozen=True)
class Leaf:
    """One stored array."""

    shape: tuple[int, ...]
    dtype: str
    digest: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Manifest:
    """Everything of a step but the arrays' values."""

    leaves: Mapping[str, Leaf]
    data_state: np.ndarray  # int64 [rows, 2]
    metadata: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        body = {
            "format": FORMAT,
            "leaves": {
                path: {"shape": list(leaf.shape), "dtype": leaf.dtype, "digest": leaf.digest}
                for path, leaf in self.leaves.items()
            },
            "data_state": self.data_state.tolist(),
            "metadata": dict(self.metadata),
        }
        body = json.loads(json.dumps(body))  # as it will be read: keys that are no strings become such
        return {"sha256": checksum(body), **body}


def checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of the body's canonical JSON."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: str, step: int) -> Manifest:
    """Raises UserError when the step is not complete, or its manifest is damaged or of another format."""
    if not is_complete(directory, step):
        steps = ", ".join(map(str, complete_steps(directory))) or "none at all"
        raise UserError(f"{directory} has no complete checkpoint of step {step}; it has {steps}.")
    path = epath.Path(directory) / str(step) / MANIFEST / "data.json"
    with _readable(path):
        text = path.read_bytes()
    try:
        body = json.loads(text)
        stored, found = body.pop("sha256"), body["format"]
        damage = "" if stored == checksum(body) else "its content does not match its checksum"
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        damage = f"not the expected JSON ({type(e).__name__}: {e})"
    if damage:
        raise DamagedStep(f"{path} is damaged: {damage}.", advice(directory, step))
    if found != FORMAT:
        raise UserError(f"{path} has format {found}, this version reads {FORMAT}: use the one that saved it.")
    return Manifest(
        leaves={
            name: Leaf(tuple(leaf["shape"]), leaf["dtype"], leaf["digest"])
            for name, leaf in body["leaves"].items()
        },
        data_state=np.array(body["data_state"], np.int64).reshape(-1, 2),
        metadata=body["metadata"],
    )


def complete_steps(directory: str) -> list[int]:
    """Steps that can be restored, ascending; anything else in the directory is ignored.

    Raises UserError when the directory cannot be listed.
    """
    steps = [int(name) for name in names(epath.Path(directory)) if _is_step(name)]
    return sorted(step for step in steps if is_complete(directory, step))


def is_complete(directory: str, step: int) -> bool:
    return not why_incomplete(directory, step)


def why_incomplete(directory: str, step: int) -> str:
    """Why a step cannot be restored, in words; empty when it is complete."""
    path = epath.Path(directory) / str(step)
    with _readable(path):
        if (path / QUARANTINE_MARK).exists():
            return f"{QUARANTINE_MARK} says why"
        for part in (COMMIT_MARK, WRITTEN_MARK, f"{MANIFEST}/data.json", STATE):
            if not (path / part).exists():
                return f"it has no {part}" if names(path) else "it is empty"
    return ""


def quarantine(directory: str, step: int, reason: str) -> None:
    """Marks a step, which is never restored then; the next save of this step replaces it."""
    path = epath.Path(directory) / str(step)
    with _readable(path):
        (path / QUARANTINE_MARK).write_text(f"{reason}\n")


def passed_over(directory: str, step: int) -> list[str]:
    """A line on each entry that looks like a checkpoint newer than ``step``, and is none that can be used."""
    lines = []
    for name in names(epath.Path(directory)):
        stem, infix, _ = name.partition(UNFINISHED_INFIX)
        if not _is_step(stem) or int(stem) <= step:
            continue
        why = "its save was cut short" if infix else why_incomplete(directory, int(stem))
        if why:
            lines.append(f"{epath.Path(directory) / name} is not used: {why}.")
    return lines


def unfinished(directory: str) -> list[str]:
    """Names of what interrupted saves and deletions left; never of a directory that Orbax did not write."""

    def interrupted(name: str) -> bool:
        stem, infix, _ = name.partition(UNFINISHED_INFIX)
        if infix:
            return _is_step(stem)
        parts = names(epath.Path(directory) / name) if _is_step(name) else []
        return (STATE in parts or MANIFEST in parts) and WRITTEN_MARK not in parts

    return [name for name in names(epath.Path(directory)) if interrupted(name)]


def names(path: epath.Path) -> list[str]:
    """Names of a directory's entries; none when there is no such directory."""
    with _readable(path):
        try:
            return sorted(entry.name for entry in path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []


@contextmanager
def _readable(path: epath.Path) -> Iterator[None]:
    try:
        yield
    except ImportError as e:  # the package that reads this kind of URL, such as gcsfs
        raise UserError(f"{path}: {e}.", code=ExitCode.INTERNAL) from e
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}.", code=ExitCode.INTERNAL) from e


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def advice(directory: str, step: int) -> str:
    """What to do about a damaged step."""
    older = [s for s in complete_steps(directory) if s < step]
    then = f"continues from step {older[-1]}" if older else "starts anew, for there is no older one"
    return f"Delete {epath.Path(directory) / str(step)}: the run then {then}."
