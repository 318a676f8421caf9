"""Continue prompts with the model of a run, or with released weights. Text is printed as it comes.

uv run python -m experiments.generate --workdir=runs/... --prompt='class Stack:' --prompt='def main('
uv run python -m experiments.generate --weights=Kimi-Linear-48B-A3B-Base --prompt='The delta rule'
"""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from experiments.run_directory import CHECKPOINTS, saved_settings
from experiments.tokenization import END_OF_DOCUMENT, IdTokenizer, ReleasedTokenizer, Tokenizer, get_tokenizer
from kimi_jax.checkpoints import load_model
from kimi_jax.convert import load_hf
from kimi_jax.generate import STEPS_PER_CALL, generate, stream
from kimi_jax.model import KimiLM


class Speaker(NamedTuple):
    """A model, what turns its ids into text, and the ids that end a text."""

    model: KimiLM
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]


def load_run(workdir: str) -> Speaker:
    """The newest checkpoint of a run. ValueError if the directory holds no run or no checkpoint."""
    settings = saved_settings(workdir)
    if settings is None:
        raise ValueError(f"workdir={workdir!r} holds no run; give the directory that experiments.train printed")
    return Speaker(load_model(f"{workdir}/{CHECKPOINTS}"), get_tokenizer(settings.tokenizer), (END_OF_DOCUMENT,))


def load_released(folder: str, tokenizer: str | None = None) -> Speaker:
    """A released checkpoint, with the tokenizer in its folder, in another one, or "ids": numbers instead of text."""
    if tokenizer == "ids":
        return Speaker(load_hf(folder), IdTokenizer(), ())
    released = ReleasedTokenizer(tokenizer or folder)  # before the weights, which take their time
    return Speaker(load_hf(folder), released, released.stop_ids)


def stream_text(
    speaker: Speaker, prompts: Sequence[str], tokens: int, *, temperature: float, top_p: float = 1.0, seed: int = 0
) -> Iterator[list[str]]:
    """What comes after each prompt, in pieces: one string per prompt, each time what is new (maybe nothing yet).

    The prompts are one batch of rows of different lengths. A text ends at `tokens` tokens or at a stop id, which is not
    part of it. ValueError for a prompt without tokens.
    """
    model, tokenizer, stop_ids = speaker
    ids = [_encode(tokenizer, prompt) for prompt in prompts]
    lengths = np.array([len(row) for row in ids])
    padded = np.zeros((len(ids), lengths.max()), np.int64)
    for row, values in zip(padded, ids, strict=True):
        row[: len(values)] = values
    options = dict(lengths=lengths, temperature=temperature, top_p=top_p, seed=seed, stop_ids=stop_ids)
    pieces = stream(model, padded, tokens, **options)

    def texts():
        new_ids, said = [[] for _ in ids], [len(tokenizer.decode(row)) for row in ids]
        for piece in pieces:
            new = []
            for row, values in enumerate(piece):
                new_ids[row] += values.tolist()
                final = len(new_ids[row]) == tokens or new_ids[row][-1] in stop_ids
                text = tokenizer.decode([*ids[row], *_before_stop(new_ids[row], stop_ids)])
                # Bytes that are no character yet may become one.
                end = len(text) if final else len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
                new.append(text[said[row] : end])
                said[row] = max(said[row], end)
            yield new

    return texts()


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
    """prompt and its continuation by `tokens` tokens, ends of documents included."""
    ids = jnp.asarray(_encode(tokenizer, prompt), jnp.int32)
    new_ids = generate(model, ids, tokens, temperature=temperature, top_p=top_p, seed=seed)
    return prompt + tokenizer.decode(np.asarray(new_ids))


def _encode(tokenizer, prompt):
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise ValueError(f"prompt={prompt!r} has no token; give at least one character")
    return ids


def _before_stop(ids, stop_ids):
    stops = [i for i, value in enumerate(ids) if value in stop_ids]
    return ids[: stops[0]] if stops else ids


class _Printer:
    """Prints one text after the other, each as far as it has come."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts = prompts
        self._waiting = [""] * len(prompts)
        self._print_head(0)

    def say(self, new: list[str]) -> None:
        """The first text at once; the others are kept until it is finished, since all go on at the same time."""
        print(new[0], end="", flush=True)
        self._waiting = [text + more for text, more in zip(self._waiting, new, strict=True)]

    def finish(self) -> None:
        print()
        for number in range(1, len(self._prompts)):
            self._print_head(number)
            print(self._waiting[number])

    def _print_head(self, number: int) -> None:
        if len(self._prompts) > 1:
            print(f"--- {number + 1} of {len(self._prompts)}")
        print(self._prompts[number], end="", flush=True)


class _Clock:
    """Tokens per second, without what was compiled: the first token and the first call of the decoding loop."""

    def __init__(self):
        self._start = time.perf_counter()
        self._times: list[float] = []

    def tick(self) -> None:
        self._times.append(time.perf_counter())

    def report(self, rows: int) -> str:
        first = f"first token after {self._times[0] - self._start:.2f} s, compilation included"
        calls = self._times[1:-1]  # the last one may have been shorter
        if len(calls) < 2:
            return f"{first}; too few tokens for a speed"
        steps = STEPS_PER_CALL * (len(calls) - 1)
        return f"{first}; then {rows * steps / (calls[-1] - calls[0]):.1f} tokens/s, {rows} at a time"


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """The flags of the command."""
    text = "For released weights: a folder with a tokenizer.json (default: theirs), or ids."
    flags.DEFINE_string("workdir", None, "Directory of a run.", flag_values=values)
    flags.DEFINE_string("weights", None, "Folder of released weights.", flag_values=values)
    flags.DEFINE_string("tokenizer", None, text, flag_values=values)
    text = "How a text begins. Given again: another text."
    flags.DEFINE_multi_string("prompt", ["import os\n\n\nclass "], text, flag_values=values)
    flags.DEFINE_integer("tokens", 400, "How many tokens to add at most.", lower_bound=1, flag_values=values)
    text = "0 takes the likeliest token each time."
    flags.DEFINE_float("temperature", 0.8, text, lower_bound=0, flag_values=values)
    text = "Sample among the likeliest tokens that together have this probability."
    flags.DEFINE_float("top_p", 1.0, text, flag_values=values)
    flags.DEFINE_integer("seed", 0, "Another seed, another text.", flag_values=values)


def speak(values: flags.FlagValues) -> None:
    """Print what the flags ask for, and to stderr how fast it came."""
    if (values.workdir is None) == (values.weights is None):
        raise app.UsageError("give either --workdir (a run) or --weights (a released folder)")
    if values.tokenizer is not None and values.weights is None:
        raise app.UsageError("--tokenizer goes with --weights; a run has its own")
    if values.weights is None:
        speaker = load_run(values.workdir)
    else:
        speaker = load_released(values.weights, values.tokenizer)
    options = dict(temperature=values.temperature, top_p=values.top_p, seed=values.seed)
    clock, pieces = _Clock(), stream_text(speaker, values.prompt, values.tokens, **options)
    printer = _Printer(values.prompt)
    for new in pieces:
        clock.tick()
        printer.say(new)
    printer.finish()
    print(clock.report(len(values.prompt)), file=sys.stderr)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; a prompt is --prompt='...'")
    try:
        speak(flags.FLAGS)
    except (ValueError, NotImplementedError) as error:
        logging.debug("where it happened:", exc_info=True)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    flags.FLAGS.verbosity = logging.WARNING  # libraries have much to say at INFO; --verbosity still works
    app.run(main)
