"""The named, versioned packages that the corpus is made of, and how to get them.

packages.lock.json is the whole recipe: for each package its version, the sha256 of its one file, its licence,
and which members of it are read, by which reader (readers.py).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

DOMAINS = ("general", "docs", "code")
KINDS = ("deb", "pypi", "npm")
LOCK = Path(__file__).with_name("packages.lock.json")


class PackageError(RuntimeError):
    """A package cannot be had as locked. The message names each one, and says what to do."""


@dataclass(frozen=True)
class Package:
    kind: str  # which client fetches it: deb, pypi or npm
    name: str
    version: str
    file: str  # the file's name as the client saves it
    sha256: str  # of that file
    domain: str  # general, docs or code
    licence: str
    permissive: bool  # public domain, permissive or attribution-only: no copyleft
    reader: str  # a name in readers.READERS
    include: str  # regular expression: the members to read
    exclude: str = ""  # regular expression: members left out all the same
    cap_mb: float | None = None  # at most so many 10^6 bytes of clean text (repetitive or very large packages)
    sentences_only: bool = False  # API references: keep only paragraphs of eight words or more

    def __post_init__(self):
        for field, value, allowed in (("kind", self.kind, KINDS), ("domain", self.domain, DOMAINS)):
            if value not in allowed:
                raise ValueError(f"{self.name}: {field} is {value!r}, allowed are {', '.join(allowed)}")


def load_lock(path: Path = LOCK) -> list[Package]:
    """The packages of a lock file, in its order."""
    return [Package(**entry) for entry in json.loads(Path(path).read_text())["packages"]]


def select(
    packages: Sequence[Package], *, permissive: bool = False, kinds: Sequence[str] = KINDS, without: Sequence[str] = ()
) -> list[Package]:
    """Those packages that the caller wants.

    Raises ValueError for a kind that is not deb, pypi or npm, or a name in `without` that is not locked.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds: {', '.join(sorted(unknown))} given, allowed are {', '.join(KINDS)}")
    if unknown := set(without) - {p.name for p in packages}:
        raise ValueError(f"without: {', '.join(sorted(unknown))} given, which packages.lock.json does not name")
    return [p for p in packages if p.kind in kinds and p.name not in without and (p.permissive or not permissive)]


def fetch(package: Package, cache: Path) -> Path:
    """The package's file in `cache`, downloaded if it is not there, its sha256 checked either way.

    Raises PackageError if its client is missing or cannot get it, or if the file is not the locked one.
    """
    path = Path(cache) / package.file
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # In the cache's own file system, so that the rename is atomic: a killed download leaves no wrong file.
        room = Path(tempfile.mkdtemp(prefix="download-", dir=cache))
        try:
            check_hash(package, _download(package, room)).rename(path)
        finally:
            shutil.rmtree(room)
        return path
    return check_hash(package, path)


def check_hash(package: Package, path: Path) -> Path:
    """The path itself; raises PackageError naming the package if the file's sha256 is not the locked one."""
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != package.sha256:
        raise PackageError(
            f"{package.kind} package {package.name} {package.version}: {path} has sha256 {found}, "
            f"but packages.lock.json says {package.sha256}"
        )
    return path


def _download(package: Package, room: Path) -> Path:
    """Runs the package's ordinary client in an empty directory; returns the one file that it left there."""
    done = subprocess.run(_command(package), cwd=room, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = list(room.iterdir())
    if done.returncode or len(files) != 1:
        hint = " (apt-get update first refreshes what it knows)" if package.kind == "deb" else ""
        raise PackageError(
            f"{package.kind} package {package.name} {package.version} cannot be fetched{hint}: "
            f"{' '.join(done.stdout.split())[-300:] or 'its client left no file'}"
        )
    return files[0]


def _command(package: Package) -> list[str]:
    if package.kind == "pypi":
        # A fixed interpreter and platform, so that every machine is given the same wheel.
        return [
            *_pip(), "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.13",
            "--implementation", "py", "--abi", "none", "--platform", "any", "--dest", ".",
            f"{package.name}=={package.version}",
        ]  # fmt: skip
    client = {"deb": "apt-get", "npm": "npm"}[package.kind]
    if shutil.which(client) is None:
        raise PackageError(f"{client} is needed for the {package.kind} package {package.name}, and is not on PATH")
    if package.kind == "deb":
        return [client, "download", "--quiet", f"{package.name}={package.version}"]
    return [client, "pack", "--loglevel=error", f"{package.name}@{package.version}"]


def _pip() -> list[str]:
    """pip of this interpreter, else that on PATH, else one that uv runs (uv's environments have none)."""
    if find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for client in (["pip"], ["pip3"], ["uvx", "pip"]):
        if shutil.which(client[0]):
            return client
    raise PackageError("pip or uv is needed to fetch the PyPI packages, and neither is on PATH")


def default_cache() -> Path:
    """Where downloads are kept: kimi_jax/packages under the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimi_jax" / "packages"
