"""Outputs and gradients over the depth while models were trained: a figure, and what it says beside the paper.

A model "grows" if its outputs in the last quarter of the depth are, on average, at least GROWTH times those in the
first; its gradients fall by as much as those in the first quarter are above those in the last.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.configs import SOURCES, Table
from experiments.depth_profile import as_matrix
from experiments.paper import DYNAMICS, DYNAMICS_ATTN_RES, DYNAMICS_LAYERS
from experiments.report_parts import EARLIER, markdown_table
from experiments.run_store import Entry, RunStore

GROWTH = 2.0
NAMES = {"output_rms": "outputs", "gradient_rms": "gradients"}
VARYING = ("row", "seed", "model")

Profile = Mapping[str, Any]  # of depth_profile, and its "step"


def section(table: Table, path: Path) -> list[str]:
    """Lines of Markdown; the figure is drawn beside the file. Of the present code, or else of the most runs."""
    store = RunStore(path, sources=SOURCES)
    for entries in store.comparable(VARYING):
        runs = {row: _profiles(entries, row) for row in table.rows}
        if found := {row: of_seed for row, of_seed in runs.items() if of_seed}:
            present = entries[0].sources == store.sources
            figure = path.with_suffix(".png")
            draw({row: of_seed[0] for row, of_seed in found.items()}, figure, present=present)
            mark = [] if present else [f"**{EARLIER.strip()} By earlier code.**", ""]
            return [*mark, f"![Outputs, gradients and weights over the depth]({figure.name})", "", *_said(found, table)]
    return []


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Means over the first and the last quarter of the depth."""
    size = max(len(values) // 4, 1)
    return statistics.fmean(values[:size]), statistics.fmean(values[-size:])


def draw(profiles: Mapping[str, Sequence[Profile]], path: Path, *, present: bool = True) -> None:
    """Of one run of each row: the last profile, how they moved, and what the sites read at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colors, pyplot, ticker

    columns = max(len(profiles), 3)
    figure, axes = pyplot.subplots(4, columns, figsize=(4.6 * columns, 14), layout="constrained")
    for axis, name in zip(axes[0], NAMES, strict=False):
        for row, of_run in profiles.items():
            values = of_run[-1][name]
            axis.plot(range(1, len(values) + 1), values, marker="o", markersize=3, label=row)
        axis.set(title=f"{NAMES[name]} at step {of_run[-1]['step']}, rms", xlabel="sub-layer", yscale="log")
        axis.legend()
    for row, of_run in profiles.items():
        growth = [last / first for first, last in (quarters(p["output_rms"]) for p in of_run)]
        axes[0, 2].plot([p["step"] for p in of_run], growth, marker="o", markersize=3, label=row)
    axes[0, 2].set(title="outputs, last quarter over first", xlabel="step", yscale="log")
    axes[0, 2].legend()
    for above, name in zip(axes[1:3], NAMES, strict=True):
        matrices = {row: np.array([p[name] for p in of_run]).T for row, of_run in profiles.items()}
        scale = colors.LogNorm(min(m.min() for m in matrices.values()), max(m.max() for m in matrices.values()))
        for axis, (row, matrix) in zip(above, matrices.items(), strict=False):
            image = axis.imshow(matrix, norm=scale, cmap="viridis", aspect="auto", origin="lower")
            steps = [p["step"] for p in profiles[row]]
            axis.set_xticks(range(0, len(steps), 3), steps[::3])
            axis.set(title=f"{row}: {NAMES[name]}, rms", xlabel="step", ylabel="sub-layer, from 0")
        figure.colorbar(image, ax=list(above))
    mixed = {row: of_run[-1]["weights"] for row, of_run in profiles.items() if any(of_run[-1]["weights"])}
    for axis, (row, weights) in zip(axes[3], mixed.items(), strict=False):
        image = axis.imshow(as_matrix(weights), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=f"{row}: what each site reads", xlabel="source, oldest first", ylabel="site, the output's last")
        figure.colorbar(image, ax=axis, label="mean weight")
    for axis in axes.ravel():
        if not axis.has_data():
            axis.remove()
    for axis in axes[0, :2]:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    if not present:
        figure.suptitle(f"{EARLIER.strip()} made by earlier code than the present one")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _profiles(entries: Sequence[Entry], row: str) -> list[list[Profile]]:
    """Of every finished run of the row, by seed."""
    runs = sorted((e for e in entries if e.config["row"] == row), key=lambda e: e.config["seed"])
    return [e.result["profiles"] for e in runs if e.result and e.result.get("profiles")]


def _said(runs: Mapping[str, Sequence[Sequence[Profile]]], table: Table) -> list[str]:
    last = {row: [of_run[-1] for of_run in of_seed] for row, of_seed in runs.items()}
    lines = [
        "Root mean square over the depth at the end of training, first and last quarter of the sub-layers, means over "
        "seeds. The paper's are read off charts, of a run of 48B parameters and of a norm that it does not name. "
        f'Outputs "grow" if those of the last quarter are at least {GROWTH:g} times those of the first.',
        "",
    ]
    rows = []
    for row, profiles in last.items():
        cells = [row]
        for name in NAMES:
            first, end = (statistics.fmean(x) for x in zip(*(quarters(p[name]) for p in profiles), strict=True))
            ratio = statistics.fmean(_ratios(profiles, name))
            cells += [f"{first:.3g} to {end:.3g}", f"{ratio:.3g}", _paper(row, name, table)]
        rows.append(cells)
    head = [""]
    for name, ratio in (("output_rms", "last / first"), ("gradient_rms", "first / last")):
        head += [NAMES[name], ratio, "paper"]
    lines += markdown_table(head, rows)
    if table.baseline in last:
        lines += [_verdicts(last, table.baseline), ""]
    return lines


def _ratios(profiles: Sequence[Profile], name: str) -> list[float]:
    """Growth of outputs, fall of gradients, of each run."""
    ends = [quarters(profile[name]) for profile in profiles]
    return [last / first if name == "output_rms" else first / last for first, last in ends]


def _paper(row: str, name: str, table: Table) -> str:
    if row != table.baseline:
        return DYNAMICS_ATTN_RES[name]
    points = DYNAMICS[name]
    first = statistics.fmean(x for layer, x in points.items() if layer < DYNAMICS_LAYERS / 4)
    last = statistics.fmean(x for layer, x in points.items() if layer >= DYNAMICS_LAYERS * 3 / 4)
    return f"{last / first if name == 'output_rms' else first / last:.2g}"


def _verdicts(last: Mapping[str, Sequence[Profile]], baseline: str) -> str:
    """The paper's: the baseline's outputs grow, those of AttnRes do not, and its gradients fall less."""
    said = []
    for row, profiles in last.items():
        found = {ratio >= GROWTH for ratio in _ratios(profiles, "output_rms")}
        said.append(f"outputs of {row} {_in_words(found, row == baseline, ('grow', 'do not grow'))}")
    least = min(_ratios(last[baseline], "gradient_rms"))
    words = tuple(f"{word} less than those of {baseline}" for word in ("fall", "do not fall"))
    for row in (row for row in last if row != baseline):
        found = {ratio < least for ratio in _ratios(last[row], "gradient_rms")}
        said.append(f"gradients of {row} {_in_words(found, True, words)}")
    return f"Directions: {'; '.join(said)}."


def _in_words(found: set[bool], paper: bool, words: tuple[str, str]) -> str:
    """found: the answers of all seeds; words: for yes and no."""
    if len(found) > 1:
        return f"{words[0]} in some seeds alone (not resolved)"
    (ours,) = found
    return f"{words[0] if ours else words[1]} ({'as' if ours == paper else 'not as'} in the paper)"
