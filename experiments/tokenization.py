"""Text to token ids and back. Token 0 ends a document and occurs nowhere else."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

END_OF_DOCUMENT = 0


class Tokenizer(Protocol):
    """What the input pipeline and sampling need."""

    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, [N] of an unsigned dtype, without the end-of-document token."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; ids that make no valid text become U+FFFD."""
        ...

    def to_bytes(self, tokens: np.ndarray) -> np.ndarray:
        """The documents in `tokens` as bytes (uint8), each end of document as one NUL."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: 256 ids, no file, one byte per token."""

    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(int(t) for t in tokens).decode("utf-8", errors="replace")

    def to_bytes(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(tokens, np.uint8)


class BPETokenizer:
    """A JSON file of the `tokenizers` library. Its id 0 must be kept for the end of a document."""

    def __init__(self, path: str | Path):
        from tokenizers import Tokenizer as FastTokenizer  # only those who use one pay for the import

        if not Path(path).is_file():
            raise ValueError(f"tokenizer={str(path)!r}: no such file; give 'byte' or the path of a tokenizers JSON")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"tokenizer={str(path)!r} is not a tokenizers JSON: {error}") from error
        self.path = str(path)
        self.vocab_size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)
        if (ids == END_OF_DOCUMENT).any():
            raise ValueError(
                f"tokenizer={self.path!r} uses id 0 ({self._tokenizer.id_to_token(0)!r}) for text; "
                "id 0 must be a special token kept for the end of a document"
            )
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens if int(t) != END_OF_DOCUMENT])

    def to_bytes(self, tokens: np.ndarray) -> np.ndarray:
        ends = np.flatnonzero(tokens == END_OF_DOCUMENT)
        texts = [self.decode(document) for document in np.split(tokens, ends)]
        return np.frombuffer(b"\0".join(text.encode("utf-8") for text in texts), np.uint8)


class ReleasedTokenizer:
    """The tokenizer of a released model: tokenizer.json in its folder. Ids are its own, and 0 is like any other.

    `stop_ids` are the model's eos_token_id, of generation_config.json or else config.json; empty without either.
    """

    def __init__(self, folder: str | Path):
        from tokenizers import Tokenizer as FastTokenizer

        path = Path(folder) / "tokenizer.json"
        if not path.is_file() and (path.parent / "tiktoken.model").is_file():
            raise NotImplementedError(
                f"tokenizer={str(folder)!r} holds a tiktoken.model, which is not read here; save it as tokenizer.json "
                "(transformers' slow-to-fast conversion), or give --tokenizer=ids and numbers"
            )
        if not path.is_file():
            raise ValueError(f"tokenizer={str(folder)!r} holds no tokenizer.json; give a folder that does, or 'ids'")
        try:
            self._tokenizer = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{str(path)!r} is not a tokenizers JSON: {error}") from error
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.stop_ids = _stop_ids(path.parent)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, with what the tokenizer puts before a text (a beginning-of-text id, say)."""
        return np.asarray(self._tokenizer.encode(text).ids, np.uint32)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode([int(t) for t in tokens])


class IdTokenizer:
    """Numbers for those who have no tokenizer: "12 7 99" is three tokens."""

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.asarray([int(word) for word in text.split()], np.int64)
        except ValueError:
            raise ValueError(f"prompt={text!r} is not allowed with tokenizer='ids': numbers between blanks") from None

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(f" {int(token)}" for token in tokens)


def _stop_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        if (path := folder / name).is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
    return ()


def get_tokenizer(name: str) -> Tokenizer:
    """`byte`, or the path of a tokenizers JSON file. ValueError if there is no such file."""
    return ByteTokenizer() if name == "byte" else BPETokenizer(name)
