"""slicewise tune as a user runs it on a machine without an accelerator."""

import importlib.util
import json
import signal
import types

import jax
import pytest

from slicewise import cli
from slicewise.compile import compiler, kernels
from slicewise.compile.compiler import CompileFailed
from slicewise.config import load_config
from slicewise.errors import ExitCode
from slicewise.kernels import tuned
from slicewise.measure import timing
from slicewise.parallel import cluster
from slicewise.tune import compiled
from slicewise.tune.problems import REMAT

SMALL = ["model=demo-tiny", "sequence_length=128", "global_batch_size=8", "attention=xla_chunked"]


@pytest.fixture(autouse=True)
def in_this_process(tmp_path, monkeypatch):
    """With a table of its own, on one device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as JAX is configured already")
    monkeypatch.setattr(cluster, "initialize", lambda: None)
    monkeypatch.setattr(cluster, "found", lambda: cluster.by_slice(jax.devices()[:1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "kernles"], "--only kernles: expected some of kernels, flags, remat"),
        (["--only", ""], "--only '': expected some of kernels, flags, remat"),
        (["--write", "absent/run.toml"], "there is no folder"),
        (["--minutes", "soon"], "--minutes soon: expected"),
        (["--minutes", "0"], "--minutes 0: expected minutes above 0, such as 20"),
        (["--minutes", "20T"], "--minutes 20T: expected minutes above 0"),
        (["--chip", "v6e"], "absent slices need --chip and --topology"),
        (["--topology", "4x4"], "absent slices need --chip and --topology"),
        (["--slices", "2"], "--slices is for absent slices"),
        (["--chip", "h100", "--topology", "8"], "no compiler here makes programs for h100"),
        (["--chip", "v6e", "--topology", "3x3"], "v6e has no 3x3 slice"),
        (["remat_policy=most", "--only", "kernels"], "remat_policy = 'most'"),
    ],
)
def test_bad_input_is_a_sentence(arguments, message, capsys):
    assert cli.main(["tune", *arguments]) == ExitCode.USER
    assert message in capsys.readouterr().err


def test_says_so_where_nothing_can_be_tuned(capsys):
    assert cli.main(["tune", "--only", "kernels,flags,kernels"]) == ExitCode.DONE
    assert "nothing to tune: kernels and flags have no settings on cpu" in capsys.readouterr().out


def test_blocks_of_attention_are_timed_here_and_used_from_then_on(capsys, tmp_path):
    """128 tokens have one block only: one trial, and the same command again knows it."""
    for _ in range(2):
        assert cli.main(["tune", *SMALL, "--only", "kernels", "--json"]) == ExitCode.DONE
        found = json.loads(capsys.readouterr().out)
        assert [t["setting"] for t in found["trials"]] == ["128"]
        assert found["skipped"] == 0
    (entry,) = tuned.own()
    assert (entry.key.chip, entry.judge, entry.values) == ("cpu", "measured", {"block": 128})
    assert tuned.find(entry.key, ("block",)) == {"block": 128}


ABSENT = ["--chip", "v6e", "--topology", "4x4"]


def test_without_the_compiler_nothing_is_tried(monkeypatch, capsys):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else there(name))
    monkeypatch.setattr(kernels.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert cli.main(["tune", *ABSENT]) == ExitCode.USER
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "slicewise: the TPU compiler is not installed: pip install 'slicewise[compile]'.\n"


@pytest.fixture
def compiler_of_shell(tmp_path, monkeypatch):
    """A shell script instead of the process that compiles kernels, and no check of what is installed."""

    def become(script):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(kernels, "sys", types.SimpleNamespace(executable=str(path)))

    monkeypatch.setattr(compiler, "check", lambda request: None)
    monkeypatch.setattr("slicewise.cli.tune._check_packages", lambda found: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return become


def test_kernels_whose_compiler_is_killed_are_said_and_tried_again(compiler_of_shell, capsys):
    compiler_of_shell("kill -9 $$")
    command = ["tune", *ABSENT, "--only", "kernels"]
    for _ in range(2):
        assert cli.main(command) == ExitCode.INTERNAL
        shown = capsys.readouterr()
        assert "\nslicewise: no setting can be had of 2 that were tried; splash, v6e" in shown.err
        assert "SIGKILL" in shown.err
        assert shown.out.count("The same command tries it again.") == 2
    compiler_of_shell('while read l; do echo \'{"error": "vmem: too much"}\'; done')
    assert cli.main(command) == ExitCode.USER
    assert "exceeds VMEM: vmem: too much" in capsys.readouterr().err


def test_sigterm_removes_the_folder_of_the_compiler_as_ctrl_c_does(compiler_of_shell, tmp_path):
    compiler_of_shell("kill -TERM $PPID; exec sleep 60")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        cli.main(["tune", *ABSENT, "--only", "kernels"])
    assert left.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("slicewise-kernels-*"))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def steps(monkeypatch):
    """Seconds of a step by its policy, or what is raised; returns the policies that were asked for."""
    known, asked = {}, []

    def seconds(config, *_):
        asked.append(config.model.remat_policy)
        found = known.get(config.model.remat_policy, 2.0)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(timing, "step_seconds", seconds)
    return known, asked


def test_steps_that_were_timed_are_not_timed_again(steps, capsys):
    known, asked = steps
    command = ["tune", *SMALL, "remat_policy=none", "--only", "remat", "--json"]
    known[REMAT[2]] = KeyboardInterrupt()
    assert cli.main(command) == 130
    assert asked == ["none", *REMAT[:3]]
    del asked[:]
    known[REMAT[2]] = 1.0
    assert cli.main(command) == ExitCode.DONE
    assert asked == list(REMAT[2:])
    found = json.loads(capsys.readouterr().out)
    assert (len(found["trials"]), found["skipped"], found["step_s"]) == (1 + len(REMAT), 0, [2.0, 1.0])
    del asked[:]
    assert cli.main([*command, "sequence_length=64"]) == ExitCode.DONE  # another step
    assert len(asked) == 1 + len(REMAT)


def test_a_step_that_fails_is_a_word_in_the_table_and_a_line_below(steps, capsys):
    known, asked = steps
    known["full"] = jax.errors.JaxRuntimeError("INTERNAL: [/a/b] " + "long " * 40)
    known["minimal"] = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
    command = ["tune", *SMALL, "remat_policy=none", "--only", "remat"]
    assert cli.main(command) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.startswith("full"))
    assert row == ["full", "failed"]
    assert next(line.split() for line in lines if line.startswith("minimal ")) == [
        "minimal",
        "does",
        "not",
        "fit",
    ]
    assert any(line.startswith("remat policy full: INTERNAL: [/a/b] long long") for line in lines)
    del asked[:]
    assert cli.main(command) == ExitCode.DONE
    assert asked == ["full"]  # the memory is as it was, a failure may be over


def test_a_new_file_is_the_given_config_with_what_was_found(steps, tmp_path, capsys):
    steps[0]["full"] = 1.0
    path = tmp_path / "new.toml"
    given = ["tune", *SMALL, "remat_policy=none", "compiler_flags=scheduler,xla_a=1"]
    assert cli.main([*given[:-1], "--only", "remat", "--write", str(path)]) == ExitCode.DONE
    assert f"{path}: remat_policy=full\n" in capsys.readouterr().out
    expected = load_config(None, [*SMALL, "remat_policy=full"]).config
    assert load_config(str(path)).config == expected
    path.write_text("[run]\nseed = 3\n")
    assert cli.main([*given[:-1], "--only", "remat", "--write", str(path)]) == ExitCode.DONE
    assert load_config(str(path)).config == load_config(None, ["seed=3", "remat_policy=full"]).config


def test_flags_are_written_as_a_list(monkeypatch, tmp_path, capsys):
    def fake(request, **_):
        return request

    def judged(request):
        flags = request.config.compiler.compiler_flags
        memory = types.SimpleNamespace(total_bytes=2.0**30, limit_bytes=2.0**34)
        estimate = types.SimpleNamespace(step_time_s=1.0 if "layer-scheduler" in flags else 2.0)
        return types.SimpleNamespace(memory=memory, estimate=estimate, fits=True)

    monkeypatch.setattr(compiler, "check", lambda request: None)
    monkeypatch.setattr(compiled, "compile_request", fake)
    monkeypatch.setattr(compiled, "analyse", judged)
    path = tmp_path / "new.toml"
    command = ["tune", "model=llama3-8b", "--chip", "tpu7x", "--topology", "2x2x2", "--only", "flags"]
    assert cli.main([*command, "--write", str(path)]) == ExitCode.DONE
    assert f"{path}: compiler_flags=layer-scheduler" in capsys.readouterr().out
    assert 'compiler_flags = ["layer-scheduler"]' in path.read_text()
    assert load_config(str(path)).config.model.model == "llama3-8b"


def test_where_the_step_as_it_is_is_not_compiled_nothing_is_written(monkeypatch, tmp_path, capsys):
    def killed(request, **_):
        raise CompileFailed("the compiler crashed (signal 9). Its log: /a/log", code=ExitCode.INTERNAL)

    monkeypatch.setattr(compiler, "check", lambda request: None)
    monkeypatch.setattr(compiled, "compile_request", killed)
    path = tmp_path / "new.toml"
    assert cli.main(["tune", *ABSENT, "--only", "remat", "--write", str(path)]) == ExitCode.INTERNAL
    shown = capsys.readouterr()
    assert (
        "the step as it is was not judged, so no other is compared with it: the compiler crashed (signal 9)"
        in (shown.err)
    )
    assert f"{path}: not written" in shown.out
    assert not path.exists()
