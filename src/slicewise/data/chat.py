"""Conversations to token ids and back: which of them are an answer, on which alone the loss is taken.

Dims: n tokens of a conversation.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slicewise.config import Data
from slicewise.data.files import decode_utf8, reading
from slicewise.data.tokenizers import Tokenizer, TokenizerJson
from slicewise.errors import UserError, did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
# Not characters (Unicode 23.7), so no text has them: what template.py puts around answers and into spelled-out tokens.
START, END, HIDDEN = "\ufdd0", "\ufdd1", "\ufdd2"

Message = dict[str, str]  # role, content


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    where: Callable[[], str]  # it stands, for messages


class Chat(Protocol):
    """A form of conversations for one tokenizer."""

    name: str
    stop_ids: frozenset[int]  # tokens that end an answer

    def encode(self, conversation: Conversation) -> np.ndarray:
        """int32 [2, n]: the ids, and 1 where one belongs to an answer: those of the text, and the end of the turn."""
        ...

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the next answer begins."""
        ...


def check_messages(value: Any, where: Callable[[], str]) -> Conversation:
    """The conversation in a field of a record. Raises UserError where it is none, with the message's number from 1."""
    if not isinstance(value, list) or not value:
        kind = "an empty list" if isinstance(value, list) else type(value).__name__
        raise UserError(
            f"{where()}: a conversation is {kind}; expected a list of messages with role and content."
        )
    return Conversation(tuple(_message(m, i, where) for i, m in enumerate(value, 1)), where)


def _message(value: Any, number: int, where: Callable[[], str]) -> Message:
    def wrong(what: str) -> UserError:
        return UserError(f"{where()}: message {number} {what}.")

    if not isinstance(value, dict):
        raise wrong(f"is {type(value).__name__}; expected an object with role and content")
    if more := sorted(key for key, x in value.items() if x is not None and key not in ("role", "content")):
        raise wrong(f"has '{more[0]}'; only role and content are read, so remove it")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        near = did_you_mean(role, ROLES) if isinstance(role, str) else ""
        raise wrong(f"has role {role!r}; expected {', '.join(ROLES)}{near and ':'}{near.removesuffix('?')}")
    if not isinstance(content, str):
        raise wrong(f"has content of type {type(content).__name__}; expected text")
    try:
        content.encode()
    except UnicodeEncodeError as e:
        raise wrong(f"has half a surrogate pair as character {e.start}, which is no text") from e
    if any(mark in content for mark in (START, END, HIDDEN)):
        raise wrong("has one of U+FDD0 to U+FDD2, which are no characters")
    return {"role": role, "content": content}


def open_chat(data: Data, tokenizer: Tokenizer) -> Chat:
    """The form that ``data.chat_template`` asks for.

    Raises UserError for a template that cannot be read, is none, or needs another kind of tokenizer.
    """
    if data.chat_template == "builtin":
        return Builtin(tokenizer)
    folder = Path(data.tokenizer).expanduser().parent
    settings = _settings(folder) if data.tokenizer != "bytes" else {}
    if data.chat_template == "auto":
        found = _beside(folder, settings) if data.tokenizer != "bytes" else None
        if found is None:
            return Builtin(tokenizer)
        source, name = found
    else:
        path = Path(data.chat_template).expanduser()
        source, name = _text(path), str(path)
    if not isinstance(tokenizer, TokenizerJson):
        raise UserError(
            f"chat template {name} needs a tokenizer.json, and tokenizer = '{data.tokenizer}' is none;"
            " set tokenizer, or chat_template=builtin."
        )
    from slicewise.data.template import TemplateChat

    return TemplateChat(source, name, tokenizer, settings)


def _text(path: Path) -> str:
    """What a template's file holds. Raises UserError where it cannot be read, or is not UTF-8."""
    with reading(str(path)):
        content = path.read_bytes()
    return decode_utf8(content, lambda i: f"{path}: byte {i}")


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a Hugging Face folder; empty where there is none."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    with reading(str(path)):
        content = path.read_bytes()
    try:
        found = json.loads(content)
    except ValueError as e:
        raise UserError(f"{path} is not JSON: {e}.") from e
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object but {type(found).__name__}.")
    return found


def _beside(folder: Path, settings: dict[str, Any]) -> tuple[str, str] | None:
    """(text, name) of the chat template that a published tokenizer has beside it."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return _text(path), str(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {
            t["name"]: t["template"]
            for t in template
            if isinstance(t, dict) and t.keys() >= {"name", "template"}
        }
        template = named.get("default")
        if template is None:
            raise UserError(
                f"{folder / 'tokenizer_config.json'} has no chat template called default;"
                " write the one you mean into a file and set chat_template to it."
            )
    return (template, f"of {folder / 'tokenizer_config.json'}") if isinstance(template, str) else None


class Builtin:
    """The form for tokenizers that have none: begin, and of each message <|role|>, a newline, its content, end, a
    newline. Each part is tokenized by itself, and end is the tokenizer's own id, so no content can end a turn.
    """

    name = "builtin"

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.stop_ids = frozenset({tokenizer.end_id})

    def encode(self, conversation: Conversation) -> np.ndarray:
        parts: list[tuple[Sequence[int], bool]] = [(self._begin(), False)]
        for message in conversation.messages:
            is_answer = message["role"] == "assistant" and bool(message["content"])
            content = [*self._ids(message["content"]), self._tokenizer.end_id]
            parts += [(self._header(message["role"]), False), (content, is_answer), (self._ids("\n"), False)]
        ids = [i for part, _ in parts for i in part]
        return np.array([ids, [is_answer for part, is_answer in parts for _ in part]], np.int32)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        said = self.encode(Conversation(tuple(messages), lambda: "the prompt"))[0].tolist()
        return [*said, *self._header("assistant")]

    def _begin(self) -> list[int]:
        return [] if self._tokenizer.begin_id is None else [self._tokenizer.begin_id]

    def _header(self, role: str) -> list[int]:
        return self._ids(f"<|{role}|>\n")

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).tolist()
