"""Text to token ids and back: raw bytes, a Hugging Face tokenizer.json, or a SentencePiece .model."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slicewise.data.files import reading
from slicewise.errors import UserError

# How published tokenizers name the special tokens around a document; the first one present is taken.
# The escapes spell the full-width bars and the word separator of the DeepSeek family.
BEGIN_NAMES = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|startoftext|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
)
END_NAMES = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
REPLACEMENT = "\ufffd"  # what stands for an id or a byte sequence that is no text


class Tokenizer(Protocol):
    """Ids are in [0, vocab_size). Specials decode to nothing; what is no text is replaced, no error."""

    vocab_size: int
    begin_id: int | None
    end_id: int
    fingerprint: str  # of its content

    def encode(self, text: str) -> np.ndarray:
        """int32 ids [n] of ``text`` without begin and end; special tokens spelled out in it are text."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``name``: 'bytes', or the path of a tokenizer.json or SentencePiece .model.

    Raises UserError for an unknown kind, an unreadable or wrong file, a missing package or end-of-text token.
    """
    if name == "bytes":
        return Bytes()
    kinds: dict[str, Callable[[bytes, str], Tokenizer]] = {".json": TokenizerJson, ".model": SentencePiece}
    path = Path(name).expanduser()
    if path.suffix not in kinds:
        raise UserError(
            f"tokenizer = '{name}' is of no known kind;"
            " expected 'bytes', a tokenizer.json or a SentencePiece .model."
        )
    with reading(str(path)):
        content = path.read_bytes()
    tokenizer = kinds[path.suffix](content, str(path))
    tokenizer.fingerprint = (
        f"{tokenizer.vocab_size:,} ids ({hashlib.blake2b(content, digest_size=4).hexdigest()})"
    )
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """int32 ids [n >= 1] of a whole document: begin (where the tokenizer has one), the text, end."""
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    ids = tokenizer.encode(text)
    return np.concatenate([np.array(begin, np.int32), ids, np.array([tokenizer.end_id], np.int32)])


class Bytes:
    """UTF-8 bytes are ids 0..255; nothing to train or download."""

    vocab_size = 258
    begin_id: int | None = 256
    end_id = 257
    fingerprint = "bytes"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        text_ids = [i for i in ids if i not in (self.begin_id, self.end_id)]
        return _decode_runs(text_ids, 256, lambda run: bytes(run).decode(errors="replace"))


class TokenizerJson:
    """A tokenizer.json of the Hugging Face tokenizers package."""

    fingerprint: str

    def __init__(self, content: bytes, path: str):
        try:
            import tokenizers
        except ImportError as e:
            raise _missing("tokenizers", path) from e
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as e:  # the package raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json of the tokenizers package: {e}.") from e
        # A saved file may ask for truncation or padding, which would silently drop or add text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Otherwise a text that mentions an end-of-text token would end the document.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1  # ids may have gaps
        self.begin_id = next((ids[name] for name in BEGIN_NAMES if name in ids), None)
        end_id = next((ids[name] for name in END_NAMES if name in ids), None)
        if end_id is None:
            known = ", ".join(map(ascii, END_NAMES))
            raise UserError(f"{path} has no end-of-text token; looked for {known}. Add one to the tokenizer.")
        self.end_id: int = end_id

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return _decode_runs(ids, self.vocab_size, self._tokenizer.decode)

    def with_special_tokens(self) -> Any:
        """The package's tokenizer, which takes special tokens that are spelled out for what they say."""
        marked = type(self._tokenizer).from_str(self._tokenizer.to_str())
        marked.encode_special_tokens = False
        return marked


class SentencePiece:
    """A SentencePiece .model."""

    fingerprint: str

    def __init__(self, content: bytes, path: str):
        try:
            import sentencepiece
        except ImportError as e:
            raise _missing("sentencepiece", path) from e
        if not content:  # which the package takes for a model without pieces
            raise UserError(f"{path} is not a SentencePiece model: it is empty.")
        try:
            self._processor: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size: int = self._processor.vocab_size()
        except Exception as e:  # the package raises RuntimeError, and others between versions
            raise UserError(f"{path} is not a SentencePiece model: {e}.") from e
        self.begin_id = self._processor.bos_id() if self._processor.bos_id() >= 0 else None
        self.end_id: int = self._processor.eos_id()
        if self.end_id < 0:
            raise UserError(
                f"{path} has no end-of-text token (eos_id {self.end_id}); train it with an eos_id."
            )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text), np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return _decode_runs(ids, self.vocab_size, self._processor.decode)


def _decode_runs(ids: Iterable[int], vocab_size: int, decode: Callable[[Sequence[int]], str]) -> str:
    """Decodes runs of valid ids with one REPLACEMENT for each id outside [0, vocab_size) between them."""
    runs: list[list[int]] = [[]]
    for i in map(int, ids):
        if 0 <= i < vocab_size:
            runs[-1].append(i)
        else:
            runs.append([])
    return REPLACEMENT.join(decode(run) if run else "" for run in runs)


def _missing(package: str, path: str) -> UserError:
    return UserError(f"reading {path} needs the package {package}: pip install 'slicewise[text]'.")
