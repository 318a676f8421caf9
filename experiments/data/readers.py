"""From one package file to its documents: open it, pick the members, read each by the package's reader."""

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.data import clean, markup, records
from experiments.data.clean import Document
from experiments.data.packages import Package

# Alphabetical indexes, in any HTML manual: every entry of theirs stands elsewhere too.
_INDEX_PAGE = re.compile(
    r"(^|/)(genindex\S*|theindex|doc-index|index-all|chapInd|search|allclasses\S*|overview-tree|([A-Z]\w*-)*Index)\.html?$"
)
# Tests, vendored copies and generated code.
_NOT_SOURCE = re.compile(
    r"(^|/)(tests?|testing|testdata|benches|_?vendor\w*|migrations|locale|lib2to3|idlelib|pydoc_data)/"
    r"|(^|/)(test_[^/]*|conftest)\.py$|_test\.go$|(^|/)tests?\.rs$|_pb2\.py$|\.min\.js$"
)


def _whole(convert: Callable[[str], str]) -> Callable[[str], Iterator[Document]]:
    def read(text: str) -> Iterator[Document]:
        yield "", convert(text)

    return read


def _code(text: str) -> Iterator[Document]:
    lines = text.split("\n")
    # Tables and generated data have long lines, or are long.
    if len(text) <= 250_000 and max(map(len, lines)) <= 400 and len(text) <= 90 * len(lines):
        yield "", text


# Readers of decoded text, each with the share of function words that its English has at least. Dictionaries,
# facts and verse have few; code is not held to it.
READERS: dict[str, tuple[Callable[[str], Iterator[Document]], float]] = {
    "text": (_whole(lambda text: clean.unwrap(clean.normalise(text))), 0.10),
    "html": (_whole(markup.html_text), 0.10),
    "rst": (_whole(markup.rst_text), 0.10),
    "pod": (_whole(markup.pod_text), 0.10),
    "mallard": (_whole(markup.mallard_text), 0.10),
    "code": (_code, 0.0),
    "dictionary": (records.dictionary, 0.05),
    "wordnet": (records.wordnet, 0.05),
    "fortunes": (records.fortunes, 0.05),
    "metamath": (records.metamath, 0.05),
    "factbook": (records.factbook, 0.03),
    "summaries": (records.summaries, 0.05),
    "game_json": (records.game_json, 0.10),
    "backquoted": (records.backquoted, 0.10),
    "api_descriptions": (records.api_descriptions, 0.05),
}
# Readers of bytes; a SWORD book lies in two files.
BINARY_READERS: dict[str, float] = {"r_strings": 0.10, "sword": 0.05}


def read_package(package: Package, path: Path) -> list[Document]:
    """All documents of a package that pass its filters, by name; paragraphs are not yet de-duplicated.

    Raises ValueError if the package names a reader that does not exist.
    """
    if package.reader not in READERS and package.reader not in BINARY_READERS:
        raise ValueError(
            f"{package.name}: reader is {package.reader!r}, allowed are {', '.join([*READERS, *BINARY_READERS])}"
        )
    found = [
        (f"{package.kind}:{package.name}/{member}{'#' * bool(part)}{part}", clean.normalise(text))
        for member, part, text in _read(package, members(package, path))
    ]
    if package.reader in ("html", "mallard"):
        found = clean.without_recurring_lines(found)
    kept = []
    for name, text in found:
        if package.sentences_only:
            text = clean.sentences_only(text)
        text = clean.normalise(text)
        if len(text) >= clean.MIN_DOCUMENT and (package.reader == "code" or clean.is_english(text, _share(package))):
            kept.append((name, text))
    return kept


def _share(package: Package) -> float:
    return BINARY_READERS.get(package.reader) or READERS[package.reader][1]


def _read(package: Package, files: dict[str, bytes]) -> Iterator[tuple[str, str, str]]:
    for member, data in files.items():
        if package.reader == "sword":
            if member.endswith("z"):
                yield from ((member, part, text) for part, text in records.sword(data, files[member[:-1] + "s"]))
        elif package.reader == "r_strings":
            yield from ((member, part, text) for part, text in records.r_strings(data))
        else:
            text = decode(data)
            if package.reader == "code" and member.endswith(".py"):
                text = text.expandtabs(4)
            yield from ((member, part, text) for part, text in READERS[package.reader][0](text))


def members(package: Package, path: Path) -> dict[str, bytes]:
    """The wanted regular files of a .deb, a wheel or an npm tarball, by name, uncompressed, in sorted order."""
    include, exclude = re.compile(package.include), re.compile(package.exclude or r"(?!)")
    usual = {"html": _INDEX_PAGE, "code": _NOT_SOURCE}.get(package.reader, re.compile(r"(?!)"))

    def wanted(name: str) -> bool:
        return bool(include.search(name)) and not exclude.search(name) and not usual.search(name)

    found = {}
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            found = {n: archive.read(n) for n in archive.namelist() if not n.endswith("/") and wanted(n)}
    else:
        with _open_tar(path) as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isreg() and wanted(name):
                    found[name] = archive.extractfile(member).read()
    return {
        name: gzip.decompress(found[name]) if name.endswith((".gz", ".dz")) else found[name] for name in sorted(found)
    }


def _open_tar(path: Path) -> tarfile.TarFile:
    """An npm tarball, or the data.tar.* that an ar archive (.deb) holds: 60-byte headers, members padded to even."""
    if path.suffix != ".deb":
        return tarfile.open(path, mode="r:*")
    data, position = path.read_bytes(), len(b"!<arch>\n")
    while position < len(data):
        name, size = data[position : position + 16].decode().strip(" /"), int(data[position + 48 : position + 58])
        position += 60
        if name.startswith("data.tar"):
            return tarfile.open(fileobj=io.BytesIO(data[position : position + size]), mode="r:*")
        position += size + size % 2
    raise ValueError(f"{path.name}: a .deb with no data.tar in it")


def decode(data: bytes) -> str:
    """UTF-8, else Windows-1252, else Latin-1; the first only if the file does not declare one of the others."""
    declared = re.search(rb"iso-8859-1\b|latin-?1\b|windows-1252", data[:2048].lower())
    for encoding in ("cp1252",) if declared else ("utf-8", "cp1252"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return data.decode("latin-1")
