"""What experiments.depth says of a model, on models whose depth is known by construction."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import depth
from experiments.depth_profile import _outliers, as_matrix, depth_profile
from kimi_jax.configs import get_config
from kimi_jax.model import KimiLM, lm_loss
from kimi_jax.quantize import round_weights
from tests.support import assert_close

ROOT = Path(__file__).parents[2]
TOKENS = jax.random.randint(jax.random.key(0), (2, 16), 0, 256)


def tiny(**fields):
    return KimiLM(get_config("tiny", num_layers=2, mla_every=1, kernel_backend="reference", **fields), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("residual, sources", [
    ("full_attn_res", [None, 2, 3, 4, 5]), ("block_attn_res", [None, 2, 2, 3, 3]),
])  # fmt: skip
def test_a_new_model_weighs_all_sources_alike(residual, sources):
    model = tiny(residual=residual)
    found = depth_profile(model, TOKENS)
    assert [w and len(w) for w in found["weights"]] == sources
    for weights in found["weights"]:
        assert weights is None or np.allclose(weights, 1 / len(weights), atol=1e-6)
    assert_close(found["loss"], float(lm_loss(model, TOKENS)[0]), 1e-6)
    assert len(found["output_rms"]) == len(found["gradient_rms"]) == 4
    assert min(found["output_rms"]) > 0 and min(found["gradient_rms"]) > 0


def test_weights_are_those_of_the_mix():
    """A query along one source's direction makes the site read that source."""
    model = tiny(residual="full_attn_res")
    embedding = model.embedding[...]
    model.embedding[...] = jnp.ones_like(embedding)  # every token is the same vector of ones
    model.final_mix.query[...] = jnp.full(64, 10.0)
    weights = depth_profile(model, TOKENS)["weights"][-1]
    assert weights[0] > 0.99 and sum(weights) == pytest.approx(1, abs=1e-5)


def test_gradients_are_those_of_the_outputs():
    """A larger output projection makes an output, and its gradient by no more than the norm allows, what it says."""
    model = tiny(residual="standard")
    before = depth_profile(model, TOKENS)
    layer = model.layers.lead[0]
    layer.ffn.down[...] = 2 * layer.ffn.down[...]
    after = depth_profile(model, TOKENS)
    assert after["output_rms"][1] == pytest.approx(2 * before["output_rms"][1], rel=1e-5)
    assert after["output_rms"][0] == pytest.approx(before["output_rms"][0], rel=1e-6)
    assert after["output_largest"][1] == pytest.approx(2 * before["output_largest"][1], rel=1e-5)
    assert after["output_kurtosis"][1] == pytest.approx(before["output_kurtosis"][1], rel=1e-4)

    def loss(bias):
        own = nnx.merge(*nnx.split(model))
        call = own.layers.lead[1].ffn.__call__

        class Shifted(nnx.Module):
            def __call__(self, x):
                return call(x) + bias

        own.layers.lead[1].ffn = Shifted()
        return lm_loss(own, TOKENS)[0]

    gradient = jax.grad(loss)(jnp.zeros((*TOKENS.shape, 64)))
    assert after["gradient_rms"][3] == pytest.approx(float(jnp.sqrt(jnp.mean(gradient**2))), rel=1e-4)


def test_remat_changes_nothing():
    plain, again = (depth_profile(tiny(residual="block_attn_res", remat=r), TOKENS) for r in ("none", "layer"))
    assert plain["output_rms"] == again["output_rms"] and plain["weights"] == again["weights"]


def test_outliers_are_those_of_the_numbers():
    x = np.random.default_rng(0).normal(1.0, 2.0, (4, 3000))
    x[1, 5] = -60.0
    found = _outliers(jnp.asarray(x, jnp.float32))
    assert found["largest"] == 60.0
    assert found["kurtosis"] == pytest.approx(((x - x.mean()) ** 4).mean() / x.var() ** 2, rel=1e-4)


def test_rounded_losses_are_those_of_rounded_models():
    model = tiny(residual="standard")
    exact = float(lm_loss(model, TOKENS)[0])
    found = depth.rounded_losses(model, TOKENS)
    assert float(lm_loss(model, TOKENS)[0]) == exact  # the model is as it was
    for name, bits in (("int8", 8), ("int4", 4)):
        rounded = nnx.clone(model)
        round_weights(rounded, bits)
        assert_close(found[name], float(lm_loss(rounded, TOKENS)[0]), 1e-6, name)
    assert 0 < abs(found["int8"] - exact) < abs(found["int4"] - exact)
    assert 0 < abs(found["w8a8"] - exact) < abs(found["int4"] - exact) and found["w8a8"] != found["int8"]


def test_scanned_layers_are_refused():
    with pytest.raises(NotImplementedError, match="scan_layers=True: .*; train without it"):
        depth_profile(tiny(scan_layers=True), TOKENS)


def test_a_figure_of_runs_with_and_without_weights(tmp_path):
    profiles = {r: depth_profile(tiny(residual=r), TOKENS) for r in ("standard", "full_attn_res")}
    depth.draw(profiles, tmp_path / "folder" / "depth.png")
    assert (tmp_path / "folder" / "depth.png").stat().st_size > 10_000
    matrix = as_matrix(profiles["full_attn_res"]["weights"])
    assert matrix.shape == (5, 5) and np.isnan(matrix[0]).all() and not np.isnan(matrix[-1]).any()
    json.dumps(profiles)


def test_the_program_says_that_there_is_no_run(tmp_path):
    command = [sys.executable, "-m", "experiments.depth", f"--workdirs={tmp_path}", f"--out={tmp_path}/depth.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1 and f"error: workdirs: '{tmp_path}' holds no run; give" in done.stderr
    assert not list(tmp_path.iterdir())
