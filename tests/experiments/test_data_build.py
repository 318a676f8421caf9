"""The builder on small packages made here: no network, the real lock file read but not fetched."""

import dataclasses
import hashlib
import json
import lzma
import random
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from experiments.data import corpus, packages, readers
from experiments.data.packages import Package, PackageError

WORDS = "the a of and to in is that it for with on river stone light winter house garden letter music engine".split()


def prose(seed: int, paragraphs: int = 3) -> str:
    draw = random.Random(seed)
    return "\n\n".join(" ".join(draw.choices(WORDS, k=40)) + "." for _ in range(paragraphs))


def make_package(cache: Path, name: str, domain: str, texts: dict[str, str], **fields) -> Package:
    """A wheel in the cache, as if it had been fetched, and its lock entry."""
    cache.mkdir(exist_ok=True)
    file = f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(cache / file, "w") as archive:
        for member, text in texts.items():
            archive.writestr(zipfile.ZipInfo(member), text)
    sha256 = hashlib.sha256((cache / file).read_bytes()).hexdigest()
    defaults = dict(licence="MIT", permissive=True, reader="text", include=r"\.txt$")
    return Package(
        kind="pypi", name=name, version="1.0", file=file, sha256=sha256, domain=domain, **(defaults | fields)
    )


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def chosen(cache):
    return [
        make_package(cache, "essays", "general", {f"{i}.txt": prose(i) for i in range(150)}),
        make_package(
            cache,
            "manual",
            "docs",
            {f"{i}.txt": prose(1000 + i) for i in range(150)},
            licence="GPL-2",
            permissive=False,
        ),
        make_package(
            cache,
            "program",
            "code",
            {f"{i}.py": "# " + prose(2000 + i).replace(" ", "\n# ") for i in range(40)},
            reader="code",
            include=r"\.py$",
        ),
    ]


def documents(path: Path) -> list[str]:
    *texts, rest = path.read_bytes().split(b"\0")
    assert rest == b""
    return [text.decode() for text in texts]


def test_two_builds_are_equal_to_the_byte(tmp_path, cache, chosen):
    one = corpus.build(tmp_path / "one", chosen, cache, jobs=1)
    two = corpus.build(tmp_path / "two", chosen, cache, jobs=2)
    assert one == two
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == ["manifest.json", *(f"{s}.{d}.txt" for s in ("train", "val") for d in ("code", "docs", "general"))]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_manifest_says_what_is_there(tmp_path, cache, chosen):
    manifest = corpus.build(tmp_path / "out", chosen, cache)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    for name, info in manifest["files"].items():
        data = (tmp_path / "out" / name).read_bytes()
        assert info == {"documents": data.count(0), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert [(p["name"], p["licence"], p["permissive"]) for p in manifest["packages"]] == [
        ("essays", "MIT", True),
        ("manual", "GPL-2", False),
        ("program", "MIT", True),
    ]
    assert manifest["packages"][0]["sha256"] == chosen[0].sha256
    total = {d: sum(p["documents"] for p in manifest["packages"] if p["domain"] == d) for d in packages.DOMAINS}
    assert total == {"general": 150, "docs": 150, "code": 40}
    assert total == {
        d: manifest["files"][f"train.{d}.txt"]["documents"] + manifest["files"][f"val.{d}.txt"]["documents"]
        for d in total
    }


def test_split_follows_names_alone(tmp_path, cache):
    texts = {f"{i}.txt": prose(i) for i in range(300)}
    all_of_it = make_package(cache, "essays", "general", texts)
    corpus.build(tmp_path / "all", [all_of_it], cache)
    expected = {prose(i) for i in range(300) if corpus.is_validation(f"pypi:essays/{i}.txt")}
    assert 0 < len(expected) < 15
    assert set(documents(tmp_path / "all" / "val.general.txt")) == expected
    # Half of the package is gone; what is left stays on its side.
    half = make_package(cache, "essays", "general", {n: t for n, t in texts.items() if int(n[:-4]) % 2})
    corpus.build(tmp_path / "half", [half], cache)
    assert set(documents(tmp_path / "half" / "val.general.txt")) <= expected
    assert not set(documents(tmp_path / "half" / "train.general.txt")) & expected


def test_validation_share_is_what_it_says():
    assert sum(corpus.is_validation(f"pypi:p/{i}") for i in range(20_000)) / 20_000 == pytest.approx(0.015, abs=0.002)


def test_max_mb_gives_a_prefix_and_the_same_validation(tmp_path, cache, chosen):
    corpus.build(tmp_path / "full", chosen, cache)
    manifest = corpus.build(tmp_path / "small", chosen, cache, max_mb={"general": 0.02})
    full, small = ((tmp_path / d / "train.general.txt").read_bytes() for d in ("full", "small"))
    assert 15_000 < len(small) <= 20_000 and full.startswith(small) and small.endswith(b"\0")
    for name in ("train.docs.txt", "val.general.txt", "val.docs.txt", "val.code.txt"):
        assert (tmp_path / "full" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
    assert manifest["files"]["train.general.txt"]["bytes"] == len(small)


def test_a_paragraph_is_kept_once_in_the_whole_corpus(tmp_path, cache):
    shared = prose(7, 1)
    first = make_package(cache, "first", "general", {"a.txt": f"{prose(1)}\n\n{shared}", "twin.txt": prose(1)})
    second = make_package(cache, "second", "docs", {"b.txt": f"{shared.upper().replace(' ', '  ')}\n\n{prose(2)}"})
    manifest = corpus.build(tmp_path / "out", [first, second], cache)
    everything = "\n".join(t for p in (tmp_path / "out").glob("*.txt") for t in documents(p)).lower()
    assert everything.count(shared.lower()) == 1 and everything.count(prose(1)) == 1
    assert [p["documents"] for p in manifest["packages"]] == [1, 1]
    assert manifest["packages"][0]["bytes"] < manifest["packages"][0]["bytes_before_deduplication"]


def test_cap_limits_a_package(tmp_path, cache):
    capped = make_package(cache, "big", "docs", {f"{i}.txt": prose(i) for i in range(100)}, cap_mb=0.01)
    manifest = corpus.build(tmp_path / "out", [capped], cache)
    assert 10_000 <= manifest["packages"][0]["bytes"] < 11_000


def test_sentences_only_keeps_the_title_and_sentences(tmp_path, cache):
    text = f"class Engine\n\nint start()\n\n{prose(3)}"
    api = make_package(cache, "api", "docs", {"a.txt": text}, sentences_only=True)
    corpus.build(tmp_path / "out", [api], cache)
    assert documents(tmp_path / "out" / "train.docs.txt") == [f"class Engine\n\n{prose(3)}"]


def test_pack_writes_the_same_text_compressed(tmp_path, cache, chosen):
    manifest = corpus.build(tmp_path / "out", chosen[2:], cache, pack="xz")
    packed = (tmp_path / "out" / "train.code.txt.xz").read_bytes()
    assert lzma.decompress(packed) == (tmp_path / "out" / "train.code.txt").read_bytes()
    assert manifest["files"]["train.code.txt"]["xz"] == {
        "bytes": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(),
    }


def test_another_hash_is_refused_by_name(tmp_path, cache, chosen):
    wrong = dataclasses.replace(chosen[0], sha256="0" * 64)
    also = dataclasses.replace(chosen[1], sha256="1" * 64)
    with pytest.raises(PackageError) as problem:
        corpus.build(tmp_path / "out", [wrong, also, chosen[2]], cache)
    assert f"essays 1.0: {cache / chosen[0].file} has sha256 {chosen[0].sha256}" in str(problem.value)
    assert "manual 1.0" in str(problem.value) and "program" not in str(problem.value)
    assert "0" * 64 in str(problem.value) and "--without" in str(problem.value)
    assert not (tmp_path / "out").exists()


def stand_in(folder: Path, client: str, script: str) -> None:
    """A program of a registry client's name that runs a shell script instead."""
    folder.mkdir(exist_ok=True)
    (folder / client).write_text(f"#!/bin/sh\n{script}\n")
    (folder / client).chmod(stat.S_IRWXU)


@pytest.mark.parametrize(("kind", "client"), [("deb", "apt-get"), ("npm", "npm"), ("pypi", "pip")])
def test_fetch_runs_the_client_once_and_checks_what_it_gave(tmp_path, cache, monkeypatch, kind, client):
    stand_in(tmp_path / "bin", client, f'echo "$@" >> {tmp_path}/calls; printf data > got.file')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    right = Package(kind, "thing", "2.1", "f.bin", hashlib.sha256(b"data").hexdigest(), "docs", "MIT", True, "text", "")
    assert packages.fetch(right, cache).read_bytes() == b"data"
    assert packages.fetch(right, cache) == cache / "f.bin"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert {"deb": "thing=2.1", "npm": "thing@2.1", "pypi": "thing==2.1"}[kind] in call
    wrong = dataclasses.replace(right, file="g.bin", sha256="0" * 64)
    with pytest.raises(PackageError, match=f"{kind} package thing 2.1: .* has sha256"):
        packages.fetch(wrong, cache)
    assert sorted(p.name for p in cache.iterdir()) == ["f.bin"]  # nothing half-fetched, nothing wrong kept


def test_a_version_that_is_gone_is_named(tmp_path, cache, monkeypatch):
    stand_in(tmp_path / "bin", "npm", "echo no matching version >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    gone = Package("npm", "thing", "2.1", "f.tgz", "0" * 64, "docs", "MIT", True, "text", "")
    with pytest.raises(PackageError, match="npm package thing 2.1 cannot be fetched: no matching version"):
        packages.fetch(gone, cache)


def test_a_missing_client_is_named(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    for kind, client in (("npm", "npm"), ("deb", "apt-get"), ("pypi", "pip or uv")):
        with pytest.raises(PackageError, match=f"{client} is needed"):
            packages.fetch(Package(kind, "thing", "1", "f", "0" * 64, "docs", "MIT", True, "text", ""), cache)


def test_an_interrupted_build_leaves_nothing(tmp_path, cache, chosen, monkeypatch):
    written = []

    def write_then_stop(path, *args):
        written.append(path)
        path.write_text("half")
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "_write", write_then_stop)
    with pytest.raises(KeyboardInterrupt):
        corpus.build(tmp_path / "out", chosen, cache)
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_an_existing_directory_is_kept(tmp_path, cache, chosen, capsys):
    first = corpus.build(tmp_path / "out", chosen, cache)
    for file in cache.iterdir():
        file.unlink()  # a finished corpus needs no package again
    assert corpus.build(tmp_path / "out", chosen, cache) == first
    assert "already built" in capsys.readouterr().out
    with pytest.raises(ValueError, match="out: .* another recipe"):
        corpus.build(tmp_path / "out", chosen[:2], cache)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="out: .* is not a corpus"):
        corpus.build(tmp_path / "mine", chosen, cache)


def test_select(chosen):
    assert [p.name for p in packages.select(chosen, permissive=True)] == ["essays", "program"]
    assert [p.name for p in packages.select(chosen, without=["essays"])] == ["manual", "program"]
    assert packages.select(chosen, kinds=["deb"]) == []
    with pytest.raises(ValueError, match="kinds: rpm given, allowed are deb, pypi, npm"):
        packages.select(chosen, kinds=["deb", "rpm"])
    with pytest.raises(ValueError, match="without: nosuch given"):
        packages.select(chosen, without=["nosuch"])
    with pytest.raises(ValueError, match="packages: none"):
        corpus.build(Path("unused"), [], Path("unused"))


def test_parse_max_mb():
    assert corpus.parse_max_mb("general=95,code=0.5") == {"general": 95.0, "code": 0.5}
    assert corpus.parse_max_mb("") == {}
    with pytest.raises(ValueError, match="max_mb: domain 'books' given, allowed are general, docs, code"):
        corpus.parse_max_mb("docs=1,books=3")
    for text in ("docs=-1", "docs=0", "docs=x", "docs", "docs=inf", "docs=nan"):
        with pytest.raises(ValueError, match=f"max_mb: '{text}' given, docs needs a positive number"):
            corpus.parse_max_mb(text)


def test_the_program_says_what_is_wrong(tmp_path):
    command = [sys.executable, "-m", "experiments.data.build", "--out", str(tmp_path / "out"), "--max_mb", "books=3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (
        done.returncode == 1 and done.stderr == "error: max_mb: domain 'books' given, allowed are general, docs, code\n"
    )
    assert not (tmp_path / "out").exists()


def test_the_lock_file_is_whole():
    locked = packages.load_lock()
    assert len({(p.kind, p.name) for p in locked}) == len({p.file for p in locked}) == len(locked)
    assert {p.domain for p in locked} == set(packages.DOMAINS) and {p.kind for p in locked} == set(packages.KINDS)
    assert all(len(bytes.fromhex(p.sha256)) == 32 and p.licence and p.version for p in locked)
    copyleft = [
        p.name for p in locked if p.permissive and ("GPL" in p.licence or "GFDL" in p.licence or "-SA-" in p.licence)
    ]
    assert copyleft == ["perl-doc"]  # which may be taken under the Artistic licence instead
    for package in locked:  # every pattern compiles and every reader exists
        assert package.reader in readers.READERS or package.reader in readers.BINARY_READERS
        assert re.compile(package.include) and re.compile(package.exclude)


def test_unknown_kind_and_domain_are_refused():
    with pytest.raises(ValueError, match="x: kind is 'rpm', allowed are deb, pypi, npm"):
        Package("rpm", "x", "1", "f", "0", "docs", "MIT", True, "text", "")
    with pytest.raises(ValueError, match="x: domain is 'poems'"):
        Package("deb", "x", "1", "f", "0", "poems", "MIT", True, "text", "")
