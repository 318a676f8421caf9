"""attn_res by its Hopper kernels on a Hopper GPU, against float64: `pytest -m gpu -n0`, skipped where there is none.

Every gradient is compared on its own. How the kernels lower and compile is the matter of test_attn_res_gpu_compile.py.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res, backend_of
from tests.pallas_kernels.attn_res_support import as_form, make_problem, value_and_grads
from tests.support import BF16_FORWARD, BF16_GRADIENT, F32_FORWARD, F32_GRADIENT, assert_close

pytestmark = pytest.mark.gpu

BF16 = jnp.bfloat16
gpu = partial(attn_res, backend="mosaic_gpu")


@pytest.fixture(autouse=True)
def hopper():
    """Memory that a kernel is given and does not write holds NaN."""
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        pytest.skip(f"runs on a Hopper GPU, not on a {device.device_kind}")
    jnp.full((1 << 28,), jnp.nan).block_until_ready().delete()


class Case(NamedTuple):
    name: str
    n: int
    tokens: tuple[int, ...]
    dim: int
    dtype: str = "bfloat16"
    form: str = "sequence"
    norm: bool = False
    live: int | None = None
    strength: float = 1.0  # of the query
    passes: bool = False  # the live sources are handed on, and get other cotangents too

    @property
    def passed(self):
        return (self.live or self.n) if self.passes else 0


CASES = [
    Case("k3", 9, (300,), 7168),
    Case("k3_norm", 9, (2, 150), 7168, norm=True),
    Case("kimi_linear", 8, (1237,), 2304),
    Case("kimi_linear_norm", 10, (7, 100), 2304, norm=True),
    Case("in_pieces", 27, (301,), 2304),
    Case("in_pieces_norm", 27, (301,), 2304, norm=True),
    Case("in_pieces_both_ways", 55, (140,), 2304, norm=True),
    Case("sixty_four", 64, (300,), 512, form="buffer"),
    Case("sixty_four_wide", 64, (135,), 8192, form="buffer", norm=True),
    Case("padded_channels", 5, (999,), 1168, norm=True),
    Case("few_channels", 2, (5,), 8),
    Case("one_token", 3, (1,), 256),
    Case("one_source_norm", 1, (77,), 512, norm=True),
    Case("float32", 4, (100,), 24, dtype="float32"),
    Case("float32_norm", 6, (333,), 960, dtype="float32", norm=True),
    Case("float32_in_pieces", 9, (140,), 7168, dtype="float32", norm=True),
    Case("warps_norm", 5, (1000,), 1024, norm=True),
    Case("warps_short_words", 9, (4, 99), 384, norm=True, passes=True),
    Case("warps_float32_in_pieces", 27, (240,), 1024, dtype="float32", norm=True),
    Case("live_prefix", 7, (500,), 1024, form="buffer", norm=True, live=3),
    Case("live_prefix_of_a_tuple", 5, (500,), 1264, live=2),
    Case("live_prefix_of_many", 20, (500,), 512, form="buffer", live=17),
    Case("live_prefix_in_pieces", 27, (300,), 2304, norm=True, live=11),
    Case("one_live", 3, (77,), 512, live=1),
    Case("more_live_than_there_are", 3, (77,), 512, live=9),
    Case("strong_logits", 8, (300,), 2304, strength=40.0),
    Case("float32_strong_logits", 8, (300,), 512, dtype="float32", strength=20.0),
    Case("passes", 9, (300,), 7168, norm=True, passes=True),
    Case("passes_padded", 5, (999,), 1168, passes=True),
    Case("passes_float32", 6, (2, 150), 600, dtype="float32", norm=True, passes=True),
    Case("passes_live_prefix", 20, (500,), 512, form="buffer", live=17, passes=True),
    Case("passes_live_prefix_in_pieces", 27, (300,), 2304, norm=True, live=11, passes=True),
]


def problem_of(case: Case):
    problem = make_problem(case.n, case.tokens, case.dim, spread=0.5)
    query = problem.query * case.strength * 2 * case.dim**-0.5
    sources = np.asarray(jnp.asarray(problem.sources, case.dtype), np.float64)
    cotangent = np.asarray(jnp.asarray(problem.cotangent, case.dtype), np.float64)
    return problem._replace(query=query, sources=sources, cotangent=cotangent)


def run(case: Case, problem):
    """value_and_grads by the kernels, of the live sources by a count that is traced; the others hold NaN."""
    call = partial(value_and_grads, dtype=jnp.dtype(case.dtype), form=case.form, backend="mosaic_gpu", norm=case.norm)
    call = partial(call, passes=case.passed)
    if case.live is None:
        return call(problem)
    dead = problem.sources.copy()
    dead[case.live :] = np.nan
    return jax.jit(lambda count: call(problem._replace(sources=dead), count=count))(jnp.int32(case.live))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_against_float64(case):
    problem = problem_of(case)
    live = problem._replace(sources=problem.sources[: case.live])
    with jax.enable_x64(True):
        want = value_and_grads(
            live, jnp.float64, "sequence", "reference", case.norm, vectors=jnp.float64, passes=case.passed
        )
    mixture, lse, grads = run(case, problem)
    low = case.dtype == "bfloat16"
    assert_close(mixture, want[0], BF16_FORWARD if low else F32_FORWARD, "mixture")
    assert_close(lse, want[1], F32_FORWARD, "lse")
    assert not np.asarray(grads["sources"][case.live or case.n :], np.float32).any()
    grads["sources"] = grads["sources"][: case.live]
    for name, grad in grads.items():
        assert_close(grad, want[2][name], BF16_GRADIENT if low else F32_GRADIENT, name)


@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[16]], ids=lambda c: c.name)
def test_the_same_call_gives_the_same_bits(case):
    problem = problem_of(case)
    first = jax.tree.leaves(run(case, problem))
    for _ in range(5):
        for x, again in zip(first, jax.tree.leaves(run(case, problem)), strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(again, np.float32))


def test_the_card_chooses_the_kernels():
    assert backend_of(jnp.ones((3, 4, 64), BF16), jnp.ones(64)) == "mosaic_gpu"
    assert backend_of(jnp.ones((3, 4, 60), BF16), jnp.ones(60)) == "xla"


@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
def test_field_AR02_one_source_is_itself(traced):
    source = jnp.asarray(np.random.default_rng(0).normal(size=(50, 512)), BF16).at[0, 0].set(-0.0)
    count = jnp.int32(1) if traced else 1

    def loss(query):
        mixture, _ = gpu(jnp.stack([source] * 2), query, count=count, return_lse=True)
        return jnp.sum(mixture.astype(jnp.float32) ** 2), mixture

    (_, mixture), query_bar = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.ones(512))
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(mixture, jnp.uint16),
                                  jax.lax.bitcast_convert_type(source, jnp.uint16))  # fmt: skip
    assert not np.asarray(query_bar).any()


def test_field_AR01_zero_query_is_the_plain_mean():
    sources = jnp.asarray(np.random.default_rng(0).normal(size=(6, 40, 256)), jnp.float32)
    mean = np.mean(np.asarray(sources, np.float64), axis=0)
    assert_close(gpu(tuple(sources), jnp.zeros(256)), mean, F32_FORWARD)


def test_a_count_of_zero_is_not_a_number():
    mixture = jax.jit(lambda count: gpu(jnp.ones((3, 4, 64)), jnp.ones(64), count=count))(jnp.int32(0))
    assert np.isnan(mixture).all()


@pytest.mark.parametrize("axis", ["queries", "tokens"])
def test_vmap_is_the_calls_one_by_one(axis):
    problem = make_problem(3, (2, 16), 64)
    sources = jnp.asarray(problem.sources, BF16)
    queries = jnp.stack([jnp.asarray(problem.query, jnp.float32), jnp.ones(64)])
    if axis == "queries":
        got = jax.vmap(lambda q: gpu(sources, q))(queries)
        want = [gpu(sources, q) for q in queries]
    else:
        got = jax.vmap(lambda s: gpu(s, queries[0]), in_axes=1)(sources)
        want = [gpu(sources[:, i], queries[0]) for i in range(2)]
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(jnp.stack(want), np.float32))


def test_two_phases_merge_to_one():
    problem = problem_of(Case("phases", 7, (64,), 256, dtype="float32"))
    sources, query = as_form(jnp.asarray(problem.sources, jnp.float32), "sequence"), jnp.asarray(problem.query)
    (a, lse_a), (b, lse_b) = (gpu(part, query, return_lse=True) for part in (sources[:4], sources[4:]))
    merged = a + jax.nn.sigmoid(lse_b - lse_a)[:, None] * (b - a)
    assert_close(merged, np.asarray(gpu(sources, query), np.float64), F32_FORWARD)
