"""Draws the tables and figures of results/README.md from results/*.json; no number in it is typed by hand.

    python -m experiments.report

The papers' numbers come from paper.py. What has not been run yet says so; what was made by earlier code is marked.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from experiments import report_ablation, report_decode, report_dynamics, report_scaling, report_synthetic
from experiments.configs import TABLES, attn_res_dynamics
from experiments.files import replace_text

_RESULTS = flags.DEFINE_string("results", "results", "Folder of the JSON files; README.md and figures go there too.")


def report(results: Path) -> Path:
    """Write results/README.md and its figures. ValueError names a file that cannot be read."""
    lines = [
        "# Results",
        "",
        "Made by `python -m experiments.report` from the JSON files beside it: change those, not this page.",
        "",
    ]
    if (path := results / "synthetic.json").exists():
        lines += report_synthetic.section(path)
    for table in TABLES.values():
        if (path := results / f"{table.name}.json").exists():
            lines += report_ablation.section(table, path)
            if table is attn_res_dynamics.TABLE:
                lines += report_dynamics.section(table, path)
    if (path := results / "scaling.json").exists():
        lines += report_scaling.section(path)
    if (path := results / "decode.json").exists():
        lines += report_decode.section(path)
    lines += _files(results)
    replace_text(results / "README.md", "\n".join(lines).rstrip() + "\n")
    return results / "README.md"


def _files(results: Path) -> list[str]:
    """What else was measured: each file with its command and the cards and dates found in it."""
    lines = ["## Files", "", "| file | command | on | when |", "|---|---|---|---|"]
    for path in sorted(results.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON file: {error}") from error
        commands, cards, dates = (sorted(_found(content, name)) for name in ("command", "card", "date"))
        when = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else ""
        shown = f"`{commands[0]}`" + (f" and {len(commands) - 1} more" if commands[1:] else "") if commands else ""
        lines.append(f"| [{path.name}]({path.name}) | {shown} | {', '.join(cards)} | {when} |")
    return lines


def _found(content: Any, name: str) -> set[str]:
    """All strings called so, at any depth."""
    if isinstance(content, list):
        return {value for item in content for value in _found(item, name)}
    if not isinstance(content, dict):
        return set()
    below = {value for item in content.values() for value in _found(item, name)}
    return below | ({content[name]} if isinstance(content.get(name), str) else set())


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        print(f"wrote {report(Path(_RESULTS.value))}")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
