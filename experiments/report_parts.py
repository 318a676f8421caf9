"""What the sections of results/README.md share: where runs come from, Markdown tables, comparisons in words."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.comparison import Difference, mean_and_std
from experiments.run_store import Entry

EARLIER = " †"


def provenance(entries: Sequence[Entry], settings: Mapping[str, Any], present: bool) -> list[str]:
    """How many runs, where, when, by which command and with what settings; a mark for those of earlier code."""
    cards = ", ".join(sorted({entry.card for entry in entries}))
    dates = sorted({entry.date for entry in entries})
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    minutes = sum(entry.seconds for entry in entries) / 60
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    lines = [
        f"{len(entries)} runs, {minutes:.0f} minutes on {cards}, {when}, jax {entries[0].versions.get('jax')}: "
        f"`{entries[0].command}`. Settings: {said}.",
        "",
    ]
    if not present:
        code = f"(sources {entries[0].sources[:12]}), not to be compared with others."
        lines[:0] = [f"**{EARLIER.strip()} By earlier code** {code}", ""]
    return lines


def speeds(runs: Mapping[str, Iterable[Entry]]) -> list[str]:
    """One line, by label: tokens per second, and model FLOPs utilisation where it is known, medians over the runs."""
    said = []
    for label, entries in runs.items():
        found = [e.result for e in entries if e.result and "tokens_per_second" in e.result]
        if found:
            shares = [result["mfu"] for result in found if "mfu" in result]
            tokens = statistics.median(result["tokens_per_second"] for result in found)
            said.append(f"{label} {tokens:,.0f}" + (f" ({statistics.median(shares):.1%})" if shares else ""))
    return [f"Tokens per second (model FLOPs utilisation): {'; '.join(said)}.", ""] if said else []


def failures(entries: Iterable[Entry], names: Sequence[str]) -> list[str]:
    """Runs that failed, each by the named fields of its config, and why."""
    said = [f"- {' '.join(str(e.config[n]) for n in names)}: {e.error}" for e in entries if e.error is not None]
    return [f"Runs that failed ({', '.join(names)}):", "", *said, ""] if said else []


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows), ""]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation (number)."""
    mean, std = mean_and_std(values)
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}") + f" ({len(values)})"


def signed(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # no -0.0


def signed_difference(found: Difference, digits: int) -> str:
    return signed(found.mean, digits) + ("" if found.std is None else f" ± {found.std:.{digits}f}")


def verdict(found: Difference, paper: float | None, words: tuple[str, str, str], tie: float, paper_tie: float) -> str:
    """Whether ours points where the paper does. words: for below, within the tie, above."""
    ours = found.direction(tie)
    if ours is None:
        return "not resolved"
    said = words[ours + 1]
    if paper is None:
        return said
    theirs = 0 if abs(paper) <= paper_tie else 1 if paper > 0 else -1
    return f"{said}: {'as in the paper' if ours == theirs else 'not as in the paper'}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
