"""What the tokens of a step may be: plan and train refuse in the same words."""

import math

from slicewise.costs.layout import ContextExchange
from slicewise.errors import UserError

BLOCK = 128  # splash attention: sequences are multiples of the lanes of a vector register
LARGEST = 2**31 - 1  # devices count steps and tokens in 32 bits


def check_tokens(rows: int, length: int) -> None:
    """Raises UserError for more tokens a step than devices can count."""
    if (tokens := rows * length) > LARGEST:
        raise UserError(
            f"global_batch_size x sequence_length = {rows:,} x {length:,} = {tokens:,} tokens a step: devices count at"
            f" most {LARGEST:,}; lower one of them."
        )


def check_positions(model: str, length: int, positions: int | None) -> None:
    """Raises UserError for sequences longer than the ``positions`` that ``model`` has learned; None: it needs none."""
    if positions is not None and length > positions:
        raise UserError(
            f"sequence_length = {length} exceeds the {positions} learned positions of {model}; lower it."
        )


def is_balanced(strategy: ContextExchange) -> bool:
    """Whether a device holds an early and a late chunk of a row, instead of neighbouring tokens."""
    return strategy != "ulysses"


def check_divided(length: int, ways: int, strategy: ContextExchange, prediction_layers: int) -> None:
    """Raises UserError for sequences of ``length`` that the context axis cannot divide in ``ways``."""
    if ways == 1:
        return
    chunks = 2 * ways if is_balanced(strategy) else ways
    if length % chunks:
        above = length + -length % chunks
        below = length - length % chunks
        near = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"sequence_length = {length} does not fall into the {chunks} equal chunks that context"
            f" parallelism {ways} by {strategy} needs; use {near}."
        )
    if length // chunks < prediction_layers:
        raise UserError(
            f"sequence_length = {length} leaves chunks of {length // chunks} tokens to context"
            f" parallelism {ways}, fewer than the {prediction_layers} prediction layers look ahead; raise it."
        )


def check_heads(model: str, kv_heads: int, ways: int, tensor: int, strategy: ContextExchange) -> None:
    """Raises UserError for the ``kv_heads`` of ``model`` that a context axis of ``ways`` cannot exchange, behind a
    tensor axis that divides them."""
    if strategy == "ulysses" and (heads := kv_heads // tensor) % ways:
        kept = "kv_heads" if tensor == 1 else "kv_heads / tensor parallelism"
        raise UserError(
            f"context_strategy = ulysses exchanges heads, and context parallelism {ways} does not divide {kept} ="
            f" {heads} of {model}; use {math.gcd(heads, ways)} ways, or all_gather or ring."
        )


def check_blocks(length: int, ways: int, strategy: ContextExchange) -> None:
    """Raises UserError for sequences of ``length``, divided in ``ways``, that splash attention cannot cut in blocks."""
    multiple = BLOCK * (ways if strategy != "ring" or ways == 1 else 2 * ways)
    if length % multiple:
        above = length + -length % multiple
        over = f" over context parallelism {ways}" if ways > 1 else ""
        raise UserError(
            f"sequence_length = {length} is not a multiple of {multiple}, which splash attention needs{over};"
            f" use {above}, or attention = 'reference'."
        )
