"""Text from a trained model: prefill and decode with a key-value cache, sampling, batches of prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.data.chat import open_chat
from slicewise.data.tokenizers import Tokenizer, open_tokenizer
from slicewise.errors import UserError
from slicewise.kernels.attention.api import Tokens
from slicewise.model import transformer
from slicewise.parallel.rules import partition
from slicewise.train import runtime
from slicewise.train.restore import open_trained


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: greedy at temperature 0, else from the tokens that pass top-k and top-p."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature = {self.temperature}: expected 0 (greedy) or more.")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k = {self.top_k}: expected 1 or more.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p = {self.top_p}: expected more than 0 and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed = {self.seed}: expected 0 to {2**32 - 1}.")


@dataclass(frozen=True)
class GenerateStep:
    """Compiled functions of one (model, mesh). Rows B, prompt length T, cache slots S.

    prefill: (params, tokens [B, T], lengths [B], slots S) -> (logits of each row's last token [B, V], cache)
    decode: (params, cache, tokens [B], positions [B]) -> (logits [B, V], cache); donates the cache
    """

    prefill: Callable[..., tuple[jax.Array, transformer.Cache]]
    decode: Callable[..., tuple[jax.Array, transformer.Cache]]


def build_generate_step(spec: ModelSpec, mesh: Mesh, dtype: jnp.dtype) -> GenerateStep:
    whole = PartitionSpec()

    def run(params: Any, cache: Any, tokens_BT: jax.Array, positions_BT: jax.Array, last_B: jax.Array):
        where = Tokens(positions_BT, jnp.ones_like(positions_BT))
        logits_BTV, cache = transformer.forward(params, spec, tokens_BT, where, dtype=dtype, cache=cache)
        # Which row's last token is wanted is data, so all logits are gathered; the prompt is short beside training.
        logits_BTV = jax.sharding.reshard(logits_BTV, whole).astype(jnp.float32)
        return jnp.take_along_axis(logits_BTV, last_B[:, None, None], axis=1)[:, 0, : spec.vocab], cache

    def prefill(params: Any, tokens_BT: jax.Array, lengths_B: jax.Array, slots: int):
        B, T = tokens_BT.shape
        cache = transformer.empty_cache(spec, B, slots, dtype)
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        rows = partition("batch", "sequence")
        tokens_BT, positions_BT = (jax.sharding.reshard(x, rows) for x in (tokens_BT, positions_BT))
        return run(params, cache, tokens_BT, positions_BT, lengths_B - 1)

    def decode(params: Any, cache: Any, tokens_B: jax.Array, positions_B: jax.Array):
        rows = partition("batch", "sequence")
        tokens_B1, positions_B1 = (jax.sharding.reshard(x[:, None], rows) for x in (tokens_B, positions_B))
        return run(params, cache, tokens_B1, positions_B1, jnp.zeros_like(positions_B))

    with jax.set_mesh(mesh):
        return GenerateStep(jax.jit(prefill, static_argnums=3), jax.jit(decode, donate_argnums=1))


def draw(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Token ids [B] drawn from float32 logits."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is not None:
        least_B1 = jax.lax.top_k(logits_BV, min(sampling.top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    if sampling.top_p is not None:
        ordered_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        before_BV = jnp.cumsum(jax.nn.softmax(ordered_BV), axis=-1) - jax.nn.softmax(ordered_BV)
        # The likeliest token is always kept: nothing comes before it.
        least_B1 = jnp.where(before_BV < sampling.top_p, ordered_BV, jnp.inf).min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV)


def generate(
    path: str,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    overrides: Sequence[str] = (),
    *,
    is_chat: bool = False,
) -> list[str]:
    """Prompts with their continuations by the model at ``path``, up to ``max_tokens`` more or an end token.

    With ``is_chat`` each prompt is what a user says, in the run's chat template, and only the answer is returned.
    ``overrides`` replace keys of the run's config.
    Raises UserError for a checkpoint that cannot be used or a length that exceeds the model's context.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens = {max_tokens}: expected 1 or more.")
    runtime.start()
    trained = open_trained(path, list(overrides))
    spec, tokenizer = trained.step.spec, open_tokenizer(trained.config.data.tokenizer)
    step = build_generate_step(spec, trained.mesh, jnp.dtype(trained.config.model.compute_dtype))
    chat = open_chat(trained.config.data, tokenizer) if is_chat else None
    if chat is None:
        rows = [_encode(tokenizer, prompt) for prompt in prompts]
    else:
        rows = [chat.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    stop_ids = frozenset({tokenizer.end_id}) if chat is None else chat.stop_ids
    longest = max(map(len, rows))
    if longest + max_tokens > spec.max_context:
        raise UserError(
            f"a prompt of {longest} tokens and {max_tokens} more exceed the model's context of {spec.max_context};"
            " shorten the prompt or ask for fewer tokens."
        )
    spare = -len(rows) % trained.mesh.shape["data"]  # rows divide evenly over the devices
    with jax.set_mesh(trained.mesh):
        new = _continue(step, trained.params, rows + rows[:1] * spare, max_tokens, sampling, stop_ids)
    runtime.stop()
    said = [""] * len(prompts) if chat else prompts
    return [before + tokenizer.decode(ids) for before, ids in zip(said, new, strict=False)]


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    ids = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    ids += tokenizer.encode(prompt).tolist()
    return ids or [tokenizer.end_id]  # a document begins where another ended


def _continue(
    step: GenerateStep,
    params: Any,
    rows: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    stop_ids: frozenset[int],
) -> list[list[int]]:
    lengths = np.array([len(row) for row in rows])
    tokens_BT = np.zeros((len(rows), lengths.max()), np.int32)
    for i, row in enumerate(rows):
        tokens_BT[i, : len(row)] = row
    key = jax.random.key(sampling.seed)
    choose = jax.jit(lambda logits_BV, key: draw(logits_BV, key, sampling))
    logits_BV, cache = step.prefill(params, tokens_BT, lengths, int(lengths.max()) + max_tokens)
    new: list[list[int]] = [[] for _ in rows]
    running = np.ones(len(rows), bool)
    for count in range(max_tokens):
        drawn_B = np.asarray(choose(logits_BV, jax.random.fold_in(key, count))).astype(np.int32)
        running &= ~np.isin(drawn_B, list(stop_ids))
        for i in np.flatnonzero(running).tolist():
            new[i].append(int(drawn_B[i]))
        if not running.any() or count == max_tokens - 1:
            break
        logits_BV, cache = step.decode(params, cache, drawn_B, (lengths + count).astype(np.int32))
    return new
