"""Readers of files that hold many short texts: dictionaries, databases, game data, API descriptions.

Each takes a file's decoded text (or its bytes, where the format is binary) and yields documents (name, text),
short entries collected into documents of some thousand characters.
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from experiments.data.clean import Document, grouped, normalise, unwrap
from experiments.data.markup import html_text

_GROUP = 6000  # characters of a document made of short entries


def dictionary(text: str) -> Iterator[Document]:
    """A dictd database: headwords at the margin, definitions indented; editors' marks and link braces removed."""
    text = re.sub(r"\s*\[(?:1913 Webster|Webster|WordNet|PJC|RP|AS|JJJS|Century Dict)[^\]\n]*\]", "", text)
    text = re.sub(r"\{([^{}]*)\}", lambda m: " ".join(m[1].split()), text)
    entries = re.split(r"\n\n+(?=\S)", text)[2:]  # before them stands the database's description of itself
    yield from grouped((e for e in map(_dictionary_entry, entries) if len(e) > 40), _GROUP)


def _dictionary_entry(entry: str) -> str:
    head, *rest = normalise(entry).split("\n")
    lines, wrapped = [head], False
    for line in rest:
        words = line.strip()
        # Definitions are wrapped at about 65 columns; a quotation's author follows it after two dashes.
        if words.startswith("--") or (wrapped and words and not re.match(r"(\d+|\w)\. |Syn:|Note:", words)):
            lines[-1] = f"{lines[-1]} {words}"
        else:
            lines.append(words)
        wrapped = len(line) >= 55
    return normalise("\n".join(lines))


def wordnet(text: str) -> Iterator[Document]:
    """A WordNet data file: one synset a line, hexadecimal word count in the fourth field, its gloss after a bar."""

    def entries():
        for line in text.split("\n"):
            fields, bar, gloss = line.partition(" | ")
            if bar and line[0].isdigit():
                fields = fields.split()
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                yield ", ".join(re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in words) + ": " + gloss.strip()

    yield from grouped(entries(), _GROUP)


def fortunes(text: str) -> Iterator[Document]:
    """Entries parted by lines of %; lines that begin with # are comments."""
    text = re.sub(r"^#.*$", "", text.expandtabs(8), flags=re.M)
    entries = (unwrap(normalise(e)) for e in re.split(r"^%+$", text, flags=re.M))
    yield from grouped((e for e in entries if len(e) > 30 and "{{" not in e), _GROUP)


def metamath(text: str) -> Iterator[Document]:
    """The comments of a Metamath database, which explain each definition and proof in words."""

    def entries():
        for comment in re.findall(r"\$\(\s(.*?)\s\$\)", text, re.S):
            words = re.sub(r"[`~_]|\((?:Contributed|Revised|Proof|New usage)[^()]*\)", "", comment)
            words = " ".join(words.split())
            if len(words) > 70:
                yield words

    yield from grouped(entries(), _GROUP)


def sword(blocks: bytes, index: bytes) -> Iterator[Document]:
    """A book of a SWORD module: `index` has 12 bytes a block, the first 8 its offset and size, each a zlib stream."""
    for number in range(len(index) // 12):
        start, size = (int.from_bytes(index[12 * number + i :][:4], "little") for i in (0, 4))
        if size:
            markup = zlib.decompress(blocks[start : start + size]).decode("utf-8", "replace")
            markup = re.sub(r"<note\b.*?</note>", "", markup, flags=re.S)
            markup = re.sub(r"</?(?:lb|lg?|milestone|chapter|verse)\b[^>]*>", "<br>", markup)
            text = re.sub(r" *\n *", "\n", html_text(markup))
            for name, part in grouped(normalise(text).split("\n\n"), 40_000):
                yield f"{number}-{name}", part


_R_STRING = re.compile(rb"\x00(?:\x04\x00|\x00\x80|\x00\x00)\x09(.{4})", re.S)


def r_strings(data: bytes) -> Iterator[Document]:
    """The character vectors of an R lazy-load database, a book in lines each; one document a chapter."""
    book, position = 0, 0
    while (start := data.find(b"\x78\x9c", position)) >= 0:
        stream = zlib.decompressobj()
        try:
            raw = stream.decompress(data[start:])
        except zlib.error:  # these two bytes were not the beginning of a stream
            position = start + 2
            continue
        position = max(start + 2, len(data) - len(stream.unused_data))
        lines = list(_r_vector(raw))
        if len(lines) > 500:
            chapters = re.split(r"\n(?=CHAPTER |Chapter [IVXL\d])", unwrap(normalise("\n".join(lines))))
            yield from ((f"{book}-{number}", chapter) for number, chapter in enumerate(chapters))
            book += 1


def _r_vector(raw: bytes) -> Iterator[str]:
    position = 0
    while found := _R_STRING.search(raw, position):
        size = int.from_bytes(found[1], "big")
        position = found.end()
        if size < 4000:
            yield raw[position : position + size].decode("utf-8", "replace")
            position += size


def factbook(text: str) -> Iterator[Document]:
    """A country of the World Factbook as JSON: `section - label: text`."""
    facts = [f"{' - '.join(path[-3:-1])}: {value}" for path, value in strings(text) if path[-1] == "text"]
    yield "", "\n".join(facts)


def summaries(text: str) -> Iterator[Document]:
    """Lead sections of encyclopaedia articles: {key: {title, extract}}."""
    articles = [article for _, article in sorted(json.loads(text).items())]
    texts = (f"{a['title']}\n{a['extract']}" for a in articles if len(a.get("extract", "")) > 80)
    yield from grouped(texts, _GROUP)


def game_json(text: str) -> Iterator[Document]:
    """Descriptions and dialogue of a game: the JSON strings of ten words or more."""
    found = (
        value
        for path, value in strings(text)
        if len(value) >= 60 and value.count(" ") >= 9 and not any(p.startswith(("//", "comment")) for p in path)
    )
    yield from grouped((re.sub(r"<[^<>\n]{1,40}>", "", value) for value in found), 4 * _GROUP)


def backquoted(text: str) -> Iterator[Document]:
    """Descriptions and dialogue of a game: strings in backquotes of four words or more."""
    found = (value for value in re.findall(r"`([^`\n]+)`", text) if value.count(" ") >= 3)
    yield from grouped((re.sub(r"<[^<>]{1,40}>", "", value).strip() for value in found), 4 * _GROUP)


def api_descriptions(text: str) -> Iterator[Document]:
    """Descriptions of an API model, each under the nearest name that is not just structure."""
    structure = set("shapes operations member members properties schemas methods parameters resources".split())

    def entries():
        for path, value in strings(text):
            if path[-1] in ("documentation", "description") and len(value) > 80:
                label = next((p for p in reversed(path[:-1]) if p not in structure), "")
                words = normalise(html_text(value) if "<" in value else value)
                yield f"{label}\n{words}" if label else words

    yield from grouped(entries(), _GROUP)


def strings(text: str) -> Iterable[tuple[tuple[str, ...], str]]:
    """(path of keys, value) for every string of a JSON text, in its order; nothing if the text is not JSON."""

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(node, str):
            yield path, node
        elif isinstance(node, dict):
            for key, value in node.items():
                yield from walk(value, (*path, key))
        elif isinstance(node, list):
            for value in node:
                yield from walk(value, path)

    try:
        return walk(json.loads(text), ("",))
    except ValueError:
        return ()
