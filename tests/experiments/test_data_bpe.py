"""The BPE trainer and the token files, on a corpus of a few kilobytes."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from experiments.data.bpe import read_documents, tokenize, train_bpe

WORDS = "the a of and to in river stone light winter house garden letter music engine harbour 1984 naïve don't".split()
ODD = "Tabs\tand\n\n  blanks, 日本語, emoji 🙂, 007 and \x01\x7f\u0000".replace("\0", "")


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    draw = random.Random(0)
    for split, count in (("train", 40), ("val", 3)):
        for domain in ("general", "code"):
            texts = [f"{domain}: " + " ".join(draw.choices(WORDS, k=60)) for _ in range(count)]
            (folder / f"{split}.{domain}.txt").write_bytes(b"".join(t.encode() + b"\0" for t in texts))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("bpe") / "corpus")


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_bpe(corpus, 300)


def test_training_twice_gives_the_same_file(corpus, tokenizer):
    assert train_bpe(corpus, 300).to_str() == tokenizer.to_str()


def test_round_trip_of_any_text(corpus, tokenizer):
    for text in [ODD, *read_documents(corpus / "val.general.txt")]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_text_gets_shorter_and_token_0_is_the_end(corpus, tokenizer):
    text = next(read_documents(corpus / "val.general.txt"))
    assert len(tokenizer.encode(text).ids) < 0.6 * len(text.encode())
    assert tokenizer.token_to_id("\0") == 0 and tokenizer.get_vocab_size() == 300
    assert tokenizer.encode("<|eod|></s>[EOS]").ids.count(0) == 0  # no spelling of it in text


def test_the_sample_stops_at_its_size(corpus):
    path = corpus / "train.general.txt"
    whole = list(read_documents(path))
    assert len(whole) == 40
    assert list(read_documents(path, 1000)) == whole[: len(list(read_documents(path, 1000)))] != []


def test_bad_arguments_are_named(corpus, tmp_path):
    with pytest.raises(ValueError, match="vocab: 256 given, at least 257"):
        train_bpe(corpus, 256)
    with pytest.raises(ValueError, match="vocab: 60000 given, but the text that was read gives"):
        train_bpe(corpus, 60_000)
    with pytest.raises(ValueError, match="sample_mb: 0"):
        train_bpe(corpus, 300, 0)
    with pytest.raises(ValueError, match=r"corpus: .* holds no train\.\*\.txt"):
        train_bpe(tmp_path, 300)


def test_token_files_hold_every_document(corpus, tokenizer, tmp_path):
    file = tmp_path / "bpe.json"
    tokenizer.save(str(file))
    counts = tokenize(corpus, file, tmp_path / "tokens")
    arrays = {name: np.load(tmp_path / "tokens" / name) for name in counts}
    assert {name: len(a) for name, a in arrays.items()} == counts
    assert set(counts) == {"train.npy", "val.npy", "val.general.npy", "val.code.npy"}
    assert all(a.dtype == np.uint16 and a[-1] == 0 for a in arrays.values())
    np.testing.assert_array_equal(
        arrays["val.npy"], np.concatenate([arrays["val.code.npy"], arrays["val.general.npy"]])
    )

    def texts(ids):
        return [tokenizer.decode(part.tolist()) for part in np.split(ids, np.flatnonzero(ids == 0) + 1)[:-1]]

    assert texts(arrays["val.code.npy"]) == list(read_documents(corpus / "val.code.txt"))
    train = texts(arrays["train.npy"])
    assert sorted(train) == sorted(t for d in ("general", "code") for t in read_documents(corpus / f"train.{d}.txt"))
    assert 5 < sum(t.startswith("code") for t in train[:40]) < 35  # shuffled, not one domain after the other


def test_the_programs_train_and_encode(corpus, tmp_path):
    def run(program, *flags):
        command = [sys.executable, "-m", f"experiments.data.{program}", *flags]
        return subprocess.run(command, capture_output=True, text=True)

    file, out = str(tmp_path / "bpe.json"), str(tmp_path / "tokens")
    done = run("train_bpe", "--corpus", str(corpus), "--vocab", "300", "--out", file)
    assert done.returncode == 0 and "300 tokens" in done.stdout and "val.code.txt: " in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["bpe.json"]
    assert run("tokenize", "--corpus", str(corpus), "--tokenizer", file, "--out", out).returncode == 0
    done = run("tokenize", "--corpus", str(corpus), "--tokenizer", file, "--out", out)
    assert done.returncode == 1 and "error: out: " in done.stderr and "exists" in done.stderr


def test_tokenize_refuses_what_it_cannot_use(corpus, tokenizer, tmp_path):
    file = tmp_path / "bpe.json"
    tokenizer.save(str(file))
    with pytest.raises(ValueError, match="out: .* exists"):
        tokenize(corpus, file, corpus)
    with pytest.raises(ValueError, match="tokenizer: .* cannot be read"):
        tokenize(corpus, tmp_path / "none.json", tmp_path / "tokens")
    with pytest.raises(ValueError, match="corpus: .* holds no train"):
        tokenize(tmp_path, file, tmp_path / "tokens")
    Tokenizer(models.BPE(vocab={"a": 0, "e": 1}, merges=[])).save(str(file))
    with pytest.raises(ValueError, match="tokenizer: it gives id 0 to text"):
        tokenize(corpus, file, tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()
