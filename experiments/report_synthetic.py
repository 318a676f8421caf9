"""The section of results/README.md, and the figure, that results/synthetic.json has to show.

Runs are compared only where everything but model, task, length, rate and seed is the same, the code included. Such a
group makes a part of its own; those of earlier code come last and say so.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from experiments.comparison import difference, mean_and_std
from experiments.paper import SYNTHETIC_CURVE, SYNTHETIC_CURVE_LENGTH, SYNTHETIC_EVERY, SYNTHETIC_PEAK, SYNTHETIC_SOURCE
from experiments.report_parts import (
    EARLIER,
    failures,
    markdown_table,
    provenance,
    signed,
    signed_difference,
    spread,
    verdict,
)
from experiments.run_store import Entry, RunStore
from experiments.synthetic_models import MIXERS
from experiments.synthetic_study import SOURCES, best_entry, peak, steps_to
from experiments.synthetic_tasks import TASKS

NAMES = {
    "kda": "KDA", "gated_delta_net": "Gated DeltaNet", "delta_net": "DeltaNet", "mamba2": "Mamba2-style",
    "softmax": "softmax attention",
}  # fmt: skip
OURS = ("task", "model", "length", "learning_rate", "seed")  # what may differ within a group
TIE = 1.0  # percentage points that are called no difference
WORDS = ("KDA behind", f"within {TIE:g}", "KDA ahead")
LEARNED = 0.99


@dataclass(frozen=True)
class Group:
    """Runs that may be compared, failed ones included."""

    entries: tuple[Entry, ...]
    present: bool  # made by the code as it is now

    @property
    def settings(self) -> dict[str, object]:
        return {name: value for name, value in self.entries[0].config.items() if name not in OURS}

    def select(self, **fields) -> list[Entry]:
        return [e for e in self.entries if all(e.config[name] == value for name, value in fields.items())]

    @property
    def grid_length(self) -> int:
        """The length with the most learning rates."""
        rates = defaultdict(set)
        for entry in self.entries:
            rates[entry.config["length"]].add(entry.config["learning_rate"])
        return max(rates, key=lambda length: len(rates[length]))

    def best_rate(self, task: str, model: str) -> float | None:
        done = [e for e in self.select(task=task, model=model, length=self.grid_length, seed=0) if e.error is None]
        return best_entry(done).config["learning_rate"] if done else None

    def rates(self, task: str | None = None, model: str | None = None) -> set[float]:
        """Learning rates with a result at the grid's length, of one task and model or of all."""
        which = {name: value for name, value in (("task", task), ("model", model)) if value is not None}
        done = (e for e in self.select(length=self.grid_length, seed=0, **which) if e.error is None)
        return {entry.config["learning_rate"] for entry in done}

    def has_grid(self, task: str, model: str) -> bool:
        """Whether all rates have been tried, so that the best one is the best."""
        return self.rates(task, model) == self.rates()

    def at_best(self, task: str, model: str, length: int) -> list[Entry]:
        rate = self.best_rate(task, model)
        return self.select(task=task, model=model, length=length, learning_rate=rate)

    def tasks(self) -> list[str]:
        return [task for task in TASKS if self.select(task=task)]

    def models(self, task: str) -> list[str]:
        return [model for model in MIXERS if self.select(task=task, model=model)]

    def lengths(self) -> list[int]:
        return sorted({entry.config["length"] for entry in self.entries})


def groups_of(path: Path) -> list[Group]:
    """The comparable groups of a file of runs; the present code's first, then the largest."""
    store = RunStore(path, sources=SOURCES)
    return [Group(entries, entries[0].sources == store.sources) for entries in store.comparable(OURS)]


def section(path: Path) -> list[str]:
    """Lines of Markdown; each group's figure is drawn beside the file."""
    lines = [
        "## Synthetic tasks",
        "",
        "Accuracy is that on batches which were never seen before, over windows of steps; a run ends early once it has "
        "learned its task. Given is the highest of a run, in percent, as mean ± standard deviation over seeds (their "
        "number), at the best learning rate of the grid, which the first seed has chosen. Where not all rates have "
        "been run yet, the model says how many, and is not compared with others. Paper: "
        f"{SYNTHETIC_SOURCE}; its batch, optimiser, vocabularies and numbers of pairs are not known.",
        "",
    ]
    for index, group in enumerate(groups_of(path)):
        figure = path.with_name(f"{path.stem}{f'-{index + 1}' if index else ''}.png")
        draw(group, figure)
        lines += provenance(group.entries, group.settings, group.present)
        lines += [f"![Accuracy by step and by length]({figure.name})", ""]
        lines += _accuracy_table(group) + _differences(group) + _grid_table(group) + failures(group.entries, OURS)
    return lines


def draw(group: Group, path: Path) -> None:
    """Above, accuracy by step at the grid's length and best rate; below, peaks by length; the paper's beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks, length = group.tasks(), group.grid_length
    figure, axes = pyplot.subplots(2, len(tasks), figsize=(4.8 * len(tasks), 7.2), layout="constrained", squeeze=False)
    for column, task in enumerate(tasks):
        by_step, by_length = axes[:, column]
        for model in group.models(task):
            color = f"C{MIXERS.index(model)}"
            for entry in _done(group.at_best(task, model, length)):
                x, y = _curve(entry)
                by_step.plot(x, y, color=color, linewidth=1.2, label=_once(by_step, NAMES[model]))
            points = [(n, _peaks(group.at_best(task, model, n))) for n in group.lengths()]
            points = [(n, *mean_and_std(list(peaks.values()))) for n, peaks in points if peaks]
            n, mean, std = zip(*points, strict=True) if points else ((), (), ())
            by_length.errorbar(n, mean, [s or 0 for s in std], color=color, marker="o", capsize=3, label=NAMES[model])
            if length == SYNTHETIC_CURVE_LENGTH and (paper := SYNTHETIC_CURVE.get(task, {}).get(model)):
                steps = [SYNTHETIC_EVERY * (i + 1) for i in range(len(paper))]
                by_step.plot(steps, paper, "x--", color=color, alpha=0.5, label=f"{NAMES[model]}, paper")
            if paper := SYNTHETIC_PEAK.get(task, {}).get(model):
                by_length.plot(*zip(*paper.items(), strict=True), "x--", color=color, alpha=0.5)
        by_step.set(title=f"{task}, length {length}", xlabel="step", ylabel="accuracy, %", ylim=(-3, 103))
        by_step.set_xscale("log")
        by_length.set(xlabel="length", ylabel="highest accuracy, %", ylim=(-3, 103))
        by_length.set_xscale("log", base=2)
        by_length.set_xticks(group.lengths(), [str(n) for n in group.lengths()])
        by_step.legend(fontsize=7)
        by_length.legend(fontsize=7, title="crosses: paper", title_fontsize=7)
    if not group.present:
        figure.suptitle(f"{EARLIER.strip()} made by earlier code than the present one")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _accuracy_table(group: Group) -> list[str]:
    lengths, grid = group.lengths(), group.grid_length
    head = ["task", "model", *map(str, lengths), f"steps to {100 * LEARNED:.0f}% at {grid}"]
    rows = []
    for task in group.tasks():
        for model in group.models(task):
            cells = [_cell(group, task, model, length) for length in lengths]
            tried = (
                ""
                if group.has_grid(task, model)
                else f", {len(group.rates(task, model))} of {len(group.rates())} rates"
            )
            rows.append([task, _name(group, model) + tried, *cells, _steps_cell(group, task, model)])
    return markdown_table(head, rows)


def _cell(group: Group, task: str, model: str, length: int) -> str:
    entries = group.at_best(task, model, length)
    peaks, failed = _peaks(entries), [e for e in entries if e.error is not None]
    said = []
    if peaks:
        said.append(spread(list(peaks.values()), 1))
    if diverged := sum(e.result["ended"] == "diverged" for e in _done(entries)):
        said.append(f"{diverged} diverged")
    if failed:
        said.append(f"{len(failed)} failed")
    paper = SYNTHETIC_PEAK.get(task, {}).get(model, {}).get(length)
    return (", ".join(said) or "not run") + ("" if paper is None else f"; paper {paper:.1f}")


def _steps_cell(group: Group, task: str, model: str) -> str:
    done = _done(group.at_best(task, model, group.grid_length))
    steps = [steps_to(e.result, LEARNED, e.config["window"]) for e in done]
    said = ", ".join("never" if n is None else str(n) for n in steps) or "not run"
    paper = SYNTHETIC_CURVE.get(task, {}).get(model) if group.grid_length == SYNTHETIC_CURVE_LENGTH else None
    if paper is None:
        return said
    first = next((SYNTHETIC_EVERY * (i + 1) for i, x in enumerate(paper) if x >= 100 * LEARNED), None)
    return f"{said}; paper {'never' if first is None else first}"


def _differences(group: Group) -> list[str]:
    """KDA against the others: ours, the paper's, whether they point the same way, how sure.

    A model that the paper has not is compared at the grid's length alone, one whose grid is not finished not at all.
    """
    rows = []
    for task in group.tasks():
        paper = SYNTHETIC_PEAK.get(task, {})
        grids = [model for model in group.models(task) if group.has_grid(task, model)]
        for model in (m for m in grids if m != "kda" and "kda" in grids):
            for length in group.lengths() if model in paper else [group.grid_length]:
                ours, theirs = (_peaks(group.at_best(task, m, length)) for m in ("kda", model))
                if (found := difference(ours, theirs)) is None:
                    continue
                known = length in paper.get("kda", {}) and length in paper.get(model, {})
                gap = paper["kda"][length] - paper[model][length] if known else None
                rows.append([
                    task, f"{NAMES['kda']} - {NAMES[model]}", str(length), signed_difference(found, 1),
                    "" if gap is None else signed(gap, 1), verdict(found, gap, WORDS, TIE, TIE), found.certainty(),
                ])  # fmt: skip
    head = ["task", "difference, points", "length", "ours", "paper", "direction", "how sure (paired over seeds)"]
    return markdown_table(head, rows) if rows else []


def _grid_table(group: Group) -> list[str]:
    length = group.grid_length
    rates = sorted({e.config["learning_rate"] for e in group.select(length=length, seed=0)})
    rows = []
    for task in group.tasks():
        for model in group.models(task):
            cells = []
            for rate in rates:
                done = _done(group.select(task=task, model=model, length=length, seed=0, learning_rate=rate))
                cells.append(f"{100 * peak(done[0].result):.1f}" if done else "not run")
            rows.append([task, _name(group, model), *cells])
    return [
        f"By learning rate, length {length}, first seed:",
        "",
        *markdown_table(["task", "model", *(f"{r:g}" for r in rates)], rows),
    ]


def _name(group: Group, model: str) -> str:
    return NAMES[model] + ("" if group.present else EARLIER)


def _done(entries: Iterable[Entry]) -> list[Entry]:
    return sorted((e for e in entries if e.error is None), key=lambda e: e.config["seed"])


def _peaks(entries: Iterable[Entry]) -> dict[int, float]:
    """Percent by seed."""
    return {e.config["seed"]: 100 * peak(e.result) for e in _done(entries)}


def _curve(entry: Entry) -> tuple[list[int], list[float]]:
    """Steps and percent; a run that has learned its task stays where it ended."""
    curve, window = entry.result["accuracy"], entry.config["window"]
    x, y = [window * (i + 1) for i in range(len(curve))], [100 * a for a in curve]
    if entry.result["ended"] == "solved":
        x, y = [*x, entry.config["steps"]], [*y, y[-1]]
    return x, y


def _once(axis, label: str) -> str | None:
    """label, unless a line of the axis has it already."""
    return None if label in axis.get_legend_handles_labels()[1] else label
