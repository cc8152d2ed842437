"""slicewise compile as a user runs it: one small step is really compiled. Total time: fifteen seconds of one core."""

import contextlib
import dataclasses
import gzip
import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from slicewise import cli
from slicewise.cli import compile_more
from slicewise.compile.analysis import analyse
from slicewise.config import load_config, with_overrides
from slicewise.errors import ExitCode, UserError

TINY = ["compile", "model=demo-tiny", "sequence_length=256", "global_batch_size=8"]
HERE = ["--chip", "v5e", "--topology", "2x2"]

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="no TPU compiler here: pip install 'slicewise[compile]'",
)


@pytest.fixture
def refused(capsys, program_cache):
    """Runs a command that must fail and gives its code and its one line."""

    def run(*arguments):
        code = cli.main([*TINY, *arguments])
        said = capsys.readouterr()
        assert said.out == ""
        (line,) = said.err.splitlines()
        return code, line.removeprefix("slicewise: ")

    return run


@pytest.mark.aot
@needs_compiler
def test_a_restore_brings_each_part_to_its_hosts(capsys, program_cache):
    layout = ["ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "dcn_data_parallelism=2"]
    where = ["--chip", "v5e", "--topology", "4x2", "--slices", "2"]
    assert cli.main([*TINY, *layout, *where, "--program", "restore", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_name = {a["name"]: a for a in found["arrays"]}
    up, norm = by_name["params.layers.w_up"], by_name["params.final_norm.scale"]
    layers, d_model, d_ff = up["shape"]
    assert up["axes"] == [[], ["fsdp"], ["tensor"]]
    assert up["part"] == [layers, d_model // 4, d_ff // 2]
    assert (up["copies"], norm["copies"]) == (2, 16)  # once a slice; on every device
    assert up["host_bytes"] * found["hosts"] == 2 * up["bytes"]
    assert norm["host_bytes"] == norm["bytes"] == norm["part_bytes"]
    assert found["total_bytes"] == sum(a["bytes"] for a in found["arrays"])


@pytest.mark.aot
@pytest.mark.slow
@needs_compiler
def test_a_step_is_compiled_once_told_and_written(capsys, program_cache, tmp_path):
    trace, page = tmp_path / "plugins/profile/run/step.json.gz", tmp_path / "step.html"
    assert cli.main([*TINY, *HERE, "--trace", str(trace), "--html", str(page)]) == 0
    said = capsys.readouterr()
    assert "demo-tiny on 1 x v5e 2x2 (4 chips): a training step, 2,048 tokens" in said.out
    assert "It fits: " in said.out
    assert "Compiling took " in said.out
    assert said.err == f"wrote {trace}\nwrote {page}\n"
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert "Predicted timeline" in page.read_text()

    start = time.process_time()
    assert cli.main([*TINY, *HERE, "--json"]) == 0
    assert time.process_time() - start < 3
    found = json.loads(capsys.readouterr().out)
    assert found["compiling"]["from_cache"]
    assert found["depth"] == "schedule"
    assert {r["part"] for r in found["seconds"]} >= {"attention", "mlp", "output", "optimizer"}
    assert all(b["source"] or b["op_name"] for b in found["memory"]["largest"])


@pytest.fixture
def kept(monkeypatch, compiled):
    """Takes what the compiler left of a small step for whatever is asked."""

    def take(name):
        monkeypatch.setattr("slicewise.compile.compiler.compile_request", lambda *_, **__: compiled(name))

    return take


def test_what_does_not_fit_is_the_users_to_mend(kept, capsys):
    kept("too_large_v5e")
    assert cli.main([*TINY, *HERE]) == 2
    assert "It does not fit: " in capsys.readouterr().out
    assert cli.main([*TINY, *HERE, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False


def test_other_programs_are_shown_without_a_plan(kept, capsys):
    kept("tiny_v5e_decode")
    assert cli.main([*TINY, *HERE, "--program", "decode"]) == 0
    out = capsys.readouterr().out
    assert "a decode step, 8 tokens" in out
    assert "The planner prices training steps, and no decode." in out


def test_json_stands_alone_on_standard_output_beside_a_check(kept, monkeypatch, capsys, tmp_path, compiled):
    kept("tiny_v5e")
    request = compiled("tiny_v5e").request
    monkeypatch.setattr("slicewise.compile.compiler.Request", lambda *_: request)
    asked = [*TINY, *HERE, "--json", "--check", str(tmp_path / "result.json")]
    for end in ("holds this result from now on.", "as good as "):
        assert cli.main(asked) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["fits"]
        assert end in said.err


def test_a_stored_result_is_refused_before_anything_is_compiled(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("slicewise.compile.compiler.compile_request", None)
    (path := tmp_path / "result.json").write_text("{")
    code, line = refused(*HERE, "--check", str(path))
    assert code == 2
    assert "none of slicewise compile --check" in line


def test_what_is_kept_and_damaged_is_said_with_its_folder(compiled, tmp_path):
    whole = compiled("tiny_v5e")
    damaged = dataclasses.replace(whole, directory=shutil.copytree(whole.directory, tmp_path / "program"))
    text = damaged.directory / "buffers.txt.gz"
    text.write_bytes(text.read_bytes()[:-9] + b"123456789")
    with pytest.raises(UserError, match=rf"{damaged.directory} is damaged: .* delete that folder") as raised:
        analyse(damaged)
    assert raised.value.code == ExitCode.INTERNAL


def test_a_new_file_holds_the_config_that_was_given_with_the_layout_that_was_found(tmp_path):
    (given := tmp_path / "run.toml").write_text(
        "[optimizer]\nlearning_rate = 0.5\n[data]\nsequence_length = 384\n"
    )
    loaded = load_config(str(given), ["model=demo-tiny", "remat_policy=full"])
    path = tmp_path / "best.toml"
    said = compile_more.write_found(str(path), loaded, {"remat_policy": "minimal"}, "fsdp 4", "Found.")
    assert said == f"{path}: fsdp 4"
    written = load_config(str(path)).config
    assert written == with_overrides(loaded.config, ["remat_policy=minimal"])
    compile_more.write_found(str(tmp_path / "same.toml"), loaded, {}, "as given", "Found.")
    assert load_config(str(tmp_path / "same.toml")).config == loaded.config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chip", "v5e", "--topology", "2x3"], ["v5e has no 2x3 slice", "nearest"]),
        (["--chip", "h100", "--topology", "8"], ["no compiler here makes programs for h100", "v5p"]),
        (["--chip", "v3", "--topology", "4x4"], ["no compiler here makes programs for v3"]),
        (["--chip", "v5q", "--topology", "4x4"], ["v5q", "Did you mean"]),
        ([*HERE, "--slices", "0"], ["--slices 0"]),
        ([*HERE, "ici_fsdp_parallelism=3"], ["multiply to 3", "4 devices per slice"]),
        ([*HERE, "--slices", "2", "dcn_data_parallelism=3"], ["multiply to 3", "2 slices"]),
        (
            ["--chip", "v5p", "--topology", "4x4x4", "model=demo-tiny"],
            ["parallelism 64 leaves a device one column", "use 32 and 2 of data"],
        ),
        ([*HERE, "--timeout", "soon"], ["--timeout soon", "30d"]),
        ([*HERE, "--memory-limit", "much"], ["--memory-limit much", "2GiB"]),
        ([*HERE, "--trace", "trace.txt"], ["--trace trace.txt", ".json.gz"]),
        ([*HERE, "stepz=3"], ["unknown key 'stepz'"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(refused, monkeypatch, arguments, words):
    monkeypatch.setattr("subprocess.Popen", None)
    code, line = refused(*arguments)
    assert code == 2
    assert all(word in line for word in words), line


def test_without_the_compiler_it_says_what_to_install(refused, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "libtpu" else found(name, *rest)
    )
    code, line = refused(*HERE)
    assert code == 2
    assert line == "the TPU compiler is not installed: pip install 'slicewise[compile]'."


@pytest.mark.aot
@needs_compiler
def test_a_model_that_cannot_be_divided_is_refused_by_the_step_itself(refused):
    code, line = refused(*HERE, "ici_tensor_parallelism=4")
    assert code == 2
    assert line.startswith("tensor parallelism 4 does not divide kv_heads = 2 of demo-tiny")


def log_of(line):
    """The log that a message names."""
    return Path(line.partition("Its log: ")[2])


@pytest.mark.aot
@needs_compiler
@pytest.mark.parametrize(
    ("limit", "why"),
    [
        (["weight_decay=0.21", "--timeout", "0.1"], "took longer than 0.1 s. Its log: "),
        (["weight_decay=0.22", "--memory-limit", "20MB"], "used more than "),
    ],
)
def test_a_compile_that_passes_a_limit_is_stopped(refused, limit, why):
    code, line = refused(*HERE, *limit)
    assert code == 1
    assert line.startswith(f"the compiler was stopped: it {why}")
    assert log_of(line).exists()
    assert not children()


@pytest.mark.aot
@needs_compiler
def test_a_killed_compiler_is_a_crash_and_leaves_its_log(refused):
    ended = threading.Event()

    def kill():
        while not ended.wait(0.02):
            for pid in children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        code, line = refused(*HERE, "weight_decay=0.23")
    finally:
        ended.set()
        killer.join()
    assert code == 1
    assert line.startswith("the compiler crashed (signal 9). Its log: ")
    assert log_of(line).exists()


def children():
    """Compiling processes that this process started and has not reaped."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"slicewise.compile.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


def test_the_cache_that_cannot_be_made_is_the_environments_fault(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("slicewise.compile.compiler.check", lambda request: None)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.main([*TINY, *HERE]) == 1
    assert "set XDG_CACHE_HOME to a place that can be written" in capsys.readouterr().err


def test_the_page_without_plotly_says_what_to_install(kept, monkeypatch, tmp_path):
    kept("tiny_v5e_decode")
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    arguments = cli._parser().parse_args([*TINY, *HERE, "--html", str(tmp_path / "p.html")])
    with pytest.raises(UserError, match=r"slicewise\[report\]"):
        arguments.verb(arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--search", "--check", "a.json"], ["--check does not go with --search"]),
        (["--search", "--trace", "a.json"], ["--trace does not go with --search"]),
        (["--search", "--depth", "full"], ["--depth full does not go with --search"]),
        (["--depth", "schedule", "--serialize", "a.bin"], ["--depth schedule does not go with --serialize"]),
        (["--search", "--write", __file__], ["config file", "is not TOML"]),
        (["--trace", f"{__file__}/a.json"], ["there is no folder", "make it"]),
        (["--html", "a" * 300], ["--html aaa", "File name too long"]),
        (["--write", "a.toml"], ["--write", "add --search"]),
        (["--fix", "--check", "a.json"], ["--fix does not go with --check"]),
        (["--fix", "--program", "decode"], ["--fix is for --program update"]),
        (["--check", ""], ["--check ''", "expected the path of a file"]),
        (["--serialize", "absent/step.bin"], ["there is no folder", "absent"]),
        (["--slices", "100000"], ["100000 slices", "at most 256"]),
    ],
)
def test_options_that_mean_nothing_together_are_refused_before_compiling(refused, options, words):
    code, line = refused(*HERE, *options)
    assert code == 2
    assert all(word in line for word in words), line


def test_an_executable_that_is_no_longer_kept_is_said_with_its_folder(compiled_step, program_cache, tmp_path):
    with pytest.raises(UserError, match=rf"kept in {program_cache}.* No such file .* delete that folder"):
        compile_more.save_executable(compiled_step("tiny_v5e"), str(tmp_path / "step.bin"))
