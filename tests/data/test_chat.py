"""Conversations: which tokens are an answer, exactly, by the built-in form and by templates of published kinds."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from slicewise.config import Data
from slicewise.data.chat import START, Builtin, Conversation, check_messages, open_chat
from slicewise.data.loader import BatchLoader
from slicewise.data.packing import FIELDS, ConversationPacker
from slicewise.data.sources import open_source
from slicewise.data.tokenizers import Bytes, open_tokenizer
from slicewise.errors import UserError

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "the lazy dog"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "jumps"},
]
# Of each kind of published template: the program, and the answers of ASKED that it makes, with the end of the turn.
TEMPLATES = {
    "marked turns": (
        "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
        ["the lazy dog<|stop|>", "jumps<|stop|>"],
    ),
    "content is trimmed": (
        "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|stop|>"
        "{% endfor %}",
        ["the lazy dog<|stop|>", "jumps<|stop|>"],
    ),
    "the end of the text ends an answer": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [/Q]"
        "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        [" the lazy dog <|endoftext|>", " jumps <|endoftext|>"],  # a token counts whole
    ),
    "no token ends an answer": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        [" the lazy dog", " jumps"],
    ),
    "only the last answer, by the template's own mark": (
        "{% for m in messages %}{% if loop.last and m.role == 'assistant' %}"
        "<|start|>{% generation %}{{ m.content }}<|stop|>{% endgeneration %}"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}",
        ["jumps<|stop|>"],
    ),
}
SPECIALS = ["<|endoftext|>", "<s>", "<|start|>", "<|end|>", "<|stop|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer as it is published, without a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick fox jumps over the lazy dog\nassistant\nuser\n"] * 9, trainer)
    path = tmp_path_factory.mktemp("t")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def chat_of(folder, template="auto", **keys):
    data = Data(tokenizer=str(folder / "tokenizer.json"), chat_template=str(template), **keys)
    return open_chat(data, open_tokenizer(data.tokenizer))


def with_template(folder, tmp_path, source):
    path = tmp_path / "chat.jinja"
    path.write_text(source)
    return chat_of(folder, path)


def conversation(messages):
    return Conversation(tuple(messages), lambda: "here")


def texts(folder, ids, is_answer):
    """The text of each run of answer tokens, and the whole text."""
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    runs, now = [], []
    for token, answer in zip([*ids, 0], [*is_answer, 0], strict=True):
        if answer:
            now.append(int(token))
        elif now:
            runs.append(plain.decode(now, skip_special_tokens=False))
            now = []
    return runs, plain.decode(list(map(int, ids)), skip_special_tokens=False)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_answers_of_a_template_are_the_text_of_assistants_and_what_ends_their_turn(
    folder, tmp_path, kind
):
    source, answers = TEMPLATES[kind]
    chat = with_template(folder, tmp_path, source)
    ids, is_answer = chat.encode(conversation(ASKED))
    assert texts(folder, ids, is_answer)[0] == answers
    ends = {SPECIALS.index(special) for special in SPECIALS if answers[-1].endswith(special)}
    assert chat.stop_ids == ends | {0}


def test_a_template_is_tokenized_as_one_text_with_its_special_tokens(folder, tmp_path):
    chat = with_template(folder, tmp_path, TEMPLATES["marked turns"][0])
    plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    said = "".join(f"<|start|>{m['role']}\n{m['content']}<|stop|>\n" for m in ASKED)
    assert chat.encode(conversation(ASKED))[0].tolist() == plain.encode(said).ids
    prompt = chat.prompt(ASKED[:2])
    start = "".join(f"<|start|>{m['role']}\n{m['content']}<|stop|>\n" for m in ASKED[:2])
    assert prompt == plain.encode(start + "<|start|>assistant\n").ids


def test_a_special_token_that_a_message_spells_out_is_text(folder, tmp_path):
    chat = with_template(folder, tmp_path, TEMPLATES["marked turns"][0])
    ids, is_answer = chat.encode(
        conversation(
            [{"role": "user", "content": "say <|stop|>"}, {"role": "assistant", "content": "<|stop|>!"}]
        )
    )
    assert ids.tolist().count(SPECIALS.index("<|stop|>")) == 2  # those of the template
    answers, whole = texts(folder, ids, is_answer)
    assert answers == ["<|stop|>!<|stop|>"]
    assert "say <|stop|><|stop|>" in whole


def test_without_a_template_of_its_own_a_tokenizer_has_the_builtin_one(folder):
    chat = chat_of(folder)
    assert chat.name == "builtin"
    ids, is_answer = chat.encode(conversation(ASKED))
    answers, whole = texts(folder, ids, is_answer)
    assert answers == ["the lazy dog<|endoftext|>", "jumps<|endoftext|>"]
    assert whole.startswith(
        "<s><|system|>\nBe brief.<|endoftext|>\n<|user|>\nthe fox?<|endoftext|>\n<|assistant|>\n"
    )


def test_the_template_beside_a_tokenizer_is_found(folder, tmp_path):
    source = TEMPLATES["marked turns"][0]
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": source, "bos_token": {"content": "<s>"}}))
    assert chat_of(tmp_path).name == f"of {settings}"
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": source}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert chat_of(tmp_path).encode(conversation(ASKED))[1].sum() > 0
    (tmp_path / "chat_template.jinja").write_text(source)
    assert chat_of(tmp_path).name == str(tmp_path / "chat_template.jinja")
    assert chat_of(tmp_path, "builtin").name == "builtin"
    (tmp_path / "chat_template.jinja").unlink()
    settings.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(UserError, match="has no chat template called default; write the one you mean"):
        chat_of(tmp_path)
    settings.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        chat_of(tmp_path)
    settings.write_text("[]")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is no JSON object but list"):
        chat_of(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", r"chat\.jinja is no Jinja template: line 1: "),
        (
            "{{ raise_exception('roles must alternate') }}",
            r"here: the chat template .* refuses it: roles must alter",
        ),
        ("{{ strftime_now('%Y') }}", r"refuses it: 'strftime_now' is undefined\."),
        ("{{ messages.append(1) }}", r"refuses it: "),
        (
            "{% for m in messages %}{{ m.content | upper }}{{ m.content | length }}{% endfor %}",
            r"here: the chat template .* rewrites an answer, so it cannot be told where that lies; put \{% gen",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(folder, tmp_path, source, message):
    with pytest.raises(UserError, match=message):
        with_template(folder, tmp_path, source).encode(conversation(ASKED))


def test_a_template_needs_a_tokenizer_json_and_a_file(folder, tmp_path):
    (tmp_path / "chat.jinja").write_text("x")
    with pytest.raises(
        UserError, match=r"needs a tokenizer\.json, and tokenizer = 'bytes' is none; set tokenizer"
    ):
        open_chat(Data(chat_template=str(tmp_path / "chat.jinja")), Bytes())
    with pytest.raises(UserError, match=r"nothing\.jinja: No such file"):
        chat_of(folder, tmp_path / "nothing.jinja")
    (tmp_path / "chat.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"chat\.jinja: byte 3 is not UTF-8 text"):
        chat_of(folder, tmp_path / "chat.jinja")


def test_a_conversation_of_bytes_has_this_form_to_the_last_token():
    ids, is_answer = Builtin(Bytes()).encode(
        conversation([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}])
    )
    expected = [256, *b"<|user|>\nhi", 257, *b"\n<|assistant|>\nyo", 257, *b"\n"]
    assert ids.tolist() == expected
    assert is_answer.tolist() == [0] * (len(expected) - 4) + [1, 1, 1, 0]
    assert Builtin(Bytes()).prompt([{"role": "user", "content": "hi"}]) == expected[:-4]


def test_an_empty_answer_is_none():
    said = conversation([{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}])
    assert Builtin(Bytes()).encode(said)[1].sum() == 0


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=5)), min_size=1))
def test_the_builtin_form_counts_every_byte_of_every_answer_and_no_other(turns):
    said = conversation({"role": role, "content": text} for role, text in turns)
    ids, is_answer = Builtin(Bytes()).encode(said)
    answers = b"".join(text.encode() + b"\0" for role, text in turns if role == "assistant" and text)
    assert bytes(0 if i == 257 else int(i) for i in ids[is_answer == 1]) == answers


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hi", "a conversation is str; expected a list of messages"),
        ([], "a conversation is an empty list; expected a list of messages"),
        ([3], "message 1 is int; expected an object with role and content"),
        (
            [{"role": "usr", "content": "x"}],
            "message 1 has role 'usr'; expected system, .*tool: Did you mean 'user'",
        ),
        ([{"role": None, "content": "x"}], "message 1 has role None; expected system"),
        ([ASKED[0], {"role": "user"}], "message 2 has content of type NoneType; expected text"),
        (
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            "has 'tool_calls'; only role and content are read",
        ),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair as character 0"),
        ([{"role": "user", "content": START}], "U.FDD0 to U.FDD2, which are no characters"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(value, message):
    with pytest.raises(UserError, match=f"^here: .*{message}"):
        check_messages(value, lambda: "here")


def test_an_absent_value_of_another_key_is_no_matter():
    kept = check_messages([{**ASKED[1], "name": None}], lambda: "here")
    assert kept.messages == (ASKED[1],)


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("dataset", ["jsonl", "parquet", "huggingface"])
def test_conversations_are_read_from_every_kind_of_record(config, tmp_path, dataset):
    if dataset == "huggingface":
        pytest.importorskip("datasets")
    records = [{"messages": ASKED[:n]} for n in (3, 5)]
    path = tmp_path / "a.jsonl"
    if dataset == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif dataset == "parquet":
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "a.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        import datasets

        path = tmp_path / "saved"
        datasets.Dataset.from_list(records).save_to_disk(str(path))
    source = open_source(config(dataset=dataset, dataset_path=path, messages_field="messages").data)
    assert [list(source[i].messages) for i in range(2)] == [ASKED[:3], ASKED[:5]]


def test_a_record_without_the_field_and_a_kind_without_fields_are_refused(config, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"message": []}\n{"messages": 3}\n')
    source = open_source(config(dataset="jsonl", dataset_path=tmp_path, messages_field="messages").data)
    with pytest.raises(UserError, match="no field 'messages'. Did you mean 'message'.* set messages_field"):
        source[0]
    with pytest.raises(UserError, match=r"a\.jsonl:2: a conversation is int"):
        source[1]
    for dataset in ("text", "synthetic"):
        with pytest.raises(
            UserError, match=f"dataset = '{dataset}' has no fields; expected dataset = jsonl, parq"
        ):
            open_source(config(dataset=dataset, dataset_path=tmp_path, messages_field="m").data)


# ---------------------------------------------------------------- rows


def stream(*lengths, answer=slice(-2, None)):
    """Conversation k has tokens 100 k, 100 k + 1, ... of which the last two are an answer."""

    def read(k):
        ids = 100 * k + np.arange(lengths[k % len(lengths)], dtype=np.int32)
        is_answer = np.zeros_like(ids)
        is_answer[answer] = 1
        return np.stack([ids, is_answer])

    return read


def rows(packer, count, length):
    found = []
    for _ in range(count):
        row = {field: np.full(length, 77, np.int32) for field in FIELDS}
        packer.fill(*row.values())
        found.append({field: values.tolist() for field, values in row.items()})
    return found


def test_whole_conversations_stand_in_a_row_and_only_answers_are_targets():
    packer = ConversationPacker(stream(4, 3, 5))
    first, second = rows(packer, 2, 9)
    assert first == {
        "tokens": [0, 1, 2, 3, 100, 101, 102, 0, 0],
        "targets": [-1, 2, 3, -1, 101, 102, -1, -1, -1],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 0],
    }
    assert second["tokens"] == [200, 201, 202, 203, 204, 300, 301, 302, 303]
    assert packer.state == (4, 0)


def test_a_conversation_longer_than_a_row_loses_its_end_and_without_an_answer_is_skipped():
    packer = ConversationPacker(stream(9, 3, answer=slice(1, 3)))
    (first,) = rows(packer, 1, 5)
    assert first["tokens"] == [0, 1, 2, 3, 4]
    assert first["targets"] == [1, 2, -1, -1, -1]
    assert packer.skipped == 0
    late = ConversationPacker(stream(9, 3))  # the answer of the long one is beyond the row
    assert rows(late, 1, 5)[0]["tokens"][:3] == [100, 101, 102]
    assert (late.skipped, late.state) == (2, (3, 0))  # also the next one, which was looked at


def test_a_stream_without_answers_is_refused(monkeypatch):
    monkeypatch.setattr("slicewise.data.packing.MOST_SKIPPED", 20)
    with pytest.raises(
        UserError, match="20 conversations, .* have no answer within sequence_length = 5 tokens"
    ):
        rows(ConversationPacker(stream(9)), 1, 5)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(3, 15), st.integers(0, 5))
def test_rows_continue_from_any_state(lengths, length, taken):
    lengths = [2, *lengths]  # one at least has an answer that fits
    packer = ConversationPacker(stream(*lengths))
    rows(packer, taken, length)
    again = ConversationPacker(stream(*lengths), packer.state)
    assert rows(again, 3, length) == rows(packer, 3, length)


@pytest.fixture
def chats(config, tmp_path):
    """Forty conversations, every fourth of them without an answer."""
    said = [
        [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "x" * (i % 7)}]
        for i in range(40)
    ]
    for i in range(0, 40, 4):
        said[i] = said[i][:1]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))

    def make(**keys):
        defaults = {"dataset": "jsonl", "dataset_path": path, "messages_field": "messages"}
        return config(**defaults | {"global_batch_size": 4, "sequence_length": 96} | keys)

    return make


def test_a_row_is_the_same_whoever_reads_it_and_continues_from_its_state(chats):
    whole, half = BatchLoader(chats(), range(4)), BatchLoader(chats(), [1, 3])
    for _ in range(3):
        batch, mine = next(whole), next(half)
        for field in FIELDS:
            np.testing.assert_array_equal(batch[field][[1, 3]], mine[field])
    assert whole.chat_template == "builtin"
    assert whole.skipped.sum() > 0
    again = BatchLoader(chats(), range(4), state=whole.state)
    expected = next(whole)
    np.testing.assert_array_equal(next(again)["tokens"], expected["tokens"])
    for loader in (whole, half, again):
        loader.close()


def test_fewer_conversations_with_an_answer_than_rows_are_refused_with_both_numbers(chats):
    config = chats(global_batch_size=64, held_out_fraction=0)
    with pytest.raises(
        UserError, match=r"^26 of 40 conversations .* = 96 tokens, fewer than global_batch_size = 64"
    ):
        BatchLoader(config, range(64))
    short = chats(sequence_length=8, held_out_fraction=0)
    with pytest.raises(
        UserError, match=r"^0 of 40 conversations for training have an answer within .* = 8 tokens"
    ):
        BatchLoader(short, range(4))
