"""Global batches are a function of the seed and the step, whoever reads them and wherever they continue."""

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from slicewise.data import loader as loader_module
from slicewise.data.loader import BatchLoader
from slicewise.data.packing import FIELDS
from slicewise.data.tokenizers import Bytes
from slicewise.errors import ExitCode, UserError

B, T, STEPS = 8, 64, 12


@pytest.fixture
def text_config(config, tmp_path):
    """Sixty documents of 0 to 300 characters that begin with their number, read in batches [B, T]."""
    rng = np.random.default_rng(0)
    texts = [f"<{i}>" + "x" * int(n) for i, n in enumerate(rng.integers(0, 300, 60))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def make(**keys):
        defaults = {"dataset": "jsonl", "dataset_path": tmp_path / "a.jsonl", "held_out_fraction": 0.2}
        return config(**defaults | {"global_batch_size": B, "sequence_length": T} | keys)

    return make


@pytest.fixture
def load():
    """Opens loaders that are closed after the test."""
    opened = []

    def make(*args, **kwargs):
        opened.append(BatchLoader(*args, **kwargs))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


def take(loader, count):
    return [next(loader) for _ in range(count)]


def assert_equal(batches, expected):
    for batch, other in zip(batches, expected, strict=True):
        assert tuple(batch) == FIELDS
        for field in FIELDS:
            assert batch[field].dtype == np.int32
            np.testing.assert_array_equal(batch[field], other[field])


def grain_threads():
    return [thread for thread in threading.enumerate() if "grain" in thread.name]


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("kind", ["jsonl", "synthetic"])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_any_number_of_hosts_reads_the_same_global_batches(text_config, load, hosts, kind, split):
    config = text_config(dataset=kind)
    whole = take(load(config, range(B), split), STEPS)
    assert whole[0]["tokens"].shape == (B, T)
    strided = [range(host, B, hosts) for host in range(hosts)]  # rows need not be contiguous
    parts = [take(load(config, rows, split), STEPS) for rows in strided]
    for host, rows in enumerate(strided):
        assert_equal(parts[host], [{f: batch[f][list(rows)] for f in FIELDS} for batch in whole])


@pytest.mark.parametrize("kind", ["jsonl", "synthetic"])
@pytest.mark.parametrize("stop", [0, 1, 5])
def test_a_loader_continues_identically_from_the_state_behind_the_batches_returned(
    text_config, load, kind, stop
):
    config = text_config(dataset=kind)
    whole = take(load(config, range(B)), STEPS)
    first = load(config, range(B))
    take(first, stop)
    time.sleep(0.05)  # time to read ahead of what was returned
    state = first.state
    assert state.dtype == np.int64
    assert state.shape == (B, 2)
    for rows in (range(B), range(3, 7)):  # also by another host
        second = load(config, rows, state=state[list(rows)])
        np.testing.assert_array_equal(second.state, state[list(rows)])
        continued = take(second, STEPS - stop)
        assert_equal(continued, [{f: batch[f][list(rows)] for f in FIELDS} for batch in whole[stop:]])


def test_a_row_holds_its_shards_documents_whole(text_config, load):
    batches = take(load(text_config(), range(B)), 40)
    for row in range(B):
        tokens = np.concatenate([batch["tokens"][row] for batch in batches])
        documents = np.split(tokens, np.flatnonzero(tokens == Bytes.begin_id)[1:])
        for document in documents[:-1]:
            assert document[-1] == Bytes.end_id
            assert set(Bytes().decode(document).partition(">")[2]) <= {"x"}


def numbers(loader, batches):
    """The documents that begin in ``batches`` batches and are not cut off at their end."""
    rows = np.concatenate([batch["tokens"] for batch in take(loader, batches)], axis=1)
    texts = ["".join(chr(t) if t < 256 else "|" for t in row).rpartition("|")[0] for row in rows]
    return {int(part[1:].partition(">")[0]) for text in texts for part in text.split("|") if part}


def test_training_and_held_out_documents_are_disjoint_and_together_all(text_config, load):
    train = numbers(load(text_config(), range(B)), 60)
    held_out = numbers(load(text_config(), range(B), "held_out"), 60)
    assert train
    assert held_out
    assert not train & held_out
    assert train | held_out == set(range(60))
    for change in ({"seed": 5}, {"global_batch_size": 4}, {"sequence_length": 32}):
        config = text_config(**change)
        assert numbers(load(config, range(config.data.global_batch_size), "held_out"), 200) == held_out


def test_the_seed_changes_training_and_not_evaluation(text_config, load):
    def tokens(split, seed):
        return np.stack([b["tokens"] for b in take(load(text_config(seed=seed), range(B), split), 4)])

    assert (tokens("train", 1) != tokens("train", 2)).any()
    np.testing.assert_array_equal(tokens("held_out", 1), tokens("held_out", 2))
    np.testing.assert_array_equal(tokens("train", 1), tokens("train", 1))


def test_the_default_config_reads_the_standard_library(config, load):
    batch = next(load(config(), range(16), vocab_size=258))
    text = Bytes().decode(batch["tokens"][batch["segment_ids"] == 1])
    assert "def " in text
    assert "import " in text


def test_synthetic_ids_cover_the_vocabulary(text_config, load):
    loader = load(text_config(dataset="synthetic", tokenizer="there is none"), range(B), vocab_size=1000)
    first, second = take(loader, 2)
    assert first["tokens"].min() >= 0
    assert 900 < first["tokens"].max() < 1000
    assert (first["tokens"] != second["tokens"]).any()
    np.testing.assert_array_equal(first["tokens"][:, 1:], first["targets"][:, :-1])
    assert (first["tokens"][0] != first["tokens"][1]).any()
    assert first["positions"].tolist() == [list(range(T))] * B
    assert (first["segment_ids"] == 1).all()


def test_synthetic_imports_neither_grain_nor_a_tokenizer():
    script = (
        "import sys; from slicewise.config import load_config; from slicewise.data.loader import BatchLoader;"
        "next(BatchLoader(load_config(None, ['dataset=synthetic']).config, range(16)));"
        "print([m for m in ('grain', 'jax', 'tokenizers', 'sentencepiece', 'pyarrow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_close_leaves_no_thread_and_may_be_repeated(text_config):
    loader = BatchLoader(text_config(), range(B))
    next(loader)
    assert grain_threads()
    loader.close()
    loader.close()
    assert not grain_threads()
    with pytest.raises(AssertionError, match="closed"):
        next(loader)


def test_a_loader_nobody_closed_ends_quietly():
    script = (
        "from slicewise.config import load_config; from slicewise.data.loader import BatchLoader;"
        "loader = BatchLoader(load_config(None).config, range(2)); next(loader); raise SystemExit(3)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (3, "")


def test_an_error_of_the_background_surfaces_as_itself_and_stays(text_config, load, tmp_path):
    loader = load(text_config(held_out_fraction=0), range(B))
    size = (tmp_path / "a.jsonl").stat().st_size
    (tmp_path / "a.jsonl").write_bytes(b" " * size)
    for _ in range(2):
        with pytest.raises(UserError, match=r"a.jsonl:1 is not JSON"):
            take(loader, 100)
    assert not grain_threads()


def test_an_error_behind_good_batches_comes_after_them(text_config, load, monkeypatch):
    good = load(text_config(), range(B))
    whole = take(good, 3)
    good.close()
    packed_next, calls = loader_module.PackedBatches.__next__, iter(range(100))

    def fail_at_the_fourth(self):
        if next(calls) == 3:
            raise RuntimeError("disk on fire")
        return packed_next(self)

    monkeypatch.setattr(loader_module.PackedBatches, "__next__", fail_at_the_fourth)
    loader = load(text_config(), range(B))
    assert_equal(take(loader, 3), whole)
    with pytest.raises(RuntimeError, match="disk on fire"):
        next(loader)


def test_a_corpus_shorter_than_one_batch_is_refused_with_both_numbers(config, tmp_path):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text("x" * 98)  # 100 tokens with begin and end
    keys = {"dataset": "text", "dataset_path": tmp_path, "held_out_fraction": 0, "global_batch_size": 4}
    with pytest.raises(UserError, match=r"has 200 tokens, fewer than one batch: .* 4 x 51 = 204; lower"):
        BatchLoader(config(**keys, sequence_length=51), range(4))
    loader = BatchLoader(config(**keys, sequence_length=50), range(4))
    assert next(loader)["tokens"].shape == (4, 50)
    loader.close()


def test_only_as_many_documents_are_counted_as_needed(text_config, load, monkeypatch):
    read = []
    get = loader_module.TokenizedDocuments.__getitem__
    monkeypatch.setattr(
        loader_module.TokenizedDocuments, "__getitem__", lambda self, i: read.append(i) or get(self, i)
    )
    load(text_config(), range(B))
    assert len(read) < 10
    read.clear()
    load(text_config(sequence_length=4), range(B))  # the number of documents says enough
    assert not read


def test_nothing_held_out_cannot_be_evaluated(text_config):
    with pytest.raises(UserError, match="held_out_fraction = 0 leaves nothing to evaluate on"):
        BatchLoader(text_config(held_out_fraction=0), range(B), "held_out")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(text_config):
    with pytest.raises(
        UserError, match="tokenizer = 'bytes' has 258 ids, but model = 'demo-1m' knows only 257"
    ):
        BatchLoader(text_config(), range(B), vocab_size=257)


def test_a_state_of_another_dataset_is_refused(text_config, load):
    loader = load(text_config(), range(B), state=np.full((B, 2), 10_000))
    with pytest.raises(UserError, match="not those of the checkpoint") as error:
        next(loader)
    assert error.value.code == ExitCode.USER
