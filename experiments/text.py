"""Where text comes from, and which documents are held out.

Three kinds of source:
- "stdlib": the source of Python's own standard library, which every machine that runs this has;
- a glob of text files: a file is a document, or several where NUL bytes separate them;
- one .npy or .bin file of tokens, prepared in advance, each document ended by token 0.

Up to DOMAINS files of validation text are a domain each: evaluated one by one, in equal shares.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.tokenization import END_OF_DOCUMENT, Tokenizer

HELD_OUT_PERCENT = 3.0
DOMAINS = 16  # more files than that are documents of one text

# Not the library itself: its tests, its bundled programs, and tables written by generators.
_STDLIB_LEFT_OUT = {
    "__pycache__", "config", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "dist-packages", "test", "tests", "turtledemo",
}  # fmt: skip


class Document(NamedTuple):
    """One text and the name that decides whether it is held out."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Two streams of token ids [N]; each document in them is ended by token 0."""

    train: np.ndarray
    validation: np.ndarray
    domains: Mapping[str, int]  # the tokens of each in `validation`, in its order; empty if it is one text

    @functools.cached_property
    def train_sha256(self) -> str:
        return hashlib.sha256(np.ascontiguousarray(self.train)).hexdigest()

    def evaluated(self, tokens: int) -> dict[str, np.ndarray]:
        """What an evaluation of so many tokens reads, by domain: the first ones of each, in equal shares, or all of a
        domain that has fewer. Without domains the only name is "". ValueError for a share of less than two tokens.
        """
        domains = self.domains or {"": len(self.validation)}
        share = tokens // len(domains)
        if share < 2:
            raise ValueError(f"eval_tokens={tokens} is not allowed: at least 2 for each of {len(domains)} texts")
        starts = np.cumsum([0, *domains.values()])
        return {
            name: self.validation[start : start + min(share, size)]
            for (name, size), start in zip(domains.items(), starts, strict=False)
        }


_read: dict[Any, tuple[Any, np.ndarray, dict[str, int]]] = {}  # what `_load` has read last
_last: dict[Any, Corpus] = {}


def load_corpus(data: str, tokenizer: Tokenizer, *, validation_data: str | None = None, seed: int = 0) -> Corpus:
    """Read, tokenize and split `data`.

    Args:
      data: "stdlib", a glob of text files, or the path of one .npy or .bin token file. A .bin file holds uint8 if the
        vocabulary has at most 256 ids, else little-endian uint16 (uint32 above 65,536 ids).
      validation_data: a source of its own for validation; then all of `data` is for training. Without it the documents
        whose name hashes below HELD_OUT_PERCENT are held out (of a token file: the documents at its end).
      seed: order of the training documents.

    The last corpus is kept, and returned again while its files are as they were: runs in one process read it once, and
    only put its documents into another order for another seed.

    Raises:
      ValueError: a glob that matches nothing, an empty side of the split, or a token id outside the vocabulary.
    """
    sources = (data, validation_data, getattr(tokenizer, "path", None))
    key = (*sources, *map(_stamps, sources))
    if (key, seed) not in _last:
        _last.clear()  # first, for memory
        if key not in _read:
            _read.clear()
            _read[key] = _load(data, tokenizer, validation_data)
        train, validation, domains = _read[key]
        _last[key, seed] = Corpus(_shuffled(train, seed) if isinstance(train, list) else train, validation, domains)
    return _last[key, seed]


def held_out(name: str) -> bool:
    """Whether the document of this name is for validation: decided by the name alone, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:4], "big") < HELD_OUT_PERCENT / 100 * 2**32


def stdlib_documents() -> Iterator[Document]:
    """The modules of the running Python's standard library, by sorted relative path."""
    root = Path(sysconfig.get_path("stdlib") or os.path.dirname(os.__file__))
    paths = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [d for d in subfolders if d.split("-")[0] not in _STDLIB_LEFT_OUT and d not in _STDLIB_LEFT_OUT]
        paths += [Path(folder, file) for file in files if file.endswith(".py")]
    if not paths:
        raise ValueError(f"data='stdlib': this Python keeps no source files under {root}; give a glob of text files")
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        text = path.read_text(encoding="utf-8", errors="replace").replace("\0", " ")
        if text.strip():
            yield Document(name, text)


def _load(data: str, tokenizer: Tokenizer, validation_data: str | None):
    """(the training documents' tokens, a list of them or the stream of a token file, validation stream, domains)."""
    domains = {}
    if validation_data is not None:
        train = _read_tokens(data, "data", tokenizer) if _is_token_file(data) else _encoded(data, "data", tokenizer)
        validation, domains = _validation(validation_data, tokenizer)
    elif _is_token_file(data):
        train, validation = _split_tokens(_read_tokens(data, "data", tokenizer))
    else:
        documents = list(_documents(data, "data"))
        train = _encode([d for d in documents if not held_out(d.name)], tokenizer)
        validation = _joined(_encode([d for d in documents if held_out(d.name)], tokenizer))
    for side, tokens in (("training", train), ("validation", validation)):
        if len(tokens) == 0:
            raise ValueError(
                f"data={data!r} leaves no {side} document: {HELD_OUT_PERCENT:g}% of the documents are held out, chosen "
                "by a hash of their names; give more documents, or validation_data of its own"
            )
    return train, validation, domains


def _documents(source: str, argument: str) -> Iterator[Document]:
    if source == "stdlib":
        yield from stdlib_documents()
        return
    paths = _paths(source)
    if not paths:
        raise ValueError(
            f"{argument}={source!r} matches no file; allowed: 'stdlib', a glob of text files (quote it), "
            "or one .npy or .bin token file"
        )
    root = os.path.dirname(os.path.commonprefix([os.path.join(os.path.dirname(p), "") for p in paths]))
    for path in paths:
        name = os.path.relpath(path, root) if root else path
        for index, text in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").split("\0")):
            if text.strip():
                yield Document(f"{name}:{index}", text)


def _validation(source: str, tokenizer: Tokenizer) -> tuple[np.ndarray, dict[str, int]]:
    """The stream, and how many tokens of it each domain has, if they are several."""
    paths = [] if _is_token_file(source) or source == "stdlib" else _paths(source)
    if not 1 < len(paths) <= DOMAINS:
        if _is_token_file(source):
            return _read_tokens(source, "validation_data", tokenizer), {}
        return _joined(_encoded(source, "validation_data", tokenizer)), {}
    streams = [_joined(_encoded(glob.escape(path), "validation_data", tokenizer)) for path in paths]
    for path, stream in zip(paths, streams, strict=True):
        if len(stream) == 0:
            raise ValueError(f"validation_data={source!r}: {path} holds no text; each of its files is a domain")
    return np.concatenate(streams), dict(zip(_names(paths), map(len, streams), strict=True))


def _names(paths: Sequence[str]) -> list[str]:
    """What differs between the paths: "code" of val.code.txt beside val.docs.txt; else all behind the folder."""
    parts = [re.split(r"[./]", path) for path in paths]
    ahead = len(os.path.commonprefix(parts))
    behind = len(os.path.commonprefix([own[ahead:][::-1] for own in parts]))
    names = [".".join(own[ahead : len(own) - behind]) for own in parts]
    if all(names) and len({*names}) == len(names):
        return names
    return [os.path.relpath(path, os.path.commonpath([os.path.dirname(p) for p in paths]) or ".") for path in paths]


def _paths(source: str) -> list[str]:
    return sorted(path for path in glob.glob(os.path.expanduser(source), recursive=True) if os.path.isfile(path))


def _stamps(source: str | None) -> tuple[tuple[str, int, int, int], ...]:
    """By which one sees that a file has changed."""
    found = [(path, os.stat(path)) for path in (_paths(source) if source else [])]
    return tuple((path, stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in found)


def _encode(documents: list[Document], tokenizer: Tokenizer) -> list[np.ndarray]:
    end = np.array([END_OF_DOCUMENT], np.uint8)
    return [np.concatenate([tokenizer.encode(document.text), end]) for document in documents]


def _encoded(source: str, argument: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    return _encode(list(_documents(source, argument)), tokenizer)


def _joined(documents: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(documents) if documents else np.zeros(0, np.uint8)


def _shuffled(documents: list[np.ndarray], seed: int) -> np.ndarray:
    """In an order of their own, or else neighbours in a folder would always share a row."""
    return _joined([documents[i] for i in np.random.default_rng(seed).permutation(len(documents))])


def _is_token_file(source: str) -> bool:
    return source.endswith((".npy", ".bin"))


def _read_tokens(path: str, argument: str, tokenizer: Tokenizer) -> np.ndarray:
    if not os.path.isfile(path):
        raise ValueError(f"{argument}={path!r}: no such file")
    if path.endswith(".npy"):
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    else:
        dtype = "u1" if tokenizer.vocab_size <= 256 else "<u2" if tokenizer.vocab_size <= 65536 else "<u4"
        tokens = np.memmap(path, dtype, "r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ValueError(f"{argument}={path!r} holds {tokens.dtype}{list(tokens.shape)}; allowed: integers [N]")
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0 or high >= tokenizer.vocab_size:
        raise ValueError(
            f"{argument}={path!r} holds token ids {low} to {high}; the tokenizer allows 0 to {tokenizer.vocab_size - 1}"
        )
    return tokens


def _split_tokens(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut behind the last document that ends before the held-out share begins."""
    ends = np.flatnonzero(tokens == END_OF_DOCUMENT) + 1
    cuts = ends[ends <= len(tokens) * (1 - HELD_OUT_PERCENT / 100)]
    cut = int(cuts[-1]) if len(cuts) else 0
    return tokens[:cut], tokens[cut:]
