"""Train a model.

    uv run python -m experiments.train                                   two or three minutes on two cores
    uv run python -m experiments.train --data='texts/**/*.txt' --set hidden_size=256 --steps=5000
    uv run python -m experiments.train --workdir=runs/...                go on with a run that was stopped

Everything about the loop is in loop.py, everything about the settings in train_config.py; here are only the flags.
"""

import dataclasses
import sys

from absl import app, flags, logging

from experiments.loop import TrainingDiverged, TrainResult, train
from experiments.run_directory import saved_settings
from experiments.train_config import TrainConfig, parse_overrides


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """One flag per setting, with its default and help; `overrides` is --set, which may be repeated."""
    for field in dataclasses.fields(TrainConfig):
        text, choices = field.metadata["help"], field.metadata["choices"]
        if field.name == "overrides":
            flags.DEFINE_multi_string("set", [], text, flag_values=values)
        elif choices:
            flags.DEFINE_enum(field.name, field.default, choices, text, flag_values=values)
        elif isinstance(field.default, bool):
            flags.DEFINE_bool(field.name, field.default, text, flag_values=values)
        elif isinstance(field.default, int):
            flags.DEFINE_integer(field.name, field.default, text, flag_values=values)
        elif isinstance(field.default, float):
            flags.DEFINE_float(field.name, field.default, text, flag_values=values)
        else:
            flags.DEFINE_string(field.name, field.default, text, flag_values=values)


def config_from_flags(values: flags.FlagValues = flags.FLAGS) -> TrainConfig:
    """The settings that were given; the others are the defaults or, where --workdir holds a run, that run's."""
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name in values]
    given = {name: values[name].value for name in names if values[name].present}
    if values["set"].present:
        given["overrides"] = parse_overrides(values["set"].value)
    saved = saved_settings(given["workdir"]) if given.get("workdir") else None
    return dataclasses.replace(saved or TrainConfig(), **given)


def report(result: TrainResult) -> None:
    """What a finished run has to show."""
    if result.sample:
        print(f"\nsample\n------\n{result.sample}\n------")
    bits, trigram = result.validation_bits_per_byte, result.trigram_bits_per_byte
    print(f"\nvalidation bits per byte   model {bits:.4f}   byte trigram {trigram:.4f}   ({_compare(bits, trigram)})")
    for name, found in (result.domains or {}).items():
        bits, trigram = found["bits_per_byte"], found["trigram_bits_per_byte"]
        print(f"{name:>26}   model {bits:.4f}   byte trigram {trigram:.4f}   ({_compare(bits, trigram)})")
    print(f"loss curve {result.workdir}/loss.png   checkpoint {result.workdir}/checkpoints/{result.step}")


def _compare(bits: float, trigram: float) -> str:
    percent = 100 * (1 - bits / trigram)
    return f"{abs(percent):.1f}% {'lower' if percent > 0 else 'higher'} than the trigram"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; quote a glob, or the shell expands it")
    try:
        result = train(config_from_flags())
    except (ValueError, TrainingDiverged) as error:
        logging.debug("where it happened:", exc_info=True)  # with --verbosity=1
        sys.exit(f"error: {error}")
    if result.finished:
        report(result)


if __name__ == "__main__":
    define_flags()
    flags.FLAGS.verbosity = logging.WARNING  # libraries have much to say at INFO; --verbosity still works
    app.run(main)
