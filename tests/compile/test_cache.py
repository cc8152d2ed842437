"""What the cache of compiled programs holds is whole, or is made again."""

import ast
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from slicewise.catalog import slices
from slicewise.compile import compiler
from slicewise.compile.compiler import CompileFailed, Request, compile_request
from slicewise.config import load_config
from slicewise.train import identity


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """Compiling leaves three small files in a cache of the test's own; returns what was compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = []

    def run(child, timeout_s, memory_limit_bytes):
        done.append(child.request)
        for suffix in (
            ".after_optimizations.txt",
            ".after_optimizations-buffer-assignment.txt",
            "live-range.txt",
        ):
            (child.dump / f"module_0000.jit_update.x{suffix}").write_text("HloModule")
        if child.request.serialize:
            (child.work / compiler.EXECUTABLE).write_bytes(bytes(100))
        (child.work / "facts.json").write_text("{}")
        return {"module": "jit_update", "out_of_memory": None}

    monkeypatch.setattr(compiler._Child, "run", run)
    monkeypatch.setattr(compiler, "check", lambda request: None)
    return done


@pytest.fixture
def request_():
    return Request(load_config(None, ["model=demo-tiny"]).config, slices.cluster("v5e:2x2"))


def test_the_same_request_is_compiled_once(compiles, request_):
    first = compile_request(request_)
    assert not first.from_cache
    assert first.text("scheduled.hlo") == "HloModule"
    assert request_.is_cached
    assert compile_request(request_).from_cache
    assert len(compiles) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("facts.json", ""),
        ("facts.json", "{}"),
        ("facts.json", '{"mesh": {"da'),
        ("facts.json", None),
        ("scheduled.hlo.gz", ""),
        ("buffers.txt.gz", None),
        ("live_ranges.txt.gz", "garbage"),
    ],
)
def test_a_damaged_entry_is_made_again(compiles, request_, name, content):
    path = compile_request(request_).directory / name
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert not request_.is_cached
    again = compile_request(request_)
    assert len(compiles) == 2
    assert again.text("scheduled.hlo") == "HloModule"
    assert sorted(p.name for p in again.directory.parent.glob(f"{request_.key}*")) == [request_.key]


@pytest.mark.parametrize("size", [None, 0, 60])
def test_an_executable_of_which_a_part_is_missing_is_made_again(compiles, request_, size):
    request = replace(request_, depth="full", serialize=True)
    path = compile_request(request).directory / compiler.EXECUTABLE
    path.unlink()
    if size is not None:
        path.write_bytes(bytes(size))
    assert not request.is_cached
    assert (compile_request(request).directory / compiler.EXECUTABLE).stat().st_size == 100
    assert len(compiles) == 2


def test_an_entry_is_whole_before_it_has_its_name(compiles, request_):
    kept = compile_request(request_).directory
    sizes = json.loads((kept / "facts.json").read_text())["sizes"]
    assert set(sizes) == {"scheduled.hlo.gz", "buffers.txt.gz", "live_ranges.txt.gz"}
    assert all(gzip.decompress((kept / n).read_bytes()) for n in sizes)


# Of costs: what train counts, says and refuses, not what it builds.
ONLY_MEASURES = {"columns.py", "experts.py", "flops.py", "scales.py", "shapes.py", "units.py"}


def test_a_change_of_any_rule_that_shapes_a_program_makes_it_again():
    source = Path(compiler.__file__).parents[1]
    used = set()
    for folder in identity.SOURCES:
        for path in (source / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ImportFrom):
                    continue
                if node.module == "slicewise.costs":
                    used |= {f"{alias.name}.py" for alias in node.names}
                elif (node.module or "").startswith("slicewise.costs."):
                    used.add(node.module.rpartition(".")[2] + ".py")
    assert used - ONLY_MEASURES == {*identity.RULES}


def test_a_schedule_is_kept_as_it_was_when_the_compiler_was_stopped(tmp_path, monkeypatch, request_):
    """It may be about to write the same files anew, for what it offloads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "check", lambda request: None)

    def run(child, timeout_s, memory_limit_bytes):
        (child.work / "facts.json").write_text('{"module": "jit_update"}')
        files = {
            suffix: child.dump / f"module_0000.jit_update.x.after_optimizations{suffix}"
            for suffix in ("-live-range.txt", "-buffer-assignment.txt", ".txt")
        }
        for suffix, text in (("-live-range.txt", "ranges"), (".txt", "HloModule x\n\nENTRY %m {\n}\n")):
            files[suffix].write_text(text)
        files["-buffer-assignment.txt"].write_text("")
        assert not child._schedule_is_there()
        files["-buffer-assignment.txt"].write_text("buffers")
        assert child._schedule_is_there()
        files["-buffer-assignment.txt"].write_text("")
        return {"module": "jit_update", "out_of_memory": None}

    monkeypatch.setattr(compiler._Child, "run", run)
    assert compile_request(request_).text("buffers.txt") == "buffers"


def test_a_compile_that_failed_leaves_its_log_until_nobody_wants_it(compiles, request_, monkeypatch):
    def run(child, timeout_s, memory_limit_bytes):
        child.log.write_text("said")
        raise CompileFailed(f"Its log: {child.log}")

    monkeypatch.setattr(compiler._Child, "run", run)
    with pytest.raises(CompileFailed) as failed:
        compile_request(request_)
    assert Path(str(failed.value).removeprefix("Its log: ")).read_text() == "said"
    failed.value.forget()
    assert not any(compiler.cache_directory().iterdir())
