"""Documentation markup to plain text: HTML, reStructuredText, POD, Mallard.

HTML goes through a small tokenizer of our own: html.parser's reading of odd markup changes between Python's
maintenance releases, and the corpus must not.
"""

import html
import re

from experiments.data.clean import normalise, unwrap

# Elements that never hold running text, and elements whose class, id or role says that they are page furniture.
_UNREAD = frozenset("nav footer form aside button select svg map object iframe audio video canvas noscript".split())
_FURNITURE = frozenset(
    """sphinxsidebar sphinxsidebarwrapper related headerlink toc toctree-wrapper contents-toc navigation nav navbar
    navheader navfooter navsettop navsetbottom navpath topnav subnav bottomnav skipnav skip-nav breadcrumb breadcrumbs
    sidebar sidebarmenu menu footer search searchbox copyright banner clipboard linenos lineno t-navbar editsection
    noprint page-header toplang bottomlang preheader langnav top-nav tocset tocview tocsub versionset refpara anchor
    srclink quickview method-toggle page-info legal-copy innertube up doc-info printfooter catlinks nav_table""".split()
)
_ATTRIBUTE = re.compile(r"\b(?:class|id|role)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>]+))", re.I)
_PARAGRAPHS = frozenset(
    """p div pre ul ol dl table blockquote section article main details figure figcaption caption hr h1 h2 h3 h4 h5 h6
    page title note item example steps terms list""".split()
)
_LINES = {"li": "\n- ", "br": "\n", "tr": "\n", "dt": "\n", "dd": "\n", "summary": "\n", "address": "\n"}
_CELLS = ("td", "th")
_EMPTY = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_WHOLE = re.compile(r"<!--.*?-->|<(script|style|head|template)\b.*?</\1\s*>|<[!?][^>]*>", re.I | re.S)
_TAG = re.compile(r"<(/?)([a-z][\w:.-]*)((?:\"[^\"]*\"|'[^']*'|[^<>\"'])*)>", re.I)


def html_text(markup: str) -> str:
    """The running text of a page: a blank line between blocks, `- ` before list items, <pre> as it stands."""
    pieces: list[str] = []
    skipping, depth, preformatted = "", 0, 0  # the element that is being skipped, and how deep in namesakes of it
    position = 0
    markup = _WHOLE.sub(" ", markup)
    for tag in _TAG.finditer(markup):
        if not skipping:
            pieces.append(_words(markup[position : tag.start()], preformatted))
        position = tag.end()
        end, name, attributes = tag[1], tag[2].lower(), tag[3]
        empty = name in _EMPTY or attributes.endswith("/")
        if skipping:
            if name == skipping and not empty:
                depth += -1 if end else 1
                skipping = skipping if depth else ""
            continue
        if not end and not empty and (name in _UNREAD or _is_furniture(name, attributes)):
            skipping, depth = name, 1
            continue
        if name == "pre":
            preformatted = max(0, preformatted + (-1 if end else 1))
        if name in _PARAGRAPHS:
            pieces.append("\n\n")
        elif name in _LINES and not end:
            pieces.append(_LINES[name])
        elif name in _CELLS and not end:
            pieces.append("  ")
    pieces.append("" if skipping else _words(markup[position:], preformatted))
    text = re.sub(r"^[ ](?! )|^-?[ ]*$", "", "".join(pieces), flags=re.M)
    text = re.sub(r"\n{3,}", "\n\n", text)
    return re.sub(r"^(- .+)\n\n(?=- )", r"\1\n", text, flags=re.M)


def _words(raw: str, preformatted: int) -> str:
    text = html.unescape(raw)
    return text if preformatted else re.sub(r"\s+", " ", text)


def _is_furniture(name: str, attributes: str) -> bool:
    if name in ("body", "html") or not attributes:
        return False
    values = " ".join("".join(groups) for groups in _ATTRIBUTE.findall(attributes))
    return not _FURNITURE.isdisjoint(values.lower().split())


# Directives whose body is not prose of this page: includes, figures, indexes, generated API.
_RST_UNREAD = re.compile(
    r"toctree|contents|(single)?index|figure|image|raw|only|include|literalinclude|plot|graphviz|digraph|autos?\w*"
    r"|(current)?module|currentlibrary|py:\w*module|highlight|role|default-role|meta|bibliography|csv-table|container"
    r"|kernel-\w+|maintainers-include|(section|module)author|tabularcolumns|cssclass|rubric|program|default-domain"
    r"|test(setup|cleanup|output)|inheritance-diagram|version(added|changed|removed)|deprecated|replace|unicode|date"
    r"|grid.*|card.*|tab-.*|button.*|raw-html.*|linkall|ifconfig|minigallery|sidebar"
)
_RST_LABELLED = frozenset("note warning tip important seealso caution hint danger attention".split())
_RST_BODY_ONLY = frozenset("code-block code sourcecode parsed-literal math list-table table testcode doctest".split())
_RST_DIRECTIVE = re.compile(r"(\s*)\.\. ([\w:+.-]+):: *(.*)")
_RST_RULE = re.compile(r"\s*(\W)\1{2,} *$")
_RST_FIELD = re.compile(r"\s{3,}:\w[\w -]*:( .*)?$")


def rst_text(source: str) -> str:
    """reStructuredText without its comments, targets, unread directives, underlines and inline marks."""
    lines, hidden = [], None  # the indent of the directive whose body is being left out
    for line in source.split("\n"):
        indent = len(line) - len(line.lstrip())
        if hidden is not None:
            if not line.strip() or indent > hidden:
                continue
            hidden = None
        if line.lstrip().startswith(".. ") or line.strip() == "..":
            directive = _RST_DIRECTIVE.match(line)
            if directive is None or _RST_UNREAD.fullmatch(directive[2]):
                hidden = indent
                continue
            name = directive[2].rsplit(":", 1)[-1]
            if name in _RST_LABELLED:
                lines.append(directive[1] + (directive[3] or f"{name.capitalize()}:"))
            elif directive[3] and name not in _RST_BODY_ONLY:
                lines.append(directive[1] + directive[3])
        elif not _RST_RULE.match(line) and not _RST_FIELD.match(line):
            lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"(?::[\w:+.-]+:)?`[~!]?([^`<]*?)\s*<[^`<>]*>`_{0,2}", r"\1", text)  # :role:`text <target>`
    text = re.sub(r":[\w:+.-]+:`[~!]?([^`]*)`", r"\1", text)
    text = re.sub(r"(`{1,2})([^`\n]+)\1(?:__?\b)?", r"\2", text)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)
    text = re.sub(r"::$", ":", text, flags=re.M)
    return unwrap(normalise(text))


def pod_text(source: str) -> str:
    """Perl's documentation format without its commands and formatting codes."""
    text = source
    for _ in range(3):  # codes nest
        text = re.sub(r"[BCFIS]<<+ (.*?) >>+", r"\1", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"[BCFIS]<([^<>]*)>", r"\1", text)
        text = re.sub(r"[XZ]<[^<>]*>", "", text)
    for code, character in (("lt", "<"), ("gt", ">"), ("verbar", "|"), ("sol", "/")):
        text = text.replace(f"E<{code}>", character)
    text = re.sub(r"^=item +\* *\n+", "* ", text, flags=re.M)
    text = re.sub(r"^=(head\d|item) +", "", text, flags=re.M)
    text = re.sub(r"^=\w+.*$", "", text, flags=re.M)
    return unwrap(normalise(text))


def mallard_text(source: str) -> str:
    """A page of GNOME's user help: XML whose block names html_text knows."""
    return html_text(re.sub(r"<(info|links|media)\b[^>]*(?<!/)>.*?</\1>", "", source, flags=re.S))
