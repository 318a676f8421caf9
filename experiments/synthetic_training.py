"""One run of the synthetic study: its settings, its training, how it stops and goes on.

Every batch is drawn afresh from the seed and the number of the step, so no row is ever seen twice: the accuracy on it
before the update is one on held-out data. That is what is reported, over windows of steps.
"""

import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.optim import make_optimizer
from experiments.schedules import make_schedule
from experiments.synthetic_models import MIXERS, SyntheticLM
from experiments.synthetic_tasks import VOCABULARY, Batch, check_task, draw_batch
from kimi_jax.checkpoints import Checkpoints

SOLVED, WINDOWS_SOLVED = 0.999, 2  # a run that is at least so accurate over so many windows on end has finished
CHECKPOINT_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run is. All of it decides its numbers.

    AdamW (b1 0.9, b2 0.95, gradients clipped to a norm of 1); the rate rises linearly, stays, and falls linearly to
    zero over the last part. ValueError names a field that is not allowed.
    """

    task: str
    model: str
    length: int
    learning_rate: float
    seed: int
    steps: int  # at most
    batch: int  # rows
    dtype: str  # of the computation; parameters are float32
    window: int = 100  # steps that an accuracy is taken over
    warmup: int = 100
    decay_fraction: float = 0.5  # of the steps
    weight_decay: float = 0.1
    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 128

    def __post_init__(self):
        if self.model not in MIXERS:
            raise ValueError(f"model={self.model!r} is unknown; allowed: {', '.join(MIXERS)}")
        check_task(self.task, self.length)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} is not allowed: float32 or bfloat16")
        for name in ("steps", "batch", "window", "num_layers", "num_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: at least 1")
        if self.steps % self.window:
            raise ValueError(f"steps={self.steps} is not allowed: a multiple of window={self.window}")
        make_schedule("wsd", peak=1.0, steps=self.steps, warmup=self.warmup, decay_fraction=self.decay_fraction)
        if not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise ValueError(f"learning_rate={self.learning_rate} is not allowed: a number above 0")
        if self.seed < 0 or self.weight_decay < 0:
            raise ValueError(f"seed={self.seed}, weight_decay={self.weight_decay}: both are at least 0")

    def config(self) -> dict[str, Any]:
        """The run in JSON types, for `RunStore`."""
        return dataclasses.asdict(self)


class State(NamedTuple):
    """A pytree; all of it goes into a checkpoint."""

    params: nnx.State  # float32
    optimizer: Any


class Program(NamedTuple):
    """What is compiled: all runs that differ in task, learning rate and seed alone share one."""

    model: str
    length: int
    batch: int
    dtype: str
    window: int
    steps: int
    warmup: int
    decay_fraction: float
    weight_decay: float
    num_layers: int
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, run: Run) -> "Program":
        return cls(**{name: getattr(run, name) for name in cls._fields})

    def build(self, key: jax.Array) -> SyntheticLM:
        sizes = dict(num_layers=self.num_layers, num_heads=self.num_heads, head_dim=self.head_dim)
        return SyntheticLM(self.model, vocab=VOCABULARY, rngs=nnx.Rngs(key), dtype=jnp.dtype(self.dtype), **sizes)

    def begin(self, key: jax.Array) -> State:
        params = nnx.split(self.build(key), nnx.Param)[1]
        return State(params, self._optimizer(1.0, params).init(params))

    def train(self, state: State, batches: Batch, learning_rate: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        """A window of steps; what is returned beside the state is summed over them."""
        graphdef = nnx.split(nnx.eval_shape(self.build, jax.random.key(0)), nnx.Param)[0]
        optimizer = self._optimizer(learning_rate, state.params)

        def loss_fn(params, batch):
            return task_loss(nnx.merge(graphdef, params)(batch.tokens), batch.targets)

        def step(state, batch):
            (loss, sums), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
            updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            return State(params, optimizer_state), {"loss": loss, **sums}

        state, each = jax.lax.scan(step, state, batches)
        finite = jnp.isfinite(optax.global_norm(state.params))
        return state, {**jax.tree.map(jnp.sum, each), "finite": finite}

    def shapes(self) -> tuple[State, Batch, jax.ShapeDtypeStruct]:
        """What `train` takes: a state, batches [window, B, T], a learning rate."""
        state = jax.eval_shape(self.begin, jax.eval_shape(lambda: jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((self.window, self.batch, self.length), jnp.int32)
        return state, Batch(tokens, tokens), jax.ShapeDtypeStruct((), jnp.float32)

    def compile(self) -> "Compiled":
        train = jax.jit(self.train, donate_argnums=0).lower(*self.shapes()).compile()
        return Compiled(jax.jit(self.begin).lower(jax.eval_shape(lambda: jax.random.key(0))).compile(), train)

    def _optimizer(self, learning_rate, params):
        schedule = make_schedule(
            "wsd", peak=1.0, steps=self.steps, warmup=self.warmup, decay_fraction=self.decay_fraction
        )
        rate = lambda step: learning_rate * schedule(step)  # noqa: E731
        return make_optimizer("adamw", rate, params, weight_decay=self.weight_decay)


class Compiled(NamedTuple):
    """A program for this device."""

    begin: Callable[[jax.Array], State]
    train: Callable[[State, Batch, jax.Array], tuple[State, dict[str, jax.Array]]]


class Programs:
    """Compiled programs by what they are; several are compiled side by side, ahead of the runs that need them."""

    def __init__(self, threads: int = 2):  # more would only slow the first: lowering is Python
        self._threads = ThreadPoolExecutor(threads)
        self._compiled: dict[Program, Future] = {}

    def prepare(self, runs: Iterable[Run]) -> None:
        """Begin to compile what these runs need."""
        for program in map(Program.of, runs):
            if program not in self._compiled:
                self._compiled[program] = self._threads.submit(program.compile)

    def get(self, run: Run) -> Compiled:
        """The compiled program of a run, waited for; raises what its compilation raised."""
        self.prepare([run])
        return self._compiled[Program.of(run)].result()

    def close(self) -> None:
        """Leave out what has not begun to compile."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def task_loss(logits_BTN: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy in nats where there is a target, and {"correct", "asked"}: int32 numbers of targets."""
    asked_BT = targets_BT >= 0
    is_target = jnp.arange(logits_BTN.shape[-1]) == targets_BT[..., None]
    target_logits_BT = jnp.sum(jnp.where(is_target, logits_BTN, 0), axis=-1)
    losses_BT = jax.nn.logsumexp(logits_BTN, axis=-1) - target_logits_BT
    correct = jnp.sum((jnp.argmax(logits_BTN, axis=-1) == targets_BT), dtype=jnp.int32)  # never where it is -1
    asked = jnp.sum(asked_BT, dtype=jnp.int32)
    loss = jnp.sum(jnp.where(asked_BT, losses_BT, 0)) / jnp.maximum(asked, 1)
    return loss, {"correct": correct, "asked": asked}


def train_run(
    run: Run,
    programs: Programs,
    directory: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[int, float, float], None] = lambda step, accuracy, loss: None,
) -> dict[str, Any] | None:
    """The result of a run, or None if stop() became true: called again, it then goes on.

    Its numbers are those of an undisturbed run, bit for bit where the compiler makes the same program again (on a GPU:
    with its compilation cache). directory keeps a checkpoint, at most a minute old, and is removed at the end. report
    is called after every window with the steps done, the accuracy (a fraction) and the loss.

    Returns:
      {"accuracy", "loss": one number per window, "steps": done, "ended": "solved", "steps" (all were used up) or
      "diverged" (a loss or parameter was not finite; the window in which it happened is left out),
      "tokens_per_second": of the windows of the last call, its first left out, or None}
    """
    program = programs.get(run)
    init_key, data_key = jax.random.split(jax.random.key(run.seed))
    state = program.begin(init_key)
    checkpoints = Checkpoints(directory, keep=1)
    curve: dict[str, list[float]] = {"accuracy": [], "loss": []}
    if checkpoints.latest_step() is not None:
        state = checkpoints.restore({"state": state})["state"]
        curve = checkpoints.describe()[1]
    saved, timed = time.monotonic(), []
    while (ended := _ended(run, curve)) is None:
        done = len(curve["accuracy"]) * run.window
        started = time.perf_counter()
        batches = _draw(run.task, run.batch, run.length, run.window, data_key, done)
        state, sums = program.train(state, batches, jnp.float32(run.learning_rate))
        correct, asked, loss = int(sums["correct"]), int(sums["asked"]), float(sums["loss"]) / run.window
        timed.append(time.perf_counter() - started)
        if not (math.isfinite(loss) and sums["finite"]):
            ended = "diverged"
            break
        curve["accuracy"].append(round(correct / max(asked, 1), 6))
        curve["loss"].append(round(loss, 6))
        report(done + run.window, curve["accuracy"][-1], curve["loss"][-1])
        if stopping := stop() or time.monotonic() - saved > CHECKPOINT_SECONDS:
            checkpoints.save(done + run.window, {"state": state}, config=run.config(), extra=curve)
            saved = time.monotonic()
        if stopping and stop() and _ended(run, curve) is None:
            checkpoints.close()
            return None
    checkpoints.close()
    shutil.rmtree(directory, ignore_errors=True)
    tokens = run.window * run.batch * run.length
    speed = round(tokens * len(timed[1:]) / sum(timed[1:])) if timed[1:] else None
    return {**curve, "steps": len(curve["accuracy"]) * run.window, "ended": ended, "tokens_per_second": speed}


def _ended(run: Run, curve: dict[str, list[float]]) -> str | None:
    last = curve["accuracy"][-WINDOWS_SOLVED:]
    if len(last) == WINDOWS_SOLVED and min(last) >= SOLVED:
        return "solved"
    return "steps" if len(curve["accuracy"]) * run.window >= run.steps else None


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _draw(task, batch, length, window, data_key, done) -> Batch:
    """The batches of the steps from `done` on, each from its own key, [window, B, T]."""
    keys = jax.vmap(lambda step: jax.random.fold_in(data_key, step))(done + jnp.arange(window))
    return jax.lax.map(lambda key: draw_batch(task, key, batch, length), keys)
