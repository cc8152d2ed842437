"""A step from a file is the step that is compiled here."""

import hashlib
import json
import pickle
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.parallel.mesh import build_mesh
from slicewise.train import choices, executable, identity
from slicewise.train.step import build_train_step

TINY = [
    "model=demo-tiny",
    "dataset=synthetic",
    "sequence_length=64",
    "global_batch_size=8",
    "steps=2",
    "eval_batches=0",
]
TINY += ["checkpoint_every=0", "tensorboard=false"]


@pytest.fixture(scope="module")
def mesh():
    """Of one device."""
    return build_mesh(config_of(), cluster.by_slice(jax.devices()[:1]))


@pytest.fixture(scope="module")
def path(tmp_path_factory, mesh):
    step = build_train_step(config_of(), mesh)
    with jax.set_mesh(mesh):
        compiled = step.update.lower(step.abstract_state, step.abstract_batch).compile()
    path = tmp_path_factory.mktemp("executable") / "step.bin"
    path.write_bytes(executable.dumps(compiled, config_of(), mesh))
    return path


def config_of(*overrides):
    return load_config(None, [*TINY, *overrides]).config


def changed(path, other, **fields):
    """A whole file like ``path`` with other ``fields``."""
    kept = pickle.loads(path.read_bytes()[len(executable.MARK) + executable.DIGEST_BYTES :])
    content = pickle.dumps(kept | fields)
    other.write_bytes(executable.MARK + hashlib.sha256(content).digest() + content)
    return str(other)


def test_a_run_with_an_executable_takes_the_same_steps(path, tmp_path, command):
    losses = []
    for name, more in (("a", [f"executable={path}"]), ("b", [])):
        ran = command.run("train", *TINY, f"output_directory={tmp_path / name}", *more)
        assert ran.returncode == 0, ran.stderr
        lines = (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rate=1e-9", "compiled with learning_rate = 0.0003, and this run has 1e-09"),
        ("quantization=int8", "compiled with quantization = none, and this run has int8"),
        ("steps=3", "compiled with steps = 2, and this run has 3"),
        ("sequence_length=128", "compiled with sequence_length = 64, and this run has 128"),
        ("on_bad_step=skip", "compiled with on_bad_step = stop or rollback, and this run has skip"),
        ("warmup_steps=1", "compiled with warmup_steps = 0, and this run has 1"),
        ("model=demo-1m", "compiled with the model's d_model = 64, and this run has 192"),
    ],
)
def test_an_executable_of_another_config_is_refused_by_what_differs(path, mesh, override, words):
    with pytest.raises(UserError, match=f"{re.escape(words)}.*make it again"):
        executable.load(str(path), config_of(override), mesh)


def test_keys_that_do_not_enter_the_step_do_not_matter(path, mesh):
    outside = ["run_name=x", "seed=4", "checkpoint_every=7", "dataset=text", "dataset_path=/", "log_every=5"]
    outside += [
        "on_bad_step=rollback",
        "rollback_steps=2",
        "use_qwix_quantization=false",
        "attention=reference",
    ]
    assert executable.load(str(path), config_of(*outside), mesh)


def test_each_flag_of_the_compiler_counts(path, mesh, monkeypatch):
    monkeypatch.setattr(choices, "compiler_options", lambda config, mesh: {"xla_x": True})
    with pytest.raises(UserError, match="the compiler's xla_x = not set, and this run has True"):
        executable.load(str(path), config_of(), mesh)


def test_an_executable_for_other_devices_is_refused(path, mesh, tmp_path):
    two = build_mesh(config_of(), cluster.by_slice(jax.devices()[:2]))
    with pytest.raises(UserError, match=r"compiled for 1 x cpu; here is 2 x cpu\. Leave"):
        executable.load(str(path), config_of(), two)
    of_tpu = changed(path, tmp_path / "tpu.bin", place="v5e 2x2", executable=(b"not looked at", None, None))
    with pytest.raises(UserError, match=r"compiled for v5e 2x2; here is 1 x cpu"):
        executable.load(of_tpu, config_of(), mesh)


def test_slices_are_named_as_a_person_names_them():
    class Device:
        platform, device_kind = "tpu", "TPU v5"

        def __init__(self, slice_index, *coords):
            self.slice_index, self.coords = slice_index, coords

    grid = np.array(
        [Device(s, x, y, z) for s in (0, 1) for x in (0, 1) for y in (0, 1, 2, 3) for z in (4, 5)]
    )
    assert executable._place(SimpleNamespace(devices=grid)) == "2 x v5p 2x4x2"


def test_an_executable_of_other_versions_or_sources_is_refused(path, mesh, tmp_path):
    versions = {n: v for n, v in identity.versions().items() if n != "libtpu"}
    old = changed(path, tmp_path / "old.bin", versions=versions | {"jaxlib": "0.1"})
    with pytest.raises(UserError, match=r"made with jaxlib 0\.1, and .* is installed"):
        executable.load(old, config_of(), mesh)
    edited = changed(path, tmp_path / "edited.bin", sources="0")
    with pytest.raises(UserError, match="other sources of slicewise"):
        executable.load(edited, config_of(), mesh)


def test_what_is_no_whole_executable_is_refused(path, mesh, tmp_path):
    bad, whole = tmp_path / "bad.bin", path.read_bytes()
    contents = {
        b"not one": "is none of",
        pickle.dumps([1]): "is none of",
        b"": "is cut short or damaged",
        whole[:5]: "is cut short or damaged",
        whole[:-1]: "is cut short or damaged",
        whole[:900] + b"?" + whole[901:]: "is cut short or damaged",
    }
    for content, words in contents.items():
        bad.write_bytes(content)
        with pytest.raises(UserError, match=words):
            executable.load(str(bad), config_of(), mesh)
    with pytest.raises(UserError, match="No such file"):
        executable.load(str(tmp_path / "absent.bin"), config_of(), mesh)
