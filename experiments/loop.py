"""The training loop, as a function that a notebook can call: train(TrainConfig(...)) -> TrainResult."""

import contextlib
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from tqdm import tqdm

from experiments.depth_profile import ROWS, make_depth_profile
from experiments.evaluate import make_evaluate
from experiments.files import replace_text
from experiments.flops import tokens_at_peak
from experiments.generate import sample_text
from experiments.input_pipeline import Batch, training_batches, validation_batches
from experiments.metrics import MetricsWriter, read_metrics
from experiments.plots import plot_loss
from experiments.run_directory import CHECKPOINTS, open_run, read_result, write_result
from experiments.stopping import StopRequest
from experiments.text import Corpus, load_corpus
from experiments.tokenization import get_tokenizer
from experiments.train_config import TrainConfig
from experiments.train_state import TrainState, start_training
from experiments.trigram import Trigram
from experiments.turns import turn
from kimi_jax.checkpoints import Checkpoints, require_same_config
from kimi_jax.sharding import make_mesh, partition_spec

VALIDATION = "validation_bits_per_byte"


class TrainResult(NamedTuple):
    """How a call of `train` ended."""

    workdir: Path
    finished: bool  # False: stopped on request before the last step, and can be resumed
    step: int
    validation_bits_per_byte: float | None  # the rest is None or empty unless finished
    trigram_bits_per_byte: float | None
    sample: str
    domains: dict[str, dict[str, float]] | None = None  # the two by domain, where validation_data has some


class TrainingDiverged(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


def train(config: TrainConfig, *, limit_minutes: float = math.inf, take_turns: bool = False) -> TrainResult:
    """Run, or go on with, the run of config.workdir.

    A run that was killed at any moment goes on from its last checkpoint and repeats the losses of an undisturbed run
    bit for bit (on one kind of machine and mesh). SIGTERM, Ctrl-C and the limit end it cleanly behind the current step.
    With take_turns it compiles beside other processes on the device, and trains when none of those that said so does.

    Raises:
      ValueError: settings that do not fit together, or that differ from those the run began with.
      TrainingDiverged: a loss or gradient that is not finite; checkpoints from before stay.
    """
    if config.dtype is None:
        on_cpu = jax.default_backend() == "cpu"
        config = dataclasses.replace(config, dtype="float32" if on_cpu else "bfloat16")
    workdir = open_run(config)
    if (result := read_result(workdir)) is not None:
        tqdm.write(f"The run in {workdir} is finished; nothing to do. Without --workdir a new one is started.")
        return TrainResult(workdir, True, **result)
    mesh = make_mesh(sizes) if (sizes := config.mesh_sizes()) else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), StopRequest(limit_minutes) as stop:
        return _Run(config, workdir, mesh).go(stop, take_turns)


class _Run:
    """What the parts of one call of `train` share."""

    def __init__(self, config: TrainConfig, workdir: Path, mesh: jax.sharding.Mesh | None):
        self.config, self.workdir, self.mesh = config, workdir, mesh
        self.tokenizer = get_tokenizer(config.tokenizer)
        self.model_config = config.model_config(vocab_size=self.tokenizer.vocab_size)
        self.corpus = load_corpus(config.data, self.tokenizer, validation_data=config.validation_data, seed=config.seed)
        self.validation = self.corpus.evaluated(config.eval_tokens)
        self.bytes = {name: len(self.tokenizer.to_bytes(tokens)) for name, tokens in self.validation.items()}
        self.bytes_per_token = sum(self.bytes.values()) / sum(map(len, self.validation.values()))
        self.batches = training_batches(
            self.corpus.train, sequence_length=config.sequence_length, batch_size=config.batch_size, seed=config.seed
        )
        self.checkpoints = Checkpoints(workdir / CHECKPOINTS, keep=config.keep_checkpoints)
        resumed = self.checkpoints.latest_step() is not None
        self.training = start_training(config, self.model_config, mesh, resumed=resumed)
        self.evaluate = make_evaluate(self.training.graphdef, self._put)
        if config.profile_every:
            self.profile = make_depth_profile(self.training.graphdef, self.model_config)
        # What a checkpoint must agree with to be gone on from.
        self.identity = {
            "model": dataclasses.asdict(self.model_config),
            "training": config.binding(),
            "data": {"train_sha256": self.corpus.train_sha256},
        }

    def go(self, stop: StopRequest, take_turns: bool) -> TrainResult:
        config = self.config
        state, first = self._restore_or_begin()
        if take_turns:  # compiled before its turn; the step is by being done once
            self.evaluate(state.model(), [next(self._validation_batches(self.corpus.validation))], self.bytes_per_token)
        self._introduce(first)
        metrics = MetricsWriter(self.workdir, from_step=first)
        interval = 0.2 if sys.stderr.isatty() else 10  # seconds; a log file keeps every update
        with (
            contextlib.closing(metrics),
            contextlib.ExitStack() as own_turn,
            tqdm(
                total=config.steps,
                initial=first,
                unit="step",
                desc="training",
                dynamic_ncols=True,
                mininterval=interval,
            ) as bar,
        ):
            pending = _Pending(metrics, bar, config, self.bytes_per_token, self._tokens_at_peak(), self.checkpoints)
            for step in range(first + 1, config.steps + 1):
                state, values = self.training.step(state, self._put(Batch(**next(self.batches))))
                pending.flush()
                if take_turns and step == first + 1:
                    own_turn.enter_context(turn(lambda: stop.requested))
                    pending.restart_clock()
                pending.set(step, values)
                last = step == config.steps
                evaluates = last or (config.eval_every and step % config.eval_every == 0)
                profiles = config.profile_every and (last or step % config.profile_every == 0)
                stopping = stop.requested  # looked at once: what ends the loop has been saved
                saves = last or stopping or step % config.checkpoint_every == 0
                if evaluates or profiles or saves:
                    pending.flush()  # so that a state that is not finite is never saved
                    if evaluates:
                        self._evaluate(state, step, metrics, bar)
                    if profiles:
                        metrics.write_profile(step, self._profile(state))
                    if saves:
                        self._save(state, step)
                    pending.restart_clock()
                if stopping and not last:
                    bar.close()
                    print(f"Stopped after step {step} of {config.steps}. To go on: --workdir={self.workdir}")
                    return TrainResult(self.workdir, False, step, None, None, "")
        return self._finish(state)

    def _restore_or_begin(self) -> tuple[TrainState, int]:
        state = self.training.state
        step = self.checkpoints.latest_step()
        if step is None:
            return state, 0
        identity, position = self.checkpoints.describe(step)
        require_same_config(identity, self.identity, where=f"the checkpoint in {self.workdir}")
        targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _as_trees(state))
        restored = self.checkpoints.restore(targets, step=step)
        self.batches.set_state(position)
        params, rest = nnx.split_state(restored["model"], nnx.Param, ...)
        done, key = restored["training"]["step"], restored["training"]["key"]
        return TrainState(done, key, params, rest, restored["optimizer"]), step

    def _save(self, state: TrainState, step: int) -> None:
        self.checkpoints.save(step, _as_trees(state), config=self.identity, extra=self.batches.get_state())

    def _put(self, batch: Batch) -> Batch:
        if self.mesh is None:
            return jax.device_put(batch)
        return jax.device_put(batch, NamedSharding(self.mesh, partition_spec(("batch", None), self.mesh)))

    def _evaluate(self, state: TrainState, step: int, metrics: MetricsWriter, bar: tqdm) -> None:
        model, found = state.model(), {}
        for name, tokens in self.validation.items():
            found[name] = self.evaluate(model, self._validation_batches(tokens), self.bytes[name] / len(tokens))
        bits = self._together(found)
        by_domain = {_of_domain(name): x for name, x in found.items()} if self.corpus.domains else {}
        metrics.write(step, **{VALIDATION: bits}, **by_domain)
        said = ", ".join(f"{name} {found[name]:.4f}" for name in self.corpus.domains)
        bar.write(f"step {step:>6}   validation {bits:.4f} bits per byte" + (f" ({said})" if said else ""))

    def _validation_batches(self, tokens: np.ndarray) -> Iterator[Batch]:
        config = self.config
        return validation_batches(tokens, sequence_length=config.sequence_length, batch_size=config.batch_size)

    def _profile(self, state: TrainState) -> dict[str, Any]:
        """Of the first rows of the validation text."""
        length = self.config.sequence_length
        rows = next(validation_batches(self.corpus.validation, sequence_length=length, batch_size=ROWS))
        return self.profile(state.model(), *rows)

    def _tokens_at_peak(self) -> float | None:
        """Per second, of all devices; None where a peak or the operations are not known."""
        kind = jax.devices()[0].device_kind
        one = tokens_at_peak(self.model_config, self.config.sequence_length, kind)
        return one and one * (self.mesh.size if self.mesh else 1)

    def _together(self, bits: dict[str, float]) -> float:
        """Bits per byte of all domains, from those of each."""
        return sum(bits[name] * size for name, size in self.bytes.items()) / sum(self.bytes.values())

    def _introduce(self, first: int) -> None:
        config, model = self.config, self.model_config
        size = sum(leaf.size for leaf in jax.tree.leaves(self.training.state.params))
        kinds = f"{model.layer_kinds.count('kda')} KDA + {model.layer_kinds.count('mla')} MLA layers"
        devices = f"{jax.default_backend()} {config.mesh or '(one device)'}"
        print(f"{model.name}: {size:,} parameters, {kinds}, {model.residual}; {devices}, {config.dtype}")
        print(
            f"data {config.data}: {len(self.corpus.train):,} training and {len(self.corpus.validation):,} validation "
            f"tokens; each step reads {config.batch_size} x {config.sequence_length}"
        )
        print(f"run {self.workdir}" + (f", resumed after step {first}" if first else ""), flush=True)

    def _finish(self, state: TrainState) -> TrainResult:
        last = [record for record in read_metrics(self.workdir) if VALIDATION in record][-1]
        trigrams = _trigrams(self.corpus, self.config.tokenizer, self.config.eval_tokens)
        trigram = self._together(trigrams)
        sample = self._sample(state) if self.config.sample_tokens else ""
        replace_text(self.workdir / "sample.txt", sample)
        plot_loss(self.workdir, bytes_per_token=self.bytes_per_token, trigram=trigram)
        result = {
            "step": self.config.steps,
            VALIDATION: last[VALIDATION],
            "trigram_bits_per_byte": trigram,
            "sample": sample,
        }
        if self.corpus.domains:
            result["domains"] = {
                name: {"bits_per_byte": last[_of_domain(name)], "trigram_bits_per_byte": trigrams[name]}
                for name in self.corpus.domains
            }
        write_result(self.workdir, result)  # last: its presence means that the run is finished
        return TrainResult(self.workdir, True, **result)

    def _sample(self, state: TrainState) -> str:
        config = self.config
        model = nnx.merge(self.training.graphdef, state.model())
        seed = int(jax.random.bits(jax.random.fold_in(state.key, state.step), dtype=jnp.uint32) >> 1)
        return sample_text(
            model, self.tokenizer, config.prompt, config.sample_tokens, temperature=config.temperature, seed=seed
        )


class _Pending:
    """The values of the step that the device still works on: looked at one step late, so that it need not wait."""

    def __init__(
        self,
        metrics: MetricsWriter,
        bar: tqdm,
        config: TrainConfig,
        bytes_per_token: float,
        tokens_at_peak: float | None,
        checkpoints: Checkpoints,
    ):
        self._metrics, self._bar, self._config, self._checkpoints = metrics, bar, config, checkpoints
        self._bytes_per_token, self._tokens_at_peak = bytes_per_token, tokens_at_peak
        self._step, self._values = 0, None
        self.restart_clock()

    def set(self, step: int, values: dict[str, jax.Array]) -> None:
        self._step, self._values = step, values

    def restart_clock(self) -> None:
        """Leave what was done since the last flush out of the next tokens per second."""
        self._time = time.perf_counter()

    def flush(self) -> None:
        """Write the values down, if any wait. Raises TrainingDiverged if they are not finite."""
        if self._values is None:
            return
        values: dict[str, Any] = {name: float(value) for name, value in self._values.items()}
        self._values = None
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                raise TrainingDiverged(self._complaint(name, values[name]))
        now = time.perf_counter()
        tokens = self._config.batch_size * self._config.sequence_length
        values["tokens_per_second"] = round(tokens / (now - self._time), 1)
        if self._tokens_at_peak is not None:
            values["mfu"] = round(values["tokens_per_second"] / self._tokens_at_peak, 4)
        self._time = now
        self._metrics.write(self._step, **values)
        bits = values["loss"] / math.log(2) / self._bytes_per_token
        self._bar.set_postfix_str(f"{bits:.3f} bits/byte, {values['tokens_per_second']:,.0f} tokens/s", refresh=False)
        self._bar.update()

    def _complaint(self, name: str, value: float) -> str:
        last = self._checkpoints.latest_step()
        kept = "no checkpoint was written before it" if last is None else f"the last good checkpoint is of step {last}"
        return (
            f"step {self._step}: {name} is {value}; {kept}. A smaller --learning_rate, a longer --warmup or "
            "a smaller --grad_clip, in a new --workdir, may help."
        )


def _of_domain(name: str) -> str:
    """What the metrics call the bits per byte of a domain."""
    return f"{VALIDATION}/{name}"


@functools.lru_cache(maxsize=1)  # runs of one process mostly share it, and counting takes seconds
def _trigrams(corpus: Corpus, tokenizer: str, eval_tokens: int) -> dict[str, float]:
    """Bits per byte of a trigram of all training text, by domain."""
    to_bytes = get_tokenizer(tokenizer).to_bytes
    trigram = Trigram.fit(to_bytes(corpus.train))
    return {name: trigram.bits_per_byte(to_bytes(x)) for name, x in corpus.evaluated(eval_tokens).items()}


def _as_trees(state: TrainState) -> dict[str, Any]:
    """A state as a checkpoint's trees; "model" alone is enough to sample from."""
    training = {"step": state.step, "key": state.key}
    return {"model": state.model(), "optimizer": state.optimizer, "training": training}
