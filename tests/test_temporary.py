"""Folders that go with their process, also with one that is killed."""

import errno
import fcntl
import subprocess
import sys
import tempfile

import pytest

from slicewise.temporary import LOCKED, temporary_folder

HOLDS = """
import sys
from slicewise.temporary import temporary_folder
with temporary_folder("slicewise-test-") as folder:
    (folder / "file").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Where temporary files of this process and of those that it starts are."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def holder():
    return subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_it_is_for_one_user_and_gone_at_the_end(disk):
    with temporary_folder("slicewise-test-") as folder:
        assert [*disk.iterdir()] == [folder]
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "below").mkdir()
    with pytest.raises(ZeroDivisionError), temporary_folder("slicewise-test-"):
        1 / 0  # noqa: B018
    assert [*disk.iterdir()] == []


def test_that_of_a_killed_process_is_removed_and_that_of_a_living_one_is_not(disk):
    with holder() as killed, holder() as living:
        names = [process.stdout.readline().strip() for process in (killed, living)]
        killed.kill()
        killed.wait()
        with temporary_folder("slicewise-test-") as own:
            assert {str(path) for path in disk.iterdir()} == {names[1], str(own)}
            assert (disk / names[1] / "file").read_text() == "x"
            with temporary_folder("slicewise-test-"):  # of this process too
                assert own.is_dir()
        living.communicate()
        assert living.returncode == 0
    assert [*disk.iterdir()] == []


def test_what_is_not_its_kind_is_left_alone(disk, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (disk / f"slicewise-test-link{LOCKED}").symlink_to(elsewhere)
    (disk / f"slicewise-test-file{LOCKED}").touch()
    (disk / "slicewise-test-never-locked").mkdir()
    (disk / f"slicewise-other-{LOCKED}").mkdir()
    before = {*disk.iterdir()}
    with temporary_folder("slicewise-test-"):
        pass
    assert {*disk.iterdir()} == before
    assert (elsewhere / "file").exists()


def test_where_there_are_no_locks_nobody_takes_one_in_use_for_left(disk, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refused)
        unlocked = temporary_folder("slicewise-test-")
        folder = unlocked.__enter__()
    with temporary_folder("slicewise-test-"):
        assert folder.is_dir()
    unlocked.__exit__(None, None, None)
    assert [*disk.iterdir()] == []
