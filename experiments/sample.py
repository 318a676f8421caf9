"""Continue a prompt with the model of a run.

uv run python -m experiments.sample --workdir=runs/... --prompt='class Stack:'
"""

import sys

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from experiments.run_directory import CHECKPOINTS, saved_settings
from experiments.tokenization import Tokenizer, get_tokenizer
from kimi_jax.checkpoints import load_model
from kimi_jax.generate import generate
from kimi_jax.model import KimiLM


def sample_text(
    model: KimiLM,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """prompt and its continuation by `tokens` tokens."""
    ids = jnp.asarray(tokenizer.encode(prompt), jnp.int32)
    if not len(ids):
        raise ValueError(f"prompt={prompt!r} has no token; give at least one character")
    new_ids = generate(model, ids, tokens, temperature=temperature, top_p=top_p, seed=seed)
    return prompt + tokenizer.decode(np.asarray(new_ids))


def sample_run(workdir: str, prompt: str, tokens: int, **options) -> str:
    """sample_text of the newest checkpoint of a run. ValueError if the directory holds no run or no checkpoint."""
    settings = saved_settings(workdir)
    if settings is None:
        raise ValueError(f"workdir={workdir!r} holds no run; give the directory that experiments.train printed")
    model = load_model(f"{workdir}/{CHECKPOINTS}")
    return sample_text(model, get_tokenizer(settings.tokenizer), prompt, tokens, **options)


def main(argv: list[str]) -> None:
    values = flags.FLAGS
    options = dict(temperature=values.temperature, top_p=values.top_p, seed=values.seed)
    try:
        print(sample_run(values.workdir, values.prompt, values.tokens, **options))
    except ValueError as error:
        logging.debug("where it happened:", exc_info=True)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
    flags.DEFINE_string("prompt", "import os\n\n\nclass ", "How the text begins.")
    flags.DEFINE_integer("tokens", 400, "How many tokens to add.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token each time.", lower_bound=0)
    flags.DEFINE_float("top_p", 1.0, "Sample among the likeliest tokens that together have this probability.")
    flags.DEFINE_integer("seed", 0, "Another seed, another text.")
    flags.FLAGS.verbosity = logging.WARNING  # libraries have much to say at INFO; --verbosity still works
    app.run(main)
