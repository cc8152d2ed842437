"""BatchLoader: the rows of every global batch that one host needs, read ahead in the background.

Dims: R rows of this host, T tokens of a row.
"""

import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from slicewise.config import RunConfig
from slicewise.data import chat, grain_import, order, packing, sources, tokenizers
from slicewise.errors import UserError

PREFETCHED_BATCHES = 2
SYNTHETIC_VOCAB = 256  # where the caller does not say how many ids the model knows
SPLITS = ("train", "held_out")

Batch = dict[str, np.ndarray]  # packing.FIELDS, each int32 [R, T]


class BatchLoader:
    """Iterates for ever over batches {tokens, targets, segment_ids, positions}, each int32 [R, T].

    ``rows`` are the rows of the global batch this host needs, sorted. Row r is the same whichever host reads
    it: a function of the dataset, the seed and the step. ``state`` [R, 2] goes on behind the loader it is of.
    ``held_out`` batches do not depend on the seed and always start at the beginning.
    ``vocab_size`` is the number of ids the model knows. ``fingerprint`` tells datasets and tokenizers apart by
    content, as far as that can be told without reading the text.
    Raises UserError, also from ``next``, for whatever is wrong with the dataset or the tokenizer.
    """

    def __init__(
        self,
        config: RunConfig,
        rows: Sequence[int],
        split: str = "train",
        state: np.ndarray | None = None,
        *,
        vocab_size: int | None = None,
    ):
        assert split in SPLITS, split
        assert list(rows) == sorted(set(rows)), rows
        assert 0 <= rows[0] <= rows[-1] < config.data.global_batch_size, rows
        assert state is None or (split == "train" and state.shape == (len(rows), 2)), "one state for each row"
        self._error: Exception | None = None
        start = np.zeros((len(rows), 2), np.int64) if state is None else np.array(state, np.int64)
        batches, self.fingerprint, self.chat_template = _open_batches(
            config, rows, split, start, fresh=state is None, vocab_size=vocab_size
        )
        self._open = [batches]
        # Also for a loader that nobody closed: the library's own clean-up fails while the interpreter exits.
        weakref.finalize(self, _close, self._open)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        assert self._open, "the loader is closed"
        if self._error is not None:
            raise self._error
        try:
            return next(self._open[0])
        except Exception as e:
            self._error = e  # the rows before the fault have moved on: going on would lose their tokens
            raise

    @property
    def state(self) -> np.ndarray:
        """int64 [R, 2]: documents finished and tokens used of the next, behind the last batch returned."""
        assert self._open, "the loader is closed"
        return self._open[0].get_state()["rows"].copy()

    @property
    def skipped(self) -> np.ndarray:
        """int64 [R]: conversations that had no answer, since this loader was made, of each row."""
        assert self._open, "the loader is closed"
        return self._open[0].get_state()["skipped"].copy()

    def close(self) -> None:
        """Ends the background thread; the loader is of no use afterwards. May be called twice."""
        _close(self._open)


def _close(batches: list[Any]) -> None:
    """Closes what the list holds and drops it: no reference may outlive this."""
    while batches:
        batches.pop().close()


def _open_batches(
    config: RunConfig,
    rows: Sequence[int],
    split: str,
    state: np.ndarray,
    *,
    fresh: bool,
    vocab_size: int | None,
) -> tuple[Any, dict[str, str], str | None]:
    """An iterator over batches with get_state and close, the fingerprint of what it reads, and the name of the chat
    template where there is one."""
    if config.data.dataset == "synthetic" and not config.data.messages_field:
        return SyntheticBatches(config, rows, split, state, vocab_size or SYNTHETIC_VOCAB), {}, None
    documents = TokenizedDocuments(config, split, vocab_size)
    if split == "train" and fresh:
        _check_one_batch(config, documents)
    packed = PackedBatches(documents, rows, state, config.data.sequence_length)
    ahead = grain_import.load().experimental.ThreadPrefetchDatasetIterator(packed, PREFETCHED_BATCHES)
    return ahead, documents.fingerprint, documents.chat_template


class TokenizedDocuments:
    """The documents of one side of the split as int32 tokens, in the order of the virtual shards."""

    def __init__(self, config: RunConfig, split: str, vocab_size: int | None):
        data = config.data
        if split == "held_out" and data.held_out_fraction == 0:
            raise UserError(
                "held_out_fraction = 0 leaves nothing to evaluate on; set it above 0, or eval_batches=0."
            )
        self.tokenizer = tokenizers.open_tokenizer(data.tokenizer)
        if vocab_size is not None and self.tokenizer.vocab_size > vocab_size:
            raise UserError(
                f"tokenizer = '{data.tokenizer}' has {self.tokenizer.vocab_size} ids, but model ="
                f" '{config.model.model}' knows only {vocab_size}; choose another of the two."
            )
        self.is_chat = bool(data.messages_field)
        self._chat = chat.open_chat(data, self.tokenizer) if self.is_chat else None
        self.chat_template = None if self._chat is None else self._chat.name
        self._source = sources.open_source(data)
        train, held_out = order.split(self._source.files, data.held_out_fraction)
        self._documents = train if split == "train" else held_out
        listed = "".join(f"{name}\0{int(count)}\n" for name, count in self._source.files)
        names = hashlib.blake2b(listed.encode(), digest_size=4)
        self.fingerprint = {
            "dataset": f"{len(self._source):,} documents ({names.hexdigest()})",
            "tokenizer": self.tokenizer.fingerprint,
        }
        if sizes := self._source.sizes_bytes:  # text that was edited has another size, in all likelihood
            each = hashlib.blake2b("\n".join(map(str, sizes)).encode(), digest_size=4)
            self.fingerprint["text of the dataset"] = f"{sum(sizes):,} bytes ({each.hexdigest()})"
        self._shards = data.global_batch_size
        # Evaluations of runs that differ in their seed are to be comparable.
        self._shuffled = order.shuffled(len(self._documents), config.run.seed if split == "train" else 0)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, i: int) -> np.ndarray:
        """int32 [>= 1], of a conversation [2, n]: the i-th document in the order of the source."""
        document = self._source[self._documents[i]]
        if self._chat is not None:
            return self._chat.encode(document)
        return tokenizers.encode_document(self.tokenizer, document)

    def read(self, shard: int, k: int) -> np.ndarray:
        """As [i]: the k-th document of virtual shard ``shard``, at global position shard + k B."""
        return self[self._shuffled(shard + k * self._shards)]


def _check_one_batch(config: RunConfig, documents: TokenizedDocuments) -> None:
    """Raises UserError where an epoch is less than one batch; reads as many documents as it takes to know."""
    batch, length = config.data.global_batch_size, config.data.sequence_length
    if documents.is_chat:
        return _check_one_conversation_each(documents, batch, length)
    smallest = 1 if documents.tokenizer.begin_id is None else 2
    if len(documents) * smallest >= batch * length:
        return
    tokens = 0
    for i in range(len(documents)):
        tokens += len(documents[i])
        if tokens >= batch * length:
            return
    raise UserError(
        f"the training text has {tokens} tokens, fewer than one batch: global_batch_size x sequence_length ="
        f" {batch} x {length} = {batch * length}; lower one of them or add text."
    )


def _check_one_conversation_each(documents: TokenizedDocuments, batch: int, length: int) -> None:
    """Raises UserError where some row of a batch would have no conversation of its own."""
    found = 0
    for i in range(len(documents)):
        found += packing.has_answer(documents[i][1, :length])
        if found == batch:
            return
    raise UserError(
        f"{found} of {len(documents)} conversations for training have an answer within sequence_length = {length}"
        f" tokens, fewer than global_batch_size = {batch}; lower it, raise sequence_length or add some."
    )


class PackedBatches:
    """Endless batches of packed rows, with the state behind the last one; runs in the prefetching thread."""

    def __init__(
        self, documents: TokenizedDocuments, rows: Sequence[int], state: np.ndarray, sequence_length: int
    ):
        self._shape = len(rows), sequence_length
        kind = packing.ConversationPacker if documents.is_chat else packing.RowPacker
        self._rows: list[packing.Packer] = [
            kind(functools.partial(documents.read, row), (int(done), int(offset)))
            for row, (done, offset) in zip(rows, state, strict=True)
        ]

    def __next__(self) -> Batch:
        batch = {field: np.empty(self._shape, np.int32) for field in packing.FIELDS}
        for r, row in enumerate(self._rows):
            row.fill(*(batch[field][r] for field in packing.FIELDS))
        return batch

    def get_state(self) -> dict[str, np.ndarray]:
        skipped = [row.skipped for row in self._rows]
        return {
            "rows": np.array([row.state for row in self._rows], np.int64),
            "skipped": np.array(skipped, np.int64),
        }


class SyntheticBatches:
    """Endless batches of random ids, each row one document: a function of seed, split, step and row alone."""

    def __init__(
        self, config: RunConfig, rows: Sequence[int], split: str, state: np.ndarray, vocab_size: int
    ):
        self._rows, self._shape, self._vocab_size = rows, (len(rows), config.data.sequence_length), vocab_size
        self._key = [config.run.seed if split == "train" else 0, SPLITS.index(split)]
        self._state = state

    def __next__(self) -> Batch:
        length = self._shape[1]
        tokens = np.empty((self._shape[0], length + 1), np.int32)
        for r, (row, step) in enumerate(zip(self._rows, self._state[:, 0].tolist(), strict=True)):
            generator = np.random.default_rng([*self._key, step, row])
            tokens[r] = generator.integers(self._vocab_size, size=length + 1, dtype=np.int32)
        self._state = self._state + np.array([1, 0])
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), self._shape).copy()
        return {
            "tokens": tokens[:, :-1].copy(),
            "targets": tokens[:, 1:].copy(),
            "segment_ids": np.ones(self._shape, np.int32),
            "positions": positions,
        }

    def get_state(self) -> dict[str, np.ndarray]:
        return {"rows": self._state, "skipped": np.zeros(len(self._rows), np.int64)}

    def close(self) -> None:
        """Nothing runs in the background."""
