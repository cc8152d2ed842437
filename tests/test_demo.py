"""The demo as a user runs it, if shorter: two emulated slices, real text, checkpoints, a model that learnt."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slicewise.config import load_config
from slicewise.data.loader import TokenizedDocuments

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
SHORTER = ("steps=100", "checkpoint_every=50", "eval_every=50")  # of 160: enough to fall below both baselines

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def slicewise(directory, *arguments):
    command = [sys.executable, "-m", "slicewise", *arguments]
    environment = os.environ | {"XLA_FLAGS": ""}  # so many steps pay for programs that are optimised
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    return directory, slicewise(directory, "train", str(DEMO), *SHORTER, "--local", "2x2x2")


def pair_counts(documents, vocab):
    counts = np.zeros((vocab, vocab))
    for i in range(len(documents)):
        tokens = documents[i]
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    return counts


def test_held_out_loss_falls_below_unigram_and_bigram_baselines(demo):
    """Baselines with add-one and add-0.1 smoothing, counted on the training text, scored on the held-out text."""
    _, output = demo
    loss = float(re.search(r"^held-out loss ([\d.]+) nats/token", output, re.M)[1])
    config = load_config(str(DEMO)).config
    vocab = 258
    train, held_out = (
        pair_counts(TokenizedDocuments(config, side, vocab), vocab) for side in ("train", "held_out")
    )
    unigram = np.log((train.sum(0) + 1) / (train.sum() + vocab))
    bigram = np.log((train + 0.1) / (train.sum(1, keepdims=True) + 0.1 * vocab))
    unigram_loss = -(held_out.sum(0) * unigram).sum() / held_out.sum()
    bigram_loss = -(held_out * bigram).sum() / held_out.sum()
    assert loss < bigram_loss < unigram_loss


def test_reports_what_a_reader_wants(demo):
    directory, output = demo
    assert "8 x cpu in 4 processes, data 2 x fsdp 4" in output
    assert re.search(
        r"loss [\d.]+ +[\d.]+ s/step +[\d,]+ tokens/s +[\d.e-]+ TFLOP/s/device +MFU [\d.]+%", output
    )
    records = [json.loads(line) for line in (directory / "runs/demo/metrics.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in records if "loss" in r]
    assert steps == list(range(1, steps[-1] + 1))
    assert all(0 < r["mfu"] < 1 for r in records if "mfu" in r)
    assert sorted(p.name for p in (directory / "runs/demo/logs").iterdir()) == [
        f"slice{s}-host{h}.log" for s in range(2) for h in range(2)
    ]


def test_text_is_generated_and_scored_from_its_checkpoint(demo):
    directory, output = demo
    checkpoint = re.search(r"^checkpoint (\S+)$", output, re.M)[1]
    text = slicewise(directory, "generate", checkpoint, "--prompt", "def ", "--max-tokens", "60")
    assert text.startswith("def ")
    assert sum(c.isascii() and (c.isprintable() or c == "\n") for c in text) > 0.9 * len(text) > 30
    score = slicewise(directory, "evaluate", "runs/demo", "--batches", "4")
    assert 1.0 < float(re.search(r"loss ([\d.]+)", score)[1]) < 3.0
