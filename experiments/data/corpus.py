"""The corpus itself: read every package, remove what repeats, split, write.

Documents are put in order and split by the sha256 of their names: a smaller limit gives a prefix of the larger corpus
with the same validation files, and no paragraph of any length to speak of is in both.
"""

import hashlib
import json
import lzma
import multiprocessing
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.data import clean, markup, packages, readers, records
from experiments.data.packages import DOMAINS, Package, PackageError

VALIDATION_SHARE = 0.015  # of the documents
SHORTEST_PARAGRAPH = {"general": 60, "docs": 60, "code": 120}  # characters; shorter ones are not de-duplicated
_DESCRIBED = ("kind", "name", "version", "sha256", "domain", "licence", "permissive")  # in the manifest


def build(
    out: Path,
    chosen: Sequence[Package],
    cache: Path,
    *,
    max_mb: Mapping[str, float] | None = None,
    pack: str | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Makes the corpus directory `out` from `chosen` packages; returns its manifest.

    A directory made earlier from the same recipe is left as it is. Raises ValueError if `out` is anything else that
    exists or no package is chosen, and PackageError naming every package that cannot be had as locked.
    """
    if not chosen:
        raise ValueError("packages: none is left to build from")
    recipe = recipe_hash(chosen, max_mb or {}, pack)
    if out.exists():
        return _finished(out, recipe)
    files = fetch_all(chosen, cache)
    corpus, sources = assemble(chosen, files, jobs)

    out.parent.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        written = {}
        for domain, documents in corpus.items():
            limit = (max_mb or {}).get(domain, float("inf")) * 1e6
            for split in ("train", "val"):
                path = room / f"{split}.{domain}.txt"
                some = (text for name, text in documents if is_validation(name) == (split == "val"))
                written[path.name] = _write(path, some, limit if split == "train" else float("inf"))
        if pack:
            with ThreadPoolExecutor(jobs) as pool:  # lzma works outside the interpreter's lock
                for name, packed in zip(written, pool.map(_pack, [room / n for n in written]), strict=True):
                    written[name]["xz"] = packed
        manifest = {"recipe": recipe, "files": written, "packages": sources}
        (room / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        room.chmod(0o755)
        room.rename(out)
    except BaseException:
        shutil.rmtree(room)
        raise
    return manifest


def fetch_all(chosen: Sequence[Package], cache: Path) -> list[Path]:
    """Every package's file; raises one PackageError that names all packages that cannot be had."""
    files, problems = [], []
    for package in tqdm(chosen, desc="fetch", unit="package"):
        try:
            files.append(packages.fetch(package, cache))
        except PackageError as problem:
            problems.append(str(problem))
    if problems:
        raise PackageError(
            "\n".join(problems) + "\nPut another version and its sha256 into packages.lock.json, "
            "or leave packages out with --without NAME,NAME or --kinds."
        )
    return files


def assemble(
    chosen: Sequence[Package], files: Sequence[Path], jobs: int = 1
) -> tuple[dict[str, list[tuple[str, bytes]]], list[dict[str, Any]]]:
    """Each domain's documents (name, UTF-8), de-duplicated and in order, and a record of each package."""
    corpus: dict[str, list[tuple[str, bytes]]] = {domain: [] for domain in DOMAINS}
    sources, deduplicate = [], clean.Deduplicator()
    found = tqdm(_read_all(chosen, files, jobs), total=len(chosen), desc="read", unit="package")
    for package, documents in zip(chosen, found, strict=True):
        kept = [
            (name, fresh.encode())
            for name, text in clean.cut_long(documents)
            if (fresh := deduplicate(text, SHORTEST_PARAGRAPH[package.domain]))
        ]
        kept = list(_prefix(sorted(kept, key=_place), (package.cap_mb or float("inf")) * 1e6))
        corpus[package.domain] += kept
        sources.append(
            {field: getattr(package, field) for field in _DESCRIBED}
            | {
                "documents": len(kept),
                "bytes": sum(len(text) for _, text in kept),
                "bytes_before_deduplication": sum(len(text.encode()) for _, text in documents),
            }
        )
    for documents in corpus.values():
        documents.sort(key=_place)
    return corpus, sources


def is_validation(name: str) -> bool:
    """Whether the document of this name is validation: decided by the first half of its sha256 alone."""
    return int(_digest(name)[:32], 16) < VALIDATION_SHARE * 16**32


def recipe_hash(chosen: Sequence[Package], max_mb: Mapping[str, float], pack: str | None) -> str:
    """sha256 of all that the result depends on: the locked packages, the options, this code, Unicode's version."""
    code = [Path(m.__file__).read_text() for m in (clean, markup, records, readers)] + [Path(__file__).read_text()]
    parts = [[asdict(p) for p in chosen], sorted(max_mb.items()), pack, code, unicodedata.unidata_version]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def parse_max_mb(text: str) -> dict[str, float]:
    """{'general': 95.0, ...} from 'general=95,...'; raises ValueError for an unknown domain or no positive number."""
    limits = {}
    for part in filter(None, text.split(",")):
        domain, _, number = part.partition("=")
        if domain not in DOMAINS:
            raise ValueError(f"max_mb: domain {domain!r} given, allowed are {', '.join(DOMAINS)}")
        try:
            limits[domain] = float(number)
        except ValueError:
            limits[domain] = 0.0
        if not 0 < limits[domain] < float("inf"):
            raise ValueError(f"max_mb: {part!r} given, {domain} needs a positive number of 10^6 bytes")
    return limits


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _place(document: tuple[str, bytes]) -> str:
    # The half that is_validation does not read: a prefix then has its fair share of validation documents.
    return _digest(document[0])[32:]


def _prefix(documents: Sequence[tuple[str, bytes]], size: float) -> Iterator[tuple[str, bytes]]:
    total = 0
    for name, text in documents:
        if total >= size:
            return
        yield name, text
        total += len(text)


def _read_all(chosen: Sequence[Package], files: Sequence[Path], jobs: int) -> Iterator[list[clean.Document]]:
    if jobs == 1:
        yield from map(readers.read_package, chosen, files)
        return
    # Spawned, not forked: a fork would copy the parent's threads' locks. In order, so that the first copy of a
    # paragraph is the same one however the processes race.
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_read_one, zip(chosen, files, strict=True))


def _read_one(job: tuple[Package, Path]) -> list[clean.Document]:
    return readers.read_package(*job)


def _write(path: Path, documents: Iterator[bytes], limit: float) -> dict[str, Any]:
    digest, count, size = hashlib.sha256(), 0, 0
    with open(path, "wb") as f:
        for text in documents:
            data = text + b"\0"
            if size + len(data) > limit:
                break
            f.write(data)
            digest.update(data)
            count, size = count + 1, size + len(data)
    return {"documents": count, "bytes": size, "sha256": digest.hexdigest()}


def _pack(path: Path) -> dict[str, Any]:
    packed = path.with_name(path.name + ".xz")
    with open(path, "rb") as f, lzma.open(packed, "wb", preset=9) as g:
        shutil.copyfileobj(f, g, 1 << 22)
    with open(packed, "rb") as f:
        return {"bytes": packed.stat().st_size, "sha256": hashlib.file_digest(f, "sha256").hexdigest()}


def _finished(out: Path, recipe: str) -> dict[str, Any]:
    try:
        manifest = json.loads((out / "manifest.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"out: {out} exists and is not a corpus; give a directory that does not exist") from None
    if manifest.get("recipe") != recipe:
        raise ValueError(f"out: {out} holds a corpus of another recipe; give a directory that does not exist")
    print(f"{out} is already built from this recipe.")
    return manifest
