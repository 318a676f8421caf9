"""What a trained model's depth mixing has learned, how large outputs and gradients are, and what outliers cost.

    uv run python -m experiments.depth --workdirs=runs/plain,runs/attn_res

takes the newest checkpoint of each run, reads validation text of the run's own, and writes the numbers
(results/depth.json) and a figure of them (results/depth.png): how much of each source every site reads, on average over
tokens, and for every sub-layer the root mean square of its output and of the loss's gradient there (AttnRes, Figures 5
and 8). Also how far single numbers of an output stand out, by the largest magnitude and the kurtosis, and the loss with
weights rounded to int8 and int4, and with weights and activations in int8 ("w8a8"), which suffer from that (arXiv
2605.17887, as far as its abstract says it).
"""

import json
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from flax import nnx

from experiments.benchmark_suites import card, versions
from experiments.depth_profile import ROWS, as_matrix, depth_profile
from experiments.files import replace_text
from experiments.input_pipeline import validation_batches
from experiments.run_directory import CHECKPOINTS, saved_settings
from experiments.text import load_corpus
from experiments.tokenization import get_tokenizer
from kimi_jax.checkpoints import load_model
from kimi_jax.model import KimiLM, lm_loss
from kimi_jax.quantize import round_activations, round_weights

COLUMNS = 3  # of the figure


def rounded_losses(model: KimiLM, tokens: jax.Array, segment_ids: jax.Array | None = None) -> dict[str, float]:
    """Nats per token of the model {"int8", "int4": with its weights rounded, "w8a8": with weights and activations
    rounded to int8}; the model itself stays as it is."""

    def loss(model, *text):
        return lm_loss(model, *text)[0]

    exact, found = nnx.jit(loss), {}
    for name, bits, run in (("int8", 8, exact), ("int4", 4, exact), ("w8a8", 8, nnx.jit(round_activations(loss)))):
        rounded = nnx.clone(model)
        round_weights(rounded, bits)
        found[name] = float(run(rounded, tokens, segment_ids))
    return found


def profile_run(workdir: str) -> dict[str, Any]:
    """`depth_profile` of a run's newest checkpoint on the first rows of its validation text, with what the run was and
    "rounded_losses".

    ValueError if the directory holds no run or no checkpoint.
    """
    settings = saved_settings(workdir)
    if settings is None:
        raise ValueError(f"workdirs: {workdir!r} holds no run; give directories that experiments.train printed")
    model = load_model(f"{workdir}/{CHECKPOINTS}")
    corpus = load_corpus(
        settings.data, get_tokenizer(settings.tokenizer), validation_data=settings.validation_data, seed=settings.seed
    )
    batch = next(validation_batches(corpus.validation, sequence_length=settings.sequence_length, batch_size=ROWS))
    text = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    profile = {**depth_profile(model, *text), "rounded_losses": rounded_losses(model, *text)}
    about = {"config": settings.config, "overrides": settings.overrides, "steps": settings.steps, "seed": settings.seed}
    return {"run": about, "residual": model.config.residual, "block_size": model.config.block_size, **profile}


def draw(profiles: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """The weights of every run that has some; outputs, their outliers and gradients of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    mixed = {name: p for name, p in profiles.items() if any(w is not None for w in p["weights"])}
    rows = -(-(len(mixed) + 3) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(4.6 * COLUMNS, 4.2 * rows), layout="constrained")
    axes = axes.ravel()
    for axis in axes[len(mixed) + 3 :]:
        axis.remove()
    for axis, (name, profile) in zip(axes, mixed.items(), strict=False):
        image = axis.imshow(as_matrix(profile["weights"]), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=f"{name}: what each site reads", xlabel="source, oldest first", ylabel="site, the output's last")
        figure.colorbar(image, ax=axis, label="mean weight")
    for axis, key, title in (
        (axes[len(mixed)], "output_rms", "outputs, root mean square"),
        (axes[len(mixed) + 1], "output_kurtosis", "outputs, kurtosis"),
        (axes[len(mixed) + 2], "gradient_rms", "gradients at the outputs, root mean square"),
    ):
        for name, profile in profiles.items():
            axis.plot(range(1, len(profile[key]) + 1), profile[key], marker="o", markersize=3, label=name)
        axis.set(title=title, xlabel="sub-layer", yscale="log")
        axis.legend()
    for axis in axes[: len(mixed) + 3]:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    names = values.names or [Path(workdir).name for workdir in values.workdirs]
    if len(names) != len(values.workdirs) or len({*names}) != len(names):
        raise app.UsageError(f"--names: got {names} for {len(values.workdirs)} runs; each needs a name of its own")
    try:
        profiles = {name: profile_run(w) for name, w in zip(names, values.workdirs, strict=True)}
    except (ValueError, NotImplementedError) as error:
        logging.debug("where it happened:", exc_info=True)
        sys.exit(f"error: {error}")
    about = {
        "command": shlex.join(["python", "-m", "experiments.depth", *argv_of(values)]),
        "date": datetime.now(UTC).date().isoformat(),
        "card": card(),
        "versions": versions(),
    }
    out = Path(values.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, json.dumps({**about, "profiles": profiles}, indent=1) + "\n")
    draw(profiles, out.with_suffix(".png"))
    for name, profile in profiles.items():
        last = profile["weights"][-1]
        read = "" if last is None else f"   the output reads {', '.join(f'{w:.2f}' for w in last)}"
        rms = profile["output_rms"]
        cost = ", ".join(f"{to} {found - profile['loss']:+.4f}" for to, found in profile["rounded_losses"].items())
        print(
            f"{name}: {profile['loss']:.3f} nats   outputs {min(rms):.2g} to {max(rms):.2g}   rounded to {cost}{read}"
        )
    print(f"wrote {out} and {out.with_suffix('.png')}")


def argv_of(values) -> list[str]:
    return [f"--workdirs={','.join(values.workdirs)}"] + ([f"--names={','.join(values.names)}"] if values.names else [])


if __name__ == "__main__":
    flags.DEFINE_list("workdirs", None, "Directories of runs.", required=True)
    flags.DEFINE_list("names", None, "What to call them in the figure (default: the directories' names).")
    flags.DEFINE_string("out", "results/depth.json", "Where the numbers go; the figure lies beside, as .png.")
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
