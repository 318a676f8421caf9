"""attn_res against published numbers, against its definition, and its promises about memory and exactness."""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res, attn_res_reference
from tests.pallas_kernels.attn_res_support import as_form, make_problem, value_and_grads
from tests.quick_compile import quick_compile  # noqa: F401 (a fixture for all tests here)
from tests.support import (
    BF16_FORWARD,
    BF16_GRADIENT,
    F32_FORWARD,
    F32_GRADIENT,
    GOLDEN,
    assert_close,
    equations,
    golden,
)

BACKENDS = ("reference", "xla")
FORMS = ("sequence", "buffer")
GOLDEN_NAMES = sorted(path.stem for path in (GOLDEN / "attnres_ops").glob("*.npz"))


# --- the sources handed on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_sources_handed_on_add_their_cotangents(form, backend):
    """The same values and gradients as of sources that are used twice."""
    problem = make_problem(3)
    _, _, alone = value_and_grads(problem, jnp.float32, form, backend)
    mixture, _, grads = value_and_grads(problem, jnp.float32, form, backend, passes=3)
    others = np.stack([problem.cotangent, -problem.cotangent, problem.cotangent])
    chex.assert_trees_all_close(grads["sources"], alone["sources"] + others, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(grads["query"], alone["query"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_sources_are_handed_on(backend):
    sources = tuple(jnp.asarray(make_problem(4).sources, jnp.float32))
    query = jnp.ones(24)
    for count in (None, 1, 2, jnp.int32(2)):
        mixture, passed = attn_res(sources, query, count=count, return_sources=True, backend=backend)
        chex.assert_trees_all_equal(passed, sources)
        np.testing.assert_array_equal(mixture, attn_res(sources, query, count=count, backend=backend))
    mixture, lse, buffer = attn_res(jnp.stack(sources), query, return_lse=True, return_sources=True, backend=backend)
    assert lse.shape == mixture.shape[:-1] and buffer.shape == (4, *mixture.shape)


# --- published numbers -------------------------------------------------------------------------------------------


def max_error(x, ref) -> float:
    """max|x - ref| / max|ref|, the measure of the golden vectors; plain max|x| where ref is all zero."""
    error = np.abs(np.asarray(x, np.float64) - ref).max()
    return float(error / (np.abs(ref).max() or 1.0))


@pytest.mark.parametrize(
    "backend, form, dtype, bound",
    [
        ("reference", "sequence", "float64", 1e-10),
        ("xla", "buffer", "float64", 1e-10),
        ("xla", "sequence", "float32", 5e-6),
    ],
)
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden(name, backend, form, dtype, bound):
    z = golden("attnres_ops", name)
    with jax.enable_x64(dtype == "float64"):
        args = {
            "sources": as_form(jnp.asarray(z["residuals"], dtype), form),
            "query": jnp.asarray(z["query"], dtype),
            "key_scale": jnp.asarray(z["rms_weight"], dtype),
        }
        if "output_rms_weight" in z:
            args["output_scale"] = jnp.asarray(z["output_rms_weight"], dtype)

        def loss(args):
            args = {**args, "query": args["query"] * float(z["scale"])}
            o = attn_res(**args, eps=float(z["rms_eps"]), backend=backend)
            return jnp.sum(o * jnp.asarray(z["do"], dtype)), o

        (_, o), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(args)
        assert o.dtype == dtype
        assert max_error(o, z["o_f64"]) <= bound
        assert max_error(np.stack(list(grads["sources"])), z["dresiduals_f64"]) <= bound
        assert max_error(grads["query"], z["dquery_f64"]) <= bound
        assert max_error(grads["key_scale"], z["drms_weight_f64"]) <= bound
        if "output_scale" in args:
            assert max_error(grads["output_scale"], z["doutput_rms_weight_f64"]) <= bound


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_example(backend):
    """Four channels by hand: logits 2, 1, 0.5; then the last source split off and merged back."""
    sources = [jnp.array([1.0, 0, 0, 0]), jnp.array([0, 2.0, 0, 0]), jnp.ones(4)]
    query = jnp.array([1, 0.5, 0, -1])
    mixture, lse = attn_res(sources, query, eps=0, return_lse=True, backend=backend)
    np.testing.assert_allclose(mixture, [0.76877, 0.60269, 0.14024, 0.14024], atol=1e-5)
    np.testing.assert_allclose(lse, np.log(np.exp([2, 1, 0.5]).sum()), atol=1e-5)

    early, lse_early = attn_res(sources[:2], query, eps=0, return_lse=True, backend=backend)
    _, lse_late = attn_res(sources[2:], query, eps=0, return_lse=True, backend=backend)
    np.testing.assert_allclose(early, [0.73106, 0.53788, 0, 0], atol=1e-5)
    np.testing.assert_allclose(lse_early, 2.31326, atol=1e-5)
    np.testing.assert_allclose(jax.nn.sigmoid(lse_late - lse_early), 0.14024, atol=1e-5)


# --- the XLA path against the definition ---------------------------------------------------------------------------


class Case(NamedTuple):
    name: str
    n: int
    norm: bool = False
    tokens: tuple[int, ...] = (2, 5)
    dim: int = 24
    spread: float = 1.0
    form: str = "sequence"


CASES = [
    Case("one_source", 1),
    Case("one_source_norm", 1, norm=True),
    Case("two", 2),
    Case("seven_norm", 7, norm=True),
    Case("buffer", 5, form="buffer"),
    Case("buffer_norm", 5, norm=True, form="buffer"),
    Case("no_token_axes", 3, tokens=()),
    Case("one_channel", 3, dim=1),
    Case("odd_sizes", 4, tokens=(3, 1, 7), dim=13, norm=True),
    Case("norms_from_1e-4_to_1e4", 6, spread=4.0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_float32_within_budget(case):
    problem = make_problem(case.n, case.tokens, case.dim, spread=case.spread)
    with jax.enable_x64(True):
        want = value_and_grads(problem, jnp.float64, "sequence", "reference", case.norm, vectors=jnp.float64)
    mixture, lse, grads = value_and_grads(problem, jnp.float32, case.form, "xla", case.norm)
    assert mixture.dtype == lse.dtype == jnp.float32
    assert_close(mixture, want[0], F32_FORWARD, "mixture")
    assert_close(lse, want[1], F32_FORWARD, "lse")
    assert grads.keys() == want[2].keys()
    for name, grad in grads.items():
        assert_close(grad, want[2][name], F32_GRADIENT, name)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_within_budget(form, norm):
    problem = make_problem(6, (3, 8), 64)
    problem = problem._replace(sources=np.asarray(jnp.asarray(problem.sources, jnp.bfloat16), np.float64))
    with jax.enable_x64(True):
        want = value_and_grads(problem, jnp.float64, "sequence", "reference", norm, vectors=jnp.float64)
    mixture, lse, grads = value_and_grads(problem, jnp.bfloat16, form, "xla", norm)
    assert mixture.dtype == grads["sources"].dtype == jnp.bfloat16
    assert lse.dtype == grads["query"].dtype == grads["key_scale"].dtype == jnp.float32
    assert_close(mixture, want[0], BF16_FORWARD, "mixture")
    assert_close(lse, want[1], F32_FORWARD, "lse")  # scores never see a rounded number
    assert_close(grads["sources"], want[2]["sources"], BF16_GRADIENT, "sources")
    # The losses differ by the rounding of the mixture, which the vectors' gradients hardly see.
    for name in grads.keys() - {"sources"}:
        assert_close(grads[name], want[2][name], BF16_GRADIENT, name)


def test_gradients_keep_their_dtypes():
    problem = make_problem(3)
    _, _, grads = value_and_grads(problem, jnp.bfloat16, norm=True, vectors=jnp.bfloat16)
    chex.assert_type(jax.tree.leaves(grads), jnp.bfloat16)


def test_gradients_by_central_differences():
    problem = make_problem(4, (3,), 6)
    with jax.enable_x64(True):
        args = [jnp.asarray(x) for x in problem[:4]]

        def loss(sources, query, key_scale, output_scale):
            out = attn_res(sources, query, key_scale, output_scale=output_scale, return_lse=True, backend="xla")
            return jnp.sum(out[0] * problem.cotangent) + jnp.sum(out[1] * problem.lse_cotangent)

        for i, grad in enumerate(jax.grad(loss, argnums=range(4))(*args)):
            direction = jnp.asarray(np.random.default_rng(i).normal(size=grad.shape))
            step = 1e-5
            ends = [loss(*args[:i], args[i] + sign * step * direction, *args[i + 1 :]) for sign in (1, -1)]
            np.testing.assert_allclose(jnp.vdot(grad, direction), (ends[0] - ends[1]) / (2 * step), rtol=1e-7)


# --- field cases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_field_AR01_zero_query_is_the_plain_mean(backend):
    problem = make_problem(5, spread=3.0)
    problem = problem._replace(query=np.zeros(24), lse_cotangent=0 * problem.lse_cotangent)
    mixture, lse, grads = value_and_grads(problem, jnp.float32, backend=backend)
    assert_close(mixture, problem.sources.mean(0), F32_FORWARD, "mixture")
    np.testing.assert_array_equal(lse, np.float32(np.log(np.float32(5))))
    assert np.abs(grads["query"]).max() > 0.1
    np.testing.assert_array_equal(grads["key_scale"], 0)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("live", ["sequence", "buffer", "count", "traced_count"])
@pytest.mark.parametrize("backend, dtype", [("reference", jnp.float32), ("xla", jnp.float32), ("xla", jnp.bfloat16)])
def test_field_AR02_one_source(backend, dtype, live, norm):
    """Exactly the source, with exactly no query gradient: alone, and as the only live row of a buffer."""
    problem = make_problem(4 if "count" in live else 1, (3, 40), 65)
    sources = as_form(jnp.asarray(problem.sources, dtype), "sequence" if live == "sequence" else "buffer")
    output_scale = jnp.asarray(problem.output_scale, jnp.float32) if norm else None

    def loss(sources, query, one):
        count = {"count": 1, "traced_count": one}.get(live)
        mixture = attn_res(sources, query, count=count, output_scale=output_scale, backend=backend)
        return jnp.sum(mixture * problem.cotangent.astype(np.float32)), mixture

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (sources_bar, query_bar), mixture = step(sources, jnp.asarray(problem.query, jnp.float32), jnp.int32(1))
    np.testing.assert_array_equal(query_bar, 0)
    for dead_bar in sources_bar[1:]:
        np.testing.assert_array_equal(dead_bar, 0)

    if not norm:
        np.testing.assert_array_equal(mixture, sources[0])
        np.testing.assert_array_equal(sources_bar[0], problem.cotangent.astype(np.float32).astype(dtype))
        return

    def rms_norm(v):
        return v / jnp.sqrt(jnp.mean(v * v, -1, keepdims=True) + 1e-6) * problem.output_scale

    with jax.enable_x64(True):
        want, pull = jax.vjp(rms_norm, jnp.asarray(sources[0], jnp.float64))
        want_bar = pull(jnp.asarray(problem.cotangent))[0]
    bounds = (F32_FORWARD, F32_GRADIENT) if dtype == jnp.float32 else (BF16_FORWARD, BF16_GRADIENT)
    assert_close(mixture, want, bounds[0], "RMSNorm")
    assert_close(sources_bar[0], want_bar, bounds[1], "gradient of RMSNorm")


@pytest.mark.parametrize("live", ["sequence", "traced_count"])
def test_field_AR02_no_query_gradient_by_construction(live):
    """Not because two sums happen to cancel: still exactly 0 where those sums overflow."""
    problem = make_problem(1 if live == "sequence" else 3)
    sources = as_form(jnp.asarray(problem.sources, jnp.float32), "sequence" if live == "sequence" else "buffer")

    def loss(query, one):
        count = None if live == "sequence" else one
        mixture, _ = attn_res(sources, query, count=count, return_lse=True, backend="xla")
        return jnp.sum(mixture * 3e38 * np.sign(problem.sources[0]).astype(np.float32))

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones(24), 1), 0)


def remat_everything(f):
    return jax.checkpoint(f)


def remat_by_policy(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)


@pytest.mark.parametrize("remat", [remat_everything, remat_by_policy])
@pytest.mark.parametrize("form", FORMS)
def test_field_AR05_checkpoint_around_each_site(form, remat):
    """A small stack of sites that appends to a Python list inside of the recomputed region."""
    r = np.random.default_rng(0)
    depth, dim = 4, 16
    weights, queries = (jnp.asarray(r.normal(size=s) / 4, jnp.float32) for s in ((depth, dim, dim), (depth, dim)))
    x = jnp.asarray(r.normal(size=(6, dim)), jnp.float32)

    def site(sources, weight, query):
        h = attn_res(sources if form == "sequence" else jnp.stack(sources), query, output_scale=jnp.ones(dim))
        sources.append(jnp.tanh(h @ weight))
        return sources

    def loss(site, weights, queries, x):
        sources = [x]
        for weight, query in zip(weights, queries, strict=True):
            sources = site(list(sources), weight, query)
        return jnp.sum(attn_res(sources, queries[0]) ** 2)

    def lowered(f):
        return jax.jit(jax.value_and_grad(lambda *args: loss(f, *args), argnums=(0, 1, 2))).lower(weights, queries, x)

    plain, recomputed = lowered(site), lowered(remat(site))
    assert recomputed.as_text().count("tanh") > plain.as_text().count("tanh")
    want, got = plain.compile()(weights, queries, x), recomputed.compile()(weights, queries, x)
    assert_close(got[0], want[0], F32_FORWARD, "loss")
    for name, a, b in zip(("weights", "queries", "x"), got[1], want[1], strict=True):
        assert_close(a, b, F32_FORWARD, name)


# --- a live count ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_rows_may_hold_anything(backend, form, traced, norm):
    """NaN, infinity, and zeros where eps is 0, whose norm has no inverse."""
    problem = make_problem(6)
    problem.sources[3:] = np.reshape([np.nan, np.inf, 0.0], (3, 1, 1, 1))
    live = problem._replace(sources=problem.sources[:3])
    want = value_and_grads(live, jnp.float32, form, backend, norm, eps=0.0)

    def run(count):
        return value_and_grads(problem, jnp.float32, form, backend, norm, count=count, eps=0.0)

    got = jax.jit(run)(3) if traced else run(3)
    np.testing.assert_array_equal(np.stack(got[2]["sources"][3:]), 0)
    got[2]["sources"] = got[2]["sources"][:3]
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


def test_traced_count_never_recompiles():
    problem = make_problem(4)
    traces = []

    @jax.jit
    def run(count):
        traces.append(count)
        return attn_res(jnp.asarray(problem.sources, jnp.float32), jnp.ones(24), count=count)

    for count in (1, 2, 3, 4):
        assert_close(run(count), attn_res_reference(problem.sources[:count], np.ones(24)), F32_FORWARD)
    assert len(traces) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_traced_count_of_zero_is_nan_and_not_a_number(backend):
    run = jax.jit(lambda count: attn_res(jnp.ones((3, 4, 8)), jnp.ones(8), count=count, backend=backend))
    assert np.isnan(run(0)).all()


# --- two phases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 4])
def test_two_phases_merge_to_one(split):
    problem = make_problem(7)
    with jax.enable_x64(True):
        args = [jnp.asarray(x) for x in problem[:3]]

        def whole(sources, query, key_scale):
            return attn_res(sources, query, key_scale, return_lse=True)

        def merged(sources, query, key_scale):
            early, lse_early = whole(sources[:split], query, key_scale)
            late, lse_late = whole(sources[split:], query, key_scale)
            mixture = early + jax.nn.sigmoid(lse_late - lse_early)[..., None] * (late - early)
            return mixture, jnp.logaddexp(lse_early, lse_late)

        @partial(jax.jit, static_argnums=0)
        def run(f, *args):
            out, pull = jax.vjp(f, *args)
            return *out, *pull((jnp.asarray(problem.cotangent), jnp.asarray(problem.lse_cotangent)))

        names = ("mixture", "lse", "sources", "query", "key_scale")
        for name, got, want in zip(names, run(merged, *args), run(whole, *args), strict=True):
            assert_close(got, want, 1e-12, name)


# --- promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("form", FORMS)
def test_saves_only_references_and_scalars(form, norm, capsys):
    """What the reverse pass keeps: the inputs themselves, and two scalars per source and token."""
    n, tokens, dim = 3, 7, 5
    sources = as_form(jnp.ones((n, tokens, dim), jnp.bfloat16), form)

    def run(sources, query, output_scale):
        return attn_res(sources, query, output_scale=output_scale if norm else None)

    jax.ad_checkpoint.print_saved_residuals(run, sources, jnp.ones(dim), jnp.ones(dim))
    saved = capsys.readouterr().out.strip().splitlines()
    made_here = [line for line in saved if "from the argument" not in line]
    assert len(saved) - len(made_here) == (n if form == "sequence" else 1) + (2 if norm else 1)
    assert len(made_here) == 2 * n
    assert all(line.startswith(f"f32[{tokens}] ") for line in made_here), made_here


@pytest.mark.parametrize("form", FORMS)
def test_scratch_does_not_grow_with_the_number_of_sources(form):
    """The compiled forward and reverse pass: a few arrays [T, D], never a wide copy of every source."""
    n, tokens, dim = 12, 512, 128
    sources = as_form(jnp.ones((n, tokens, dim), jnp.bfloat16), form)

    def both_passes(sources, query, cotangent):
        return jax.vjp(lambda s, q: attn_res(s, q, output_scale=q), sources, query)[1](cotangent)

    compiled = jax.jit(both_passes).lower(sources, jnp.ones(dim), sources[0]).compile()
    wide_copy = 4 * tokens * dim
    assert compiled.memory_analysis().temp_size_in_bytes <= 6 * wide_copy


def test_no_dot_and_no_stack():
    """A dot could be rounded to a narrow format by the machine; a stack would copy every source."""
    sources = [jnp.ones((8, 16), jnp.bfloat16)] * 4

    def step(sources, query):
        return jax.grad(lambda s, q: jnp.sum(attn_res(s, q, output_scale=q)), argnums=(0, 1))(sources, query)

    names = {equation.primitive.name for equation in equations(jax.make_jaxpr(step)(sources, jnp.ones(16)).jaxpr)}
    assert "reduce_sum" in names
    assert not names & {"dot_general", "concatenate", "scatter", "dynamic_update_slice"}


def test_deterministic():
    problem = make_problem(6, (4, 64), 64)
    sources, query = jnp.asarray(problem.sources, jnp.bfloat16), jnp.asarray(problem.query, jnp.float32)
    step = jax.jit(jax.grad(lambda *args: jnp.sum(attn_res(*args, output_scale=query) ** 2), argnums=(0, 1, 2)))
    first = step(sources, query, query)
    for _ in range(5):
        chex.assert_trees_all_equal(step(sources, query, query), first)


def test_tokens_do_not_see_each_other():
    problem = make_problem(4, (6,))
    whole = attn_res(jnp.asarray(problem.sources, jnp.float32), problem.query, output_scale=problem.output_scale)
    problem.sources[:, 1:] = np.nan
    spoilt = attn_res(jnp.asarray(problem.sources, jnp.float32), problem.query, output_scale=problem.output_scale)
    np.testing.assert_array_equal(whole[0], spoilt[0])
