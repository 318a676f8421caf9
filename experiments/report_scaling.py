"""The section of results/README.md, and the figure, that results/scaling.json has to show, see scaling.py.

Runs are compared only where everything but model, size and seed is the same, the code included. Such a group makes a
part of its own; those of earlier code come last and say so.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.comparison import mean_and_std
from experiments.configs import SOURCES
from experiments.paper import SCALING_ADVANTAGE, SCALING_AT, SCALING_LAWS
from experiments.report_parts import EARLIER, failures, markdown_table, provenance, speeds, spread
from experiments.run_store import Entry, RunStore
from experiments.scaling_fit import (
    COVERAGE,
    PFLOPS_DAY,
    Fit,
    Law,
    Measured,
    advantage,
    compute_advantage,
    fit_law,
)
from experiments.scaling_study import MODELS, OF_RUN, SIZES, flops_of, model_of, tokens_of
from kimi_jax.model import active_parameter_count

NAMES = {
    "mla": "all MLA",
    "hybrid": "hybrid (3 KDA : 1 MLA)",
    "block": "hybrid + Block AttnRes",
    "full": "hybrid + Full AttnRes",
}
COMPARED = (("hybrid", "mla"), ("block", "hybrid"), ("full", "hybrid"))  # model, baseline
COVERED = f"{100 * COVERAGE:.0f}%"


@dataclass(frozen=True)
class Group:
    """Runs that may be compared, failed ones included."""

    entries: tuple[Entry, ...]
    present: bool  # made by the code as it is now

    def select(self, model: str, size: str) -> list[Entry]:
        found = [e for e in self.entries if (e.config["model"], e.config["size"]) == (model, size)]
        return sorted(found, key=lambda e: e.config["seed"])

    def models(self) -> list[str]:
        return [m for m in MODELS if any(e.config["model"] == m for e in self.entries)]

    def sizes(self) -> list[str]:
        return [s for s in SIZES if any(e.config["size"] == s for e in self.entries)]

    def measured(self, model: str) -> dict[str, Measured]:
        """By size, where a run has ended."""
        found = {}
        for size in self.sizes():
            if done := _done(self.select(model, size)):
                losses = {e.config["seed"]: nats_per_token(e) for e in done}
                found[size] = Measured(flops_of(done[0].config) / PFLOPS_DAY, losses)
        return found


def section(path: Path) -> list[str]:
    """Lines of Markdown; each group's figure is drawn beside the file."""
    store = RunStore(path, sources=SOURCES)
    lines = ["## Scaling laws", ""]
    for index, entries in enumerate(store.comparable(OF_RUN)):
        group = Group(entries, entries[0].sources == store.sources)
        figure = path.with_name(f"{path.stem}{f'-{index + 1}' if index else ''}.png")
        draw(group, figure)
        settings = {**entries[0].config["training"], "corpus": entries[0].config["corpus"]["train"][:12]}
        lines += [*_about(), *provenance(entries, settings, group.present), f"![Loss by compute]({figure.name})", ""]
        runs = {f"{NAMES[m]}, {s}": group.select(m, s) for s in group.sizes() for m in group.models()}
        lines += _losses(group) + speeds(runs) + _laws(group) + _advantages(group)
        lines += failures(entries, ("model", "size", "seed"))
    return lines


def draw(group: Group, path: Path) -> None:
    """Losses by compute, each with its standard deviation over seeds, and the fitted laws."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axis = pyplot.subplots(figsize=(7, 4.8), layout="constrained")
    for model in group.models():
        color, sizes = f"C{list(MODELS).index(model)}", group.measured(model)
        if not sizes:
            continue
        compute = [found.compute for found in sizes.values()]
        mean, std = zip(*(mean_and_std(list(found.losses.values())) for found in sizes.values()), strict=True)
        label = NAMES[model]
        if not isinstance(found := _fit_or_why(group, model), str):
            x = np.geomspace(min(compute), max(compute), 50)
            axis.plot(x, [found.law.loss(c) for c in x], color=color, linewidth=1)
            label += f": {found.law.A:.3f} C^-{found.law.alpha:.4f}"
        axis.errorbar(compute, mean, [s or 0 for s in std], color=color, fmt="o", markersize=4, capsize=3, label=label)
    axis.set(xlabel="training compute C, PFLOP/s-days", ylabel="validation loss, nats per token")
    axis.set_xscale("log")
    axis.set_yscale("log")
    for kind in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        kind(ticker.FormatStrFormatter("%.3g"))
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%.0e"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.grid(alpha=0.3, which="both")
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)
    if not group.present:
        figure.suptitle(f"{EARLIER.strip()} made by earlier code than the present one")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def nats_per_token(entry: Entry) -> float:
    """The validation loss of a run that ended."""
    return entry.result["bits_per_byte"] * math.log(2) * entry.result["bytes_per_token"]


def _about() -> list[str]:
    return [
        "Validation loss, mean ± standard deviation over seeds (their number), at sizes that are trained on tokens in "
        "proportion; all models of a size have the same tokens, rate and batch, which were tuned for none of them. "
        "Compute is that of training, of matrices, KDA, attention and the mixtures over depth, as `flops.py` counts; "
        "the papers do not say all of what theirs includes. Parameters are without embedding and head. Losses per "
        "token depend on the tokenizer and the text, so that A is not to be compared with a paper's; alpha and the "
        "advantages may be.",
        "",
    ]


def _losses(group: Group) -> list[str]:
    rows = []
    for size in group.sizes():
        for model in (m for m in group.models() if group.select(m, size)):
            entries = group.select(model, size)
            done, config = _done(entries), entries[0].config
            said = [spread([nats_per_token(e) for e in done], 4)] if done else []
            diverged = sum(e.error is None and e.result["ended"] == "diverged" for e in entries)
            for state, count in (("diverged", diverged), ("failed", sum(e.error is not None for e in entries))):
                said += [f"{count} {state}"] if count else []
            bits = spread([e.result["bits_per_byte"] for e in done], 4) if done else ""
            shape, flops = model_of(config), flops_of(config)
            rows.append([
                size, NAMES[model] + ("" if group.present else EARLIER), f"{shape.num_layers} x {shape.hidden_size}",
                f"{active_parameter_count(shape) / 1e6:.2f}M", f"{tokens_of(config) / 1e6:.1f}M",
                f"{config['of_size']['learning_rate']:.2e}", f"{flops:.3g}", f"{flops / PFLOPS_DAY:.3g}",
                ", ".join(said), bits,
            ])  # fmt: skip
    head = [
        "size", "model", "layers x width", "parameters", "tokens", "rate", "FLOP", "PFLOP/s-days", "nats per token",
        "bits per byte",
    ]  # fmt: skip
    return markdown_table(head, rows)


def _laws(group: Group) -> list[str]:
    rows, refused = [], []
    for model in group.models():
        found = _fit_or_why(group, model)
        if isinstance(found, str):
            refused += [f"No law for {NAMES[model]}: {found}.", ""]
            continue
        theirs = [f"{laws[model][1]:.4f} ({paper})" for paper, laws in SCALING_LAWS.items() if model in laws]
        rows.append([
            NAMES[model], f"{found.law.A:.4f} {_range(found.A, 4)}", f"{found.law.alpha:.4f} {_range(found.alpha, 4)}",
            "; ".join(theirs),
        ])  # fmt: skip
    if not rows:
        return refused
    return [
        f"Fitted: loss = A C^-alpha, C in PFLOP/s-days, by least squares in logarithms. In brackets are {COVERED} "
        "intervals of a bootstrap over residuals of sizes and over seeds: with so few sizes they are rough, with one "
        "seed too narrow (`scaling_fit.py` says by how much), and none of them covers the law being wrong.",
        "",
        *markdown_table(["model", "A", "alpha", "alpha in the paper"], rows),
        *refused,
    ]


def _advantages(group: Group) -> list[str]:
    rows, refused = [], []
    for model, baseline in COMPARED:
        pair = f"{NAMES[model]} against {NAMES[baseline]}"
        if not {model, baseline} <= {*group.models()}:
            continue
        try:
            found = advantage(group.measured(model), group.measured(baseline))
        except ValueError as error:
            refused += [f"No advantage of {pair}: {error}.", ""]
            continue
        sure = f"{100 * found.above_one:.0f}% of draws above 1; {found.sizes} sizes, {found.seeds} runs of each"
        rows.append([
            pair, f"{found.at:.3g}", f"{found.value:.2f} {_range(found.interval, 2)}", _paper(model, baseline),
            _verdict(found.interval), sure,
        ])  # fmt: skip
    if not rows:
        return refused
    return [
        "Compute advantage: how many times the compute the baseline's law needs for the loss that the model's law has "
        "at the largest compute of both, over the sizes and seeds that both have.",
        "",
        *markdown_table(["", "at, PFLOP/s-days", f"ours [{COVERED}]", "paper", "direction", "how sure"], rows),
        *refused,
    ]


def _paper(model: str, baseline: str) -> str:
    if (stated := SCALING_ADVANTAGE.get((model, baseline))) is not None:
        return f"{stated:.2f}"
    for laws in SCALING_LAWS.values():
        if {model, baseline} <= laws.keys():
            return f"{compute_advantage(Law(*laws[model]), Law(*laws[baseline]), SCALING_AT):.2f} (by its laws)"
    return ""


def _verdict(interval: tuple[float, float]) -> str:
    """The papers' advantages are all above 1."""
    if interval[0] > 1:
        return "ahead: as in the paper"
    return "behind: not as in the paper" if interval[1] < 1 else "not resolved"


def _fit_or_why(group: Group, model: str) -> Fit | str:
    """The law of a model, or why it has none."""
    try:
        return fit_law(group.measured(model))
    except ValueError as error:
        return str(error)


def _done(entries: Iterable[Entry]) -> list[Entry]:
    return [e for e in entries if e.error is None and e.result["ended"] == "steps"]


def _range(interval: tuple[float, float], digits: int) -> str:
    return f"[{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"
