"""The section of results/README.md, and the figure, that results/decode.json has to show, see benchmark_decode.py."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.paper import (
    ATTN_RES_INFERENCE,
    CACHE_SAVING,
    DECODE_LARGEST,
    DECODE_PRINTED,
    DECODE_SOURCE,
    DECODE_STEP,
    PREFILL,
)
from experiments.report_parts import markdown_table, signed

NAMES = {"hybrid": "hybrid", "mla": "MLA alone", "kda": "KDA alone"}
MISSING = "not measured"
OTHER_RUN = " ‡"
LIMITS = (
    "Ours are 8 of the 27 layers, with random weights and the whole vocabulary. Each mixture of experts is replaced by "
    "one dense feed-forward of the same active width: at batch 1 a step reads as much as the real layers do, at larger "
    "batches less, since there the rows would choose different experts. Times are therefore not to be set beside the "
    "paper's, and ratios only roughly."
)


@dataclass(frozen=True)
class Measured:
    """What a file of the suite holds, by context in tokens; None for what it does not hold."""

    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Measured":
        """ValueError if the file is no result of the suite."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["suite"] != "decode":
                raise ValueError(f"suite={content['suite']!r} is not allowed: decode")
            found = cls(content)
            found.contexts()
            missing = {"ms", "ratios", "cache_bytes_of_27_layers"} - content.keys()
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of --suite=decode: {error!r}") from error
        if missing:
            raise ValueError(f"{path} is no result of --suite=decode: it has no {', '.join(sorted(missing))}")
        return found

    def contexts(self) -> dict[int, str]:
        """The name of each context, the shortest first."""
        named = {}
        for case, sizes in self.content["case"].items():
            context = dict(pair.split("=") for pair in sizes.split())["context"]
            named[int(context)] = case.rpartition("-B")[0]
        return dict(sorted(named.items()))

    def time(self, context: int, batch: str, part: str, name: str) -> Mapping[str, Any] | None:
        """batch: "1" or "max". part: "step" or "piece"."""
        return self.content["ms"].get(f"{self.contexts()[context]}-B{batch} {part}: {name}")

    def ratio(self, context: int, batch: str, part: str, name: str) -> Mapping[str, Any] | None:
        """Of the time per token, to the hybrid's."""
        return self.content["ratios"].get(f"{self.contexts()[context]}-B{batch} {part}: {name} to hybrid")

    def cache(self, context: int, name: str) -> int | None:
        """Bytes of one row, of all 27 layers."""
        return self.content["cache_bytes_of_27_layers"].get(f"{self.contexts()[context]} {name}")


def section(path: Path) -> list[str]:
    """Lines of Markdown; the figure is drawn beside the file. ValueError if it is no result of the suite."""
    found = Measured.read(path)
    figure = path.with_suffix(".png")
    draw(found, figure)
    return [
        "## Decoding",
        "",
        f"Time per token of a decode step, and what a cache holds, {_provenance(found)} Paper: {DECODE_SOURCE}; its "
        "hardware is not known, its models are whole.",
        "",
        f"![Time per token at batch 1 and at the largest, and bytes of the cache, by context]({figure.name})",
        "",
        *_about("One row:", _steps(found)),
        LIMITS,
        "",
        *_about("As many rows as memory has room for, 512 at most, time per token and row:", _largest(found)),
        *_about("The last piece of a prompt that ends at that context, one row; the paper's are whole prompts:",
                _pieces(found)),
        *_about("The cache of one row, of all 27 layers, counted from its shapes:", _caches(found)),
        *_about("Block AttnRes in blocks of six sub-layers, time beside that of the plain residual, one row:",
                _overheads(found)),
        *_other_runs(found),
    ]  # fmt: skip


def draw(found: Measured, path: Path) -> None:
    """Times per token at batch 1 and at the largest beside the paper's, and the bytes of caches, by context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = found.contexts()
    figure, axes = pyplot.subplots(1, 3, figsize=(14.4, 4.2), layout="constrained")
    for color, (name, label) in enumerate(NAMES.items()):
        for axis, batch, paper in ((axes[0], "1", DECODE_STEP), (axes[1], "max", DECODE_LARGEST)):
            times = {n: t["ms_per_token"] for n in contexts if (t := found.time(n, batch, "step", name)) is not None}
            axis.plot(*_points(times), "o-", color=f"C{color}", label=label)
            if name == "kda" and len(times) == 1 and len(contexts) > 1:  # the same at any context
                axis.hlines(*times.values(), *times, max(contexts), color=f"C{color}", linestyle=":")
            axis.plot(*_points(paper.get(name, {})), "x--", color=f"C{color}", alpha=0.5)
        sizes = {n: size / 2**30 for n in contexts if (size := found.cache(n, name)) is not None}
        axes[2].plot(*_points(sizes), "o-", color=f"C{color}", label=label)
    axes[0].set(title="one row", ylabel="ms per token")
    axes[1].set(title="as many rows as there is room for", ylabel="ms per token and row", yscale="log")
    axes[2].set(title="cache of one row, 27 layers", ylabel="GiB", yscale="log")
    axes[0].set_ylim(bottom=0)
    for axis in axes:
        axis.set(xlabel="context")
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(contexts), list(contexts.values()))
        axis.minorticks_off()
        title = None if axis is axes[2] else "crosses: paper, dotted: the same at any context"
        axis.legend(fontsize=8, title=title, title_fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _provenance(found: Measured) -> str:
    """On what, when and with which jax."""
    times = found.content["ms"].values()
    about = [", ".join(sorted({t["card"] for t in times}))]
    dates = sorted({t["date"] for t in times})
    about += [" to ".join(dict.fromkeys([dates[0], dates[-1]]))] if dates else []
    about.append("jax " + ", ".join(sorted({str(t["versions"].get("jax")) for t in times})))
    return f"on {', '.join(about)}: `python -m experiments.benchmark --suite=decode`." if dates else f"{MISSING} yet."


def _other_runs(found: Measured) -> list[str]:
    if all(ratio["same_run"] for ratio in found.content["ratios"].values()):
        return []
    return [f"{OTHER_RUN.strip()} The two times are of different runs.", ""]


def _steps(found: Measured) -> list[str]:
    rows = []
    for context, label in found.contexts().items():
        times = [_ms(found.time(context, "1", "step", name)) for name in ("hybrid", "mla")]
        paper = [_paper(DECODE_STEP[name].get(context), ".2f") for name in ("hybrid", "mla")]
        ours = _ratio(found.ratio(context, "1", "step", "mla"))
        rows.append([label, *times, _kda(found, context, "1", _ms), ours, *paper, _paper_ratio("step", context)])
    head = ["context", "hybrid, ms", "MLA alone, ms", "KDA alone, ms", "MLA / hybrid", "paper: hybrid, ms", "MLA, ms"]
    return markdown_table([*head, "MLA / hybrid"], rows)


def _largest(found: Measured) -> list[str]:
    rows = []
    for context, label in found.contexts().items():
        each = [found.time(context, "max", "step", name) for name in ("hybrid", "mla")]
        paper = [DECODE_LARGEST[name].get(context) for name in ("hybrid", "mla")]
        ours = _ratio(found.ratio(context, "max", "step", "mla"))
        theirs = [_paper(None if ms is None else 1e3 * ms, ".0f") for ms in paper]
        kda = _kda(found, context, "max", _rows_and_us)
        rows.append([label, *map(_rows_and_us, each), kda, ours, *theirs, _paper_ratio("largest", context)])
    head = ["context", "hybrid", "MLA alone", "KDA alone", "MLA / hybrid", "paper: hybrid, us", "MLA, us"]
    return markdown_table([*head, "MLA / hybrid"], rows)


def _pieces(found: Measured) -> list[str]:
    rows = []
    for context, label in found.contexts().items():
        each = {name: found.time(context, "1", "piece", name) for name in ("hybrid", "mla")}
        tokens = next((_tokens(time) for time in each.values() if time is not None), "")
        paper = [_paper(PREFILL[name].get(context), "#.3g") for name in ("hybrid", "mla")]
        ours = _ratio(found.ratio(context, "1", "piece", "mla"))
        kda = _kda(found, context, "1", _ms, "piece")
        rows.append([label, tokens, *map(_ms, each.values()), kda, ours, *paper, _paper_ratio("prefill", context)])
    head = ["context", "tokens", "hybrid, ms", "MLA alone, ms", "KDA alone, ms", "MLA / hybrid", "paper: hybrid, s"]
    return markdown_table([*head, "MLA, s", "MLA / hybrid"], rows)


def _caches(found: Measured) -> list[str]:
    rows = []
    for context, label in found.contexts().items():
        sizes = {name: found.cache(context, name) for name in NAMES}
        known = sizes["hybrid"] is not None and sizes["mla"] is not None
        less = f"{100 * (1 - sizes['hybrid'] / sizes['mla']):.1f}%" if known else MISSING
        rows.append(
            [label, *(MISSING if n is None else f"{n / 2**20:.1f}" for n in sizes.values()), less, CACHE_SAVING]
        )
    head = ["context", *(f"{label}, MiB" for label in NAMES.values()), "hybrid less than MLA", "paper"]
    return markdown_table(head, rows)


def _overheads(found: Measured) -> list[str]:
    """At contexts where any of it is measured; all of them if none is."""
    columns = [(part, name) for part in ("step", "piece") for name in ("block", "two_phase")]
    every = {n: [found.ratio(n, "1", part, name) for part, name in columns] for n in found.contexts()}
    chosen = {n: ratios for n, ratios in every.items() if any(ratio is not None for ratio in ratios)} or every
    rows = []
    for context, ratios in chosen.items():
        cells = [MISSING if r is None else f"{signed(100 * (r['value'] - 1), 1)}%{_mark(r)}" for r in ratios]
        rows.append([found.contexts()[context], *cells, ATTN_RES_INFERENCE])
    ways = [f"{what}, {way}" for what in ("decode", "prefill") for way in ("one phase", "two phases")]
    return markdown_table(["context", *ways, "paper"], rows)


def _about(text: str, table: list[str]) -> list[str]:
    return [text, "", *table]


def _kda(found: Measured, context: int, batch: str, cell, part: str = "step") -> str:
    """KDA layers cost the same at any context: a longer one refers to the shortest that was measured."""
    time = found.time(context, batch, part, "kda")
    shorter = (label for n, label in found.contexts().items() if n < context and found.time(n, batch, part, "kda"))
    if time is None and (label := next(shorter, None)) is not None:
        return f"as at {label}"
    return cell(time)


def _ms(time: Mapping[str, Any] | None) -> str:
    return MISSING if time is None else f"{time['median']:.2f}"


def _rows_and_us(time: Mapping[str, Any] | None) -> str:
    if time is None:
        return MISSING
    us = 1e3 * time["ms_per_token"]
    return f"{time['rows']} rows, {us:.{1 if us < 100 else 0}f} us"


def _tokens(time: Mapping[str, Any]) -> str:
    """Of the piece that was timed."""
    return str(round(time["median"] / time["ms_per_token"] / time["rows"]))


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    return MISSING if ratio is None else f"{ratio['value']:.2f}x{_mark(ratio)}"


def _mark(ratio: Mapping[str, Any]) -> str:
    return "" if ratio["same_run"] else OTHER_RUN


def _paper(value: float | None, digits: str) -> str:
    return "" if value is None else f"{value:{digits}}"


def _paper_ratio(what: str, context: int) -> str:
    """As the paper prints it, elsewhere of its digitised times."""
    times = {"step": DECODE_STEP, "largest": DECODE_LARGEST, "prefill": PREFILL}[what]
    if (printed := DECODE_PRINTED[what].get(context)) is not None:
        return f"{printed:.1f}x"
    hybrid, mla = (times[name].get(context) for name in ("hybrid", "mla"))
    return "" if hybrid is None or mla is None else f"{mla / hybrid:.2f}x"


def _points(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())
