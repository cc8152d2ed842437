"""Which document comes when: the held-out split and the shuffled, endless order of each virtual shard.

Virtual shard r feeds row r of every global batch, so the order does not depend on which host reads a row.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slicewise.data import grain_import
from slicewise.errors import UserError

SHUFFLE_ROUNDS = 4  # of the block cipher behind index_shuffle
# index_shuffle walks a cipher of at least 16 bits until it falls below n: 2**16 / n steps, 30 ms for n = 1.
# Below this many documents a whole epoch's permutation is cheaper.
SMALL = 4096
HASH_BLOCK = 1 << 20  # documents hashed at once, which bounds the memory of a split


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one side of the split, as places in the source; ``held_out`` [h] is sorted int64."""

    total: int
    held_out: np.ndarray
    is_held_out: bool

    def __len__(self) -> int:
        return len(self.held_out) if self.is_held_out else self.total - len(self.held_out)

    def __getitem__(self, i: int) -> int:
        """The place in the source of the i-th document of this side."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        if self.is_held_out:
            return int(self.held_out[i])
        # held_out[j] - j training documents precede the j-th held-out one.
        return i + int(np.searchsorted(self._training_before, i, side="right"))

    @functools.cached_property
    def _training_before(self) -> np.ndarray:
        return self.held_out - np.arange(len(self.held_out))


def split(files: Sequence[tuple[str, int]], fraction: float) -> tuple[Documents, Documents]:
    """Training and held-out documents of a source whose ``files`` are (name, number of documents).

    A document is held out when the hash of its file's name and its number there falls below ``fraction``, so
    other files may come and go without moving it. Both sides get at least one document where fraction > 0.
    Raises UserError for a single document and fraction > 0.
    """
    total = sum(count for _, count in files)
    if fraction > 0 and total < 2:
        raise UserError(
            f"held_out_fraction = {fraction} needs at least 2 documents, but the dataset has {total};"
            " add text or set held_out_fraction=0."
        )
    held_out = np.zeros(0, np.int64)
    if fraction > 0:
        blocks, lowest, highest = [], (2.0, 0), (-1.0, 0)
        for start, hashes in _document_hashes(files):
            blocks.append(start + np.flatnonzero(hashes < fraction))
            lowest = min(lowest, (float(hashes.min()), start + int(hashes.argmin())))
            highest = max(highest, (float(hashes.max()), start + int(hashes.argmax())))
        held_out = np.concatenate(blocks)
        if len(held_out) == 0:
            held_out = np.array([lowest[1]])
        elif len(held_out) == total:
            held_out = np.setdiff1d(held_out, [highest[1]])
    return Documents(total, held_out, False), Documents(total, held_out, True)


def _document_hashes(files: Sequence[tuple[str, int]]) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first document, float64 hashes in [0, 1) of up to HASH_BLOCK documents from there on)."""
    ends = np.cumsum([count for _, count in files])
    names = [int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) for name, _ in files]
    bases = np.array(names, np.uint64)
    for start in range(0, int(ends[-1]), HASH_BLOCK):
        documents = np.arange(start, min(start + HASH_BLOCK, int(ends[-1])))
        file = np.searchsorted(ends, documents, side="right")
        within = documents - np.concatenate([[0], ends])[file]
        yield start, (_mix(bases[file] + _mix(within.astype(np.uint64))) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The output of splitmix64 for state ``x`` (Steele, Lea and Flood, OOPSLA 2014); uint64, wraps."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(documents: int, seed: int) -> Callable[[int], int]:
    """The endless order of ``documents`` documents: position p -> document, a new permutation each epoch."""
    index_shuffle = grain_import.load().experimental.index_shuffle

    @functools.lru_cache(maxsize=64)
    def epoch_seed(epoch: int) -> int:
        return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint32)[0])

    @functools.lru_cache(maxsize=64)
    def whole_epoch(epoch: int) -> np.ndarray:
        last = (1 << 16) - 1
        keys = [index_shuffle(i, last, epoch_seed(epoch), SHUFFLE_ROUNDS) for i in range(documents)]
        return np.argsort(keys)

    def document(position: int) -> int:
        epoch, place = divmod(position, documents)
        if documents < SMALL:
            return int(whole_epoch(epoch)[place])
        return index_shuffle(place, documents - 1, epoch_seed(epoch), SHUFFLE_ROUNDS)

    return document
