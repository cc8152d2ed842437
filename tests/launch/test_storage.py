import os
import threading

import pytest

from slicewise.errors import ExitCode, UserError
from slicewise.launch.storage import StorageError, create_json, open_folder, read_json, write_json


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path):
    if request.param == "disk":
        return open_folder(str(tmp_path / "folder"))
    pytest.importorskip("fsspec")
    root = f"memory://{tmp_path.name}"
    return open_folder(root)


def test_what_is_written_is_read_whole_and_replaced_whole(folder):
    assert read_json(folder, "a/b.json") is None
    write_json(folder, "a/b.json", {"x": 1})
    write_json(folder, "a/b.json", {"y": [2]})
    assert read_json(folder, "a/b.json") == {"y": [2]}
    assert folder.names("a") == ["b.json"]
    assert folder.exists("a/b.json")
    assert not folder.exists("a/c.json")
    folder.remove("a/b.json")
    folder.remove("a/b.json")
    assert folder.read("a/b.json") is None
    assert folder.names("none") == []


def test_reading_may_begin_in_the_middle(folder):
    folder.write("log", b"0123456789")
    assert folder.read("log", 7) == b"789"
    assert folder.read("log", 10) == b""
    assert folder.read("log") == b"0123456789"


def test_of_several_that_create_a_document_one_succeeds_and_its_content_stays(folder):
    winners, ready = [], threading.Barrier(8)

    def create(number):
        ready.wait()
        if create_json(folder, "claim.json", {"holder": number}):
            winners.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "://" in folder.root:  # the memory filesystem checks and writes in two steps
        assert winners
    else:
        assert len(winners) == 1
        assert read_json(folder, "claim.json") == {"holder": winners[0]}
    assert create_json(folder, "claim.json", {"holder": "late"}) is False
    assert folder.names("") == ["claim.json"]


def test_a_document_that_is_none_is_refused_with_its_place(folder):
    for text in (b"{", b"[1]", b""):
        folder.write("x.json", text)
        with pytest.raises(StorageError, match=r"x\.json is damaged"):
            read_json(folder, "x.json")


def test_names_cannot_lead_out_of_the_folder(folder):
    for name in ("../x", "a/../../x", "/etc/passwd"):
        with pytest.raises(AssertionError):
            folder.read(name)


def test_files_on_disk_are_for_their_owner_only(tmp_path):
    folder = open_folder(str(tmp_path))
    folder.write("x", b"")
    folder.create("y", b"")
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "xy"} == {0o600}


def test_a_disk_that_refuses_is_an_error_of_the_environment(tmp_path):
    (tmp_path / "file").write_text("")
    folder = open_folder(str(tmp_path / "file" / "below"))
    with pytest.raises(StorageError, match="cannot write .*file/below/x: Not a directory") as refused:
        folder.write("x", b"")
    assert refused.value.code == ExitCode.INTERNAL


def test_a_bucket_of_an_unknown_kind_is_refused_at_once():
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match="gopher://x"):
        open_folder("gopher://x")


def test_a_bucket_that_fails_says_what_it_could_not_do():
    fsspec = pytest.importorskip("fsspec")
    folder = open_folder("memory://broken")

    def fail(*arguments, **options):
        raise RuntimeError("503 backend error\nmore")

    folder._fs = type(
        "Broken", (), {name: staticmethod(fail) for name in ("cat_file", "pipe_file", "ls", "exists")}
    )()
    assert fsspec
    for act in (lambda: folder.read("x"), lambda: folder.write("x", b""), lambda: folder.names("x")):
        with pytest.raises(StorageError, match="memory://broken/x: 503 backend error"):
            act()
    assert os.sep == "/"
