"""What one host keeps on its own disk: blocks of the arrays of the newest steps. Knows nothing of other hosts.

<directory>/<step>/blocks      the blocks, one after the other
<directory>/<step>/index.json  what they are, with their checksums; written last, when the blocks are durable
"""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slicewise.checkpoint.exchange import Block
from slicewise.checkpoint.manifest import checksum

FORMAT = 1
BLOCKS, INDEX = "blocks", "index.json"


@dataclass(frozen=True)
class Stored:
    """One array that blocks are of."""

    shape: tuple[int, ...]
    dtype: str
    grid: tuple[int, ...]  # blocks along each dim
    digest: str  # of the whole array

    @property
    def block_shape(self) -> tuple[int, ...]:
        return tuple(size // blocks for size, blocks in zip(self.shape, self.grid, strict=True))


@dataclass(frozen=True)
class Index:
    """A step as one host has it. All but ``blocks`` is equal on all hosts of one save."""

    run: str  # tells a run from another that had its name before
    step: int
    arrays: Mapping[str, Stored]
    data_state: list[list[int]]
    metadata: Mapping[str, Any]
    blocks: Mapping[Block, tuple[int, int, int]]  # (place in the file, bytes, CRC-32)

    @property
    def content(self) -> str:
        """Blocks of different hosts belong together when this is equal: it covers every bit of the arrays."""
        arrays = {path: vars(stored) for path, stored in self.arrays.items()}
        return checksum({"run": self.run, "step": self.step, "arrays": arrays, "data_state": self.data_state})

    def to_json(self) -> dict[str, Any]:
        body = {
            "format": FORMAT,
            "run": self.run,
            "step": self.step,
            "arrays": {path: vars(stored) for path, stored in self.arrays.items()},
            "data_state": self.data_state,
            "metadata": dict(self.metadata),
            "blocks": [[path, number, *where] for (path, number), where in self.blocks.items()],
        }
        body = json.loads(json.dumps(body))
        return {"sha256": checksum(body), **body}

    @staticmethod
    def from_json(document: dict[str, Any]) -> "Index":
        """Raises ValueError, KeyError or TypeError for what is damaged or of another format."""
        if document.pop("sha256") != checksum(document) or document["format"] != FORMAT:
            raise ValueError("not as it was written")
        arrays = {
            path: Stored(tuple(a["shape"]), a["dtype"], tuple(a["grid"]), a["digest"])
            for path, a in document["arrays"].items()
        }
        blocks = {(path, number): (at, size, crc) for path, number, at, size, crc in document["blocks"]}
        keys = ("run", "step", "data_state", "metadata")
        return Index(arrays=arrays, blocks=blocks, **{key: document[key] for key in keys})


def write(
    directory: Path, index: Index, blocks: Mapping[Block, np.ndarray], *, keep: int
) -> None:  # raises OSError
    """Makes a step durable, then deletes all but the newest ``keep`` and what is not complete.

    ``index.blocks`` is filled in here.
    """
    folder = directory / str(index.step)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    where, at = {}, 0
    with (folder / BLOCKS).open("wb") as file:
        for block, array in blocks.items():
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            file.write(data)
            where[block] = at, data.nbytes, zlib.crc32(data)
            at += data.nbytes
        _durable(file)
    whole = Index(index.run, index.step, index.arrays, index.data_state, index.metadata, where)
    with (folder / f".{INDEX}").open("w") as file:
        json.dump(whole.to_json(), file)
        _durable(file)
    (folder / f".{INDEX}").replace(folder / INDEX)
    done = sorted(found(directory))
    for path in directory.iterdir():
        if path.name.isdigit() and int(path.name) not in done[-keep:]:
            (path / INDEX).unlink(missing_ok=True)  # first: half of it is not complete
            shutil.rmtree(path, ignore_errors=True)


def _durable(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def found(directory: Path) -> dict[int, Index]:
    """The steps that are complete as far as names and sizes tell; whatever else is there is passed over."""
    steps = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            index = Index.from_json(json.loads((path / INDEX).read_bytes()))
            size = sum(size for _, size, _ in index.blocks.values())
            if path.name == str(index.step) and (path / BLOCKS).stat().st_size == size:
                steps[index.step] = index
    return steps


def read(directory: Path, index: Index) -> dict[Block, np.ndarray]:
    """The blocks of a step, as bytes (uint8), whose checksums are right; the others are left out."""
    good: dict[Block, np.ndarray] = {}
    with contextlib.suppress(OSError), (directory / str(index.step) / BLOCKS).open("rb") as file:
        for block, (at, size, crc) in index.blocks.items():
            file.seek(at)
            data = np.fromfile(file, np.uint8, size)
            if data.nbytes == size and zlib.crc32(data) == crc:
                good[block] = data
    return good
