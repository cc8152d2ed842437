"""Conversations through the chat template of a published tokenizer: a Jinja program that writes its special tokens.

Where an answer lies in what a template writes is found by marks around it, which must leave the text as it is without.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from slicewise.data.chat import END, HIDDEN, START, Conversation, Message
from slicewise.data.tokenizers import TokenizerJson
from slicewise.errors import UserError

GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
Spans = list[tuple[int, int]]  # of characters


class TemplateChat:
    """``source`` is the Jinja program; ``settings`` that of tokenizer_config.json, which names begin and end."""

    def __init__(self, source: str, name: str, tokenizer: TokenizerJson, settings: dict[str, Any]):
        self.name = name
        self._template = _compiled(source, name)
        self._says_where = bool(GENERATION.search(source))
        self._tokenizer = tokenizer.with_special_tokens()
        tokens = {i: t for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._special = frozenset(tokens)
        texts = sorted((t.content for t in tokens.values()), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._names = {
            "bos_token": _named(settings.get("bos_token"), self._tokenizer, tokenizer.begin_id),
            "eos_token": _named(settings.get("eos_token"), self._tokenizer, tokenizer.end_id),
        }
        self.stop_ids = frozenset({tokenizer.end_id, *self._end_of_turn()})

    def encode(self, conversation: Conversation) -> np.ndarray:
        text, spans = self._text(conversation)
        ids, starts, ends = self._tokens(text)
        is_answer = np.zeros(len(ids), np.int32)
        for start, end in spans:
            # A token without characters of its own, such as a lone space, counts as the one that it stands before.
            is_answer |= (starts < end) & (np.maximum(ends, starts + 1) > start)
            if not self._says_where:
                self._add_end_of_turn(is_answer, text, ids, starts, ends, end)
        return np.stack([ids, is_answer]).astype(np.int32)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        hidden = [{**m, "content": self._hidden(m["content"])} for m in messages]
        text = self._render(hidden, lambda: "the prompt", is_prompt=True)
        return self._tokens(text.replace(START, "").replace(END, ""))[0].tolist()

    def _text(self, conversation: Conversation) -> tuple[str, Spans]:
        """What the template writes, and where in it the answers are."""
        where = conversation.where
        hidden = [{**m, "content": self._hidden(m["content"])} for m in conversation.messages]
        plain = self._render(hidden, where)
        if self._says_where:
            return _spans(plain)
        for strip in (False, True):
            marked = self._render([_marked(m, strip) for m in hidden], where)
            text, spans = _spans(marked)
            if text == plain and len(spans) == sum(m != _marked(m, strip) for m in hidden):
                return text, spans
        raise UserError(
            f"{where()}: the chat template {self.name} rewrites an answer, so it cannot be told where that lies;"
            " put {% generation %} and {% endgeneration %} around answers in the template."
        )

    def _render(self, messages: list[Message], where: Callable[[], str], *, is_prompt: bool = False) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=is_prompt, **self._names)
        except Exception as e:  # a template is a program and may fail in any way
            raise UserError(
                f"{where()}: the chat template {self.name} refuses it: {str(e).rstrip('.')}."
            ) from e

    def _hidden(self, content: str) -> str:
        """``content`` with a mark inside every special token that it spells out: only the template writes tokens."""
        if self._spelled is None:
            return content
        return self._spelled.sub(lambda found: found[0][0] + HIDDEN + found[0][1:], content)

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, and the first character and the one behind the last of each."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        kept = [text[start:end] != HIDDEN for start, end in offsets]
        return np.array(encoded.ids, np.int32)[kept], offsets[kept, 0], offsets[kept, 1]

    def _add_end_of_turn(
        self,
        is_answer: np.ndarray,
        text: str,
        ids: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        end: int,
    ) -> None:
        """Marks the special token that follows an answer, with the blanks before it."""
        first = int(np.searchsorted(starts, end))
        for i in range(first, len(ids)):
            if int(ids[i]) in self._special:
                is_answer[first : i + 1] = 1
                return
            if text[starts[i] : ends[i]].strip():
                return

    def _end_of_turn(self) -> Iterator[int]:
        """The token that ends an answer, where the template takes a plain question and answer."""
        asked = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
        try:
            ids, is_answer = self.encode(Conversation(asked, lambda: ""))
        except UserError:
            return
        last = ids[is_answer == 1][-1:].tolist()
        yield from (i for i in last if i in self._special)


def _marked(message: Message, strip: bool) -> Message:
    content = message["content"].strip() if strip else message["content"]
    if message["role"] != "assistant" or not content:
        return message
    return {**message, "content": START + content + END}


def _spans(marked: str) -> tuple[str, Spans]:
    """The text without marks, and the characters of it that were between two."""
    text, spans, open_at, size = [], [], None, 0
    for part in re.split(f"([{START}{END}])", marked):
        if part == START:
            open_at = size
        elif part == END and open_at is not None:
            spans.append((open_at, size))
            open_at = None
        elif part != END:
            text.append(part)
            size += len(part)
    return "".join(text), [span for span in spans if span[0] < span[1]]


def _named(setting: Any, tokenizer: Any, token: int | None) -> str:
    """A token's text from a setting, which may be a table, or from its id."""
    text = setting.get("content") if isinstance(setting, dict) else setting
    if isinstance(text, str):
        return text
    return "" if token is None else tokenizer.id_to_token(token)


def _compiled(source: str, name: str) -> Any:
    """The program, as published templates expect to run: sandboxed, with loop controls and raise_exception.

    strftime_now is not there: what a row holds must not depend on the day.
    """
    try:
        from jinja2 import TemplateError, TemplateSyntaxError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise UserError(
            f"chat template {name} needs the package jinja2: pip install 'slicewise[text]'."
        ) from e

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (as the base class has it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return START + caller() + END

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as e:
        raise UserError(f"chat template {name} is no Jinja template: line {e.lineno}: {e.message}.") from e
