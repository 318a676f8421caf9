"""Language models trained one after the other into a store: what a table (ablate.py) and a ladder (scaling.py) share.

A finished run is read and not repeated. One that was stopped or killed goes on from its directory under runs/. All runs
of a file are of one corpus, told by the hash of its tokens; another one is refused.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.loop import TrainingDiverged, train
from experiments.metrics import PROFILES, read_metrics
from experiments.run_directory import CHECKPOINTS
from experiments.run_store import RunStore
from experiments.stopping import StopRequest
from experiments.text import load_corpus
from experiments.tokenization import get_tokenizer
from experiments.train_config import TrainConfig

PLACES = ("data", "validation_data", "tokenizer")  # paths: what they hold is told by its hash


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One model to train."""

    name: str  # for people
    what: Mapping[str, Any]  # all that decides its numbers but the corpus and the code, in JSON types
    settings: TrainConfig

    @property
    def program(self) -> TrainConfig:
        """What runs of one compiled program have in common: all but the seed."""
        return dataclasses.replace(self.settings, seed=0)

    def config(self, corpus: "CorpusFacts") -> dict[str, Any]:
        """The run for `RunStore`."""
        return {**self.what, "corpus": corpus.hashes}


class CorpusFacts(NamedTuple):
    """A corpus as runs are told apart by it."""

    hashes: dict[str, str]  # sha256 of the tokens that are trained and validated on, in an order that is no run's
    training_tokens: int
    bytes_per_token: float  # of the validation text that an evaluation reads


def read_corpus(settings: TrainConfig) -> CorpusFacts:
    """What settings.data and validation_data hold. ValueError as of `load_corpus`."""
    tokenizer = get_tokenizer(settings.tokenizer)
    found = load_corpus(settings.data, tokenizer, validation_data=settings.validation_data, seed=0)
    validation = hashlib.sha256(np.ascontiguousarray(found.validation))
    if found.domains:  # the same stream in other domains is read in other parts
        validation.update(json.dumps(found.domains).encode())
    hashes = {"train": found.train_sha256, "validation": validation.hexdigest()}
    read = found.evaluated(settings.eval_tokens).values()
    text = sum(len(tokenizer.to_bytes(tokens)) for tokens in read)
    return CorpusFacts(hashes, len(found.train), text / sum(map(len, read)))


def training_fields(settings: TrainConfig, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The settings that decide numbers, less seed, paths and those named."""
    left_out = (*PLACES, "seed", *without)
    fields = {name: value for name, value in settings.binding().items() if name not in left_out}
    measured = {"eval_tokens": settings.eval_tokens, "profile_every": settings.profile_every}
    return fields | {name: value for name, value in measured.items() if value}


def make_runs(
    runs: Sequence[TrainingRun], corpus: CorpusFacts, store: RunStore, stop: StopRequest, *, take_turns: bool = False
) -> bool:
    """Do what is missing; True if nothing is left, False if it was stopped before, a run failed or is still being made.

    Runs of one program follow one another, compiled once. Runs that another process is making are left to it, so that
    the same command can be started on several devices. A run that fails is written down with its reason, and the others
    go on; a later call tries it again.

    Results are {"ended": "steps", "bits_per_byte", "trigram_bits_per_byte", "tokens_per_second", "bytes_per_token",
    "training_tokens"} or {"ended": "diverged", "why"}; where the card's peak is known, with "mfu", model FLOPs
    utilisation; where the validation text has domains, with "domains": {name: {"bits_per_byte",
    "trigram_bits_per_byte"}}; with profile_every, with "profiles": those of `depth_profile`, each with its "step". With
    take_turns this process compiles beside others on its device, and trains when none of those that said so does; the
    speeds are left out, since XLA times kernels on the device for those that compile.

    Raises ValueError for a corpus that is not the one of the runs in the file.
    """
    require_same_corpus(corpus, store)
    failed, compiled = False, None
    missing = [run for run in runs if store.finished(run.config(corpus)) is None]
    left = list(missing)
    while left:
        if stop.requested:
            return False
        with _next(left, compiled, corpus, store) as run:
            if run is None:  # others are making the rest
                break
            print(f"[{len(left)} left] {store.path.stem}: {run.name}", flush=True)
            config = run.config(corpus)
            directory = store.directory(config)
            train_it = functools.partial(_train, run.settings, corpus, directory, stop, take_turns)
            entry = store.attempt(config, train_it)
        if entry is None:
            return False
        if entry.error is None:
            shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)  # the curves stay
        else:  # it goes on from there when it is tried again
            failed = True
            print(f"{run.name}: failed, {entry.error}", flush=True)
        left.remove(run)
        compiled = run.program
    return not failed and all(store.finished(run.config(corpus)) is not None for run in missing)


@contextlib.contextmanager
def _next(
    runs: Sequence[TrainingRun], compiled: TrainConfig | None, corpus: CorpusFacts, store: RunStore
) -> Iterator[TrainingRun | None]:
    """A run that no other process is making, kept from the others meanwhile, or None if they have all.

    First those of the program that this process has compiled, then those of programs that no other process is at.
    """
    taken = [run.program for run in runs if store.claimed(run.config(corpus))]
    for run in sorted(runs, key=lambda run: (run.program != compiled, run.program in taken)):
        with store.claim(run.config(corpus)) as mine:
            if mine:
                yield run
                return
    yield None


def require_same_corpus(corpus: CorpusFacts, store: RunStore) -> None:
    """ValueError for a corpus that is not the one of the runs in the file."""
    for entry in store.entries() + store.entries(present=False):
        for side, found in corpus.hashes.items():
            if (before := entry.config.get("corpus", {}).get(side)) != found:
                raise ValueError(
                    f"{side} corpus: its tokens have the sha256 {found}, those of the runs in {store.path} {before}; "
                    "give the same data, or another --out"
                )


def _train(
    settings: TrainConfig, corpus: CorpusFacts, directory: Path, stop: StopRequest, take_turns: bool
) -> dict[str, Any] | None:
    settings = dataclasses.replace(settings, workdir=str(directory))
    try:
        result = train(settings, limit_minutes=stop.minutes_left(), take_turns=take_turns)
    except TrainingDiverged as error:
        return {"ended": "diverged", "why": str(error)}
    if not result.finished:
        return None
    steps = [record for record in read_metrics(directory) if "tokens_per_second" in record]
    speeds = {name: [r[name] for r in steps if name in r] for name in ("tokens_per_second", "mfu") if not take_turns}
    return {
        "ended": "steps",
        "bits_per_byte": result.validation_bits_per_byte,
        "trigram_bits_per_byte": result.trigram_bits_per_byte,
        **{name: statistics.median(found) for name, found in speeds.items() if found},
        "bytes_per_token": corpus.bytes_per_token,
        "training_tokens": corpus.training_tokens,
        **({"domains": result.domains} if result.domains else {}),
        **({"profiles": _profiles(directory)} if settings.profile_every else {}),
    }


def _profiles(directory: Path) -> list[dict[str, Any]]:
    """To five digits: the file of results is to be read by people too."""
    text = json.dumps(list(read_metrics(directory, PROFILES)))
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.5g}"))
