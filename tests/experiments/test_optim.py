"""Muon against torch's own vectors, schedules, and which parameter gets which treatment."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.muon import scale_by_momentum_and_shape
from experiments.optim import make_optimizer, parameter_kinds
from experiments.schedules import make_schedule
from kimi_jax.configs import get_config
from kimi_jax.model import KimiLM
from tests.support import assert_close, golden

MUON_FILES = ["square", "tall", "wide_rms", "per_head_4x12", "no_nesterov_no_decay"]


@pytest.mark.parametrize("stacked", [False, True], ids=["one_matrix", "scanned_stack"])
@pytest.mark.parametrize("name", MUON_FILES)
def test_muon_matches_torch(name, stacked):
    """tests/golden/muon: torch.optim.Muon with Newton-Schulz in float64. Torch stores [out, in], we store [in, out]."""
    arrays = golden("muon", name)
    meta = json.loads(str(arrays["meta_json"]))
    stack = (lambda x: jnp.stack([x, jnp.zeros_like(x), x])) if stacked else (lambda x: x)
    params = {"q": stack(jnp.asarray(arrays["param0"].T, jnp.float32))}
    optimizer = optax.chain(
        scale_by_momentum_and_shape(
            momentum=meta["momentum"],
            nesterov=meta["nesterov"],
            adjust=meta["adjust_lr_fn"] or "original",
            heads={"q": meta["per_head_blocks"]} if meta["per_head_blocks"] else None,
        ),
        optax.add_decayed_weights(meta["weight_decay"]),
        optax.scale_by_learning_rate(meta["lr"]),
    )
    state = optimizer.init(params)
    before = np.asarray(arrays["param0"], np.float64)
    for gradient, expected in zip(arrays["grads"], arrays["params_f64"], strict=True):
        updates, state = optimizer.update({"q": stack(jnp.asarray(gradient.T, jnp.float32))}, state, params)
        params = optax.apply_updates(params, updates)
        for matrix in params["q"][::2] if stacked else [params["q"]]:
            # The change, not the parameter: that is where a mistake shows.
            assert_close(matrix.T - before, expected - before, 2e-5, f"{name} change")
        before = np.asarray(expected, np.float64)


def test_matrices_of_one_size_do_not_see_each_other():
    """They are orthogonalised at once; each must come out as it does alone, its blocks of heads too."""
    muon = scale_by_momentum_and_shape(heads={"q": 2})
    shapes = {"a": (4, 6), "b": (3, 4, 6), "c": (6, 4), "q": (4, 12), "z": (4, 6)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tree = {name: 10.0**i * jax.random.normal(keys[i], shape) for i, (name, shape) in enumerate(shapes.items())}
    together = muon.update(tree, muon.init(tree))[0]
    for name, leaf in tree.items():
        alone = muon.update({name: leaf}, muon.init({name: leaf}))[0][name]
        assert_close(together[name], np.asarray(alone, np.float64), 2e-5, name)


def test_muon_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match="Muon takes matrices.*scale has shape"):
        muon = scale_by_momentum_and_shape()
        muon.update({"scale": jnp.ones(3)}, muon.init({"scale": jnp.ones(3)}))
    with pytest.raises(ValueError, match="heads=3 does not divide the 8 columns of q"):
        muon = scale_by_momentum_and_shape(heads={"q": 3})
        muon.update({"q": jnp.ones((4, 8))}, muon.init({"q": jnp.ones((4, 8))}))
    with pytest.raises(ValueError, match="adjust='rms' is unknown"):
        scale_by_momentum_and_shape(adjust="rms")


class Variant(NamedTuple):
    name: str
    overrides: dict


SMALL = dict(hidden_size=16, num_layers=4, kda_num_heads=2, kda_head_dim=8, mla_num_heads=2, kv_lora_rank=8,
             qk_nope_dim=8, qk_rope_dim=4, v_dim=8, ffn_width=24)  # fmt: skip
VARIANTS = [
    Variant("tiny", {}),
    Variant("scanned", dict(num_layers=8, scan_layers=True)),
    Variant("plain_residual", dict(residual="standard")),
    Variant("mhc", dict(residual="mhc")),
    Variant("static_depth", dict(depth_weights="static")),
    Variant("depth_query_from_hidden", dict(depth_query="hidden")),
    Variant("moe_latent_k3", dict(num_experts=4, top_k=2, num_shared_experts=1, expert_width=8, latent_width=8,
                                  full_rank_gate=True, q_lora_rank=8, mla_output_gate=True, lower_bound=-5.0)),
]  # fmt: skip


def abstract_params(overrides):
    config = get_config("tiny", **{**SMALL, **overrides})
    return nnx.state(nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0))), nnx.Param)


@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_every_parameter_has_its_kind(case):
    params = abstract_params(case.overrides)
    kinds = parameter_kinds(params)
    seen = set()
    for (path, leaf), kind in zip(jax.tree_util.tree_flatten_with_path(params)[0], jax.tree.leaves(kinds), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        last = name.split(".")[-1]
        seen.add(kind)
        if last in ("embedding", "head"):
            assert kind == "table", name
        elif last in ("A_log", "dt_bias", "query", "key_scale", "scalars") or any(
            part in name for part in ("norm", "conv", "bias")
        ):
            assert kind == "plain", name
        else:
            assert kind == "matrix" and leaf.ndim >= 2, name
    assert seen == {"matrix", "table", "plain"}


def test_an_unknown_parameter_is_named():
    with pytest.raises(ValueError, match="parameter block.mystery is of no known kind"):
        make_optimizer("muon", optax.constant_schedule(1.0), {"block": {"mystery": jnp.ones((2, 2))}})
    with pytest.raises(ValueError, match="optimizer='sgd' is unknown; allowed: adamw, muon"):
        make_optimizer("sgd", optax.constant_schedule(1.0), {})


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_and_clipping_reach_the_right_parameters(name):
    params = {name: jnp.ones((4, 4)) for name in ("q", "embedding")}
    params |= {name: jnp.ones(4) for name in ("A_log", "dt_bias", "weight")}
    optimizer = make_optimizer(name, optax.constant_schedule(0.1), params, weight_decay=0.5, grad_clip=1.0)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for leaf in ("q", "embedding"):
        np.testing.assert_allclose(updates[leaf], -0.05, rtol=1e-6)
    for leaf in ("A_log", "dt_bias", "weight"):
        np.testing.assert_array_equal(updates[leaf], 0)
    # Clipping is by the norm over all parameters, before anything else: two gradients beyond it act alike.
    small, large = ({k: jnp.full_like(p, x) for k, p in params.items()} for x in (1.0, 100.0))
    moments = [jax.tree.leaves(optimizer.update(g, optimizer.init(params), params)[1]) for g in (small, large)]
    for first, second in zip(*moments, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)


class ScheduleCase(NamedTuple):
    name: str
    step: int
    rate: float


WSD = [ScheduleCase("first", 0, 1 / 11), ScheduleCase("warm", 10, 1.0), ScheduleCase("held", 59, 1.0),
       ScheduleCase("halfway_down", 80, 0.5), ScheduleCase("last", 100, 0.0)]  # fmt: skip
COSINE = [ScheduleCase("first", 0, 1 / 11), ScheduleCase("warm", 10, 1.0), ScheduleCase("half", 55, 0.5),
          ScheduleCase("last", 100, 0.0)]  # fmt: skip


@pytest.mark.parametrize("kind, case", [("wsd", c) for c in WSD] + [("cosine", c) for c in COSINE], ids=str)
def test_schedules(kind, case):
    schedule = make_schedule(kind, peak=1.0, steps=100, warmup=10, decay_fraction=0.4)
    np.testing.assert_allclose(schedule(case.step), case.rate, atol=1e-6)


def test_bad_schedules_are_refused():
    with pytest.raises(ValueError, match="schedule='linear' is unknown; allowed: wsd, cosine"):
        make_schedule("linear", peak=1.0, steps=10, warmup=0)
    with pytest.raises(ValueError, match="warmup=10 must be at least 0 and below steps=10"):
        make_schedule("wsd", peak=1.0, steps=10, warmup=10)
