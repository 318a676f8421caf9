"""From extracted text to corpus text: normalise, unwrap, filter, remove what was seen before.

All of it is deterministic: neither locale, clock, hash seed nor the order of a file system reaches the output.
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

Document = tuple[str, str]  # name, text

MIN_DOCUMENT = 200  # characters; what is shorter is dropped
MAX_DOCUMENT = 200_000  # characters; what is longer is cut at paragraph ends

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
# Control and format characters, private use, specials: nothing a reader sees. Tabs and line feeds stay.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ue000-\uf8ff\ufff0-\uffff]"
)
_LISTED = re.compile(r"\s*([-*+|>$#:.%@]|\w{1,3}[.)]\s)")
_STOP_WORDS = frozenset(
    "a about after all also an and any are as at be because been but by can do each for from had has have he her his "
    "how i if in into is it its may more most must no not of on one only or other our she should so some such than "
    "that the their them then there these they this to up use was we were what when which who will with would "
    "you".split()
)


def normalise(text: str) -> str:
    """NFC, line feeds alone as line ends, no invisible characters, no blank at a line's end or doubled blank lines."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
    text = _INVISIBLE.sub("", re.sub("[\r\f\u2028\u2029]", "\n", text).replace("¶", ""))
    text = re.sub(r"[^\S\n]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def unwrap(text: str) -> str:
    """Joins the lines of hard-wrapped prose; leaves verse, lists, tables and code as they stand."""
    return "\n\n".join(_unwrap_paragraph(p) for p in text.split("\n\n"))


def _unwrap_paragraph(paragraph: str) -> str:
    first, *rest = lines = paragraph.split("\n")
    if not rest or any(_LISTED.match(line) for line in rest):
        return paragraph
    one_indent = len({len(line) - len(line.lstrip()) for line in rest}) == 1
    # Wrapped prose fills its lines, the last one excepted; verse and tables do not.
    full = sum(map(len, lines[:-1])) >= 50 * len(rest) and max(map(len, lines)) <= 100
    prose = sum(c.isalpha() or c in " ,.'" for c in paragraph) >= 0.8 * len(paragraph)
    if not (one_indent and full and prose):
        return paragraph
    return " ".join([first, *(line.strip() for line in rest)])


def is_english(text: str, stop_words: float) -> bool:
    """Whether the text is mostly letters, those mostly ASCII, with at least this share of English function words."""
    sample = text[:20_000]
    words = WORD.findall(sample)
    letters = sum(c.isalpha() for c in sample)
    spaces = sum(c.isspace() for c in sample)
    return (
        len(words) >= 30
        and sum(w.lower() in _STOP_WORDS for w in words) >= stop_words * len(words)
        and letters + spaces >= 0.7 * len(sample)
        and sum(map(len, words)) >= 0.9 * letters
    )


def sentences_only(text: str) -> str:
    """The first paragraph, and those of eight words or more."""
    first, *rest = text.split("\n\n")
    return "\n\n".join([first, *(p for p in rest if len(WORD.findall(p)) >= 8)])


def without_recurring_lines(documents: list[Document]) -> list[Document]:
    """Drops the short lines that many documents of one package share: menus, credits, version banners."""
    if len(documents) < 20:
        return documents
    count = Counter(line for _, text in documents for line in {line.strip() for line in text.split("\n")})
    often = max(8, len(documents) // 25)
    recurring = {line for line, n in count.items() if n > often and 3 < len(line) <= 200}
    return [
        (name, "\n".join(line for line in text.split("\n") if line.strip() not in recurring))
        for name, text in documents
    ]


def cut_long(documents: Iterable[Document]) -> Iterator[Document]:
    """Cuts documents over MAX_DOCUMENT into parts of about half of it, named NAME@0, NAME@1 ..."""
    for name, text in documents:
        if len(text) <= MAX_DOCUMENT:
            yield name, text
        else:
            yield from grouped(text.split("\n\n"), MAX_DOCUMENT // 2, f"{name}@")


def grouped(items: Iterable[str], size: int, prefix: str = "") -> Iterator[Document]:
    """Collects short items into documents of `size` characters or a little more, named PREFIX0, PREFIX1 ..."""
    held: list[str] = []
    number = total = 0
    for item in items:
        held.append(item)
        total += len(item)
        if total >= size:
            yield f"{prefix}{number}", "\n\n".join(held)
            held, number, total = [], number + 1, 0
    if held:
        yield f"{prefix}{number}", "\n\n".join(held)


class Deduplicator:
    """Passes each paragraph once: a copy anywhere later, case and spacing aside, is removed."""

    def __init__(self):
        self._seen: set[bytes] = set()

    def __call__(self, text: str, shortest: int) -> str:
        """The text without paragraphs met before; '' if too little that is new remains.

        Paragraphs under `shortest` characters recur by nature (headings, braces) and are never removed, but a
        document that keeps little else is.
        """
        kept, fresh, short = [], 0, 0
        for paragraph in text.split("\n\n"):
            plain = " ".join(paragraph.lower().split())
            if len(plain) < shortest:
                short += len(paragraph)
            else:
                digest = hashlib.blake2b(plain.encode(), digest_size=10).digest()
                if digest in self._seen:
                    continue
                self._seen.add(digest)
                fresh += len(paragraph)
            kept.append(paragraph)
        text = normalise("\n\n".join(kept))
        enough = len(text) >= MIN_DOCUMENT and fresh >= MIN_DOCUMENT // 2 and short <= 4 * fresh
        return text if enough else ""
