"""Loss and perplexity of a trained model on text, every document once."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

import jax
import numpy as np

from slicewise.config import RunConfig
from slicewise.data.loader import TokenizedDocuments
from slicewise.data.packing import FIELDS, rows_of_all
from slicewise.errors import UserError
from slicewise.train import runtime
from slicewise.train.batches import local_rows, to_global
from slicewise.train.restore import Trained, open_trained

KIND_OF_SUFFIX = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrayrecord": "arrayrecord",
    ".array_record": "arrayrecord",
}


@dataclass(frozen=True)
class Score:
    step: int  # of the checkpoint
    source: str
    loss: float  # nats a token
    tokens: int  # that were predicted

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def evaluate(path: str, data: str | None, overrides: list[str], *, batches: int | None = None) -> Score:
    """Scores the model at ``path`` on the file, directory or glob ``data``, by default the run's held-out text.

    ``batches`` bounds how many batches are read. Raises UserError for a checkpoint or text that cannot be used.
    """
    if batches is not None and batches < 1:
        raise UserError(f"batches = {batches}: expected 1 or more.")
    if data is not None:
        kind = KIND_OF_SUFFIX.get(PurePath(data).suffix, "text")
        overrides = [f"dataset={kind}", f"dataset_path={data}", "held_out_fraction=0", *overrides]
    runtime.start()
    trained = open_trained(path, overrides)
    split = "train" if data is not None else "held_out"
    if trained.config.data.dataset == "synthetic":
        raise UserError(f"{path} was trained on synthetic tokens, which hold no text to score; give --data.")
    documents = TokenizedDocuments(trained.config, split, trained.step.spec.vocab)
    with jax.set_mesh(trained.mesh):
        loss, tokens = _score(trained, itertools.islice(_batches(trained.config, documents), batches))
    runtime.stop()
    return Score(trained.number, data or f"held-out {trained.config.data.dataset}", loss, tokens)


def _batches(config: RunConfig, documents: TokenizedDocuments) -> Iterator[dict[str, np.ndarray]]:
    """Global batches, each field int32 [B, T]; rows of the last one may be empty."""
    rows = rows_of_all(documents, config.data.sequence_length)
    while chunk := list(itertools.islice(rows, config.data.global_batch_size)):
        empty = np.zeros_like(chunk[0]["tokens"])
        nothing = {field: empty - 1 if field == "targets" else empty for field in FIELDS}
        chunk += [nothing] * (config.data.global_batch_size - len(chunk))
        yield {field: np.stack([row[field] for row in chunk]) for field in FIELDS}


def _score(trained: Trained, batches: Iterator[dict[str, np.ndarray]]) -> tuple[float, int]:
    rows = local_rows(trained.step)
    total, count = 0.0, 0
    for batch in batches:
        local = {field: values[rows] for field, values in batch.items()}
        nats, tokens = trained.step.evaluate(trained.params, to_global(trained.step, rows, local))
        total, count = total + float(nats), count + int(tokens)
    if not count:
        raise UserError("the text has no token to predict; give longer documents.")
    return total / count, count
