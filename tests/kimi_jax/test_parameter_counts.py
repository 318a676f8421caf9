"""Exact parameter counts of the released models and of the papers' ladders, without allocating a parameter."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from kimi_jax import KimiLM, get_config, parameter_count
from kimi_jax.model import active_parameter_count


def test_kimi_linear_48b():
    assert parameter_count(get_config("kimi_linear_48b")) == 49_122_681_728


def test_kimi_k3():
    """The released text tower less what it stores but never uses: 32 zeros after the 96 A_log entries of each of 69 KDA
    layers, and query and norm of the mix before layer 0, which has a single source."""
    released, A_log_padding, unused_mix = 2_779_484_478_208, 69 * 32, 2 * 7168
    assert (A_log_padding, unused_mix) == (2_208, 14_336)
    assert parameter_count(get_config("kimi_k3")) == released - A_log_padding - unused_mix


def test_active_parameters_of_kimi_k3():
    """The report's 104.2B per token counts the head but not the embedding, and all selection biases."""
    config = get_config("kimi_k3")
    head = config.vocab_size * config.hidden_size
    assert active_parameter_count(config) + head == 104_189_614_848 - 2_208 - 14_336


@pytest.mark.parametrize("name", ["kimi_linear_48b", "kimi_k3"])
def test_scanning_changes_no_count(name):
    config = get_config(name, num_layers=9, mla_layers=None)
    unrolled = get_config(name, num_layers=9, mla_layers=None, scan_layers=False)
    assert parameter_count(config) == parameter_count(unrolled)


class Rung(NamedTuple):
    name: str
    published: float  # active parameters without embeddings

    @property
    def tolerance(self):
        return 0.01 if self.name.startswith("kda") else 0.03


RUNGS = [
    Rung("kda_653m", 653e6),
    Rung("kda_878m", 878e6),
    Rung("kda_1_1b", 1.1e9),
    Rung("kda_1_4b", 1.4e9),
    Rung("kda_1_7b", 1.7e9),
    Rung("attn_res_194m", 194e6),
    Rung("attn_res_241m", 241e6),
    Rung("attn_res_296m", 296e6),
    Rung("attn_res_436m", 436e6),
    Rung("attn_res_528m", 528e6),
]


@pytest.mark.parametrize("rung", RUNGS, ids=lambda r: r.name)
def test_ladders_have_the_published_active_size(rung):
    assert active_parameter_count(get_config(rung.name)) == pytest.approx(rung.published, rel=rung.tolerance)


def test_the_tiny_count_is_that_of_its_arrays():
    config = get_config("tiny")
    model = KimiLM(config, rngs=nnx.Rngs(0))
    assert parameter_count(config) == sum(np.size(leaf) for leaf in jax.tree.leaves(nnx.state(model)))
    assert parameter_count(config) == 282_150
