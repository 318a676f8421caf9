"""Trains a byte-level BPE on a corpus of build.py. The same corpus and options give the same file.

    python -m experiments.data.train_bpe --corpus corpus --vocab 8192 --out bpe8192.json

`--tokenizer bpe8192.json` of the training program and of experiments.data.tokenize reads it.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.data.bpe import corpus_files, read_documents, train_bpe

_CORPUS = flags.DEFINE_string("corpus", None, "A directory of experiments.data.build.", required=True)
_VOCAB = flags.DEFINE_integer("vocab", 8192, "Tokens, those of single bytes and of the end of a document included.")
_OUT = flags.DEFINE_string("out", None, "The JSON file to write.", required=True)
_SAMPLE_MB = flags.DEFINE_float("sample_mb", 25.0, "Training text that is read of each domain, 10^6 bytes.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        tokenizer = train_bpe(Path(_CORPUS.value), _VOCAB.value, _SAMPLE_MB.value)
        validation = corpus_files(Path(_CORPUS.value), "val")
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from None
    data = tokenizer.to_str().encode()
    partial = f"{_OUT.value}.partial-{os.getpid()}"
    Path(partial).write_bytes(data)
    os.replace(partial, _OUT.value)
    print(f"{_OUT.value}: {tokenizer.get_vocab_size()} tokens, sha256 {hashlib.sha256(data).hexdigest()}")
    for path in validation:
        texts = list(read_documents(path))
        tokens = sum(len(e.ids) + 1 for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        print(f"{path.name}: {path.stat().st_size / max(1, tokens):.3f} bytes per token")


if __name__ == "__main__":
    app.run(main)
