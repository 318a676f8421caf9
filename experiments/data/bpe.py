"""A byte-level BPE for a corpus: training it, and encoding the corpus with it.

Token 0 is NUL, which ends a document in the corpus too and occurs in no text. All 256 bytes are tokens, so any text
can be encoded.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

END_OF_DOCUMENT = "\0"
# Where merges stop: at words with the space before them, single digits, runs of other signs, and blank space, of which
# the last space goes to the word that follows.
_PIECES = r"'(?:[sdmt]|ll|re|ve)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SMALLEST = 257  # the bytes and the end of a document
_BATCH = 256  # documents that are encoded in parallel


def train_bpe(corpus: Path, vocab: int, sample_mb: float = 25.0) -> Tokenizer:
    """A BPE tokenizer trained on the first `sample_mb` of each train.*.txt of `corpus` (a uniform sample of it).

    Raises ValueError if there is no such file, if vocab is below 257, or if the text holds too little for vocab.
    """
    if vocab < _SMALLEST:
        raise ValueError(f"vocab: {vocab} given, at least {_SMALLEST} are needed (256 bytes and the end of a document)")
    if not sample_mb > 0:
        raise ValueError(f"sample_mb: {sample_mb} given, a positive number is needed")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = (text for path in corpus_files(corpus, "train") for text in read_documents(path, int(sample_mb * 1e6)))
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(
            f"vocab: {vocab} given, but the text that was read gives {tokenizer.get_vocab_size()} tokens; "
            "give a smaller vocab or a larger sample_mb"
        )
    return tokenizer


def corpus_files(corpus: Path, split: str) -> list[Path]:
    """The files train.*.txt or val.*.txt of a corpus, sorted. Raises ValueError if there are none."""
    paths = sorted(Path(corpus).glob(f"{split}.*.txt"))
    if not paths:
        raise ValueError(f"corpus: {corpus} holds no {split}.*.txt; experiments.data.build makes them")
    return paths


def read_documents(path: Path, limit: int = -1) -> Iterator[str]:
    """The documents of a corpus file that end within its first `limit` bytes (-1: all)."""
    with open(path, "rb") as f:
        *documents, _ = f.read(limit).split(b"\0")
    for document in documents:
        yield document.decode()


def tokenize(corpus: Path, tokenizer_file: Path, out: Path) -> dict[str, int]:
    """Makes the directory `out`; returns the number of tokens in each of its files.

    Raises ValueError if out exists, the corpus is none, or the tokenizer cannot be read or gives text the id 0.
    """
    if out.exists():
        raise ValueError(f"out: {out} exists; give a directory that does not")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as problem:  # the library raises bare Exception
        raise ValueError(f"tokenizer: {tokenizer_file} cannot be read: {problem}") from None
    paths = corpus_files(corpus, "train") + corpus_files(corpus, "val")
    encoded = {path.name: _encode(path, tokenizer) for path in paths}
    train = [ids for path in paths if path.name.startswith("train.") for ids in encoded[path.name]]
    files = {"train.npy": [train[i] for i in np.random.default_rng(0).permutation(len(train))], "val.npy": []}
    for path in paths:
        if path.name.startswith("val."):
            files["val.npy"] += encoded[path.name]
            files[path.with_suffix(".npy").name] = encoded[path.name]

    out.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for name, documents in files.items():
            np.save(room / name, np.concatenate(documents) if documents else np.zeros(0, np.uint16))
        room.chmod(0o755)
        room.rename(out)
    except BaseException:
        shutil.rmtree(room)
        raise
    return {name: sum(map(len, documents)) for name, documents in files.items()}


def _encode(path: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each document's ids, ended by 0."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    texts, encoded = list(read_documents(path)), []
    for start in tqdm(range(0, len(texts), _BATCH), desc=path.name, unit="batch"):
        for one in tokenizer.encode_batch_fast(texts[start : start + _BATCH], add_special_tokens=False):
            ids = np.array([*one.ids, 0], dtype)
            if not ids[:-1].all():
                raise ValueError("tokenizer: it gives id 0 to text, but 0 is kept for the end of a document")
            encoded.append(ids)
    return encoded
