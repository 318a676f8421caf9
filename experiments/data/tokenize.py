"""Encodes a corpus of build.py once, for runs that would otherwise spend their first minutes on it.

    python -m experiments.data.tokenize --corpus corpus --tokenizer bpe8192.json --out tokens
    python -m experiments.train --data tokens/train.npy --validation_data tokens/val.npy --tokenizer bpe8192.json

Writes train.npy, val.npy and val.DOMAIN.npy: one row of ids, uint16 (uint32 above 65,536 tokens), each document ended
by token 0. In train.npy the documents of all domains are shuffled, the same way every time.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.data.bpe import tokenize

_CORPUS = flags.DEFINE_string("corpus", None, "A directory of experiments.data.build.", required=True)
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "A file of experiments.data.train_bpe.", required=True)
_OUT = flags.DEFINE_string("out", None, "Directory to make: it appears whole or not at all.", required=True)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        counts = tokenize(Path(_CORPUS.value), Path(_TOKENIZER.value), Path(_OUT.value))
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from None
    for name, tokens in counts.items():
        print(f"{_OUT.value}/{name}: {tokens} tokens")


if __name__ == "__main__":
    app.run(main)
