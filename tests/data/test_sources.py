"""Every kind of source, from files written by the real libraries; each way they can be wrong."""

import json
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.data import sources
from slicewise.data.files import find_files
from slicewise.data.sources import TextSource, open_source, passage_bytes
from slicewise.errors import ExitCode, UserError


@pytest.fixture
def source(config):
    def make(dataset, path="", **keys):
        return open_source(config(dataset=dataset, dataset_path=path, **keys).data)

    return make


def documents(source):
    return [source[i] for i in range(len(source))]


@pytest.fixture
def corpus(tmp_path):
    """Three text files, one of them in a folder below, beside a hidden one."""
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden"):
        (tmp_path / name).write_text(f"text of {name}")
    return tmp_path


def test_the_default_is_the_text_of_the_standard_library(source):
    stdlib = source("python-stdlib")
    names = [name for name, _ in stdlib.files]
    assert names == sorted(names)
    assert {"ast.py", "json/decoder.py"} < set(names)
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "__pycache__"}
    assert len(stdlib) > 300
    assert 3e6 < sum(len(document) for document in documents(stdlib)) < 3e7


def test_a_directory_is_read_recursively_in_the_order_of_names(source, corpus):
    assert source("text", str(corpus)).files == [("a.txt", 1), ("b.txt", 1), ("deep/c.txt", 1)]
    assert documents(source("text", str(corpus)))[2] == "text of deep/c.txt"


@pytest.mark.parametrize(
    ("pattern", "found"), [("*.txt", ["a.txt", "b.txt"]), ("**/c*", ["deep/c.txt"]), ("b.txt", ["b.txt"])]
)
def test_a_glob_or_a_file_is_read(source, corpus, pattern, found):
    assert [name for name, _ in source("text", str(corpus / pattern)).files] == found


def test_names_do_not_depend_on_what_else_a_glob_finds(corpus):
    before = find_files("text", str(corpus / "**" / "c*"))
    (corpus / "c0.txt").write_text("new")
    assert set(before) < set(find_files("text", str(corpus / "**" / "c*")))


def test_an_empty_file_is_no_document(source, corpus):
    (corpus / "a.txt").write_text("")
    assert len(source("text", str(corpus))) == 2


@given(st.text(st.sampled_from("ab\n\u00e9\u4e2d\U0001f600"), max_size=300), st.integers(8, 40))
def test_passages_joined_are_the_file(tmp_path_factory, text, passage):
    path = tmp_path_factory.getbasetemp() / "passages.txt"
    path.write_bytes(text.encode())
    passages = documents(TextSource([("f", str(path))], passage))
    assert "".join(passages) == text
    assert all(passages)
    assert all(len(p.encode()) <= 1.5 * passage + 4 for p in passages)


def test_a_passage_ends_at_a_newline_where_one_is_near(source, tmp_path):
    (tmp_path / "long.txt").write_text("".join(f"line {i}\n" for i in range(50_000)))
    passages = documents(source("text", str(tmp_path / "long.txt")))
    assert len(passages) == -(-(tmp_path / "long.txt").stat().st_size // passage_bytes(256))
    assert all(p.endswith("\n") for p in passages)


@pytest.mark.parametrize("length", [1, 256, 2048, 2049, 131072])
def test_many_sequences_fit_in_a_passage(length):
    assert passage_bytes(length) >= 16 * length
    assert passage_bytes(length) == 4096 or length > 256


def test_json_lines_are_read_at_random_and_blank_lines_skipped(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SCAN_BYTES", 7)
    texts = ["one", "", "two\nlines", "\u00e9\u4e2d"]
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=False) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_bytes("\n".join([lines[0], "", *lines[1:]]).encode())
    (tmp_path / "b.jsonl").write_bytes("\r\n".join(["", *lines, "", ""]).encode())
    (tmp_path / "c.jsonl").write_bytes(b"")
    found = source("jsonl", str(tmp_path))
    assert found.files == [("a.jsonl", 4), ("b.jsonl", 4), ("c.jsonl", 0)]
    assert documents(found) == texts * 2
    assert documents(source("jsonl", str(tmp_path / "[ab].jsonl"))) == texts * 2
    assert found[6] == "two\nlines"


def write_parquet(path, columns, row_group_size=3):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_parquet_is_read_at_random_over_row_groups_and_files(source, tmp_path, monkeypatch, cache):
    monkeypatch.setattr(sources, "PARQUET_CACHE_BYTES", cache)
    texts = [f"document {i}" for i in range(10)]
    write_parquet(tmp_path / "a.parquet", {"id": list(range(7)), "text": texts[:7]})
    write_parquet(tmp_path / "b.parquet", {"text": pyarrow.array(texts[7:], pyarrow.large_string())})
    found = source("parquet", str(tmp_path))
    assert found.files == [("a.parquet", 7), ("b.parquet", 3)]
    assert [found[i] for i in (9, 0, 6, 2, 8, 0)] == [texts[i] for i in (9, 0, 6, 2, 8, 0)]
    assert len(found._cache) == (3 if cache else 1)


def write_array_record(path, records):
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def test_array_records_are_read_at_random(source, tmp_path):
    write_array_record(tmp_path / "x.array_record-00000-of-00002", [b"one", b"two"])
    write_array_record(tmp_path / "x.array_record-00001-of-00002", ["drei \u00e9".encode()])
    found = source("arrayrecord", str(tmp_path))
    assert [count for _, count in found.files] == [2, 1]
    assert documents(found) == ["one", "two", "drei \u00e9"]


def test_a_saved_hugging_face_dataset_is_read(source, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    one = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 2]})
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([0])}).save_to_disk(tmp_path / "split")
    datasets.DatasetDict({"test": one}).save_to_disk(tmp_path / "other")
    assert documents(source("huggingface", str(tmp_path / "one"))) == ["a", "b"]
    assert documents(source("huggingface", str(tmp_path / "split"))) == ["a", "b"]
    with pytest.raises(UserError, match="has no split 'train'"):
        source("huggingface", str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"no field 'body'.* Its fields: text, label; set text_field"):
        source("huggingface", str(tmp_path / "one"), text_field="body")
    with pytest.raises(UserError, match="row 0: field 'label' is int, not text"):
        documents(source("huggingface", str(tmp_path / "one"), text_field="label"))
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"could not be loaded: Directory .*none"):
        source("huggingface", str(tmp_path / "none"))


@pytest.mark.parametrize("dataset", ["text", "jsonl", "parquet", "arrayrecord"])
def test_a_path_that_is_missing_or_empty_is_refused(source, tmp_path, dataset):
    with pytest.raises(UserError, match="nowhere: No such file or directory") as error:
        source(dataset, str(tmp_path / "nowhere"))
    assert error.value.code == ExitCode.USER
    with pytest.raises(UserError, match=r"nowhere\*': the glob matches no file"):
        source(dataset, str(tmp_path / "nowhere*"))
    with pytest.raises(UserError, match="that directory has no file "):
        source(dataset, str(tmp_path))
    with pytest.raises(
        UserError, match=f"dataset = '{dataset}' needs dataset_path: a file, directory or glob"
    ):
        source(dataset)
    with pytest.raises(UserError, match="only local paths are read"):
        source(dataset, "gs://bucket/file")


def test_a_pipe_is_no_file(source, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a directory"):
        source("text", str(tmp_path / "pipe"))


def test_a_source_without_documents_is_refused(source, tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.jsonl").write_text("\n\n")
    write_parquet(tmp_path / "a.parquet", {"text": pyarrow.array([], pyarrow.string())})
    for dataset, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("parquet", "a.parquet")):
        with pytest.raises(UserError, match="holds no document"):
            source(dataset, str(tmp_path / name))


@pytest.mark.parametrize(("dataset", "name"), [("text", "a.gz"), ("jsonl", "a.jsonl.zst")])
def test_compressed_files_are_refused(source, tmp_path, dataset, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"is compressed.*decompress it first"):
        source(dataset, str(tmp_path / name))


def test_text_that_is_not_utf8_is_named_with_its_byte(source, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 20_000 + b"\xff" + b"line\n" * 20_000)
    with pytest.raises(UserError, match=r"a.txt: byte 100000 is not UTF-8 text"):
        documents(source("text", str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    "broken", [b"\x80" * 70_000, b"\xf0" * 70_000, b"a" * 65_534 + b"\xf0\x90" + b"a" * 9]
)
def test_bytes_that_are_not_utf8_are_found_also_where_a_passage_ends(source, tmp_path, broken):
    (tmp_path / "a.txt").write_bytes(broken)
    with pytest.raises(UserError, match=f"a.txt: byte {65_534 if broken[0] == 97 else 0} is not UTF-8 text"):
        documents(source("text", str(tmp_path / "a.txt")))


def test_a_file_that_became_shorter_is_noticed(source, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    text = source("text", str(tmp_path))
    (tmp_path / "a.txt").write_text("some")
    with pytest.raises(UserError, match="became shorter"):
        text[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", "a.jsonl:3 is not JSON: Expecting value"),
        (b"   ", "a.jsonl:3 is not JSON"),
        (b"[1]", "a.jsonl:3 is no JSON object but list"),
        (
            b'{"txt": "a", "id": 1}',
            r"a.jsonl:3 has no field 'text'. Did you mean 'txt'\? Its fields: txt, id; set",
        ),
        (b"{}", "a.jsonl:3 has no field 'text'. Its fields: none"),
        (b'{"text": 5}', "a.jsonl:3: field 'text' is int, not text"),
        (b'{"text": null}', "a.jsonl:3: field 'text' is NoneType, not text"),
        (b'{"text": "ab\\ud800"}', "a.jsonl:3: character 2 of 'text' is half a surrogate pair"),
        (b'{"text": "\xff"}', "a.jsonl:3: byte 25 is not UTF-8 text"),
    ],
)
def test_a_bad_json_line_is_named_with_its_number(source, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"ok"}\n\n' + line + b'\n{"text": "ok"}\n')
    with pytest.raises(UserError, match=message):
        documents(source("jsonl", str(tmp_path / "a.jsonl")))


def test_bad_parquet_is_named(source, tmp_path):
    path = tmp_path / "a.parquet"
    for content in (b"", b"text", b"PAR1" + b"x" * 100 + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a.parquet is not a Parquet file, or is damaged") as error:
            source("parquet", str(path))
        assert error.value.code == ExitCode.USER
        assert not str(error.value).endswith("..")
    write_parquet(path, {"body": ["a"], "n": [1]})
    with pytest.raises(UserError, match=r"a.parquet has no field 'text'. Its fields: body, n"):
        source("parquet", str(path))
    with pytest.raises(UserError, match="column 'n' holds int64, not text"):
        source("parquet", str(path), text_field="n")
    write_parquet(path, {"text": ["a", None]})
    with pytest.raises(UserError, match=r"a.parquet: row 1: field 'text' is NoneType, not text"):
        documents(source("parquet", str(path)))


def test_damage_inside_a_parquet_file_is_named(source, tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, {"text": [f"document {i}" for i in range(100)]}, row_group_size=100)
    found = source("parquet", str(path))
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.parquet is not a Parquet file, or is damaged"):
        documents(found)


def test_bad_array_records_are_named(source, tmp_path):
    path = tmp_path / "a.array_record"
    for content in (b"", b"text", os.urandom(200_000)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a.array_record is not an ArrayRecord file, or is damaged"):
            source("arrayrecord", str(path))
    write_array_record(path, [b"ok", b"no\xff"])
    with pytest.raises(UserError, match=r"a.array_record: record 1: byte 2 is not UTF-8"):
        documents(source("arrayrecord", str(path)))


@pytest.mark.parametrize("dataset", ["text", "jsonl", "parquet", "arrayrecord"])
def test_a_file_that_may_not_be_read_is_a_broken_environment(source, tmp_path, unprivileged, dataset):
    path = tmp_path / "secret"
    if dataset == "parquet":
        write_parquet(path, {"text": ["a"]})
    elif dataset == "arrayrecord":
        write_array_record(path, [b"a"])
    else:
        path.write_text('{"text": "a"}\n')
    source(dataset, str(path))  # with privileges it is fine; also imports what it needs
    path.chmod(0)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    with unprivileged(), pytest.raises(UserError, match="secret: Permission denied") as error:
        source(dataset, str(path))
    assert error.value.code == ExitCode.INTERNAL


def test_a_directory_that_may_not_be_read_is_a_broken_environment(source, corpus, unprivileged):
    (corpus / "deep").chmod(0)
    for folder in (corpus, *corpus.parents[:3]):
        folder.chmod(0o755)
    with unprivileged(), pytest.raises(UserError, match="deep: Permission denied") as error:
        source("text", str(corpus))
    assert error.value.code == ExitCode.INTERNAL
    (corpus / "deep").chmod(0o755)


@pytest.mark.parametrize(
    ("dataset", "package", "extra"),
    [
        ("parquet", "pyarrow", "text"),
        ("arrayrecord", "grain", "train"),
        ("huggingface", "datasets", "datasets"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(source, tmp_path, monkeypatch, dataset, package, extra):
    (tmp_path / "a").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=rf"needs the package {package}: pip install 'slicewise\[{extra}\]'"):
        source(dataset, str(tmp_path / "a"))


def test_a_document_out_of_range_is_an_index_error(source, corpus):
    for i in (-1, 3):
        with pytest.raises(IndexError):
            source("text", str(corpus))[i]
