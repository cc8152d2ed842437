"""What a user meets when something is wrong: one or two lines that say what to change, and the right exit code."""

import contextlib
import functools
import os
import shutil
import subprocess

import jax
import pytest

from slicewise import cli
from slicewise.checkpoint.manifest import complete_steps
from slicewise.errors import ExitCode
from slicewise.launch.targets import local
from slicewise.parallel import cluster
from slicewise.train import loop
from slicewise.train.sole import sole

TINY = ["model=demo-tiny", "sequence_length=32", "global_batch_size=4", "steps=4", "tensorboard=false"]
QUICK = [*TINY, "dataset=synthetic", "checkpoint_every=2", "eval_batches=0", "compute_dtype=float32"]
UNSAVED = [
    *QUICK,
    "checkpoint_every=0",
]  # does without the second that importing the checkpoint library takes
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")


@pytest.fixture
def slicewise(command, tmp_path):
    """Runs the command in the test's folder, or in another one."""
    return lambda *arguments, cwd=tmp_path, **options: command.run(*arguments, cwd=cwd, **options)


def _in_this_process(patch):
    """The command may run in this process, which has imported JAX already, on one of its devices."""
    patch.setattr(cluster, "initialize", lambda: None)
    patch.setenv("JAX_COMPILATION_CACHE_DIR", "as JAX is configured already")
    patch.setattr(cluster, "found", lambda: cluster.by_slice(jax.devices()[:1]))


@pytest.fixture
def here(monkeypatch, tmp_path, capfd, programs_of_tests):
    """Runs the command in this process, on one of its devices or several."""
    _in_this_process(monkeypatch)

    def run(*arguments, cwd=tmp_path, devices=1):
        if devices > 1:
            monkeypatch.setattr(cluster, "found", lambda: cluster.by_slice(jax.devices()[:devices]))
        monkeypatch.chdir(cwd)
        code = cli.main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, programs_of_tests):
    """A folder with one good run."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        _in_this_process(patch)
        patch.chdir(folder)
        assert cli.main(["train", *QUICK]) == ExitCode.DONE
    return folder


@pytest.fixture
def copy_of_finished(finished, tmp_path):
    shutil.copytree(finished / "runs", tmp_path / "runs")
    return tmp_path / "runs/run"


@pytest.fixture
def disk(tmp_path):
    """Mounts, or resizes, a file system of so many bytes in the test's folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size_bytes):
        again = ",remount" if folder.is_mount() else ""
        options = f"size={size_bytes}{again}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="session")
def unprivileged():
    """What to put before a command so that permissions bind it, although the tests may run as root."""
    if os.geteuid() != 0:
        return []
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0:
            return prefix
    pytest.skip("root ignores permissions, and setpriv is not there to lay that down")


def refused(done, code, *words):
    """Asserts the exit code and a short message with ``words`` and no traceback; returns the message."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("slicewise: ")]
    assert done.returncode == code, done.stdout + done.stderr
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    return lines[0]


def refused_by_the_cluster(done, code, *words):
    """The same for an emulated cluster, whose output is merged: the cause is what it says last, and says once."""
    *before, last = done.stdout.splitlines()
    assert done.returncode == code, done.stdout + done.stderr
    assert last.startswith("error"), done.stdout
    assert all(word in last for word in words), last
    assert not any(words[0] in line for line in before), done.stdout
    assert done.stderr == ""
    assert "Traceback" not in done.stdout


# ---------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.toml"], ["none.toml", "No such file"]),
        (["."], ["config file .", "Is a directory"]),
        (["broken.toml"], ["broken.toml", "not TOML"]),
        (["misplaced.toml"], ["misplaced.toml", "key 'steps' belongs in section [run]"]),
        (["stepz=3"], ["unknown key 'stepz'", "Did you mean 'steps'"]),
        (["steps=1", "more"], ["'more' is not an override", "key=value"]),
        (["steps=lots"], ["steps = 'lots'", "valid integer"]),
        (["steps=0"], ["steps = 0", "greater than 0"]),
        (["seed=4294967296"], ["seed = 4294967296", "less than 4294967296"]),
        (["dataset=texts"], ["dataset = 'texts'", "'text'"]),
        (["held_out_fraction=0"], ["held_out_fraction = 0", "eval_batches=0"]),
        (["profile_from=200", "profile_steps=1"], ["profile_from = 200", "last step, 100"]),
        (["--local", "2x2"], ["2x2"]),
        (["--local", "0x1x1"], ["0x1x1"]),
        (["--local", ""], ["--local ''", "is not a cluster"]),
        ([""], ["config file ''"]),
        (["--local", "2x2x2", "ici_fsdp_parallelism=3"], ["multiply to 3", "4 devices per slice"]),
        (["--local", "2x1x2", "dcn_data_parallelism=3"], ["multiply to 3", "2 slices"]),
    ],
)
def test_refused_before_any_device_is_touched(here, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(cluster, "found", None)
    (tmp_path / "broken.toml").write_text("[run\n")
    (tmp_path / "misplaced.toml").write_text("[model]\nsteps = 3\n")
    refused(here("train", *arguments), ExitCode.USER, *words)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_verb_lists_the_known_ones(slicewise):
    done = slicewise("trian")
    assert done.returncode == ExitCode.USER
    assert "train" in done.stderr


def test_only_what_is_absent_and_needed_is_asked_for(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["generate"])
    assert end.value.code == ExitCode.USER
    assert "required: CKPT. 'slicewise generate --help'" in capsys.readouterr().err


def test_debug_shows_the_traceback_and_the_code_stays(here):
    for arguments in (["none.toml"], [*UNSAVED, "model=none"]):
        done = here("train", *arguments, "--debug")
        assert done.returncode == ExitCode.USER
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("slicewise: ")


# ---------------------------------------------------------------- the model and the text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=demo-tny"], ["unknown model 'demo-tny'", "Did you mean 'demo-tiny'"]),
        (["dataset=text", "dataset_path=nowhere"], ["nowhere", "No such file"]),
        (["dataset=text", "dataset_path=empty"], ["empty"]),
        (["dataset=text", "dataset_path=nothing.txt"], ["nothing.txt holds no document"]),
        (["dataset=text", "dataset_path=latin.txt", "held_out_fraction=0"], ["latin.txt: byte 3", "UTF-8"]),
        (
            ["dataset=text", "dataset_path=short.txt", "held_out_fraction=0"],
            ["fewer than one batch", "4 x 32 = 128"],
        ),
        (["dataset=text", "dataset_path=short.txt"], ["needs at least 2 documents"]),
        (["dataset=jsonl", "dataset_path=bad.jsonl", "held_out_fraction=0"], ["bad.jsonl", "2"]),
        (["dataset=text", "dataset_path=short.txt", "tokenizer=not.json"], ["not.json"]),
        (["dataset=text", "dataset_path=short.txt", "tokenizer=none.json"], ["none.json", "No such file"]),
        (
            ["dataset=text", "dataset_path=short.txt", "tokenizer=large.json"],
            ["large.json' has 300 ids", "demo-tiny' knows only 258"],
        ),
        (["learning_rate=1e30", "gradient_clip_norm=0"], ["at step", "lower learning_rate"]),
    ],
)
def test_refused_with_what_to_change(here, tmp_path, overrides, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 200)
    (tmp_path / "short.txt").write_text("far too short")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "not.json").write_text("{}")
    if "tokenizer=large.json" in overrides:
        tokenizers = pytest.importorskip("tokenizers")
        words_300 = {"</s>": 0, **{f"word{i}": i for i in range(1, 300)}}
        model = tokenizers.models.WordLevel(words_300, unk_token="word1")
        tokenizers.Tokenizer(model).save(str(tmp_path / "large.json"))
    refused(here("train", *UNSAVED, *overrides), ExitCode.USER, *words)
    assert not complete_steps(str(tmp_path / "runs/run/checkpoints"))


@pytest.mark.parametrize(
    ("override", "word"),
    [("global_batch_size=6", "global_batch_size = 6"), ("ici_tensor_parallelism=8", "heads")],
)
def test_devices_that_the_batch_or_model_cannot_be_split_over(here, override, word):
    refused(here("train", *UNSAVED, override, devices=8), ExitCode.USER, word)


@pytest.mark.multiprocess
def test_what_every_process_of_a_cluster_finds_wrong_is_said_once(slicewise):
    done = slicewise("train", *UNSAVED, "--local", "1x2x1", "dataset=text", "dataset_path=nowhere")
    refused_by_the_cluster(done, ExitCode.USER, "nowhere", "No such file")


# ---------------------------------------------------------------- where the run is kept


@pytest.mark.parametrize("arguments", [[], ["--local", "1x1x1"]])
def test_a_folder_in_which_another_process_trains_is_left_alone(here, monkeypatch, tmp_path, arguments):
    for module in (loop, local):
        monkeypatch.setattr(module, "sole", functools.partial(sole, wait_s=0))
    with sole(tmp_path / "runs/run"):
        refused(
            here("train", *UNSAVED, *arguments), ExitCode.CONFLICT, "another process is training in runs/run"
        )
    assert [path.name for path in (tmp_path / "runs/run").iterdir()] == ["lock"]


@pytest.mark.parametrize("arguments", [[], ["--local", "1x1x1"]])
def test_a_path_below_a_file_cannot_hold_a_run(here, tmp_path, arguments):
    (tmp_path / "file").write_text("")
    done = here("train", *UNSAVED, "output_directory=file/runs", *arguments)
    refused(done, ExitCode.INTERNAL, "file/runs", "Not a directory")
    assert "compile" not in done.stdout


def test_a_folder_without_permission_cannot_hold_a_run(slicewise, tmp_path, unprivileged):
    (tmp_path / "locked").mkdir(mode=0o555)
    done = slicewise("train", *UNSAVED, "output_directory=locked", prefix=unprivileged)
    refused(done, ExitCode.INTERNAL, "locked/run", "Permission denied")
    assert "compile" not in done.stdout
    assert list((tmp_path / "locked").iterdir()) == []


def test_checkpoints_that_may_not_be_written_end_the_run(slicewise, tmp_path, unprivileged):
    (tmp_path / "runs/run/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/run/checkpoints").chmod(0o555)
    done = slicewise("train", *QUICK, prefix=unprivileged)
    assert "checkpoint of step 2 could not be written" in done.stdout
    assert "Training goes on" in done.stdout
    refused(done, ExitCode.INTERNAL, "checkpoint of step 4 could not be written", "Permission denied")


def test_text_that_may_not_be_read_is_named(slicewise, tmp_path, unprivileged):
    (tmp_path / "secret.txt").write_text("a secret " * 100)
    (tmp_path / "secret.txt").chmod(0)
    overrides = ["dataset=text", "dataset_path=secret.txt", "held_out_fraction=0"]
    done = slicewise("train", *UNSAVED, *overrides, prefix=unprivileged)
    refused(done, ExitCode.INTERNAL, "secret.txt", "Permission denied")


@needs_root
def test_a_full_disk_ends_the_run_and_once_mended_the_same_command_finishes_it(here, disk):
    """There is room for the first checkpoint and not for the second: what is left of this never looks complete."""
    folder = disk(3 << 20)
    done = here("train", *QUICK, "output_directory=disk", "checkpoint_every=1")
    refused(done, ExitCode.INTERNAL, "could not be written", "No space left")
    saved = complete_steps(str(folder / "run/checkpoints"))
    assert saved
    assert saved[-1] < 4
    disk(50 << 20)
    done = here("train", *QUICK, "output_directory=disk", "checkpoint_every=1")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert f"resumes after step {saved[-1]}" in done.stdout
    assert complete_steps(str(folder / "run/checkpoints"))[-1] == 4


@needs_root
@pytest.mark.parametrize("tensorboard", ["true", "false"])
def test_metrics_that_find_the_disk_full_end_the_run(slicewise, disk, tensorboard):
    folder = disk(64 << 10)
    (folder / "ballast").write_bytes(bytes(40 << 10))
    overrides = ["output_directory=disk", f"tensorboard={tensorboard}", "steps=400"]
    done = slicewise("train", *UNSAVED, *overrides)
    refused(done, ExitCode.INTERNAL, "disk/run/", "No space left")


# ---------------------------------------------------------------- checkpoints


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(here, copy_of_finished):
    newest = copy_of_finished / "checkpoints/4"
    data = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    done = here("train", *QUICK, "steps=6")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert f"the checkpoint of step 4 in {copy_of_finished / 'checkpoints'} is damaged" in done.stdout
    assert "It is quarantined, and step 2 used." in done.stdout
    assert "resumes after step 2" in done.stdout
    assert complete_steps(str(copy_of_finished / "checkpoints")) == [2, 4, 6]


def test_a_damaged_manifest_is_named(here, copy_of_finished):
    manifest = copy_of_finished / "checkpoints/4/manifest/data.json"
    manifest.write_text(manifest.read_text().replace('"demo-tiny"', '"demo-tinz"'))
    message = refused(here("generate", "runs/run"), ExitCode.INTERNAL, "manifest/data.json is damaged")
    assert message.endswith("the run then continues from step 2.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "runs/none"], ["runs/none", "no complete checkpoint"]),
        (["generate", "runs/run/checkpoints/3"], ["3"]),
        (["generate", "runs/run", "--max-tokens", "100000"], ["context"]),
        (["generate", "runs/run", "--top-p", "2"], ["top_p = 2"]),
        (["evaluate", "runs/run", "--data", "none.txt"], ["none.txt", "No such file"]),
        (["evaluate", "runs/run"], ["synthetic", "give --data"]),
        (["evaluate", "runs/run", "stepz=1"], ["unknown key 'stepz'"]),
        (["train", *QUICK, "resume=never"], ["resume = never"]),
        (["train", *QUICK, "steps=6", "model=demo-1m"], ["params."]),
        (["train", *QUICK, "steps=6", "global_batch_size=8"], ["global_batch_size"]),
    ],
)
def test_a_run_that_cannot_be_used_so(here, finished, arguments, words):
    refused(here(*arguments, cwd=finished), ExitCode.USER, *words)
    assert complete_steps(str(finished / "runs/run/checkpoints")) == [2, 4]
