"""Documents, their split, tokens and rows."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from experiments.input_pipeline import PackedRows, training_batches, validation_batches
from experiments.text import HELD_OUT_PERCENT, held_out, load_corpus, stdlib_documents
from experiments.tokenization import ByteTokenizer, get_tokenizer

BYTES = ByteTokenizer()


def write_files(folder, count=200):
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"document number {i}: " + "héllo " * (i % 7 + 1), encoding="utf-8")
    return str(folder / "*.txt")


def documents_of(stream) -> set[bytes]:
    return set(bytes(np.asarray(stream, np.uint8)).removesuffix(b"\0").split(b"\0"))


def test_stdlib_is_real_text_and_split_by_name():
    documents = list(stdlib_documents())
    names = [d.name for d in documents]
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not [n for n in names if n.startswith(("test/", "idlelib/", "site-packages/"))]
    assert names == sorted(names) and len(set(names)) == len(names)
    corpus = load_corpus("stdlib", BYTES)
    expected = {d.text.encode() for d in documents}
    assert documents_of(corpus.train) | documents_of(corpus.validation) == expected
    assert not documents_of(corpus.train) & documents_of(corpus.validation)
    assert corpus.train[-1] == 0 and corpus.validation[-1] == 0
    assert len(corpus.train) > 3_000_000 and len(corpus.validation) > 50_000


def test_split_does_not_depend_on_the_machine():
    assert [n for n in map(str, range(200)) if held_out(n)] == ["51", "55", "149", "152", "178"]
    share = np.mean([held_out(str(i)) for i in range(20000)])
    assert abs(share - HELD_OUT_PERCENT / 100) < 0.005


def test_seed_orders_training_documents_and_nothing_else(tmp_path):
    pattern = write_files(tmp_path)
    first, again, other = (load_corpus(pattern, BYTES, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.train, again.train)
    np.testing.assert_array_equal(first.validation, other.validation)
    assert (first.train != other.train).any()
    assert documents_of(first.train) == documents_of(other.train)


def test_nul_separates_documents_in_a_file(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"one\0two\0\0three\0")
    (tmp_path / "val.txt").write_bytes(b"four\0")
    corpus = load_corpus(str(tmp_path / "train.txt"), BYTES, validation_data=str(tmp_path / "val.txt"))
    assert documents_of(corpus.train) == {b"one", b"two", b"three"}
    assert bytes(corpus.validation) == b"four\0"


class Named(NamedTuple):
    files: list[str]
    domains: list[str]


NAMED = [
    Named(["val.code.txt", "val.docs.txt", "val.dots.txt"], ["code", "docs", "dots"]),
    Named(["a/val.txt", "b/val.txt"], ["a", "b"]),
    Named(["val.code.txt", "val.txt"], ["val.code.txt", "val.txt"]),  # what differs in the second is nothing
    Named(["val.txt"], []),
    Named([f"{i:02}.txt" for i in range(17)], []),
]


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.files[-1])
def test_files_to_validate_on_are_domains(tmp_path, case):
    for file in case.files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(f"text of {file}")
    (tmp_path / "train.bin").write_bytes(b"abc\0")
    corpus = load_corpus(f"{tmp_path}/train.bin", BYTES, validation_data=f"{tmp_path}/**/*.txt")
    assert list(corpus.domains) == case.domains
    assert bytes(corpus.validation).decode() == "".join(f"text of {file}\0" for file in case.files)


def test_domains_are_read_in_equal_shares(tmp_path):
    for name, text in (("code", "abcdefgh"), ("docs", "ij"), ("general", "klmnopqr")):
        (tmp_path / f"val.{name}.txt").write_text(text)
    train = str(tmp_path / "train.bin")
    Path(train).write_bytes(b"abc\0")
    corpus = load_corpus(train, BYTES, validation_data=str(tmp_path / "val.*.txt"))
    read = {name: bytes(tokens) for name, tokens in corpus.evaluated(14).items()}
    assert read == {"code": b"abcd", "docs": b"ij\0", "general": b"klmn"}
    assert sum(map(len, corpus.evaluated(1 << 24).values())) == len(corpus.validation)
    with pytest.raises(ValueError, match="eval_tokens=5 is not allowed: at least 2 for each of 3 texts"):
        corpus.evaluated(5)
    (tmp_path / "val.none.txt").write_text(" ")
    with pytest.raises(ValueError, match="val.none.txt holds no text; each of its files is a domain"):
        load_corpus(train, BYTES, validation_data=str(tmp_path / "val.*.txt"))
    alone = load_corpus(train, BYTES, validation_data=str(tmp_path / "val.code.txt"))
    assert [bytes(tokens) for tokens in alone.evaluated(4).values()] == [b"abcd"]


def test_a_corpus_is_read_again_when_its_files_or_the_seed_change(tmp_path):
    pattern = write_files(tmp_path, 60)
    corpus = load_corpus(pattern, BYTES)
    assert load_corpus(pattern, BYTES) is corpus
    other = load_corpus(pattern, BYTES, seed=1)
    assert other is not corpus and other.train_sha256 != corpus.train_sha256
    assert sorted(documents_of(other.train)) == sorted(documents_of(corpus.train))
    again = load_corpus(pattern, BYTES)
    (tmp_path / "000.txt").write_text("something else")
    changed = load_corpus(pattern, BYTES)
    assert b"something else" in documents_of(changed.train) and changed.train_sha256 != again.train_sha256


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_prepared_tokens_are_cut_between_documents(tmp_path, suffix):
    tokens = np.tile(np.array([5, 6, 7, 8, 0], np.uint8), 100)
    path = tmp_path / f"tokens{suffix}"
    np.save(path, tokens) if suffix == ".npy" else tokens.tofile(path)
    corpus = load_corpus(str(path), BYTES)
    np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.validation]), tokens)
    assert corpus.train[-1] == 0 and len(corpus.train) == 485


class BadData(NamedTuple):
    name: str
    tokens: np.ndarray | None
    message: str


BAD_DATA = [
    BadData("missing", None, "no such file"),
    BadData("two_axes", np.zeros((2, 3), np.uint8), r"uint8\[2, 3\]"),
    BadData("floats", np.zeros(3), "float64"),
    BadData("beyond_vocabulary", np.array([1, 256, 0]), "1|0 to 256; the tokenizer allows 0 to 255"),
    BadData("one_document", np.array([1, 2, 0]), "no training document"),
]


@pytest.mark.parametrize("case", BAD_DATA, ids=lambda case: case.name)
def test_bad_token_files_are_refused(tmp_path, case):
    path = tmp_path / "tokens.npy"
    if case.tokens is not None:
        np.save(path, case.tokens)
    with pytest.raises(ValueError, match=case.message):
        load_corpus(str(path), BYTES)


def test_a_glob_that_matches_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data='.*nothing\*\.txt' matches no file.*'stdlib'"):
        load_corpus(str(tmp_path / "nothing*.txt"), BYTES)
    with pytest.raises(ValueError, match=r"validation_data='.*nothing\*\.txt' matches no file"):
        load_corpus("stdlib", BYTES, validation_data=str(tmp_path / "nothing*.txt"))


def test_tokenizers_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = "def function(self):\n    return self.naïve\n"
    for special, path in ((["<end>"], "good.json"), ([], "bad.json")):
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
        bpe.train_from_iterator([text] * 20, trainer)
        bpe.save(str(tmp_path / path))
    tokenizer = get_tokenizer(str(tmp_path / "good.json"))
    ids = tokenizer.encode(text)
    assert 0 < len(ids) < len(text.encode()) and ids.min() > 0
    assert tokenizer.decode(ids) == text
    stream = np.concatenate([ids, [0], ids, [0]])
    assert bytes(tokenizer.to_bytes(stream)) == (text.encode() + b"\0") * 2
    with pytest.raises(ValueError, match="id 0 .* must be a special token"):
        get_tokenizer(str(tmp_path / "bad.json")).encode("".join(map(chr, range(32, 127))))
    with pytest.raises(ValueError, match="no such file"):
        get_tokenizer(str(tmp_path / "none.json"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizers JSON"):
        get_tokenizer(str(tmp_path / "broken.json"))


def test_rows_predict_each_token_once_and_number_documents():
    stream = np.array([1, 2, 0, 3, 4, 5, 0, 6, 0, 7, 8], np.uint8)
    rows = PackedRows(stream, 4, pad_last=True)
    tokens = np.stack([rows[i]["tokens"] for i in range(len(rows))])
    segments = np.stack([rows[i]["segment_ids"] for i in range(len(rows))])
    np.testing.assert_array_equal(tokens, [[1, 2, 0, 3], [3, 4, 5, 0], [0, 6, 0, 7], [7, 8, 0, 0]])
    np.testing.assert_array_equal(segments, [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 2], [0, 0, -1, -1]])
    assert len(PackedRows(stream, 4)) == 3
    predicted = np.concatenate([row[1:][seg[1:] >= 0] for row, seg in zip(tokens, segments, strict=True)])
    np.testing.assert_array_equal(predicted, stream[1:])


def test_validation_batches_pad_with_rows_of_nothing():
    batches = list(validation_batches(np.arange(1, 12), sequence_length=4, batch_size=3))
    assert [b.tokens.shape for b in batches] == [(3, 4), (3, 4)]
    np.testing.assert_array_equal(batches[-1].segment_ids[1:], -1)
    assert sum(((b.segment_ids[:, 1:] >= 0) & (b.segment_ids[:, :-1] >= 0)).sum() for b in batches) == 10


def test_training_batches_visit_everything_and_resume():
    stream = np.arange(1, 252)
    make = lambda seed: training_batches(stream, sequence_length=6, batch_size=5, seed=seed)  # noqa: E731
    batches = make(0)
    epoch = np.concatenate([next(batches)["tokens"][:, 0] for _ in range(10)])
    assert sorted(epoch) == list(range(1, 251, 5)) and list(epoch) != sorted(epoch)
    second = np.concatenate([next(batches)["tokens"][:, 0] for _ in range(10)])
    assert sorted(second) == sorted(epoch) and list(second) != list(epoch)
    place = batches.get_state()
    expected = [next(batches)["tokens"] for _ in range(7)]
    resumed = make(0)
    resumed.set_state(place)
    np.testing.assert_array_equal([next(resumed)["tokens"] for _ in range(7)], expected)
    assert (next(make(0))["tokens"] != next(make(1))["tokens"]).any()
    with pytest.raises(ValueError, match="251 tokens, 50 rows of sequence_length=6; batch_size=51"):
        training_batches(stream, sequence_length=6, batch_size=51, seed=0)
