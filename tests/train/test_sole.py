import subprocess
import sys
import time

import pytest

from slicewise.errors import ExitCode, UserError
from slicewise.train.sole import HELD, sole

HOLDS = """
import pathlib, sys, time
from slicewise.train.sole import sole
with sole(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "runs/a"
    with sole(folder, {}):
        with (
            pytest.raises(UserError, match="another process is training in .*runs/a") as error,
            sole(folder, {}, wait_s=0),
        ):
            pass
        assert error.value.code == ExitCode.CONFLICT
        with sole(tmp_path / "runs/b", {}, wait_s=0):
            pass
    with sole(folder, {}, wait_s=0):
        pass


def test_processes_of_the_same_run_and_attempts_of_a_job_share_it(tmp_path):
    with sole(tmp_path, {}) as added:
        with sole(tmp_path, added, wait_s=0):
            pass
        with sole(tmp_path, {"SLICEWISE_ATTEMPT": "2"}, wait_s=0):
            pass
    assert set(added) == {HELD}


def test_a_run_that_is_killed_lets_go_and_one_that_is_ending_is_waited_for(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(UserError), sole(tmp_path, {}, wait_s=0.2):
                pass
        finally:
            holder.kill()
        since = time.monotonic()
        with sole(tmp_path, {}):
            assert time.monotonic() - since < 5


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match="file/run.* cannot be written: Not a directory") as error,
        sole(tmp_path / "file/run", {}),
    ):
        pass
    assert error.value.code == ExitCode.INTERNAL
