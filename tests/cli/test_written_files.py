"""One rule for every file that an option names: a wrong path is the user's to mend, all else the environment's."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from slicewise import cli
from slicewise.errors import ExitCode, cannot_write
from slicewise.train.goodput_log import append

TRAIN = "plan --model llama3-8b --chip v5p --topology 4x4x4 --seq 8k --batch-tokens 4M"
SERVE = "plan serve --model llama3.1-8b --chip v5e --prompt 8k --output 512 --latency-ms 30"
GOODPUT = "plan goodput --chip v5p --topology 8x8x8 --slices 4 --host-mtbf 2y --checkpoint-time 30s"
GOODPUT += " --restart-time 5min --step-time 1s"
COMPILE = "compile model=demo-tiny sequence_length=256 global_batch_size=8 --chip v5e --topology 2x2"
COMMANDS = [
    f"{TRAIN} --html FILE.html",
    f"{SERVE} --html FILE.html",
    f"{GOODPUT} --html FILE.html",
    "goodput RUN --html FILE.html",
    f"{COMPILE} --html FILE.html",
    f"{COMPILE} --trace FILE.json",
    f"{COMPILE} --trace FILE.xplane.pb",
    f"{COMPILE} --check FILE.json",
    f"{COMPILE} --serialize FILE.bin",
    f"{TRAIN} --write FILE.toml",
    f"{GOODPUT} --write FILE.toml",
]


@pytest.fixture
def run(monkeypatch, compiled, tmp_path, capsys):
    """Runs a command, with what the compiler left of a small step for whatever it compiles."""
    found = compiled("tiny_v5e")
    monkeypatch.setattr("slicewise.compile.compiler.compile_request", lambda *_, **__: found)
    monkeypatch.setattr("slicewise.compile.compiler.cache_directory", lambda: tmp_path / "cache")
    (tmp_path / "cache" / found.request.key).mkdir(parents=True)
    (tmp_path / "cache" / found.request.key / "executable").write_bytes(b"code")
    append(tmp_path / "run", {"at": 1, "by": "trainer", "start": "a", "state": "imports"})

    def run(command):
        code = cli.main(cli._joined(command.replace("RUN ", f"{tmp_path}/run ").split()))
        return code, capsys.readouterr().err

    return run


def option(command):
    return command.split()[-2]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.split()[:2]) + option(c))
def test_a_path_that_cannot_be_is_wrong_input(run, tmp_path, command):
    (tmp_path / "file").write_text("")
    missing = [] if option(command) == "--trace" else ["missing"]  # a trace makes its folder
    for folder in ("file", *missing):
        code, said = run(command.replace("FILE", f"{tmp_path}/{folder}/x"))
        assert code == ExitCode.USER, said
        assert f"{tmp_path}/{folder}/x" in said
        assert len(said.splitlines()) == 1, said
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="needs a folder in which nobody can make files")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.split()[:2]) + option(c))
def test_a_place_that_cannot_be_written_is_the_environments_fault(run, tmp_path, monkeypatch, command):
    target = "/sys/x"
    if option(command) == "--write":  # a config that is there, on a disk that is full
        (tmp_path / "x.toml").write_text("[run]\nsteps = 3\n")
        target = str(tmp_path / "x")

        def full(**_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(tempfile, "mkstemp", full)
    code, said = run(command.replace("FILE", target))
    assert code == ExitCode.INTERNAL, said
    assert f"{target}." in said
    assert "cannot be written: " in said


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.split()[:2]) + option(c))
def test_a_file_that_was_there_is_whole_after_a_disk_was_full(run, tmp_path, monkeypatch, command):
    words = command.replace("FILE", f"{tmp_path}/x")
    target = Path(words.split()[-1])
    if option(command) != "--check":  # a result that is there is compared, and not written
        target.write_text("[run]\nsteps = 3\n")
    before = {path.name for path in tmp_path.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    code, said = run(words)
    assert code == ExitCode.INTERNAL
    assert f"{target} cannot be written: No space left on device." in said
    assert {path.name for path in tmp_path.iterdir()} == before
    assert option(command) == "--check" or target.read_text() == "[run]\nsteps = 3\n"


def test_what_is_no_file_is_written_as_it_comes(run):
    assert run(f"{GOODPUT} --html /dev/null") == (ExitCode.DONE, "wrote /dev/null\n")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOENT, ExitCode.USER),
        (errno.EISDIR, ExitCode.USER),
        (errno.ENAMETOOLONG, ExitCode.USER),
        (errno.EACCES, ExitCode.INTERNAL),
        (errno.EROFS, ExitCode.INTERNAL),
        (errno.ENOSPC, ExitCode.INTERNAL),
        (errno.EDQUOT, ExitCode.INTERNAL),
        (errno.EIO, ExitCode.INTERNAL),
    ],
)
def test_the_path_is_to_blame_or_the_place(number, code):
    error = cannot_write("--html a.html", OSError(number, os.strerror(number)))
    assert (error.code, str(error)) == (code, f"--html a.html cannot be written: {os.strerror(number)}.")
