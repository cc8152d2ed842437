"""Random access to the documents of a dataset: text, JSON Lines, Parquet, ArrayRecord, Hugging Face datasets.

Opening a source reads names, sizes and offsets only; text is read when a document is asked for.
"""

import abc
import contextlib
import errno
import importlib
import json
import os
import sysconfig
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slicewise.config import Data
from slicewise.data import grain_import
from slicewise.data.chat import check_messages
from slicewise.data.files import Files, decode_utf8, find_files, read_bytes, reading, walk
from slicewise.errors import ExitCode, UserError, did_you_mean

PASSAGE_BYTES = 4096  # of text at least; and PASSAGE_PER_SEQUENCE bytes for every token of a sequence
PASSAGE_PER_SEQUENCE = 16
NEWLINE_WINDOW_BYTES = 4096  # how far before its nominal place a passage may be cut at a newline
SCAN_BYTES = 16 << 20  # read at once to find the lines of a JSON Lines file
WITH_FIELDS = ("jsonl", "parquet", "huggingface")  # kinds whose records may hold conversations
PARQUET_CACHE_BYTES = 512 << 20  # of decoded row groups kept
# Tests and build results differ between installations of the same Python, or are no text to learn from.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Field:
    """Where a record holds its document: the field ``name``, which the config's ``key`` says."""

    name: str
    key: str
    take: Callable[[Any, Callable[[], str]], Any]  # (value, where it stands) -> the document


class Source(Protocol):
    """A sequence of documents, each text or a conversation (a list of messages).

    ``files`` names them: (file, number of its documents), in order. ``sizes_bytes`` are of the same files; none
    where the documents lie in no files that we know.
    """

    @property
    def files(self) -> Sequence[tuple[str, int]]: ...

    @property
    def sizes_bytes(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Any: ...


def open_source(data: Data) -> Source:
    """The documents of ``data.dataset`` (any kind but 'synthetic', which has no text).

    Raises UserError where nothing is found or readable, where there is no document, or a package is missing.
    """
    field = _field(data)
    assert data.dataset != "synthetic", "synthetic batches have no source"
    if data.dataset == "python-stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        source: Source = TextSource(_stdlib_files(root), passage_bytes(data.sequence_length))
    elif not data.dataset_path:
        wanted = "a dataset's name" if data.dataset == "huggingface" else "a file, directory or glob"
        raise UserError(f"dataset = '{data.dataset}' needs dataset_path: {wanted}.")
    elif data.dataset == "huggingface":
        source = HuggingFaceSource(data.dataset_path, field)
    else:
        files = find_files(data.dataset, data.dataset_path)
        if data.dataset == "text":
            source = TextSource(files, passage_bytes(data.sequence_length))
        elif data.dataset == "jsonl":
            source = JsonLinesSource(files, field)
        elif data.dataset == "parquet":
            source = ParquetSource(files, field)
        else:
            source = ArrayRecordSource(files)
    if len(source) == 0:
        raise UserError(f"dataset {data.dataset} {data.dataset_path} holds no document; give it some text.")
    return source


def _field(data: Data) -> Field:
    if not data.messages_field:
        name = data.text_field
        return Field(name, "text_field", lambda value, where: _text(value, where, name))
    if data.dataset not in WITH_FIELDS:
        raise UserError(
            f"messages_field = '{data.messages_field}': dataset = '{data.dataset}' has no fields;"
            f" expected dataset = {', '.join(WITH_FIELDS)}."
        )
    return Field(data.messages_field, "messages_field", check_messages)


def passage_bytes(sequence_length: int) -> int:
    """Size of the passages that long text is cut into, a power of two: many sequences fit in one.

    Up to 256 tokens it does not depend on ``sequence_length``, so neither do the passages held out.
    """
    return max(PASSAGE_BYTES, 1 << (PASSAGE_PER_SEQUENCE * sequence_length - 1).bit_length())


def _stdlib_files(root: Path) -> Files:
    found = []
    with reading(str(root)):
        sources = walk(str(root), ("*.py",))
    for name, path in sources:
        parts = name.split("/")
        of_the_build = parts[-1].startswith("_sysconfigdata") or parts[0].startswith("config-")
        if not STDLIB_SKIPPED.intersection(parts) and not of_the_build:
            found.append((name, path))
    return sorted(found)


class FileSource(abc.ABC):
    """Documents of several files: number ``i`` over all of them is number ``k`` of one."""

    def __init__(self, files: Files, counts: Sequence[int], sizes_bytes: Sequence[int] = ()):
        self.sizes_bytes = sizes_bytes or [_size_bytes(path) for _, path in files]
        self.files = [(name, count) for (name, _), count in zip(files, counts, strict=True)]
        self._paths = [path for _, path in files]
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self):
            raise IndexError(i)
        file = bisect_right(self._ends, i)
        return self._read(file, i - (self._ends[file - 1] if file else 0))

    @abc.abstractmethod
    def _read(self, file: int, k: int) -> Any:
        """Document ``k`` of file number ``file``."""


def _size_bytes(path: str) -> int:
    with reading(path):
        return os.stat(path).st_size


class TextSource(FileSource):
    """Plain text: each file is cut into passages of about ``passage`` bytes, at a newline where one is near.

    Where a passage ends follows from the bytes before its nominal place alone, so counting reads nothing.
    """

    def __init__(self, files: Files, passage: int):
        self._passage = passage
        self._window = min(NEWLINE_WINDOW_BYTES, passage // 2)
        sizes = []
        for _, path in files:
            sizes.append(_size_bytes(path))
            with reading(path):
                if not os.access(path, os.R_OK, effective_ids=True):  # now, not hours into the run
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        super().__init__(files, [-(-size // passage) for size in sizes], sizes)

    def _read(self, file: int, k: int) -> str:
        path, size = self._paths[file], self.sizes_bytes[file]
        nominal_start, nominal_end = k * self._passage, min((k + 1) * self._passage, size)
        start = max(nominal_start - self._window, 0)
        content = read_bytes(path, start, nominal_end - start)
        first = _cut(content, nominal_start - start, self._window) if k else 0
        last = _cut(content, len(content), self._window) if nominal_end < size else len(content)
        return decode_utf8(content[first:last], lambda i: f"{path}: byte {start + first + i}")


def _cut(content: bytes, nominal: int, window: int) -> int:
    """The cut: behind the last newline in ``window`` bytes before ``nominal``, else at a character."""
    newline = content.rfind(b"\n", nominal - window, nominal)
    if newline >= 0:
        return newline + 1
    for back in range(1, 4):  # a character has up to four bytes, of which the first tells their number
        lead = content[nominal - back]
        if lead >= 0xC0:
            size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return nominal - back if size > back else nominal
        if lead < 0x80:
            break
    return nominal


class JsonLinesSource(FileSource):
    """JSON Lines: the document in ``field`` of each line that is not blank, found by the lines' offsets."""

    def __init__(self, files: Files, field: Field):
        self._field = field
        self._lines = [_line_bounds(path) for _, path in files]
        super().__init__(files, [len(lines) for lines in self._lines])

    def _read(self, file: int, k: int) -> Any:
        path, (start, end) = self._paths[file], self._lines[file][k].tolist()
        line = read_bytes(path, start, end - start)

        def where() -> str:
            return f"{path}:{_line_number(path, start)}"

        text = decode_utf8(line, lambda i: f"{where()}: byte {start + i}")
        try:
            record = json.loads(text)
        except ValueError as e:
            raise UserError(f"{where()} is not JSON: {e}.") from e
        if not isinstance(record, dict):
            raise UserError(f"{where()} is no JSON object but {type(record).__name__}.")
        if self._field.name not in record:
            raise _no_field(where(), self._field, list(record))
        return self._field.take(record[self._field.name], where)


def _line_bounds(path: str) -> np.ndarray:
    """int64 [lines, 2]: where each line that is not blank starts and ends (without its newline)."""
    newlines, position, last = [np.zeros(0, np.int64)], 0, b"\n"
    with reading(path), open(path, "rb", buffering=0) as file:
        while block := file.read(SCAN_BYTES):
            newlines.append(position + np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")))
            position, last = position + len(block), block[-1:]
    ends = np.concatenate([*newlines, [] if last == b"\n" else [position]]).astype(np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), ends + 1])[: len(ends)]
    bounds = np.stack([starts, ends], axis=1)
    blank = ends == starts
    for i in np.flatnonzero(ends - starts == 1):  # an empty line that ends in CR LF
        blank[i] = read_bytes(path, int(starts[i]), 1) == b"\r"
    return bounds[~blank]


def _line_number(path: str, offset: int) -> int:
    """The line, from 1, at byte ``offset``: counted only for a message."""
    with reading(path), open(path, "rb") as file:
        number = 1
        while offset > 0 and (block := file.read(min(offset, SCAN_BYTES))):
            number, offset = number + block.count(b"\n"), offset - len(block)
    return number


class ParquetSource(FileSource):
    """Parquet: the column ``field``, decoded by whole row groups, of which the last used are kept."""

    def __init__(self, files: Files, field: Field):
        self._parquet = _import("pyarrow.parquet", "pyarrow", "text")
        self._field = field
        self._group_ends: list[list[int]] = []
        self._cache: OrderedDict[tuple[int, int], Any] = OrderedDict()
        for _, path in files:
            with self._open(path) as file:
                self._check(path, file.schema_arrow)
                rows = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
            self._group_ends.append(list(accumulate(rows)))
        super().__init__(files, [ends[-1] if ends else 0 for ends in self._group_ends])

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[Any]:
        import pyarrow

        with reading(path):
            try:
                with self._parquet.ParquetFile(path) as file:
                    yield file
            except (pyarrow.ArrowInvalid, OSError) as e:
                if getattr(e, "errno", None) is not None:
                    raise
                raise UserError(f"{path} is not a Parquet file, or is damaged: {str(e).rstrip('.')}.") from e

    def _check(self, path: str, schema: Any) -> None:
        import pyarrow

        name, is_text = self._field.name, self._field.key == "text_field"
        if name not in schema.names:
            raise _no_field(path, self._field, schema.names)
        kind = schema.field(name).type
        if is_text and kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise UserError(f"{path}: column '{name}' holds {kind}, not text; set text_field.")

    def _read(self, file: int, k: int) -> Any:
        ends = self._group_ends[file]
        group = bisect_right(ends, k)
        row = k - (ends[group - 1] if group else 0)
        value = self._column(file, group)[row].as_py()
        return self._field.take(value, lambda: f"{self._paths[file]}: row {k}")

    def _column(self, file: int, group: int) -> Any:
        """The decoded column of a row group, from the cache where it is there."""
        if (column := self._cache.get((file, group))) is None:
            with self._open(self._paths[file]) as opened:
                column = opened.read_row_group(group, columns=[self._field.name]).column(0)
            self._cache[file, group] = column
            while len(self._cache) > 1 and sum(c.nbytes for c in self._cache.values()) > PARQUET_CACHE_BYTES:
                self._cache.popitem(last=False)
        self._cache.move_to_end((file, group))
        return column


class ArrayRecordSource(FileSource):
    """ArrayRecord: every record is a document in UTF-8."""

    def __init__(self, files: Files):
        grain = _import("grain", "grain", "train")
        self._readers = []
        for _, path in files:
            with reading(path), open(path, "rb"):  # the library's own errors do not tell these cases apart
                pass
            with _array_record(path):
                self._readers.append(grain.sources.ArrayRecordDataSource(path))
        super().__init__(files, [len(reader) for reader in self._readers])

    def _read(self, file: int, k: int) -> str:
        path = self._paths[file]
        with _array_record(path):
            record = self._readers[file][k]
        return decode_utf8(record, lambda i: f"{path}: record {k}: byte {i}")


@contextlib.contextmanager
def _array_record(path: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as e:
        raise UserError(f"{path} is not an ArrayRecord file, or is damaged: {e}.") from e


class HuggingFaceSource:
    """A dataset of the ``datasets`` package: a folder of save_to_disk, or a 'name' or 'name:configuration'.

    Of several splits 'train' is read.
    """

    def __init__(self, name: str, field: Field):
        datasets = _import("datasets", "datasets", "datasets")
        folder = os.path.expanduser(name)
        try:
            if os.path.isdir(folder):
                dataset = datasets.load_from_disk(folder)
                if isinstance(dataset, datasets.DatasetDict):
                    dataset = dataset["train"]
            else:
                repository, _, configuration = name.partition(":")
                dataset = datasets.load_dataset(repository, configuration or None, split="train")
        except KeyError as e:
            raise UserError(f"dataset_path = '{name}' has no split {e}.") from e
        except (OSError, ValueError) as e:  # not found, no network, unknown configuration or split
            code = ExitCode.INTERNAL if isinstance(e, ConnectionError) else ExitCode.USER
            raise UserError(f"dataset_path = '{name}' could not be loaded: {e}", code=code) from e
        if field.name not in dataset.column_names:
            raise _no_field(name, field, dataset.column_names)
        self._name, self._field, self._dataset = name, field, dataset
        self.files, self.sizes_bytes = [("", len(dataset))], ()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> Any:
        return self._field.take(self._dataset[i][self._field.name], lambda: f"{self._name}: row {i}")


def _import(module: str, package: str, extra: str) -> Any:
    try:
        return grain_import.load() if module == "grain" else importlib.import_module(module)
    except ImportError as e:
        raise UserError(f"this dataset needs the package {package}: pip install 'slicewise[{extra}]'.") from e


def _no_field(where: str, field: Field, known: Sequence[str]) -> UserError:
    shown = ", ".join(known) or "none"
    near = did_you_mean(field.name, known)
    return UserError(f"{where} has no field '{field.name}'.{near} Its fields: {shown}; set {field.key}.")


def _text(value: Any, where: Callable[[], str], field: str) -> str:
    """``value`` if it is text that has a UTF-8 form."""
    if not isinstance(value, str):
        raise UserError(f"{where()}: field '{field}' is {type(value).__name__}, not text; set text_field.")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise UserError(
            f"{where()}: character {e.start} of '{field}' is half a surrogate pair, not text."
        ) from e
    return value
