"""The mixers of the synthetic study: KDA's layer itself, the others against their recurrences token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.gpu_aot import lower_for_hopper
from experiments.synthetic_models import DECAYS, DELTA_RULE, MIXERS, Mixer, SyntheticLM
from experiments.synthetic_training import Program, Run
from kimi_jax.layers import KDALayer
from tests.support import F32_FORWARD, assert_close

HIDDEN, HEADS, SIZE, T = 12, 2, 8, 9


def make(kind, **options):
    """A mixer with weights large enough that gates and normalisations matter."""
    mixer = Mixer(kind, HIDDEN, num_heads=HEADS, head_dim=SIZE, rngs=nnx.Rngs(0), **options)
    graphdef, state = nnx.split(mixer)
    return nnx.merge(graphdef, jax.tree.map(lambda x: 10 * x if x.ndim == 2 else x, state))


@pytest.fixture(scope="module")
def x_BTD():
    return jax.random.normal(jax.random.key(1), (2, T, HIDDEN))


def test_kda_is_the_layer(x_BTD):
    mixer = make("kda")
    layer = KDALayer(HIDDEN, num_heads=HEADS, head_k=SIZE, head_v=SIZE, rngs=nnx.Rngs(1))
    nnx.update(layer, nnx.state(mixer))
    expected = jax.jit(lambda x: layer(x)[0])(x_BTD)
    assert_close(jax.jit(mixer)(x_BTD), expected, F32_FORWARD)


@pytest.mark.parametrize("kind", ["gated_delta_net", "delta_net", "softmax", "mamba2"])
def test_others_are_their_recurrences(kind, x_BTD):
    mixer = make(kind)
    assert_close(jax.jit(mixer)(x_BTD), by_tokens(mixer, kind, np.asarray(x_BTD, np.float64)), F32_FORWARD)


def by_tokens(m, kind, x_BTD):
    """The mixer in float64, one token after the other."""
    w = {"".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(nnx.state(m))}

    def silu(x):
        return x / (1 + np.exp(-x))

    def heads(x):
        return x.reshape(*x.shape[:2], HEADS, SIZE)

    def convolved(name):
        x = np.pad(x_BTD @ w[name], ((0, 0), (3, 0), (0, 0)))
        taps = w[f"{name}_convweight"]
        return heads(silu(sum(x[:, i : i + T] * taps[:, i] for i in range(4))))

    q, k, v = map(convolved, "qkv")
    if kind != "softmax":
        q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    dt = np.log1p(np.exp(x_BTD @ w["f"] + w["dt_bias"])) if kind in DECAYS else None
    decay = np.exp(-np.exp(w["A_log"]) * dt) if kind in DECAYS else np.ones((*x_BTD.shape[:2], HEADS))
    write = 1 / (1 + np.exp(-x_BTD @ w["b"])) if kind in DELTA_RULE else dt
    o = np.zeros_like(v)
    for row in range(len(x_BTD)):
        for head in range(HEADS):
            S = np.zeros((SIZE, SIZE))
            for t in range(T):
                qt, kt, vt = q[row, t, head], k[row, t, head], v[row, t, head]
                if kind == "softmax":
                    p = np.exp(k[row, : t + 1, head] @ qt * SIZE**-0.5)
                    o[row, t, head] = p @ v[row, : t + 1, head] / p.sum()
                    continue
                S = decay[row, t, head] * S
                erased = S.T @ kt if kind in DELTA_RULE else 0
                S = S + write[row, t, head] * np.outer(kt, vt - erased)
                o[row, t, head] = SIZE**-0.5 * S.T @ qt
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * w["o_normweight"]
    o = o / (1 + np.exp(-heads(x_BTD @ w["g_a"] @ w["g_b"])))
    return o.reshape(*x_BTD.shape[:2], HEADS * SIZE) @ w["o"]


def test_models_have_one_size_and_see_no_later_token():
    """All models have the size of KDA's to a tenth."""

    def build(kind, layers, head_dim):
        return SyntheticLM(kind, vocab=16, num_layers=layers, num_heads=HEADS, head_dim=head_dim, rngs=nnx.Rngs(0))

    def size(kind):
        params = nnx.eval_shape(lambda: nnx.state(build(kind, 2, 128), nnx.Param))
        return sum(x.size for x in jax.tree.leaves(params))

    assert all(0.9 < size(kind) / size("kda") <= 1 for kind in MIXERS)
    model = jax.jit(build("softmax", 1, SIZE))
    tokens = jax.random.randint(jax.random.key(2), (2, T), 0, 16)
    first, second = (model(t) for t in (tokens, tokens.at[:, 5].set((tokens[:, 5] + 1) % 16)))
    assert first.shape == (2, T, 16) and first.dtype == jnp.float32
    assert (first[:, :5] == second[:, :5]).all() and (first[:, 5:] != second[:, 5:]).any()


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match="model='rwkv' is unknown; allowed: kda, gated_delta_net"):
        Mixer("rwkv", HIDDEN, num_heads=HEADS, head_dim=SIZE, rngs=nnx.Rngs(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DELTA_RULE)
def test_a_hopper_gpu_takes_the_kernels(kind):
    """Six kernels, of forward and backward (which share one), lowered once for both layers."""
    program = Program.of(Run("stack", kind, 128, 1e-3, 0, steps=10, batch=2, dtype="bfloat16", window=10, warmup=5))
    lowered = lower_for_hopper(program.train, *program.shapes())
    assert lowered.as_text().count("mosaic_gpu_v2") == 6
