"""Cuts the endless stream of one virtual shard's documents into rows of a fixed number of tokens.

Text goes on from row to row; conversations stay whole.

Dims: T tokens of a row.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from slicewise.errors import UserError

MOST_SKIPPED = 100_000  # conversations without an answer, one after the other, that are no accident
NO_TARGET = -1  # where a token has no next token in its own document
FIELDS = ("tokens", "targets", "segment_ids", "positions")


class RowPacker:
    """One row of every batch. ``read(k)`` gives the int32 tokens [>= 1] of the shard's k-th document.

    ``state`` is (documents finished, tokens already used of the next one): all that is needed to continue.
    """

    skipped = 0

    def __init__(self, read: Callable[[int], np.ndarray], state: tuple[int, int] = (0, 0)):
        self._read = read
        self._documents, self._offset = state
        self._document: np.ndarray | None = None

    @property
    def state(self) -> tuple[int, int]:
        return self._documents, self._offset

    def fill(
        self, tokens_T: np.ndarray, targets_T: np.ndarray, segment_ids_T: np.ndarray, positions_T: np.ndarray
    ) -> None:
        """Writes the next row. A document that does not end in it goes on in the next row.

        Segments count from 1 and positions from 0 at each document's part of the row; a target is the next
        token of the same document, also across the row's end, and NO_TARGET at the document's last token.
        Raises UserError when the state lies outside its document.
        """
        row_length = len(tokens_T)
        start, segment = 0, 1
        while start < row_length:
            document = self._current()
            taken = min(len(document) - self._offset, row_length - start)
            end, offset = start + taken, self._offset
            following = document[offset + 1 : offset + 1 + taken]
            tokens_T[start:end] = document[offset : offset + taken]
            targets_T[start : start + len(following)] = following
            targets_T[start + len(following) : end] = NO_TARGET
            segment_ids_T[start:end] = segment
            positions_T[start:end] = np.arange(taken)
            self._offset += taken
            if self._offset == len(document):
                self._documents, self._offset, self._document = self._documents + 1, 0, None
            start, segment = end, segment + 1

    def _current(self) -> np.ndarray:
        if self._document is None:
            self._document = self._read(self._documents)
            if self._offset >= len(self._document):
                raise UserError(
                    f"the saved position in the data is token {self._offset} of a document that has only"
                    f" {len(self._document)}: dataset, tokenizer or seed are not those of the checkpoint."
                )
        return self._document


class ConversationPacker:
    """One row of every batch, of whole conversations. ``read(k)`` gives int32 [2, n]: ids, and 1 for those of answers.

    A conversation that is longer than a row loses its end; one that does not fit in what is left of a row starts the
    next one, and the rest is padding. One without an answer is skipped. ``state`` is as RowPacker's, the second number
    always 0, and ``skipped`` counts since the packer was made.
    """

    def __init__(self, read: Callable[[int], np.ndarray], state: tuple[int, int] = (0, 0)):
        self._read = read
        self._documents = state[0]
        self._conversation: np.ndarray | None = None
        self.skipped = 0

    @property
    def state(self) -> tuple[int, int]:
        return self._documents, 0

    def fill(
        self, tokens_T: np.ndarray, targets_T: np.ndarray, segment_ids_T: np.ndarray, positions_T: np.ndarray
    ) -> None:
        """Writes the next row: as RowPacker's, with a target only where the next token belongs to an answer.

        Padding has segment 0. Raises UserError where no conversation has an answer.
        """
        row_length = len(tokens_T)
        tokens_T[:], targets_T[:], segment_ids_T[:], positions_T[:] = 0, NO_TARGET, 0, 0
        start, segment = 0, 1
        while start < row_length:
            ids, is_answer = self._current(row_length)
            end = start + len(ids)
            if end > row_length:
                return
            tokens_T[start:end] = ids
            targets_T[start : end - 1] = np.where(is_answer[1:] == 1, ids[1:], NO_TARGET)
            segment_ids_T[start:end] = segment
            positions_T[start:end] = np.arange(len(ids))
            self._documents, self._conversation = self._documents + 1, None
            start, segment = end, segment + 1

    def _current(self, row_length: int) -> np.ndarray:
        """The next conversation that has an answer, int32 [2, <= row_length]; those before it are skipped."""
        if self._conversation is not None:
            return self._conversation
        for _ in range(MOST_SKIPPED):
            conversation = self._read(self._documents)[:, :row_length]
            if has_answer(conversation[1]):
                self._conversation = conversation
                return conversation
            self._documents, self.skipped = self._documents + 1, self.skipped + 1
        raise UserError(
            f"{MOST_SKIPPED:,} conversations, one after the other, have no answer within"
            f" sequence_length = {row_length} tokens; raise it, or mend the data."
        )


def has_answer(is_answer: np.ndarray) -> bool:
    """Whether a token [n] can be predicted that belongs to an answer."""
    return bool(is_answer[1:].any())


Packer = RowPacker | ConversationPacker


class Documents(Protocol):
    """A finite sequence of documents, each int32 [>= 1], or [2, n] of conversations."""

    is_chat: bool

    def __len__(self) -> int: ...
    def __getitem__(self, i: int, /) -> np.ndarray: ...


def rows_of_all(documents: Documents, row_length: int) -> Iterator[dict[str, np.ndarray]]:
    """Every document once, in order, in rows of FIELDS, each int32 [T]; the end of the last row has no targets."""
    filler = np.full((2, row_length) if documents.is_chat else row_length, -1, np.int32)
    kind = ConversationPacker if documents.is_chat else RowPacker
    packer: Packer = kind(lambda k: documents[k] if k < len(documents) else filler)
    while packer.state[0] < len(documents):
        row = {field: np.empty(row_length, np.int32) for field in FIELDS}
        packer.fill(*row.values())
        is_filler = row["tokens"] < 0
        row["tokens"][is_filler], row["targets"][is_filler], row["segment_ids"][is_filler] = 0, NO_TARGET, 0
        yield row
