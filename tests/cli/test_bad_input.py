"""What a user meets when something is wrong: one or two lines that say what to change, and the right exit code."""

import os
import shutil
import subprocess
import sys

import pytest

from slicewise.checkpoint.manifest import complete_steps
from slicewise.errors import ExitCode

TINY = ["model=demo-tiny", "sequence_length=32", "global_batch_size=4", "steps=4", "tensorboard=false"]
QUICK = [*TINY, "dataset=synthetic", "checkpoint_every=2", "eval_batches=0", "compute_dtype=float32"]


def slicewise(directory, *arguments):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(directory / ".compiled"),
    }
    command = [sys.executable, "-m", "slicewise", *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )


def refused(done, code, *words):
    """Asserts the exit code and a short message with ``words`` and no traceback; returns the message."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("slicewise: ")]
    assert done.returncode == code, done.stdout + done.stderr
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) <= 3, done.stderr
    return lines[0]


@pytest.fixture(scope="module")
def module_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("bad-input")


@pytest.fixture(scope="module")
def finished(module_directory):
    """A folder with one good run."""
    done = slicewise(module_directory, "train", *QUICK)
    assert done.returncode == 0, done.stderr
    return module_directory


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.toml"], ["none.toml", "No such file"]),
        (["stepz=3"], ["unknown key 'stepz'", "Did you mean 'steps'"]),
        (["steps=lots"], ["steps = 'lots'", "valid integer"]),
        (["--local", "2x2"], ["2x2"]),
        (["--local", "0x1x1"], ["0x1x1"]),
        (["--local", "2x2x2", "ici_fsdp_parallelism=3"], ["multiply to 3", "4 devices per slice"]),
        (["--local", "2x1x2", "dcn_data_parallelism=3"], ["multiply to 3", "2 slices"]),
    ],
)
def test_refused_before_any_device_is_touched(tmp_path, arguments, words):
    refused(slicewise(tmp_path, "train", *arguments), ExitCode.USER, *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=demo-tny"], ["unknown model 'demo-tny'", "Did you mean 'demo-tiny'"]),
        (["model=mixtral-8x7b"], ["mixture-of-experts", "dense model"]),
        (["dataset=text", "dataset_path=nowhere"], ["nowhere", "No such file"]),
        (["dataset=text", "dataset_path=empty"], ["empty"]),
        (
            ["dataset=text", "dataset_path=short.txt", "held_out_fraction=0"],
            ["fewer than one batch", "4 x 32 = 128"],
        ),
        (["dataset=jsonl", "dataset_path=bad.jsonl", "held_out_fraction=0"], ["bad.jsonl", "2"]),
        (["dataset=text", "dataset_path=short.txt", "tokenizer=large.json"], ["large.json"]),
        (["learning_rate=1e30", "gradient_clip_norm=0"], ["at step", "lower learning_rate"]),
    ],
)
def test_refused_with_what_to_change(tmp_path, overrides, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("far too short")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "large.json").write_text("{}")
    refused(slicewise(tmp_path, "train", *QUICK, *overrides), ExitCode.USER, *words)
    assert not complete_steps(str(tmp_path / "runs/run/checkpoints"))


def test_devices_that_the_batch_or_model_cannot_be_split_over(tmp_path):
    for overrides, word in (
        (["global_batch_size=6"], "global_batch_size = 6"),
        (["ici_tensor_parallelism=8"], "heads"),
    ):
        done = slicewise(tmp_path, "train", *QUICK, "--local", "1x1x8", *overrides)
        assert done.returncode == ExitCode.USER
        assert word in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr


def test_debug_shows_the_traceback(tmp_path):
    done = slicewise(tmp_path, "train", "none.toml", "--debug")
    assert done.returncode == ExitCode.USER
    assert "Traceback" in done.stderr


def test_a_path_below_a_file_cannot_hold_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    done = slicewise(tmp_path, "train", *QUICK, "output_directory=file/runs")
    refused(done, ExitCode.INTERNAL, "file/runs", "Not a directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_full_disk_ends_the_run_and_leaves_no_checkpoint_that_looks_complete(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        done = slicewise(tmp_path, "train", *QUICK, "output_directory=disk")
        refused(done, ExitCode.INTERNAL, "No space left")
        assert not complete_steps(str(disk / "run/checkpoints"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_damaged_checkpoint_is_named_with_what_to_do(finished, tmp_path):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    newest = tmp_path / "runs/run/checkpoints/4"
    data = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    done = slicewise(tmp_path, "train", *QUICK, "steps=6")
    refused(done, ExitCode.INTERNAL, "checkpoint of step 4", "is damaged", "Delete")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "runs/none"], ["runs/none", "no complete checkpoint"]),
        (["generate", "runs/run/checkpoints/3"], ["3"]),
        (["generate", "runs/run", "--max-tokens", "100000"], ["context"]),
        (["generate", "runs/run", "--top-p", "2"], ["top_p = 2"]),
        (["evaluate", "runs/run", "--data", "none.txt"], ["none.txt", "No such file"]),
        (["evaluate", "runs/run", "stepz=1"], ["unknown key 'stepz'"]),
        (["train", *QUICK, "resume=never"], ["resume = never"]),
        (["train", *QUICK, "steps=6", "model=demo-1m"], ["params."]),
        (["train", *QUICK, "steps=6", "global_batch_size=8"], ["global_batch_size"]),
    ],
)
def test_a_run_that_cannot_be_used_so(finished, arguments, words):
    refused(slicewise(finished, *arguments), ExitCode.USER, *words)


def test_an_unknown_verb_lists_the_known_ones(tmp_path):
    done = slicewise(tmp_path, "trian")
    assert done.returncode == ExitCode.USER
    assert "train" in done.stderr
