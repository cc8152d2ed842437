"""Tokenizers made by the real libraries, text there and back, and files that are none."""

import io
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from slicewise.data.tokenizers import Bytes, encode_document, open_tokenizer
from slicewise.errors import ExitCode, UserError

LINES = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 10


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    def make(*specials):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=280,
            special_tokens=list(specials),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(LINES, trainer)
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=50)
        path = tmp_path_factory.mktemp("t") / "tokenizer.json"
        tokenizer.save(str(path))
        return str(path)

    return make


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    def make(**options):
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(LINES),
            model_writer=out,
            vocab_size=60,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        path = tmp_path_factory.mktemp("t") / "spm.model"
        path.write_bytes(out.getvalue())
        return str(path)

    return make


@given(st.text())
def test_bytes_there_and_back(text):
    assert Bytes().decode(Bytes().encode(text)) == text


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 258)))
def test_bytes_decode_anything(ids):
    assert isinstance(Bytes().decode(ids), str)


def test_bytes_are_documents_with_begin_and_end():
    ids = encode_document(Bytes(), "a\u00e9")
    assert ids.dtype == np.int32
    assert ids.tolist() == [256, 97, 0xC3, 0xA9, 257]
    assert Bytes().decode(ids) == "a\u00e9"
    assert Bytes().decode([97, 300, 0xC3, 98, -1]) == "a\ufffd\ufffdb\ufffd"


def test_tokenizer_json_there_and_back_without_its_truncation_and_padding(tokenizer_json):
    tokenizer = open_tokenizer(tokenizer_json("<|begin_of_text|>", "<|end_of_text|>"))
    text = LINES[0] + " and \u00e9"
    ids = encode_document(tokenizer, text)
    assert ids.dtype == np.int32
    assert (tokenizer.vocab_size, tokenizer.begin_id, tokenizer.end_id) == (280, 0, 1)
    assert (ids[0], ids[-1]) == (0, 1)
    assert 3 < len(ids) < len(text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_json_without_a_begin_token(tokenizer_json):
    tokenizer = open_tokenizer(tokenizer_json("<|endoftext|>"))
    assert tokenizer.begin_id is None
    assert encode_document(tokenizer, "").tolist() == [0]


def test_text_that_spells_a_special_token_does_not_end_the_document(tokenizer_json):
    tokenizer = open_tokenizer(tokenizer_json("<|endoftext|>"))
    text = "before <|endoftext|> after"
    ids = tokenizer.encode(text)
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == text


def test_sentencepiece_there_and_back(sentencepiece_model):
    tokenizer = open_tokenizer(sentencepiece_model())
    ids = encode_document(tokenizer, LINES[0])
    assert ids.dtype == np.int32
    assert (tokenizer.begin_id, tokenizer.end_id) == (1, 2)
    assert (ids[0], ids[-1]) == (1, 2)
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == LINES[0]


def test_sentencepiece_without_a_begin_token(sentencepiece_model):
    assert open_tokenizer(sentencepiece_model(bos_id=-1)).begin_id is None


def test_files_decode_ids_out_of_range_and_broken_characters(tokenizer_json, sentencepiece_model):
    for path in (tokenizer_json("</s>"), sentencepiece_model()):
        tokenizer = open_tokenizer(path)
        word = tokenizer.encode("fox").tolist()
        assert tokenizer.decode([*word, 99999, -1, *word]).count("\ufffd") == 2
        for i in range(tokenizer.vocab_size):
            assert isinstance(tokenizer.decode([i]), str)


def test_a_tokenizer_json_without_an_end_token_says_which_names_were_looked_for(tokenizer_json):
    with pytest.raises(UserError, match=r"no end-of-text token; looked for '<\|end_of_text\|>', .*'</s>'"):
        open_tokenizer(tokenizer_json("[SEP]"))


def test_a_sentencepiece_model_without_an_end_token_is_refused(sentencepiece_model):
    with pytest.raises(UserError, match="no end-of-text token"):
        open_tokenizer(sentencepiece_model(eos_id=-1))


@pytest.mark.parametrize("content", [b"", b"{}", b"text", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["tokenizer.json", "spm.model"])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is not a "):
        open_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize("name", ["byte", "tokenizer.txt", "gpt2"])
def test_an_unknown_kind_is_refused(name):
    with pytest.raises(UserError, match=f"tokenizer = '{name}' is of no known kind; expected 'bytes'"):
        open_tokenizer(name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer.json: No such file") as error:
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert error.value.code == ExitCode.USER


@pytest.mark.parametrize(
    ("name", "package"), [("tokenizer.json", "tokenizers"), ("a.model", "sentencepiece")]
)
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs the package {package}: pip install 'slicewise\[text\]'"):
        open_tokenizer(str(tmp_path / name))
