"""Data sets of tokens: an item depends only on its index, the last tenth of the tokens is for validation, and long texts are
tokenized in pieces."""

import numpy as np
import pytest

from shardlab.errors import InputError, UnknownName
from trainers import __main__ as command
from trainers.data import tokenizing, tokens
from trainers.data.token_sets import open_tokens


def opened(folder, name, split="train", **keys):
    return open_tokens(name, folder, split, **{"seq_len": 16, "vocabulary_size": None, "tokens_file": None, **keys})


@pytest.fixture
def token_path(tmp_path):
    tokens.write_token_file(tmp_path / "some.tokens", [np.arange(331) % 50], 50)
    return tmp_path


def test_the_last_tenth_of_a_file_validates(token_path):
    """The last tenth of the items of a token file is the validation split."""
    train, validation = (opened(token_path, "tokens", split, tokens_file="some.tokens") for split in ("train", "validation"))
    assert (train.source.items, validation.source.items) == (18, 2)
    assert (train.source.name, train.source.synthetic, train.vocabulary) == ("some", False, 50)
    assert train.read(np.array([0, 17])).tolist() == [[i % 50 for i in range(16 * k, 16 * k + 17)] for k in (0, 17)]
    assert validation.read(np.array([0, 1])).tolist() == [[i % 50 for i in range(16 * k, 16 * k + 17)] for k in (18, 19)]
    assert train.read(np.array([0])).dtype == np.int64
    absolute = opened(token_path / "elsewhere", "tokens", tokens_file=str(token_path / "some.tokens"))
    assert absolute.source == train.source


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("tokens", {"tokens_file": "gone.tokens"}, "gone.tokens: no such file. `python -m trainers tokenize TEXT --out"),
        (
            "tokens",
            {"tokens_file": "some.tokens", "vocabulary_size": 49},
            "has a vocabulary of 50. Allowed: at most the model's, 49.",
        ),
        ("tokens", {"tokens_file": "some.tokens", "seq_len": 1000}, "331 tokens make 0 sequences of 1000, too few"),
        ("tokens", {"tokens_file": "some.tokens", "seq_len": 40, "split": "validation"}, "make 8 sequences of 40, too few"),
        ("tokens", {}, "tokens_file: found None with the data set tokens"),
        ("synthetic", {"tokens_file": "x"}, "tokens_file: found 'x' with the data set synthetic"),
        ("synthetic", {"vocabulary_size": 1}, "vocabulary: found 1. Allowed: at least 2"),
    ],
)
def test_an_unreadable_token_file_or_option_is_refused(token_path, name, keys, why):
    with pytest.raises(InputError) as refusal:
        opened(token_path, name, **keys)
    assert why in str(refusal.value)


def test_wrong_words_are_refused(tmp_path):
    with pytest.raises(UnknownName, match="Did you mean 'synthetic'"):
        opened(tmp_path, "syntetic")
    with pytest.raises(UnknownName, match="Allowed: train, validation"):
        opened(tmp_path, "synthetic", "test")


@pytest.mark.parametrize("vocabulary", [2, 100, None, 50_257])
def test_synthetic_tokens_follow_their_rule_nine_times_in_ten(tmp_path, vocabulary):
    train, again = (opened(tmp_path, "synthetic", seq_len=100, vocabulary_size=vocabulary) for _ in range(2))
    read = train.read(np.arange(300))
    symbols = min(vocabulary or 256, 256)
    assert (read.shape, read.dtype, train.vocabulary) == ((300, 101), np.int64, vocabulary or 256)
    assert (read.min(), read.max()) == (0, symbols - 1)
    follows = (read[:, 1:] == (5 * read[:, :-1] + 3) % symbols).mean()
    assert follows == pytest.approx(0.9 + 0.1 / symbols, abs=0.01)
    assert np.array_equal(again.read(np.array([7, 3])), read[[7, 3]])
    assert (train.source.items, train.source.synthetic) == (9000, True)
    validation = opened(tmp_path, "synthetic", "validation", seq_len=100, vocabulary_size=vocabulary)
    assert validation.source.items == 1000
    assert not np.array_equal(validation.read(np.array([7])), read[[7]])
    assert not list(tmp_path.iterdir())


def tokenize(*words):
    return command.main(["tokenize", *map(str, words)])


def test_bytes_are_tokens(tmp_path, capsys):
    (tmp_path / "a").write_bytes(b"\xff\0one")
    (tmp_path / "b").write_bytes(b"two")
    assert tokenize(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out.tokens") == 0
    assert capsys.readouterr().out == f"{tmp_path}/out.tokens: 8 tokens, with ids from 0 to 255\n"
    assert bytes(tokens.TokenFile(tmp_path / "out.tokens").tokens.astype(np.uint8)) == b"\xff\0onetwo"


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"[UNK]": 0, "ein": 1, "Füßchen": 2, "und": 70_000}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("piece", [1, 2, 7, 2**20])
def test_a_text_is_the_same_tokens_however_it_is_read(tmp_path, tokenizer, monkeypatch, piece):
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", piece)
    (tmp_path / "text").write_text("ein Füßchen\n\n und\nFüßchen sonst\n" * 3, encoding="utf-8")
    assert tokenize(tmp_path / "text", "--out", tmp_path / "out", "--tokenizer", tokenizer) == 0
    file = tokens.TokenFile(tmp_path / "out")
    assert file.tokens.tolist() == [1, 2, 70_000, 2, 0] * 3
    assert (file.vocabulary, file.tokens.dtype) == (70_001, np.uint32)


def test_a_line_without_end_is_cut(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizing, "PIECE_BYTES", 4)
    monkeypatch.setattr(tokenizing, "LONGEST_LINE", 20)
    (tmp_path / "text").write_text("ein " * 50)
    tokenize(tmp_path / "text", "--out", tmp_path / "out", "--tokenizer", tokenizer)
    assert tokens.TokenFile(tmp_path / "out").tokens.tolist() == [1] * 50


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["gone"], "gone: no such file. Allowed: text files."),
        (["folder"], "folder: no such file."),
        (["empty"], "empty: the file is empty. Allowed: text files."),
        (["out"], "--out: out is also one of the input texts."),
        (["latin", "--tokenizer", "tokenizer.json"], "latin: byte 1 is not UTF-8 text: invalid start byte"),
        (["cut", "--tokenizer", "tokenizer.json"], "cut: byte 1 is not UTF-8 text: unexpected end of data"),
        (["blank", "--tokenizer", "tokenizer.json"], "out: found no tokens to write."),
        (["text", "--tokenizer", "gone.json"], "--tokenizer: gone.json: no such file. Allowed: bytes, or a tokenizer.json."),
        (["text", "--tokenizer", "text"], "--tokenizer: text: cannot be read:"),
    ],
)
def test_bad_text_is_refused_and_changes_nothing(tmp_path, tokenizer, monkeypatch, capsys, words, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in {
        "empty": b"", "out": b"mine", "latin": b"F\xfc\xdfchen", "cut": "Fü".encode()[:-1], "blank": b" \n", "text": b"ein",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert tokenize(*words, "--out", "out") == 2
    assert why in capsys.readouterr().err
    assert (tmp_path / "out").read_bytes() == b"mine"
    assert sorted(tmp_path.iterdir()) == before
