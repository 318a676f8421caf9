"""Everything that a step of training reads and writes, how it begins, and the step itself."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.input_pipeline import Batch
from experiments.optim import HEAD_MATRICES, make_optimizer
from experiments.schedules import make_schedule
from experiments.train_config import TrainConfig
from kimi_jax.configs import ModelConfig
from kimi_jax.convert import load_hf
from kimi_jax.model import KimiLM, lm_loss, update_router_biases
from kimi_jax.sharding import create_sharded, param_shardings


class TrainState(NamedTuple):
    """A pytree; all of it goes into a checkpoint."""

    step: jax.Array  # int32 [], steps done
    key: jax.Array  # the run's random key; what is drawn at a step comes from fold_in(key, step)
    params: nnx.State  # float32
    rest: nnx.State  # what has no gradient: selection biases
    optimizer: Any

    def model(self) -> nnx.State:
        """Parameters and the rest as the model's one state."""
        return nnx.merge_state(self.params, self.rest)


class Training(NamedTuple):
    """A model and its optimiser as functions of a TrainState."""

    graphdef: nnx.GraphDef
    state: TrainState
    step: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def start_training(
    config: TrainConfig, model_config: ModelConfig, mesh: jax.sharding.Mesh | None, *, resumed: bool = False
) -> Training:
    """The state before the first step, laid out on the mesh, and the compiled step. Call under jax.set_mesh(mesh).

    Parameters are drawn, or read from config.init_from; in a resumed run they will be replaced and are not read.
    """
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    if config.init_from is not None and not resumed:
        model = load_hf(config.init_from, mesh=mesh, **config.init_fields())
    elif mesh is None:
        graphdef, draw = _drawing(model_config)
        model = nnx.merge(graphdef, draw(init_key))
    else:
        model = create_sharded(lambda: KimiLM(model_config, rngs=nnx.Rngs(init_key)), mesh)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    begin_optimizer, step = _programs(graphdef, model_config, _How.of(config), mesh)
    state = TrainState(jnp.int32(0), run_key, params, rest, begin_optimizer(params))
    if mesh is not None:
        state = state._replace(
            step=jax.device_put(state.step, NamedSharding(mesh, P())),
            key=jax.device_put(state.key, NamedSharding(mesh, P())),
        )
    return Training(graphdef, state, step)


class _How(NamedTuple):
    """The fields of TrainConfig that a step's program depends on, besides the model."""

    optimizer: str
    schedule: str
    learning_rate: float
    steps: int
    warmup: int
    decay_fraction: float
    weight_decay: float
    grad_clip: float
    per_head_muon: bool
    router_bias_rate: float

    @classmethod
    def of(cls, config: TrainConfig) -> "_How":
        return cls(*(getattr(config, name) for name in cls._fields))


# The last programs are kept: runs that differ in their seed alone share them, and the second compiles nothing.
@functools.lru_cache(maxsize=1)
def _drawing(model_config: ModelConfig):
    def build(key: jax.Array) -> KimiLM:
        return KimiLM(model_config, rngs=nnx.Rngs(key))

    graphdef = nnx.split(nnx.eval_shape(build, jax.random.key(0)))[0]
    return graphdef, jax.jit(lambda key: nnx.split(build(key))[1])


@functools.lru_cache(maxsize=1)
def _programs(graphdef: nnx.GraphDef, model_config: ModelConfig, how: _How, mesh: jax.sharding.Mesh | None):
    """(the optimiser's state from parameters, the step)."""
    model = nnx.eval_shape(lambda: KimiLM(model_config, rngs=nnx.Rngs(0)))
    params = nnx.state(model, nnx.Param)
    schedule = make_schedule(
        how.schedule, peak=how.learning_rate, steps=how.steps, warmup=how.warmup, decay_fraction=how.decay_fraction
    )
    optimizer = make_optimizer(
        how.optimizer,
        schedule,
        params,
        weight_decay=how.weight_decay,
        grad_clip=how.grad_clip,
        heads=_head_counts(model) if how.per_head_muon else None,
    )
    shardings = None if mesh is None else _shardings(jax.eval_shape(optimizer.init, params), mesh)
    begin_optimizer = jax.jit(optimizer.init, out_shardings=shardings)
    return begin_optimizer, _make_step(graphdef, optimizer, schedule, how.router_bias_rate, mesh)


def _make_step(graphdef, optimizer, schedule, router_bias_rate, mesh):
    def loss_fn(params: nnx.State, rest: nnx.State, batch: Batch):
        return lm_loss(nnx.merge(graphdef, params, rest), batch.tokens, batch.segment_ids)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        (loss, aux), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params, state.rest, batch)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        model = nnx.merge(graphdef, optax.apply_updates(state.params, updates), state.rest)
        if aux.router_loads is not None:
            update_router_biases(model, aux.router_loads, router_bias_rate)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        new_state = TrainState(state.step + 1, state.key, params, rest, optimizer_state)
        if mesh is not None:
            # The compiler may choose another layout for what comes out; a state must look the same at every step.
            new_state = jax.lax.with_sharding_constraint(new_state, _shardings(new_state, mesh))
        metrics = {
            "loss": loss,
            "gradient_norm": optax.global_norm(gradients),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        return new_state, metrics

    return jax.jit(step, donate_argnums=0)


def _shardings(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Parameters, and what the optimiser keeps for each, by their logical axes; counters and keys on every device."""

    def is_parameter(node):  # optax masks the parameters that a transformation leaves alone: those hold no array
        return isinstance(node, nnx.Variable) and bool(jax.tree.leaves(node))

    def sharding(node):
        return param_shardings(node, mesh) if is_parameter(node) else NamedSharding(mesh, P())

    return jax.tree.map(sharding, tree, is_leaf=is_parameter)


def _head_counts(model: nnx.Module) -> dict[str, int]:
    """Path -> number of heads for the attention projections whose columns are heads."""
    counts = {}
    for path, module in nnx.iter_modules(model):
        for matrix, field in HEAD_MATRICES.items():
            if hasattr(module, matrix) and hasattr(module, "num_heads"):
                heads = getattr(module, field, module.num_heads)
                counts[".".join(map(str, (*path, matrix)))] = heads
    return counts
