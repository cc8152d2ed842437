import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.data.tokenizers import Bytes, encode_document
from slicewise.errors import ExitCode, UserError
from slicewise.kernels.attention.api import Tokens
from slicewise.model import transformer
from slicewise.train.evaluate import evaluate
from slicewise.train.restore import open_trained

ROW = 32  # tokens, as the run was trained with
TEXTS = [f"{i} dogs. " * (i + 1) for i in range(5)]


def run_of(trained):
    return str(trained.folder / "run")


def texts_in(folder, texts):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    return str(folder)


def expected(trained, texts):
    """Mean loss and tokens of each piece of each document alone: rows are full but for the last one."""
    model = open_trained(run_of(trained), [])
    total, count, used = 0.0, 0, 0
    for text in texts:
        tokens, start = encode_document(Bytes(), text), 0
        while start < len(tokens):
            length = min(ROW - used % ROW, len(tokens) - start)
            piece = np.zeros((1, ROW), np.int32)
            piece[0, :length] = tokens[start : start + length]
            targets = tokens[start + 1 : start + length + 1]
            where = Tokens(jnp.arange(ROW)[None], jnp.ones((1, ROW), jnp.int32))
            with jax.set_mesh(model.mesh):
                logits, _ = transformer.forward(
                    model.params, model.step.spec, piece, where, dtype=jnp.dtype("float32")
                )
            logits = np.asarray(logits, np.float64)[0, : len(targets)]
            top = logits.max(-1, keepdims=True)
            log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
            total -= log_p[np.arange(len(targets)), targets].sum()
            count, used, start = count + len(targets), used + length, start + length
    return total / count, count


@pytest.mark.parametrize("devices", [1, 8])
def test_the_score_is_the_mean_over_all_tokens_of_all_documents(trained, tmp_path, devices):
    trained.use_devices(1)
    loss, tokens = expected(trained, TEXTS)
    trained.use_devices(devices)
    score = evaluate(run_of(trained), texts_in(tmp_path / "texts", TEXTS), [])
    assert score.step == 60
    assert score.tokens == tokens == sum(len(text) + 1 for text in TEXTS)
    assert score.loss == pytest.approx(loss, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_text_shorter_than_a_row_is_scored(trained, tmp_path, devices):
    trained.use_devices(1)
    loss, tokens = expected(trained, ["hi"])
    trained.use_devices(devices)
    (tmp_path / "short.txt").write_text("hi")
    score = evaluate(run_of(trained), str(tmp_path / "short.txt"), [])
    assert (score.tokens, score.source) == (tokens, str(tmp_path / "short.txt")) == (3, score.source)
    assert score.loss == pytest.approx(loss, rel=1e-5)


def test_the_kind_of_file_follows_from_its_name(trained, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    trained.use_devices(1)
    of_text = evaluate(run_of(trained), texts_in(tmp_path / "texts", TEXTS), [])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    for name in ("texts.jsonl", "texts.ndjson"):
        (tmp_path / name).write_text(lines)
    pyarrow.parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "texts.parquet")
    for name in ("texts.jsonl", "texts.ndjson", "texts.parquet"):
        score = evaluate(run_of(trained), str(tmp_path / name), [])
        assert (score.loss, score.tokens) == (of_text.loss, of_text.tokens), name


def test_an_override_says_the_kind_where_the_name_does_not(trained, tmp_path):
    trained.use_devices(1)
    (tmp_path / "records").write_text('{"body": "some dogs"}\n')
    score = evaluate(run_of(trained), str(tmp_path / "records"), ["dataset=jsonl", "text_field=body"])
    assert score.tokens == len("some dogs") + 1


def test_without_data_the_held_out_text_of_the_run_is_scored(trained):
    trained.use_devices(1)
    score = evaluate(run_of(trained), None, [])
    train = evaluate(run_of(trained), trained.corpus, [])
    assert score.source == "held-out text"
    assert 0 < score.tokens < train.tokens
    assert score.loss < math.log(258) - 1, "text like what it was trained on"


def test_batches_bound_what_is_read(trained):
    trained.use_devices(1)
    first = evaluate(run_of(trained), trained.corpus, [], batches=1)
    assert 0 < first.tokens <= 4 * ROW
    assert evaluate(run_of(trained), trained.corpus, [], batches=10**6).tokens > first.tokens
    with pytest.raises(UserError, match=r"batches = 0: expected 1 or more"):
        evaluate(run_of(trained), None, [], batches=0)


def test_the_score_depends_on_neither_the_layout_nor_the_batch(trained):
    trained.use_devices(1)
    one = evaluate(run_of(trained), None, ["global_batch_size=1"])
    trained.use_devices(8)
    layout = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_context_parallelism=2"]
    many = evaluate(run_of(trained), None, layout)
    assert many.tokens == one.tokens
    assert many.loss == pytest.approx(one.loss, rel=1e-5)


def test_one_step_of_a_run_can_be_scored(trained):
    trained.use_devices(1)
    assert evaluate(f"{run_of(trained)}/checkpoints/60", None, []) == evaluate(run_of(trained), None, [])


def test_a_run_whose_name_is_a_number_is_not_taken_for_a_step(trained, tmp_path):
    trained.use_devices(1)
    shutil.copytree(trained.folder / "run", tmp_path / "60")
    assert evaluate(str(tmp_path / "60"), None, []).step == 60


def test_text_without_a_token_to_predict_is_refused(trained, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    trained.use_devices(1)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "dog": 1}, unk_token="dog"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no token to predict; give longer documents"):
        evaluate(run_of(trained), str(tmp_path / "empty.jsonl"), [f"tokenizer={tmp_path}/tokenizer.json"])


@pytest.mark.parametrize("name", ["", "nothing", "run/checkpoints/59"])
def test_a_checkpoint_that_is_not_there_is_refused(trained, name):
    trained.use_devices(1)
    with pytest.raises(UserError, match="no complete checkpoint") as caught:
        evaluate(str(trained.folder / name), None, [])
    assert caught.value.code == ExitCode.USER


def test_a_model_other_than_the_trained_one_is_refused(trained):
    trained.use_devices(1)
    with pytest.raises(UserError, match=r"params\.embed is float32\[384,64\] in the checkpoint of step 60"):
        evaluate(run_of(trained), None, ["model=demo-1m"])
