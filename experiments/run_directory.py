"""Where a run lives: a fresh directory, or one that is resumed.

run.json       the settings, written first      metrics.jsonl, profiles.jsonl, tensorboard/   what was measured
checkpoints/   the latest few                   loss.png, sample.txt, result.json   written at the end
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

from experiments.files import replace_text
from experiments.train_config import TrainConfig
from kimi_jax.checkpoints import require_same_config

SETTINGS, RESULT, CHECKPOINTS = "run.json", "result.json", "checkpoints"


def open_run(config: TrainConfig) -> Path:
    """Make the directory of a run, or enter it again. ValueError names the settings that differ from the run's."""
    if config.workdir is None:
        config.model_config(vocab_size=1)  # a released folder that will not do leaves no directory behind
        name = config.config if config.init_from is None else Path(config.init_from).resolve().name
        return _write_settings(_fresh_directory(name), config)
    workdir = Path(config.workdir)
    if (saved := saved_settings(workdir)) is not None:
        require_same_config(saved.binding(), config.binding(), where=f"the run in {workdir}")
        return workdir
    if workdir.exists() and not workdir.is_dir():
        raise ValueError(f"workdir={str(workdir)!r} is a file; give a directory")
    config.model_config(vocab_size=1)
    workdir.mkdir(parents=True, exist_ok=True)
    return _write_settings(workdir, config)


def saved_settings(workdir: str | Path) -> TrainConfig | None:
    """The settings of the run in this directory, or None if it holds none."""
    path = Path(workdir) / SETTINGS
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    values["overrides"] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["overrides"].items()}
    return TrainConfig(**values, workdir=str(workdir))


def read_result(workdir: Path) -> dict[str, Any] | None:
    """What a finished run ended with, or None while it is not finished."""
    path = workdir / RESULT
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_result(workdir: Path, result: dict[str, Any]) -> None:
    replace_text(workdir / RESULT, json.dumps(result, indent=2) + "\n")


def _write_settings(workdir: Path, config: TrainConfig) -> Path:
    values = dataclasses.asdict(config)
    del values["workdir"]  # a run may be moved
    replace_text(workdir / SETTINGS, json.dumps(values, indent=2) + "\n")
    return workdir


def _fresh_directory(name: str) -> Path:
    now = datetime.datetime.now()
    for attempt in range(1000):
        path = Path("runs") / f"{now:%Y-%m-%d}-{name}-{now:%H%M%S}{f'-{attempt}' if attempt else ''}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another run started in the same second
            continue
    raise RuntimeError(f"no free directory name under {Path('runs').absolute()}")
