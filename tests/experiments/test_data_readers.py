"""What each reader makes of a file of its format, and each archive format of the three registries' packages."""

import gzip
import io
import json
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest

from experiments.data import clean, markup, readers, records
from experiments.data.packages import Package


class Reading(NamedTuple):
    name: str
    reader: str
    source: str
    present: tuple[str, ...]
    absent: tuple[str, ...] = ()


READINGS = [
    Reading(
        "html",
        "html",
        "<html><head><title>No</title></head><body><div class='sphinxsidebar'><p>side<div>deep</div></p></div>"
        "<nav>menu</nav><h1>Head</h1><p>One &amp; <b>two</b>\n words.</p><ul><li>first<li>second</ul>"
        '<pre>  a = 1\n    b = 2</pre><script>x < "</p>"</script><p title="a > b">After<!-- hidden --> it.</p></body>',
        ("Head\n\nOne & two words.\n\n- first\n- second\n\n  a = 1\n    b = 2\n\nAfter it.",),
        ("No", "side", "deep", "menu", "hidden", "</p>", "<"),
    ),
    Reading(
        "rst",
        "rst",
        "Title\n=====\n\n.. comment\n   goes on\n\n.. toctree::\n   :maxdepth: 2\n\n   pages\n\n"
        ".. note:: Mind **this**.\n\nSee :ref:`the guide <guide>`, :func:`~os.walk`, ``code`` and `a page <there>`_:"
        ":\n\n    kept = 1\n\n.. code-block:: c\n\n    x;\n",
        ("Title\n\nMind this.", "See the guide, os.walk, code and a page:\n\n    kept = 1\n\n    x;"),
        ("comment", "goes on", "pages", "====", "<guide>", "::"),
    ),
    Reading(
        "pod",
        "pod",
        "=head1 NAME\n\n=over 4\n\n=item *\n\nB<bold I<both>> and C<< $x->y >>, L<the page|perl>, E<lt>X<index>\n\n"
        "=back\n\n=cut\n",
        ("NAME", "* bold both and $x->y, the page, <"),
        ("=", "over", "index"),
    ),
    Reading(
        "mallard",
        "mallard",
        '<page><info><desc>no</desc></info><links type="x"/><title>Wi-Fi</title><p>Press <key>Esc</key>.</p></page>',
        ("Wi-Fi\n\nPress Esc.",),
        ("no",),
    ),
    Reading(
        "dictionary",
        "dictionary",
        "about\n  this\n\nfile\n  itself\n\n"
        "Abase, v. t.\n   To lower {or depress}, as in rank, office, condition in life,\n"
        "   or estimation, or {to a degree}. [1913 Webster]\n   2. To cast down.\n\n"
        "Zeal\n   Eager pursuit of a thing that one cares for.\n   So they said.\n   --Someone.\n",
        (
            "Abase, v. t.\nTo lower or depress, as in rank, office, condition in life, or estimation, or to a degree.",
            "Zeal\nEager pursuit of a thing that one cares for.\nSo they said. --Someone.",
        ),
        ("itself", "{", "[1913"),
    ),
    Reading(
        "wordnet",
        "wordnet",
        "  1 licence line\n00001740 03 n 02 physical_entity 0 thing(p) 0 003 ~ 00001930 | an entity that exists  \n",
        ("physical entity, thing: an entity that exists",),
        ("licence",),
    ),
    Reading(
        "fortunes",
        "fortunes",
        "# note\nA saying that is long enough to be kept.\n%\nshort\n%\nAnother saying that is long enough.\n",
        ("A saying that is long enough to be kept.\n\nAnother saying that is long enough.",),
        ("note", "short", "%"),
    ),
    Reading(
        "metamath",
        "metamath",
        "$( Define the union of two classes, which holds all of the members ` A ` of\n  either. "
        "(Contributed by XY, 1-Jan-2000.) $)\ndf-un $a |- A $. $( short $)",
        ("Define the union of two classes, which holds all of the members A of either.",),
        ("Contributed", "short", "df-un"),
    ),
    Reading(
        "factbook",
        "factbook",
        json.dumps({"Geography": {"Area": {"text": "9 sq km", "note": "x"}}}),
        ("Geography - Area: 9 sq km",),
        ("note",),
    ),
    Reading(
        "summaries",
        "summaries",
        json.dumps({"b": {"title": "Moon", "extract": "m" * 90}, "a": {"title": "Sun", "extract": "s" * 90}}),
        ("Sun\n" + "s" * 90 + "\n\nMoon\n" + "m" * 90,),
    ),
    Reading(
        "game_json",
        "game_json",
        json.dumps(
            [{"//": "a comment " * 12, "id": "short", "text": "You <b>see</b> " + "a very long road ahead " * 5}]
        ),
        ("You see a very long road",),
        ("comment", "short"),
    ),
    Reading(
        "backquoted", "backquoted", "mission `x`\n\tdialog `You <name> have to go there now.`", ("have to go",), ("x",)
    ),
    Reading(
        "api_descriptions",
        "api_descriptions",
        json.dumps({"shapes": {"Queue": {"members": {"documentation": "<p>The queue holds messages.</p> " * 5}}}}),
        ("Queue\nThe queue holds messages.",),
        ("<p>", "shapes", "members"),
    ),
]


@pytest.mark.parametrize("case", READINGS, ids=lambda c: c.name)
def test_reader(case):
    read, _ = readers.READERS[case.reader]
    text = "\n\n".join(clean.normalise(text) for _, text in read(case.source))
    for expected in case.present:
        assert expected in text
    for unexpected in case.absent:
        assert unexpected not in text


def test_every_text_reader_is_tried():
    assert {c.reader for c in READINGS} | {"text", "code"} == set(readers.READERS)


def test_code_reader_leaves_generated_tables_out():
    read, _ = readers.READERS["code"]
    assert [text for _, text in read("def f():\n    return 1\n")] == ["def f():\n    return 1\n"]
    assert list(read("x = [" + "1, " * 200 + "]\n")) == []


def test_sword_book_is_read_block_by_block():
    books = [zlib.compress(b"<chapter n='1'/>In the <i>beginning</i> was.<note>no</note>"), zlib.compress(b"Second.")]
    index = b"".join(
        start.to_bytes(4, "little") + len(book).to_bytes(4, "little") + bytes(4)
        for start, book in zip((0, len(books[0])), books, strict=True)
    )
    assert [text for _, text in records.sword(b"".join(books), index)] == ["In the beginning was.", "Second."]


def test_r_strings_gives_one_document_a_chapter():
    lines = [
        b"CHAPTER 1",
        *[b"It is a truth universally acknowledged, no. %d." % i for i in range(600)],
        b"CHAPTER 2",
        b"End",
    ]
    vector = b"".join(b"\x00\x04\x00\x09" + len(line).to_bytes(4, "big") + line for line in lines)
    found = [text for _, text in records.r_strings(b"\x00\x00\x00\x09junk\x78\x9c" + zlib.compress(vector))]
    assert [text.split("\n")[0][:9] for text in found] == ["CHAPTER 1", "CHAPTER 2"]
    assert "no. 599." in found[0]


def test_prose_is_unwrapped_and_verse_is_not():
    prose = (
        "This paragraph of a manual was wrapped at about seventy columns,\n"
        "so that its lines are full and all of one indent, the\nlast excepted."
    )
    verse = "Tyger Tyger, burning bright,\nIn the forests of the night;"
    assert clean.unwrap(f"{prose}\n\n{verse}") == f"{prose.replace(chr(10), ' ')}\n\n{verse}"


def test_other_languages_and_tables_are_not_english():
    english = "This is the text of a manual that a person would read in order to learn how it works. " * 3
    assert clean.is_english(english, 0.1)
    assert not clean.is_english(
        "Dies ist der Text eines Handbuchs, das man liest, um zu lernen, wie es geht. " * 3, 0.1
    )
    assert not clean.is_english("Это текст руководства, the of and to a in is that it for. " * 9, 0.1)
    assert not clean.is_english("the 100 200 300 400 500 600 of 700 800 900 to 000 " * 9, 0.1)


def test_recurring_lines_go_and_others_stay():
    documents = [(str(i), f"Menu | Home\nPage {i} has its own words.") for i in range(30)]
    assert clean.without_recurring_lines(documents)[7] == ("7", "Page 7 has its own words.")


def test_html_reading_is_linear_in_odd_markup():
    # Quotes that never close must not set the tag pattern to work for ever.
    assert "end" in markup.html_text('<p class="' + "<a href='" * 3000 + "> end")


def wheel(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def tarball(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> None:
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def deb(path: Path, files: dict[str, bytes]) -> None:
    tarball(path, {f"./{name}": data for name, data in files.items()}, "w:xz")
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": path.read_bytes()}
    entries = (
        f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)
        for name, data in parts.items()
    )
    path.write_bytes(b"!<arch>\n" + b"".join(entries))


@pytest.mark.parametrize(
    ("kind", "file", "make"),
    [("pypi", "p.whl", wheel), ("npm", "p.tgz", tarball), ("deb", "p.deb", deb)],
    ids=["wheel", "npm", "deb"],
)
def test_members_of_each_kind_of_package(tmp_path, kind, file, make):
    files = {"b/two.txt.gz": gzip.compress(b"two"), "a/one.txt": b"one", "a/skip.txt": b"no", "a/data.bin": b"no"}
    make(tmp_path / file, files)
    package = Package(kind, "p", "1", file, "", "docs", "MIT", True, "text", r"\.txt(\.gz)?$", "skip")
    assert readers.members(package, tmp_path / file) == {"a/one.txt": b"one", "b/two.txt.gz": b"two"}
    assert list(readers.members(package, tmp_path / file)) == ["a/one.txt", "b/two.txt.gz"]


def test_a_deb_without_data_is_an_error(tmp_path):
    (tmp_path / "p.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ValueError, match=r"p\.deb.*no data\.tar"):
        readers.members(Package("deb", "p", "1", "p.deb", "", "docs", "MIT", True, "text", ""), tmp_path / "p.deb")


def test_unknown_reader_is_named(tmp_path):
    package = Package("deb", "p", "1", "p.deb", "", "docs", "MIT", True, "epub", "")
    with pytest.raises(ValueError, match="p: reader is 'epub', allowed are text, html"):
        readers.read_package(package, tmp_path / "p.deb")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("naïve".encode(), "naïve"),
        ("naïve".encode("cp1252"), "naïve"),
        (b'charset="iso-8859-1" \xe9\xc3', 'charset="iso-8859-1" éÃ'),
    ],
    ids=["utf-8", "cp1252", "declared"],
)
def test_decode(data, text):
    assert readers.decode(data) == text
