"""Fine-tuning as people do it: from weights of others, on answers only, with adapters, over any layout."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from slicewise.catalog.model import load
from slicewise.checkpoint.manifest import read_manifest
from slicewise.config import load_config
from slicewise.data.loader import BatchLoader
from slicewise.errors import UserError
from slicewise.interop.weights import load_weights
from slicewise.model import transformer
from slicewise.model.lora import merged_params
from slicewise.parallel.cluster import SliceDevices
from slicewise.parallel.mesh import build_mesh
from slicewise.train import initial
from slicewise.train.evaluate import evaluate
from slicewise.train.export import export
from slicewise.train.generate import Sampling, generate
from slicewise.train.restore import open_trained
from slicewise.train.step import build_train_step

pytestmark = pytest.mark.slow

LOSS_RTOL, GRADIENT_RTOL = 1e-6, 1e-5  # as test_layouts has them
HF = Path(__file__).parents[1] / "fixtures" / "hf"
# Slices, layout. test_layouts has more, of adapters on weights in 8 bits.
LAYOUTS = {
    "fsdp x tensor x data, accumulated": (
        1,
        [
            "ici_fsdp_parallelism=2",
            "ici_tensor_parallelism=2",
            "ici_data_parallelism=2",
            "gradient_accumulation_steps=2",
            "shard_optimizer_over_data=true",
        ],
    ),
    "dcn pipeline x ici data x fsdp": (
        2,
        [
            "dcn_pipeline_parallelism=2",
            "dcn_data_parallelism=1",
            "ici_data_parallelism=2",
            "ici_fsdp_parallelism=2",
        ],
    ),
}


def devices(count, slices=1):
    array = np.empty(count, dtype=object)
    array[:] = jax.devices()[:count]
    return SliceDevices(array.reshape(slices, -1))


def masked_batch(spec, step):
    """Packed rows with joints and padding, of which about half of the tokens are answers."""
    rng = np.random.default_rng(0)
    B, T = step.abstract_batch["tokens"].shape
    segments = np.sort(rng.integers(1, 4, (B, T)), axis=1)
    segments[2:, T - 5 :] = 0
    starts = np.concatenate([np.ones((B, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    positions = np.arange(T) - np.maximum.accumulate(np.where(starts, np.arange(T), 0), axis=1)
    tokens, targets = rng.integers(0, spec.vocab, (2, B, T))
    ends = np.concatenate([starts[:, 1:], np.ones((B, 1), bool)], axis=1)
    targets[ends | (segments == 0) | (rng.random((B, T)) < 0.5)] = -1
    values = (tokens, targets, segments, positions)
    return {
        key: jax.device_put(value.astype(np.int32), step.abstract_batch[key].sharding)
        for key, value in zip(("tokens", "targets", "segment_ids", "positions"), values, strict=True)
    }


def step_of(family, slices, overrides):
    """(config, step) for adapters on a Hugging Face folder; one device without ``overrides``."""
    folder = HF / family
    keys = [f"model={folder}", f"initial_weights={folder}", "global_batch_size=8", "sequence_length=32"]
    keys += ["gradient_clip_norm=0", "compute_dtype=float32", "lora_rank=4", "lora_base_dtype=float32"]
    config = load_config(None, [*keys, *overrides]).config
    count = 8 if overrides else 1
    return config, build_train_step(config, build_mesh(config, devices(count, slices)))


def assert_stored(frozen, family):
    """The weights by name are those of the folder, but for what pads the vocabulary."""
    stored = load_weights(HF / family)
    for name, weight in frozen.items():
        inner = tuple(slice(size) for size in stored[name].shape)
        assert np.array_equal(np.asarray(weight)[inner], stored[name]), name


@functools.cache
def one_step(slices, overrides):
    """(loss, gradients of adapters by name, frozen weights by name) of a step from adapters as after some training."""
    config, step = step_of("llama", slices, overrides)
    with jax.set_mesh(step.mesh):
        state = dataclasses.replace(step.init(), frozen=initial.load(config, step))
        rng = np.random.default_rng(1)

        def trained(x):
            return jax.device_put(rng.normal(size=x.shape).astype(np.float32) * 0.1, x.sharding)

        state = dataclasses.replace(state, params=jax.tree.map(trained, state.params))
        before = {name: np.asarray(x) for name, x in transformer.leaves(state.frozen).items()}
        state, metrics = step.update(state, masked_batch(step.spec, step))
        named = jax.tree.leaves_with_path(state.opt_state)
        moments = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in named}
        # The mean of gradients after the first step is a tenth of the gradient.
        gradients = {
            name.partition(".mu.")[2]: np.asarray(x) for name, x in moments.items() if ".mu." in name
        }
        after = transformer.leaves(state.frozen)
    assert all(np.array_equal(before[name], after[name]) for name in before), "only adapters change"
    return float(metrics["loss"]), gradients, before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_loss_and_every_adapters_gradient_of_one_device(layout, capfd):
    slices, overrides = LAYOUTS[layout]
    one_loss, one_gradients, one_frozen = one_step(1, ())
    loss, gradients, frozen = one_step(slices, tuple(overrides))
    assert loss == pytest.approx(one_loss, rel=LOSS_RTOL)
    assert gradients.keys() == one_gradients.keys()
    for name, wanted in one_gradients.items():
        scale = np.abs(wanted).max()
        assert scale > 0, name
        np.testing.assert_allclose(gradients[name], wanted, atol=GRADIENT_RTOL * scale, rtol=0, err_msg=name)
    assert all(np.array_equal(weight, one_frozen[name]) for name, weight in frozen.items())
    assert_stored(frozen, "llama")
    assert "rematerialization" not in capfd.readouterr().err.lower()


def test_frozen_experts_are_read_to_where_they_lie():
    overrides = ["ici_pipeline_parallelism=2", "ici_expert_parallelism=2", "ici_fsdp_parallelism=2"]
    config, step = step_of("mixtral", 1, overrides)
    with jax.set_mesh(step.mesh):
        assert_stored(transformer.leaves(initial.load(config, step)), "mixtral")


# ---------------------------------------------------------------- runs


ANSWER = "lazy dog"  # of letters that the frozen embedding knows


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Prompts that nobody can foresee, and the same answer to all of them."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for _ in range(200):
            asked = "".join(chr(97 + i) for i in rng.integers(0, 26, 12))
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": ANSWER}]
            file.write(json.dumps({"messages": said}) + "\n")
    return path


CHATS = ["dataset=jsonl", "messages_field=messages", "sequence_length=64", "global_batch_size=8"]
LORA = ["lora_rank=8", "lora_base_dtype=float32", "learning_rate=1e-2", "steps=60", "checkpoint_every=30"]
LORA += ["lora_layers=w[qv]|w_down"]  # enough to learn it, and less to compile


@pytest.fixture(scope="module")
def base(trained, tmp_path_factory):
    """The trained model as a Hugging Face folder."""
    spec, folder = load("demo-tiny"), tmp_path_factory.mktemp("hf")
    values = {
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": spec.d_ff,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_context,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(values))
    export(str(trained.folder / "run"), str(folder / "base"), [f"model={folder}"])
    return folder / "base"


@pytest.fixture(scope="module")
def tune(trained, chats, base):
    """Trains on the conversations from ``base``; gives the run's folder."""

    def run(name, *overrides):
        keys = [f"run_name={name}", f"model={base}", f"initial_weights={base}", f"dataset_path={chats}"]
        trained.train(*keys, *CHATS, *overrides)
        return trained.folder / name

    return run


@pytest.fixture(scope="module")
def tuned(tune):
    return tune("tuned", *LORA)


def losses(path, chats):
    """Nats a token of the answers, and of everything else, in one batch of conversations."""
    opened = open_trained(str(path), [f"dataset_path={chats}", *CHATS])
    loader = BatchLoader(opened.config, range(8), vocab_size=opened.step.spec.vocab)
    batch = next(loader)
    loader.close()
    tokens, answers, segments = batch["tokens"], batch["targets"], batch["segment_ids"]
    following = np.concatenate([tokens[:, 1:], np.zeros_like(tokens[:, :1])], axis=1)
    same = np.concatenate([segments[:, 1:] == segments[:, :-1], np.zeros_like(tokens[:, :1], bool)], axis=1)
    asked = np.where(same & (segments > 0) & (answers < 0), following, -1).astype(np.int32)
    found = []
    with jax.set_mesh(opened.mesh):
        for targets in (answers, asked):
            nats, count = opened.step.evaluate(opened.params, batch | {"targets": targets})
            found.append(float(nats) / int(count))
    return found


def test_adapters_learn_the_answers_and_not_the_prompts(trained, tuned, chats):
    answers, asked = losses(trained.folder / "run", chats)
    answers_after, asked_after = losses(tuned, chats)
    assert answers_after < 0.2 * answers
    assert (
        asked_after > 0.7 * asked
    )  # the lines between messages are foreseen better, letters drawn at random are not


def test_an_answer_is_generated_and_scored(tuned, chats):
    said = generate(str(tuned), ["abcdefghijkl", "zyxwvutsrqpo"], 20, Sampling(temperature=0), is_chat=True)
    assert said == [ANSWER, ANSWER]
    score = evaluate(str(tuned), str(chats), [], batches=2)
    assert score.loss < 0.8
    assert score.tokens < 2 * 8 * 64 / 3


def test_a_checkpoint_holds_adapters_and_the_digest_of_what_they_are_on(tuned):
    manifest = read_manifest(str(tuned / "checkpoints"), 60)
    arrays = [name for name in manifest.leaves if name.startswith("params.")]
    matrices = ("wq", "wv", "w_down")
    assert set(arrays) == {f"params.layers.{w}.lora_{x}" for w in matrices for x in "ab"}
    assert not [name for name in manifest.leaves if "frozen" in name]
    assert len(manifest.metadata["frozen"]) == 16


def test_a_resumed_run_of_adapters_is_the_same_to_the_bit(tune, tuned, trained):
    records, wanted = trained.records("tuned"), read_manifest(str(tuned / "checkpoints"), 60)
    shutil.rmtree(tuned / "checkpoints" / "60")
    tune("tuned", *LORA)
    again = read_manifest(str(tuned / "checkpoints"), 60)
    assert again.leaves == wanted.leaves
    assert [r["loss"] for r in trained.records("tuned")] == [r["loss"] for r in records]


def test_adapters_go_on_over_stages_and_back(tune, tuned, trained, base, tmp_path):
    """Of the steps behind the 30th a pipeline does all, and one device those behind the 45th again."""
    alone = [record["loss"] for record in trained.records("tuned")]
    shutil.copytree(tuned, trained.folder / "staged")
    shutil.rmtree(trained.folder / "staged" / "checkpoints" / "60")
    trained.use_devices(2)
    staged = tune(
        "staged", *LORA, "checkpoint_every=15", "ici_pipeline_parallelism=2", "pipeline_microbatches=2"
    )
    over_stages = [record["loss"] for record in trained.records("staged")]
    np.testing.assert_allclose(over_stages, alone, rtol=1e-4)
    assert over_stages[30:] != alone[30:]
    export(str(staged), str(tmp_path / "out"), [])
    exported, before = load_weights(tmp_path / "out"), load_weights(base)
    assert np.abs(exported["layers.wq"] - before["layers.wq"]).max() > 1e-3

    trained.use_devices(1)
    shutil.rmtree(staged / "checkpoints" / "60")
    tune("staged", *LORA)
    back = [record["loss"] for record in trained.records("staged")]
    assert back[:45] == over_stages[:45]
    np.testing.assert_allclose(back, alone, rtol=1e-4)


def test_adapters_are_refused_on_other_weights_than_they_were_trained_on(tuned):
    with pytest.raises(
        UserError,
        match=r"dtype = bfloat16\) have digest \w{16}, and the adapters were trained on \w{16}; set",
    ):
        open_trained(str(tuned), ["lora_base_dtype=bfloat16"])


def test_adapters_are_refused_with_another_factor_than_they_were_trained_with(tuned):
    with pytest.raises(UserError, match=r"lora_alpha = 4 is not the \d+ that the adapters were trained with"):
        open_trained(str(tuned), ["lora_alpha=4"])


def test_all_weights_start_from_a_run_which_a_resume_needs_no_more(tune, trained):
    copy = trained.folder / "copy"
    shutil.copytree(trained.folder / "run", copy)
    keys = [
        f"initial_weights={copy}",
        "model=demo-tiny",
        "learning_rate=1e-3",
        "steps=2",
        "checkpoint_every=1",
    ]
    full = tune("full", *keys)
    before = open_trained(str(copy), []).params
    shutil.rmtree(copy)
    shutil.rmtree(full / "checkpoints" / "2")
    tune("full", *keys)
    after = open_trained(str(full), []).params
    moved = np.abs(np.asarray(after.layers.wq) - np.asarray(before.layers.wq)).max()
    assert 0 < moved < 0.01


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["lora_rank=4", "initial_weights="],
            "lora_rank = 4 trains adapters of a trained model: set initial_weig",
        ),
        (
            ["initial_weights=nowhere"],
            "'nowhere' is neither a Hugging Face folder nor a run with a complete check",
        ),
        (
            [f"model={HF / 'mistral'}", f"initial_weights={HF / 'qwen3'}"],
            r"has no head, which model mistral needs; set model=.*qwen3, or other initial_weights",
        ),
        (
            [f"initial_weights={HF / 'mistral'}"],
            r"has head, for which model base has no place; set model=.*mistral, or other initial_weights",
        ),
        (
            ["lora_rank=4", "optimizer_type=muon"],
            "optimizer_type = muon is for whole matrices, not for adapters of",
        ),
        (
            ["lora_rank=4", "quantization=int8", "lora_base_dtype=int8"],
            "would quantise again; set one of them",
        ),
        (["lora_rank=4", "lora_layers=wx"], "lora_layers = 'wx' matches no matrix of base"),
        (["lora_rank=-1"], "lora_rank = -1: input should be greater than or equal to 0"),
        (["lora_alpha=0"], "lora_alpha = 0: input should be greater than 0"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tune, overrides, message):
    with pytest.raises(UserError, match=message):
        tune("refused", *overrides)


def test_weights_of_another_shape_are_refused_with_both(tune, base, trained, tmp_path):
    values = json.loads((base / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        UserError, match=r"layers\.w_gate has shape \[2, 64, \d+\], and model .* needs \[2, 64, 96\]"
    ):
        tune("refused", f"model={tmp_path}")
    with pytest.raises(
        UserError, match=r"w_gate is float32\[.*\] here: set model to that of the run, or other initi"
    ):
        tune("refused", f"model={tmp_path}", f"initial_weights={trained.folder / 'run'}")


def test_a_run_of_adapters_is_no_start_for_another(tune, tuned):
    with pytest.raises(
        UserError, match="lora_rank = 8, whose checkpoints hold adapters only; export it first"
    ):
        tune("refused", f"initial_weights={tuned}")


# ---------------------------------------------------------------- export


def test_an_exported_model_has_the_adapters_merged(tuned, base, tmp_path):
    opened = open_trained(str(tuned), [])
    with jax.set_mesh(opened.mesh):
        merged = jax.jit(lambda p: merged_params(p, opened.step.lora))(opened.params)
    files, _ = export(str(tuned), str(tmp_path / "out"), [])
    assert files == ["model.safetensors"]
    exported, before = load_weights(tmp_path / "out"), load_weights(base)
    for name, weight in transformer.leaves(merged).items():
        inner = tuple(slice(size) for size in exported[name].shape)
        np.testing.assert_allclose(exported[name], np.asarray(weight)[inner], rtol=1e-6, atol=1e-7)
    assert np.abs(exported["layers.wq"] - before["layers.wq"]).max() > 1e-3
    assert np.array_equal(exported["embed"], before["embed"])
    with pytest.raises(UserError, match="out is not empty; choose another folder"):
        export(str(tuned), str(tmp_path / "out"), [])


def test_a_model_without_a_config_json_is_not_exported(trained, tmp_path):
    with pytest.raises(
        UserError, match="is a Hugging Face folder, whose config.json goes with exported weights"
    ):
        export(str(trained.folder / "run"), str(tmp_path / "out"), [])
