import errno
import importlib.util
import json
import logging
import os
import resource
import shutil
import subprocess
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from slicewise.checkpoint.backend import ReadError
from slicewise.checkpoint.manifest import checksum, complete_steps, read_manifest
from slicewise.checkpoint.store import CheckpointStore
from slicewise.errors import ExitCode, UserError

DATA_STATE = np.array([[3, 2**40], [0, -1]], np.int64)
METADATA = {"config": {"model": "demo-1m", "learning_rate": 3e-4}, "versions": ["0.1.0"]}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    embedding: jax.Array  # [256, 64]
    scale: jax.Array  # [8]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    params: Params
    opt_state: optax.OptState
    step: jax.Array


def make_mesh(a: int, b: int) -> Mesh:
    return jax.make_mesh((a, b), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def shard(tree, mesh):
    """Dims split over the mesh where they divide, as arrays or as jax.ShapeDtypeStruct."""

    def sharding(x):
        dims = zip(("a", "b"), x.shape, strict=False)
        return NamedSharding(
            mesh, P(*(axis if size % mesh.shape[axis] == 0 else None for axis, size in dims))
        )

    def one(x):
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x))
        return jax.device_put(x, sharding(x))

    return jax.tree.map(one, tree)


def make_state(seed: int = 0) -> TrainState:
    embedding = jax.random.normal(jax.random.key(seed), (256, 64))
    params = Params(embedding, (jnp.arange(8) / 7).astype(jnp.bfloat16))
    return TrainState(params, optax.adamw(1e-3).init(params), jnp.int32(seed))


def abstract(mesh) -> TrainState:
    return shard(jax.eval_shape(make_state), mesh)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def save(store, step, state=None, **options):
    state = shard(make_state(step), make_mesh(4, 2)) if state is None else state
    return store.save(step, state, data_state=DATA_STATE, metadata=METADATA, **options)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A directory with steps 1 and 2, to be copied before it is changed."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    with CheckpointStore(str(directory), keep=5) as store:
        save(store, 1)
        save(store, 2)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.fixture
def open_store(tmp_path):
    """Opens stores, by default below tmp_path, and closes them after the test."""
    stores = []

    def open_one(directory=tmp_path / "checkpoints", keep=5):
        stores.append(CheckpointStore(str(directory), keep=keep))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def error_of(call, *args, code=ExitCode.USER, **options) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    assert caught.value.code is code
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


@pytest.mark.parametrize("shape", [(4, 2), (1, 8), (2, 1), (1, 1)])
def test_state_comes_back_exactly_on_any_mesh(saved, open_store, shape):
    wanted = abstract(make_mesh(*shape))
    restored = open_store(saved).restore(2, wanted)
    assert_same(restored.state, make_state(2))
    jax.tree.map(
        lambda x, y: x.sharding == y.sharding or pytest.fail(f"{x.sharding}"), restored.state, wanted
    )
    np.testing.assert_array_equal(restored.data_state, DATA_STATE)
    assert restored.data_state.dtype == np.int64
    assert restored.metadata == METADATA


def test_metadata_is_read_without_the_arrays(saved, open_store):
    assert open_store(saved).read_metadata(1) == METADATA


def test_metadata_comes_back_as_json_reads_it(open_store):
    store = open_store()
    store.save(1, make_state(), data_state=DATA_STATE[:0], metadata={"sizes": {10: (1, 2), 9: None}})
    store.wait()
    assert store.read_metadata(1) == {"sizes": {"10": [1, 2], "9": None}}
    assert read_manifest(store.directory, 1).data_state.shape == (0, 2)


def test_part_of_the_state_can_be_restored_alone(saved, open_store):
    wanted = {"params": abstract(make_mesh(1, 1)).params}
    assert_same(open_store(saved).restore(1, wanted, partial=True).state, {"params": make_state(1).params})


def test_a_save_holds_the_values_of_its_call_although_the_buffers_are_donated(open_store):
    store = open_store()
    state = jax.device_put(jnp.ones((512, 512)), jax.devices()[0])
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    save(store, 1, {"x": state})
    for _ in range(5):
        state = double(state)
    wanted = {"x": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=state.sharding)}
    assert float(store.restore(1, wanted).state["x"].sum()) == 512 * 512


def test_only_the_newest_steps_are_kept(open_store):
    store = open_store(keep=2)
    for step in (1, 2, 10, 9):
        assert save(store, step)
        store.wait()
    assert complete_steps(store.directory) == [9, 10]
    assert sorted(os.listdir(store.directory)) == ["10", "9"]


def test_the_best_by_their_loss_and_one_in_so_many_steps_are_kept_too(tmp_path):
    losses = {1: 2.0, 2: 1.0, 3: 1.5, 4: None, 5: 3.0, 6: 2.5, 7: 2.6}
    with CheckpointStore(str(tmp_path), keep=1, keep_every=3, keep_best=2) as store:
        for step, loss in losses.items():
            store.save(step, {"x": jnp.ones(2)}, data_state=DATA_STATE, metadata={"held_out_loss": loss})
            assert store.wait() == step
    assert complete_steps(str(tmp_path)) == [2, 3, 6, 7]


def test_foreign_directories_are_neither_counted_nor_deleted(copy, open_store):
    foreign = ["7", "007", "run", "notes.orbax-checkpoint-tmp", "8"]
    for name in foreign:
        (copy / name).mkdir()
    (copy / "8" / "mine.txt").write_text("keep")
    (copy / "99").write_text("a file")
    store = open_store(copy, keep=2)
    assert store.latest() == 2
    save(store, 3)
    store.wait()
    assert store.latest() == 3
    assert complete_steps(str(copy)) == [2, 3]
    assert (copy / "8" / "mine.txt").exists()
    assert {*foreign, "99"} <= set(os.listdir(copy))


def test_an_empty_directory_gives_way_but_a_foreign_one_does_not(copy, open_store):
    (copy / "7").mkdir()
    (copy / "8").mkdir()
    (copy / "8" / "mine.txt").write_text("keep")
    store = open_store(copy)
    assert save(store, 7)
    store.wait()
    assert store.latest() == 7
    assert "8 is no checkpoint" in error_of(save, store, 8)


@pytest.mark.parametrize(
    "part", ["commit_success.txt", "_CHECKPOINT_METADATA", "manifest/data.json", "state"]
)
def test_a_step_without_one_of_its_marks_is_not_complete(copy, open_store, part):
    path = copy / "2" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    store = open_store(copy)
    assert store.latest() == 1
    assert "no complete checkpoint of step 2; it has 1" in error_of(
        store.restore, 2, abstract(make_mesh(1, 1))
    )
    assert save(store, 2)
    store.wait()
    assert_same(store.restore(2, abstract(make_mesh(1, 1))).state, make_state(2))


def test_what_interrupted_saves_left_is_removed_by_the_next(copy, open_store):
    for name in ("3.orbax-checkpoint-tmp", "4"):
        shutil.copytree(copy / "2", copy / name)
    (copy / "4" / "_CHECKPOINT_METADATA").unlink()
    store = open_store(copy)
    assert store.latest() == 2
    save(store, 5)
    store.wait()
    assert sorted(os.listdir(copy)) == ["1", "2", "5"]


def test_nothing_there_is_no_step(tmp_path, open_store):
    assert open_store(tmp_path / "never").latest() is None
    assert not (tmp_path / "never").exists()
    (tmp_path / "file").write_text("")
    assert open_store(tmp_path / "file").latest() is None
    assert "it has none at all" in error_of(open_store().read_metadata, 3)


def test_a_complete_step_is_rewritten_only_when_asked(copy, open_store):
    store = open_store(copy)
    other = shard(make_state(77), make_mesh(2, 2))
    assert save(store, 2, other) is False
    assert_same(store.restore(2, abstract(make_mesh(1, 1))).state, make_state(2))
    assert save(store, 2, other, overwrite=True) is True
    assert_same(store.restore(2, abstract(make_mesh(1, 1))).state, make_state(77))


def test_two_leaves_under_one_path_are_refused(open_store):
    with pytest.raises(AssertionError, match="same path"):
        save(open_store(), 1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})


# What does not fit is refused before anything is loaded.


def test_another_dtype_is_not_cast(saved, open_store):
    wanted = {"params": {"embedding": jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)}}
    message = error_of(open_store(saved).restore, 2, wanted, partial=True)
    assert "params.embedding is float32[256,64] in the checkpoint of step 2" in message
    assert "but bfloat16[256,64] here" in message


def test_another_shape_is_named(saved, open_store):
    wanted = {"params": {"embedding": jax.ShapeDtypeStruct((256, 32), jnp.float32)}}
    message = error_of(open_store(saved).restore, 2, wanted, partial=True)
    assert "params.embedding is float32[256,64]" in message
    assert "but float32[256,32] here" in message


def test_a_leaf_that_was_not_stored_is_named(saved, open_store):
    wanted = {"params": {"embeding": jax.ShapeDtypeStruct((256, 64), jnp.float32)}}
    message = error_of(open_store(saved).restore, 2, wanted, partial=True)
    assert (
        "has no params.embeding (expected float32[256,64]): resume with the config that saved it" in message
    )
    assert "Did you mean 'params.embedding'?" in message


def test_a_stored_leaf_without_a_place_is_named(saved, open_store):
    wanted = {"params": abstract(make_mesh(1, 1)).params, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    message = error_of(open_store(saved).restore, 2, wanted)
    assert "also has opt_state.0.count (int32[]), which has no place here: resume with the config" in message


# Damage: each file of a step is truncated, zeroed, removed, or has one bit flipped.


def damage(path, kind):
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "zeroed":
        path.write_bytes(bytes(len(data)))
    elif kind == "flipped":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


def data_file(directory, step=2):
    """The largest file of a step: the arrays' values."""
    return max(
        (directory / str(step) / "state").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0
    )


@pytest.mark.parametrize("kind", ["truncated", "zeroed", "flipped", "missing"])
@pytest.mark.parametrize("which", ["data", "state/manifest.ocdbt"])
def test_a_damaged_array_file_is_detected_without_noise(copy, open_store, capfd, kind, which):
    damage(data_file(copy) if which == "data" else copy / "2" / which, kind)
    store = open_store(copy)
    message = error_of(store.restore, 2, abstract(make_mesh(4, 2)), code=ExitCode.INTERNAL)
    assert f"the checkpoint of step 2 in {copy} " in message
    assert f"Delete {copy}/2: the run then continues from step 1." in message
    assert_same(store.restore(1, abstract(make_mesh(4, 2))).state, make_state(1))
    assert capfd.readouterr() == ("", "")


def test_any_flipped_bit_in_the_data_names_its_leaf(copy, open_store):
    path, rng = data_file(copy), np.random.default_rng(0)
    clean = path.read_bytes()
    value = np.asarray(make_state(2).params.embedding)[:4, :4].tobytes()[:16]
    start = clean.index(value)  # a piece of a row of the embedding, stored as it is
    store = open_store(copy)
    for bit in rng.integers(0, 8 * len(value), 5).tolist():
        data = bytearray(clean)
        data[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        message = error_of(store.restore, 2, abstract(make_mesh(1, 1)), code=ExitCode.INTERNAL)
        assert "is damaged: params.embedding has digest" in message
    path.write_bytes(clean)
    assert_same(store.restore(2, abstract(make_mesh(1, 1))).state, make_state(2))


@pytest.mark.parametrize("kind", ["truncated", "zeroed", "flipped", "missing"])
def test_damage_to_any_file_is_detected_or_harmless(copy, open_store, kind):
    store = open_store(copy)
    wanted = abstract(make_mesh(2, 2))
    detected = set()
    for path in [p for p in (copy / "2" / "state").rglob("*") if p.is_file()]:
        clean = path.read_bytes()
        damage(path, kind)
        try:
            restored = store.restore(2, wanted)
        except UserError:
            detected.add(path.name)
        else:
            assert_same(restored.state, make_state(2))
        path.write_bytes(clean)
    assert detected >= {data_file(copy).name, "manifest.ocdbt"}


@pytest.mark.parametrize("kind", ["truncated", "zeroed", "flipped"])
def test_a_damaged_manifest_is_detected(copy, open_store, kind):
    path = copy / "2" / "manifest" / "data.json"
    damage(path, kind)
    message = error_of(open_store(copy).restore, 2, abstract(make_mesh(1, 1)), code=ExitCode.INTERNAL)
    assert f"{path} is damaged" in message
    assert f"Delete {copy}/2" in message


def test_the_only_step_being_damaged_means_a_new_start(copy, open_store):
    shutil.rmtree(copy / "1")
    damage(data_file(copy), "missing")
    message = error_of(open_store(copy).restore, 2, abstract(make_mesh(1, 1)), code=ExitCode.INTERNAL)
    assert "starts anew, for there is no older one" in message


def test_another_format_is_refused(copy, open_store):
    path = copy / "2" / "manifest" / "data.json"
    manifest = read_manifest(str(copy), 2).to_json() | {"format": 9}
    del manifest["sha256"]
    path.write_text(json.dumps({"sha256": checksum(manifest), **manifest}))
    assert "has format 9" in error_of(open_store(copy).read_metadata, 2)


# A run resumes from the newest step that is good; what is newer is set aside, with the reason.


def rewrite_leaf(directory, step, leaf, **changes):
    """Changes what the manifest says of a leaf, with a good checksum: the arrays are then not those it describes."""
    path = directory / str(step) / "manifest" / "data.json"
    body = json.loads(path.read_text())
    body["leaves"][leaf] |= changes
    del body["sha256"]
    path.write_text(json.dumps({"sha256": checksum(body), **body}))


def with_arrays(directory, dtype=jnp.float32, shape=(256, 64)):
    """Replaces the arrays of step 2 by those of a state whose embedding is another one."""
    embedding = jnp.zeros(shape, dtype)
    state = make_state(2)
    other = TrainState(Params(embedding, state.params.scale), state.opt_state, state.step)
    with CheckpointStore(str(directory.parent / "other"), keep=1) as store:
        save(store, 2, other)
    shutil.rmtree(directory / "2" / "state")
    shutil.move(directory.parent / "other" / "2" / "state", directory / "2" / "state")


FAULTS = {
    "data truncated": (lambda d: damage(data_file(d), "truncated"), "cannot be read"),
    "data zeroed": (lambda d: damage(data_file(d), "zeroed"), "cannot be read"),
    "one bit of data": (lambda d: damage(data_file(d), "flipped"), "is damaged"),
    "data missing": (lambda d: damage(data_file(d), "missing"), "cannot be read"),
    "one bit of metadata": (lambda d: damage(d / "2/manifest/data.json", "flipped"), "data.json is damaged"),
    "metadata truncated": (lambda d: damage(d / "2/manifest/data.json", "truncated"), "data.json is damaged"),
    "metadata missing": (
        lambda d: damage(d / "2/manifest/data.json", "missing"),
        "has no manifest/data.json",
    ),
    "mark missing": (lambda d: damage(d / "2/commit_success.txt", "missing"), "has no commit_success.txt"),
    "arrays missing": (lambda d: shutil.rmtree(d / "2/state"), "has no state"),
    "empty": (lambda d: (shutil.rmtree(d / "2"), (d / "2").mkdir()), "it is empty"),
    "cut short": (lambda d: (d / "2").rename(d / "2.orbax-checkpoint-tmp"), "its save was cut short"),
    "wrong shape stored": (lambda d: with_arrays(d, shape=(128, 64)), "cannot be read"),
    "wrong dtype stored": (lambda d: with_arrays(d, dtype=jnp.bfloat16), "is damaged: params.embedding"),
    "wrong shape said": (
        lambda d: rewrite_leaf(d, 2, "params.embedding", shape=[64, 256]),
        "params.embedding is float32[64,256]",
    ),
    "wrong dtype said": (
        lambda d: rewrite_leaf(d, 2, "params.embedding", dtype="bfloat16"),
        "params.embedding is bfloat16[256,64]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_is_not_as_it_was_saved_is_told_and_the_older_one_used(copy, open_store, fault):
    harm, words = FAULTS[fault]
    harm(copy)
    said, store = [], open_store(copy)
    restored = store.restore_newest(abstract(make_mesh(4, 2)), said.append)
    assert restored.step == 1
    assert_same(restored.state, make_state(1))
    assert len(said) == 1
    assert words in said[0]
    assert f"{copy}/2" in said[0] or "checkpoint of step 2" in said[0]
    assert store.latest() == 1
    again = []
    assert store.restore_newest(abstract(make_mesh(1, 1)), again.append).step == 1
    assert len(again) == 1
    if "quarantined" in said[0]:
        assert words in (copy / "2/quarantined.txt").read_text()
        assert again == [f"{copy}/2 is not used: quarantined.txt says why."]
    assert save(store, 2)
    store.wait()
    assert_same(store.restore_newest(abstract(make_mesh(1, 1)), said.append).state, make_state(2))
    assert len(said) == 1


def test_with_no_good_step_the_reason_of_the_newest_is_raised_and_nothing_changed(copy, open_store):
    damage(data_file(copy, 1), "flipped")
    damage(data_file(copy, 2), "missing")
    store = open_store(copy)
    message = error_of(store.restore_newest, abstract(make_mesh(1, 1)), pytest.fail, code=ExitCode.INTERNAL)
    assert "checkpoint of step 2" in message
    assert message.endswith(f"No older one is good either (step 1): delete {copy}, and the run starts anew.")
    assert complete_steps(str(copy)) == [1, 2]


def test_arrays_that_no_step_has_are_refused_and_no_step_quarantined(copy, open_store):
    wanted = {"params": {"embedding": jax.ShapeDtypeStruct((256, 32), jnp.float32)}}
    message = error_of(open_store(copy).restore_newest, wanted, pytest.fail)
    assert "params.embedding is float32[256,64] in the checkpoint of step 2" in message
    assert complete_steps(str(copy)) == [1, 2]


def test_storage_that_cannot_be_read_now_is_no_damage(copy, open_store, monkeypatch):
    def out_of_reach(path, arrays):
        raise ReadError("UNAVAILABLE: no route", is_damage=False)

    store = open_store(copy)
    monkeypatch.setattr(store._orbax, "load", out_of_reach)
    wanted = abstract(make_mesh(1, 1))
    message = error_of(store.restore_newest, wanted, pytest.fail, code=ExitCode.INTERNAL)
    assert "checkpoint of step 2" in message
    assert "no route" in message
    assert complete_steps(str(copy)) == [1, 2]


def test_a_step_can_be_asked_for_that_is_not_the_newest_and_newer_ones_dropped(copy, open_store):
    store = open_store(copy)
    wanted = abstract(make_mesh(1, 1))
    assert store.restore_newest(wanted, pytest.fail, at_most=1).step == 1
    assert store.restore_newest(wanted, pytest.fail, at_most=0) is None
    store.drop_after(1)
    assert store.latest() == 1


# Storage that fails while it is written.


def test_a_path_below_a_file_is_reported(tmp_path, open_store):
    (tmp_path / "file").write_text("")
    message = error_of(save, open_store(tmp_path / "file" / "sub"), 1, code=ExitCode.INTERNAL)
    assert "checkpoint of step 1 could not be written" in message
    assert "Not a directory" in message


def test_a_write_that_fails_in_the_background_is_raised_once_by_the_next_call(open_store, capfd):
    store = open_store()
    save(store, 1)
    store.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # acts like a full disk and needs no root
    try:
        large = {"x": jax.random.normal(jax.random.key(0), (100_000,))}
        save(store, 2, large)
        message = error_of(store.wait, code=ExitCode.INTERNAL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "checkpoint of step 2 could not be written" in message
    assert os.strerror(errno.EFBIG) in message
    assert capfd.readouterr() == ("", "")
    assert store.latest() == 1
    assert save(store, 2)
    store.wait()
    assert sorted(os.listdir(store.directory)) == ["1", "2"]


@pytest.fixture
def mount(tmp_path):
    """Mounts a tmpfs with the given options, or skips without the right to."""
    mounted = []

    def mount_one(options):
        path = tmp_path / "mounted"
        path.mkdir()
        run = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True
        )
        if run.returncode:
            pytest.skip(f"mounting a tmpfs needs root: {run.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount_one
    for path in mounted:
        subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_reported(mount, open_store):
    store = open_store(mount("size=100k"))
    save(store, 1, {"x": jax.random.normal(jax.random.key(0), (100_000,))})
    assert "No space left on device" in error_of(save, store, 2, code=ExitCode.INTERNAL)
    assert store.latest() is None


def test_a_read_only_disk_is_reported(mount, open_store):
    assert "Read-only file system" in error_of(save, open_store(mount("ro")), 1, code=ExitCode.INTERNAL)


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_bucket_without_its_package_is_reported(open_store):
    assert "Please install gcsfs" in error_of(open_store("gs://bucket/run").latest, code=ExitCode.INTERNAL)


# Manners.


def test_progress_notes_of_the_library_are_not_shown(open_store, caplog):
    caplog.set_level(logging.INFO)
    store = open_store()
    save(store, 1)
    store.restore(1, abstract(make_mesh(1, 1)))
    assert [record.getMessage() for record in caplog.records if "/orbax/" in record.pathname] == []
