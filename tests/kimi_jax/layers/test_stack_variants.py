"""Scanning and recomputing change nothing for the other residuals either: outputs and gradients, by each `remat`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from kimi_jax.layers.depth_variants import Weighing
from kimi_jax.layers.parameters import weight
from kimi_jax.layers.residuals import (
    BlockAttnRes,
    DeltaAttnRes,
    DeltaBlock,
    FullAttnRes,
    HyperConnections,
    make_site,
)
from kimi_jax.layers.stack import LayerStack
from tests.kimi_jax.layers.test_stack import copy_layers, randomise
from tests.support import F32_FORWARD, F32_GRADIENT, assert_close

D, LAYERS = 8, 4


class Case(NamedTuple):
    name: str
    residual: BlockAttnRes
    weighing: Weighing = Weighing()


CASES = [
    Case("delta", DeltaAttnRes()),
    Case("delta_block", DeltaBlock(2), Weighing(heads=2)),
    Case("heads", FullAttnRes(), Weighing(heads=4)),
    Case("sigmoid", BlockAttnRes(2), Weighing("sigmoid")),
    Case("no_key_norm", BlockAttnRes(2), Weighing(key_norm=False)),
    Case("hidden", BlockAttnRes(2), Weighing(query="hidden")),
    Case("static", FullAttnRes(), Weighing("static")),
    Case("dense_former", BlockAttnRes(2), Weighing("dense_former")),
    Case("window", FullAttnRes(), Weighing(window=3)),
    Case("mhc", HyperConnections(streams=3)),
]


class Run(NamedTuple):
    scan: bool
    remat: str

    @property
    def name(self):
        return f"{'scan' if self.scan else 'unrolled'}_{self.remat}"


RUNS = [Run(scan, remat) for scan in (False, True) for remat in ("none", "layer", "dots", "block")][1:]
# By default each residual scanned with the recomputing backward pass, and every fourth unrolled, policies taking turns.
DEFAULT = [(case, RUNS[4 + 2 * (index % 2)]) for index, case in enumerate(CASES)]
DEFAULT += [(case, RUNS[index // 4 % 3]) for index, case in enumerate(CASES) if index % 4 == 0]
PAIRS = [
    (case, run) if (case, run) in DEFAULT else pytest.param(case, run, marks=pytest.mark.exhaustive)
    for case in CASES
    for run in RUNS
]


class ToyLayer(nnx.Module):
    """Two sub-layers of one matrix each."""

    def __init__(self, index, case, rngs):
        self.residual = case.residual
        self.matrices = nnx.List([weight(rngs, (D, D), (None, None), jnp.float32, std=0.5) for _ in range(2)])
        self.sites = nnx.List([site_of(case, 2 * index + half, rngs) for half in range(2)])

    def __call__(self, state, ids, cache=None, lengths=None):
        for matrix, site in zip(self.matrices, self.sites, strict=True):
            h = self.residual.mix(state, site)
            h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
            state = self.residual.add(state, jnp.tanh(h @ matrix[...]), site)
        return state, cache, None


def site_of(case, sublayer, rngs):
    if not case.residual.has_site(sublayer, 2 * LAYERS):
        return None
    return make_site(case.residual, D, weighing=case.weighing, depth=2 * LAYERS, eps=1e-6, rngs=rngs)


def make(case, scan, remat):
    def opens(index):
        return *(case.residual.opens_block(2 * index + half) for half in (0, 1)), index == 0

    kinds = [opens(index) for index in range(LAYERS)]
    layer = lambda index, rngs: ToyLayer(index, case, rngs)  # noqa: E731
    return LayerStack(layer, kinds, case.residual, scan=scan, remat=remat, rngs=nnx.Rngs(0))


def results(case, stack):
    """(what the final norm would see, gradients of each layer and of the embedding)."""
    final = site_of(case, 2 * LAYERS, nnx.Rngs(0))
    graphdef, params = nnx.split(stack)
    x, cotangent = jax.random.normal(jax.random.key(0), (2, 2, 5, D))

    def loss(params, x):
        state, _, _ = nnx.merge(graphdef, params)(case.residual.start(x), None)
        out = case.residual.mix(state, final)
        return jnp.sum(cotangent * out), out

    (_, out), (bars, x_bar) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    bars = nnx.merge(graphdef, bars)
    return out, [jax.tree.leaves(nnx.state(bars.layer(index))) for index in range(LAYERS)], x_bar


@functools.cache
def plain(name):
    case = next(case for case in CASES if case.name == name)
    stack = make(case, False, "none")
    randomise(stack)
    return stack, results(case, stack)


@pytest.mark.parametrize("case, run", PAIRS, ids=lambda x: x.name)
def test_equals_the_plain_stack(case, run):
    reference, (out, bars, x_bar) = plain(case.name)
    stack = make(case, run.scan, run.remat)
    if run.scan:
        assert stack.repetition.count > 1
        copy_layers(reference, stack)
    else:
        nnx.update(stack, nnx.state(reference))
    ours, our_bars, our_x_bar = results(case, stack)
    assert_close(ours, out, F32_FORWARD, "output")
    for index, (a, b) in enumerate(zip(our_bars, bars, strict=True)):
        assert len(a) == len(b)
        for ours, theirs in zip(a, b, strict=True):
            assert_close(ours, theirs, F32_GRADIENT, f"gradient in layer {index}")
    assert_close(our_x_bar, x_bar, F32_GRADIENT, "gradient of the embedding")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_parameter_has_a_gradient(case):
    """But for mHC where it makes no difference: how the first site reads and carries streams that are all equal,
    and how the last one carries those whose mean is read."""
    stack, (_, bars, x_bar) = plain(case.name)
    for index, layer_bars in enumerate(bars):
        paths = [path for path, _ in nnx.to_flat_state(nnx.state(stack.layer(index)))]
        for path, bar in zip(paths, layer_bars, strict=True):
            without_effect = (index, *path[1:]) in (
                (0, 0, "read_bias"),
                (0, 0, "carry_bias"),
                (LAYERS - 1, 1, "carry_bias"),
            )
            assert jnp.isfinite(bar).all()
            assert without_effect or jnp.abs(bar).max() > 1e-5, (index, path)
    assert jnp.abs(x_bar).min() > 0
