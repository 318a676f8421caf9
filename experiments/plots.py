"""The loss curve of a run as a picture."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no window: runs happen on machines without a screen

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from experiments.metrics import read_metrics  # noqa: E402


def plot_loss(workdir: Path, *, bytes_per_token: float, trigram: float | None = None) -> Path:
    """Draw <workdir>/loss.png from its metrics: bits per byte over steps, with the trigram's as a line to cross."""
    records = list(read_metrics(workdir))
    train = np.array([(r["step"], r["loss"]) for r in records if "loss" in r]).reshape(-1, 2)
    validation = np.array(
        [(r["step"], r["validation_bits_per_byte"]) for r in records if "validation_bits_per_byte" in r]
    ).reshape(-1, 2)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    bits = train[:, 1] / math.log(2) / bytes_per_token
    axes.plot(train[:, 0], bits, color="tab:blue", alpha=0.25, linewidth=0.8)
    width = max(len(bits) // 50, 1)
    if len(bits) >= 2 * width:
        smooth = np.convolve(bits, np.full(width, 1 / width), "valid")
        axes.plot(train[width - 1 :, 0], smooth, color="tab:blue", label=f"training, mean of {width} steps")
    axes.plot(validation[:, 0], validation[:, 1], "o-", color="tab:orange", markersize=4, label="validation")
    if trigram is not None:
        axes.axhline(trigram, color="gray", linestyle="--", label="byte trigram, validation")
    shown = np.concatenate([bits[len(bits) // 20 :], validation[:, 1], [trigram] if trigram is not None else []])
    if len(shown):
        axes.set_ylim(0.95 * shown.min(), 1.05 * np.quantile(shown, 0.995))
    axes.set(xlabel="step", ylabel="bits per byte", title=workdir.name)
    axes.legend()
    axes.grid(alpha=0.3)
    path = workdir / "loss.png"
    temporary = workdir / "loss.tmp.png"
    figure.savefig(temporary, dpi=150)
    temporary.replace(path)
    plt.close(figure)
    return path
