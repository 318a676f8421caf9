"""The section of results/README.md that the runs of one table have to show, see ablate.py."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from experiments.comparison import difference
from experiments.configs import SOURCES, Table
from experiments.report_parts import (
    EARLIER,
    failures,
    markdown_table,
    provenance,
    signed,
    signed_difference,
    speeds,
    spread,
    verdict,
)
from experiments.run_store import Entry, RunStore

WORDS = ("better", "the same", "worse")  # lower is better, in ours and in the papers'
VARYING = ("row", "seed", "model")


def section(table: Table, path: Path) -> list[str]:
    """Lines of Markdown: ours in bits per byte, beside the paper's own measure where the table has it."""
    store = RunStore(path, sources=SOURCES)
    lines = [f"## {table.source}", ""]
    paper = f"The paper gives its {table.measure}, of a far larger model."
    if not table.paper:
        paper = f"The paper's {table.measure} does not compare: `experiments/configs/{table.name}.py` says why."
    for entries in store.comparable(VARYING):
        present = entries[0].sources == store.sources
        settings = {**entries[0].config["training"], "corpus": entries[0].config["corpus"]["train"][:12]}
        lines += [
            "Validation bits per byte, mean ± standard deviation over seeds (their number), and the difference from "
            f'"{table.baseline}"; lower is better. {paper}',
            "",
            *provenance(entries, settings, present),
            *_table(table, entries, present),
            *_domains(table, entries),
            *speeds({row: [e for e in entries if e.config["row"] == row] for row in table.rows}),
            *failures(entries, ("row", "seed")),
        ]
    return lines


def _table(table: Table, entries: Iterable[Entry], present: bool) -> list[str]:
    by_row = {row: [e for e in entries if e.config["row"] == row] for row in table.rows}
    baseline, reference = _bits(by_row[table.baseline]), table.paper.get(table.baseline)
    rows = []
    for row, found in by_row.items():
        bits, paper = _bits(found), table.paper.get(row)
        said = [spread(list(bits.values()), 4)] if bits else []
        for state, count in (("diverged", sum(_diverged(e) for e in found)), ("failed", sum(map(_failed, found)))):
            said += [f"{count} {state}"] if count else []
        cells = ["", "", "", ""]
        ours = difference(bits, baseline)
        if row != table.baseline:
            gap = None if paper is None or reference is None else paper - reference
            cells[1] = "" if gap is None else signed(gap, 3)
            if ours is not None:
                cells[0], cells[2] = signed_difference(ours, 4), verdict(ours, gap, WORDS, 0.0, 0.0)
                cells[3] = ours.certainty()
        measured = ", ".join(said) or "not run"
        rows.append([row + ("" if present else EARLIER), measured, cells[0], _number(paper), *cells[1:]])
    head = ["", "bits per byte", "difference", "paper", "difference", "direction", "how sure (paired over seeds)"]
    kept = range(len(head)) if table.paper else (0, 1, 2, 5, 6)
    return markdown_table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _domains(table: Table, entries: Iterable[Entry]) -> list[str]:
    """Means over seeds for each domain of the validation text, if it has some, and the trigram's."""
    done = [e for e in entries if e.result and e.result.get("domains")]
    if not done:
        return []
    names = list(done[0].result["domains"])

    def means(of: list[Entry], key: str) -> list[str]:
        return [f"{statistics.fmean(e.result['domains'][name][key] for e in of):.4f}" for name in names]

    by_row = {row: [e for e in done if e.config["row"] == row] for row in table.rows}
    rows = [[row, *means(found, "bits_per_byte")] for row, found in by_row.items() if found]
    rows.append(["byte trigram", *means(done, "trigram_bits_per_byte")])
    return markdown_table(["bits per byte", *names], rows)


def _bits(entries: Iterable[Entry]) -> dict[int, float]:
    return {e.config["seed"]: e.result["bits_per_byte"] for e in entries if not _failed(e) and not _diverged(e)}


def _failed(entry: Entry) -> bool:
    return entry.error is not None


def _diverged(entry: Entry) -> bool:
    return entry.error is None and entry.result["ended"] == "diverged"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
