"""What the verbs run and preflight refuse before they connect to anything."""

import sys

import pytest

from slicewise import cli
from slicewise.errors import ExitCode

INVENTORY = "[[slices]]\nhosts = ['127.0.0.1:1']\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.toml").write_text(INVENTORY)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--on", "hosts.toml"], "no command: expected slicewise run --on TARGET -- PROGRAM"),
        (["run", "--on", "hosts.toml", "--"], "no command"),
        (["run", "--on", "none.toml", "--", "true"], "no inventory file 'none.toml'"),
        (["run", "--on", "emulator:", "--", "true"], "has no name"),
        (["run", "--on", "hosts.toml", "--show", "7", "--", "true"], "expected all, or a worker from 0 to 0"),
        (["run", "--on", "hosts.toml", "--env", "a b=c", "--", "true"], "--env 'a b=c'"),
        (["run", "--on", "hosts.toml", "--name", "..", "--", "true"], "--name '..'"),
        (["run", "--on", "hosts.toml", "--python", "a;b", "--", "true"], "--python 'a;b' is not a program"),
        (["preflight", "--on", "hosts.toml", "--chip", "v5q"], "v5q"),
        (["preflight", "--on", "hosts.toml", "--devices", "-1"], "--devices -1"),
    ],
)
def test_wrong_input_is_refused_in_a_line(capsys, arguments, message):
    assert cli.main(arguments) == ExitCode.USER
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "preflight"])
def test_without_asyncssh_it_says_what_to_install(capsys, monkeypatch, verb):
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    assert cli.main([verb, "--on", "hosts.toml", *(["--", "true"] if verb == "run" else [])]) == ExitCode.USER
    assert "pip install 'slicewise[ssh]'" in capsys.readouterr().err


def test_a_folder_for_logs_that_was_there_is_left_as_it_was(folder):
    assert (
        cli.main(["run", "--on", "hosts.toml", "--logs", ".", "--env", "no value", "--", "true"])
        == ExitCode.USER
    )
    assert not (folder / ".gitignore").exists()
    from slicewise.launch.runner.run import _log_folder

    _log_folder(folder, "one")
    assert not (folder / ".gitignore").exists()
    _log_folder(folder / "new", "one")
    assert (folder / "new" / ".gitignore").read_text() == "*\n"
