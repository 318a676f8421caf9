"""The TPU's attn_res kernels, interpreted on the CPU against the definition in float64, every gradient on its own."""

import dataclasses
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from pallas_kernels.attn_res import attn_res, mosaic_tpu
from pallas_kernels.attn_res.inputs import check_inputs
from pallas_kernels.attn_res.kernels import mix_by
from pallas_kernels.attn_res.mosaic_tpu.plan import make_plan, source_operands
from pallas_kernels.attn_res.reference import mix_plainly
from tests.pallas_kernels.kda_support import PLAIN, QUICK, TPU, interpreted
from tests.support import BF16_FORWARD, BF16_GRADIENT, F32_FORWARD, F32_GRADIENT, assert_close, equations


class Case(NamedTuple):
    name: str
    N: int
    M: int = 37
    D: int = 128
    dtype: str = "float32"
    key_scale: bool = False
    output_scale: bool = False
    count: int | None = None  # live rows of a buffer, traced; the others hold NaN
    sequence: bool = False  # with a count: rows, and not a buffer
    strong: bool = False  # scores of about 80
    buffer: bool = False
    eps: float = 1e-6


CASES = [
    Case("one_source", 1),
    Case("one_source_normed", 1, D=24, dtype="bfloat16", output_scale=True),
    Case("two_narrow", 2, D=24, key_scale=True),
    Case("two_bf16_odd_lanes", 2, D=200, dtype="bfloat16", key_scale=True, output_scale=True),
    Case("nine", 9, D=200, key_scale=True, output_scale=True),
    Case("nine_bf16_wide", 9, D=1168, dtype="bfloat16", key_scale=True),
    Case("many_blocks_bf16", 2, M=300, dtype="bfloat16", output_scale=True),  # 3 blocks on two cores: one idle step
    Case("whole_blocks", 3, M=256, key_scale=True, output_scale=True),
    Case("three_whole_blocks", 2, M=384, D=24),
    Case("twenty_seven", 27, D=128, key_scale=True),
    Case("sixty_four", 64, M=20, D=24),
    Case("one_token", 3, M=1, D=24, output_scale=True),
    Case("buffer", 4, D=24, buffer=True, key_scale=True, output_scale=True),
    Case("buffer_counted", 5, D=200, count=3, key_scale=True, output_scale=True),
    Case("buffer_counted_bf16", 9, M=300, D=24, count=4, dtype="bfloat16"),
    Case("buffer_of_one", 3, D=24, count=1),
    Case("buffer_full", 3, D=24, count=3),
    Case("sequence_counted", 4, M=150, D=24, count=2, sequence=True),
    Case("strong", 9, D=128, strong=True, key_scale=True),
    Case("strong_bf16", 9, D=128, strong=True, dtype="bfloat16", output_scale=True),
]

NAMED = {case.name: case for case in CASES}


@cache
def problem(case: Case):
    """Arguments of attn_res by name, numpy in the case's dtype and float32, and the cotangents of mixture and lse."""
    r = np.random.default_rng(len(case.name))
    scale = np.exp(r.normal(size=(case.N, case.M, 1)))
    sources = np.array(jnp.asarray(r.normal(size=(case.N, case.M, case.D)) * scale, case.dtype))
    if case.count is not None:
        sources[case.count :] = np.nan
    query = r.normal(size=case.D) * (80 / case.D**0.5 if case.strong else 0.5)
    arrays = {"sources": sources, "query": query.astype(np.float32)}
    if case.key_scale:
        arrays["key_scale"] = (1 + 0.3 * r.normal(size=case.D)).astype(np.float32)
    if case.output_scale:
        arrays["output_scale"] = (1 + 0.3 * r.normal(size=case.D)).astype(np.float32)
    return arrays, r.normal(size=(case.M, case.D)), r.normal(size=case.M)


def by_kernel(inputs, return_lse=True):
    return mix_by(mosaic_tpu.MACHINE, inputs, return_lse)


@cache
def program(mix, case: Case):
    """jitted (arrays, count, cotangents) -> (mixture, lse, gradients by name), sources' as one array."""

    def loss(arrays, count, bar, lse_bar):
        inputs = check_inputs(**arrays, count=count, eps=case.eps)
        mixture, lse = mix(inputs, True)
        return jnp.sum(mixture * bar) + jnp.sum(lse * lse_bar), (mixture, lse)

    def run(arrays, count, bar, lse_bar):
        if (case.count is None or case.sequence) and not case.buffer:
            arrays = {**arrays, "sources": tuple(arrays["sources"])}
        (_, (mixture, lse)), grads = jax.value_and_grad(loss, has_aux=True)(arrays, count, bar, lse_bar)
        if isinstance(grads["sources"], tuple):
            grads["sources"] = jnp.stack(grads["sources"])
        return {"mixture": mixture, "lse": lse, **{f"d{n}": x for n, x in grads.items()}}

    return jax.jit(run, compiler_options=QUICK)


def run(mix, case: Case, wide=None, bars=(1, 1), arrays=None):
    """Results by name, float64 numpy. wide: the dtype to compute all in."""
    own, bar, lse_bar = problem(case)
    with jax.enable_x64(wide is not None):
        arrays = {n: jnp.asarray(x, wide or x.dtype) for n, x in (arrays or own).items()}
        fine = jnp.float64 if wide else jnp.float32
        count = None if case.count is None else jnp.int32(case.count)
        weights = (jnp.asarray(b * x, fine) for b, x in zip(bars, (bar, lse_bar), strict=True))
        results = program(mix, case)(arrays, count, *weights)
    return {n: np.asarray(x).astype(np.float64) for n, x in results.items()}


@pytest.mark.usefixtures("interpreter")
def test_sources_handed_on_add_their_cotangents():
    arrays, bar, _ = problem(NAMED["nine"])
    sources, query = tuple(map(jnp.asarray, arrays["sources"])), jnp.asarray(arrays["query"])

    def loss(sources, passes):
        found = attn_res(sources, query, return_sources=passes, backend="mosaic_tpu")
        mixture, sources = found if passes else (found, sources)
        return jnp.sum(mixture * bar) + sum(jnp.sum(x * i * bar) for i, x in enumerate(sources))

    once, twice = (jax.jit(jax.grad(loss), static_argnums=1)(sources, passes) for passes in (True, False))
    for a, b in zip(once, twice, strict=True):
        assert_close(a, b, F32_GRADIENT)


@cache
def adding(case: Case):
    """jitted (arrays, others, count, cotangents) -> gradients by name, the sources' added to others."""

    def run(arrays, others, count, bar, lse_bar):
        def mix(arrays):
            return mix_by(mosaic_tpu.MACHINE, check_inputs(**arrays, count=count, eps=case.eps), True, True)

        if not case.buffer:
            arrays, others = {**arrays, "sources": tuple(arrays["sources"])}, tuple(others)
        grads = jax.vjp(mix, arrays)[1]((bar.astype(case.dtype), lse_bar, others))[0]
        if not case.buffer:
            grads["sources"] = jnp.stack(grads["sources"])
        return {f"d{n}": x for n, x in grads.items()}

    return jax.jit(run, compiler_options=QUICK)


ADDING = [
    Case("rows", 5, M=256, D=200, key_scale=True, output_scale=True),
    Case("rows_bf16", 2, M=384, dtype="bfloat16"),
    Case("buffer_bf16", 3, M=256, D=24, dtype="bfloat16", buffer=True),
    Case("rows_counted", 5, M=640, D=24, count=3, sequence=True),
    Case("rows_counted_bf16", 4, M=384, D=128, count=2, sequence=True, dtype="bfloat16", key_scale=True),
    Case("buffer_counted_rows", 4, M=384, D=24, count=2, buffer=True),
    Case("ragged", 3, M=300, D=24, count=2, sequence=True),
]
COVERED = ("rows_bf16", "rows_counted", "buffer_counted_rows")  # by the others, but for more blocks or another dtype


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.exhaustive if c.name in COVERED else ()) for c in ADDING]
)
def test_gradients_are_added_to_others(case):
    """On two cores without races: each gradient, and what a dead row had to the bit."""
    arrays, bar, lse_bar = problem(case)
    others = np.array(jnp.asarray(np.random.default_rng(3).normal(size=arrays["sources"].shape), case.dtype))
    count = None if case.count is None else jnp.int32(case.count)
    with interpreted(dataclasses.replace(TPU, detect_races=True, num_cores_or_threads=2)):
        found = adding(case)(arrays, others, count, jnp.asarray(bar, jnp.float32), jnp.asarray(lse_bar, jnp.float32))
        jax.block_until_ready(found)
        assert interpret_pallas_call.races.races_found is False
    wide = run(mix_plainly, case, jnp.float64)
    wide["dsources"] += others.astype(np.float64)
    for name, value in found.items():
        if name == "dsources" and case.count is not None:
            np.testing.assert_array_equal(value[case.count :], others[case.count :])
        assert_close(value, wide[name], BF16_GRADIENT if case.dtype == "bfloat16" else F32_GRADIENT, name)


@pytest.mark.usefixtures("interpreter")
def test_others_that_do_not_fit_are_added_outside(monkeypatch):
    def plan(*args, adds=False, **options):
        return None if adds else make_plan(*args, **options)

    monkeypatch.setitem(mosaic_tpu.MACHINE.backward.__globals__, "make_plan", plan)
    case = Case("outside", 2, D=24)
    arrays, bar, lse_bar = problem(case)
    found = adding(case)(arrays, np.ones_like(arrays["sources"]), None, jnp.float32(bar), jnp.float32(lse_bar))
    assert_close(found["dsources"], run(mix_plainly, case, jnp.float64)["dsources"] + 1, F32_GRADIENT)


def check(case: Case, **options):
    low = case.dtype == "bfloat16"
    forward, gradient = (BF16_FORWARD, BF16_GRADIENT) if low else (F32_FORWARD, F32_GRADIENT)
    result, reference = run(by_kernel, case, **options), run(mix_plainly, case, jnp.float64, **options)
    assert result.keys() == reference.keys()
    for name, value in result.items():
        assert_close(value, reference[name], gradient if name.startswith("d") else forward, f"{case.name} {name}")
    return result


@pytest.fixture
def interpreter():
    with interpreted():
        yield


# What the other cases show with fewer sources, tokens or channels.
LARGE = ("sixty_four", "nine_bf16_wide", "strong_bf16", "two_bf16_odd_lanes")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=pytest.mark.exhaustive if c.name in LARGE else ()) for c in CASES]
)
def test_against_the_definition(case, interpreter):
    result = check(case)
    if case.count is not None:
        assert not result["dsources"][case.count :].any()


@pytest.mark.parametrize("bars", [(1, 0), (0, 1)], ids=["mixture", "lse"])
def test_either_cotangent_alone(bars, interpreter):
    check(NAMED["nine"], bars=bars)


@pytest.mark.parametrize("interpreter", [PLAIN, dataclasses.replace(TPU, detect_races=True, num_cores_or_threads=2)],
                         ids=["plain", "races_of_two_cores"])  # fmt: skip
@pytest.mark.parametrize("name", ["many_blocks_bf16", "buffer_counted"])
def test_every_interpreter_agrees(name, interpreter):
    with interpreted(interpreter):
        check(NAMED[name])
        if interpreter is not PLAIN:
            assert interpret_pallas_call.races.races_found is False


@pytest.mark.parametrize("case", [
    Case("one", 1, D=200, key_scale=True), Case("one_bf16", 1, D=200, dtype="bfloat16"),
    Case("one_live", 4, D=200, count=1), Case("one_live_row", 3, D=24, count=1, sequence=True, dtype="bfloat16"),
], ids=lambda c: c.name)  # fmt: skip
def test_one_source_is_returned_exactly(case, interpreter):
    """Its bits, and exactly no gradient of the query through the mixture, whatever the query."""
    arrays, bar, _ = problem(case)
    result = run(by_kernel, case, bars=(1, 0))
    np.testing.assert_array_equal(result["mixture"], arrays["sources"][0].astype(np.float64))
    np.testing.assert_array_equal(result["dsources"][0], np.asarray(jnp.asarray(bar, case.dtype), np.float64))
    assert not result["dquery"].any()
    assert run(by_kernel, case, bars=(0, 1))["dquery"].any()


def test_a_count_out_of_range(interpreter):
    """Below 1 the mixture is NaN, above N all are live."""
    arrays, *_ = problem(NAMED["buffer"])
    mix = jax.jit(lambda count: by_kernel(check_inputs(arrays["sources"], arrays["query"], count=count)))
    assert np.isnan(np.asarray(mix(jnp.int32(0))[0])).all()
    for much, all_live in zip(mix(jnp.int32(9)), mix(jnp.int32(4)), strict=True):
        np.testing.assert_array_equal(much, all_live)


@pytest.mark.parametrize(
    "case",
    [
        NAMED["many_blocks_bf16"],
        pytest.param(NAMED["nine"], marks=pytest.mark.exhaustive),
        pytest.param(NAMED["buffer_counted_bf16"], marks=pytest.mark.exhaustive),
    ],
    ids=lambda c: c.name,
)
def test_the_same_call_gives_the_same_bits(case):
    """Of every result, whichever core is first."""
    results = []
    for seed in (0, 7):
        with interpreted(dataclasses.replace(TPU, random_seed=seed, num_cores_or_threads=2)):
            results.append(run(by_kernel, case))
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name], err_msg=name)


@pytest.mark.parametrize(
    "case", [NAMED["nine"], NAMED["buffer_counted"], NAMED["sequence_counted"]], ids=lambda c: c.name
)
def test_a_token_does_not_depend_on_the_others(case, interpreter):
    """To the bit, whatever they hold: a NaN stays where it is, in its token and in what is summed over tokens."""
    arrays, *_ = problem(case)
    other = arrays["sources"].copy()
    other[:, 5] = np.nan
    clean, poisoned = run(by_kernel, case), run(by_kernel, case, arrays={**arrays, "sources": other})
    rest = np.arange(case.M) != 5
    assert np.isfinite(clean["mixture"]).all()
    for name in ("mixture", "lse"):
        np.testing.assert_array_equal(poisoned[name][rest], clean[name][rest], err_msg=name)
        assert np.isnan(poisoned[name][5]).all()
    np.testing.assert_array_equal(poisoned["dsources"][:, rest], clean["dsources"][:, rest])


def test_a_zero_query(interpreter):
    """The plain mean."""
    source = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 128)), jnp.float32)
    mixture = by_kernel(check_inputs(tuple(source), jnp.zeros(128)), False)
    np.testing.assert_allclose(mixture, source.mean(0), rtol=1e-5, atol=1e-6)


def test_what_is_kept_and_read():
    """Besides the inputs the backward keeps 512 bytes a token, and nothing around the kernels has a source's size."""
    N, M, D = 5, 64, 256
    sources, query = (jax.ShapeDtypeStruct((M, D), jnp.float32),) * N, jax.ShapeDtypeStruct((D,), jnp.float32)
    mix = lambda s, q: by_kernel(check_inputs(s, q), False)  # noqa: E731
    kept = jax.eval_shape(lambda s, q: jax.vjp(mix, s, q)[1], sources, query)
    assert sum(x.size for x in jax.tree.leaves(kept)) <= N * M * D + M * 128 + 4 * D
    jaxpr = jax.make_jaxpr(jax.grad(lambda s, q: jnp.sum(mix(s, q)), argnums=(0, 1)))(sources, query).jaxpr
    calls = [e for e in equations(jaxpr) if e.primitive.name == "pallas_call"]
    assert [e.params["name"] for e in calls] == ["attn_res_forward", "attn_res_backward"]
    assert max(x.aval.size for e in calls for x in (*e.invars, *e.outvars)) == M * D


@pytest.mark.parametrize("buffer", [True, False], ids=["buffer", "rows"])
def test_a_dead_row_is_fetched_once(buffer):
    """Its window stays at one place, where that of a live row moves on with the tokens."""
    shape = jax.ShapeDtypeStruct((5, 512, 128) if buffer else (512, 128), jnp.float32)
    sources = shape if buffer else (shape,) * 5
    p = make_plan(sources, False, True, backward=False)
    operands, specs = source_operands(p, sources, lambda t, *_: t)
    assert len(operands) == len(specs) == 5 and all(x is shape for x in operands)
    places = [[tuple(map(int, s.index_map(np.int32(t), np.array([3])))) for t in range(4)] for s in specs]
    for i, visited in enumerate(places):
        row = (i,) if buffer else ()
        assert visited == ([(*row, t, 0) for t in range(4)] if i < 3 else [(0,) * len(visited[0])] * 4)


@pytest.mark.parametrize("case, what", [
    (Case("fits", 9, 16, 7168, "bfloat16"), None),
    (Case("fits_too", 64, 16, 2304, "bfloat16"), None),
    (Case("wide", 64, 16, 16384, "float32"), "64 sources of 16384 channels in float32"),
    (Case("many", 65, 16, 24), "65 sources"),
    (Case("half", 2, 16, 24, "float16"), "float16"),
], ids=lambda x: x.name if isinstance(x, Case) else None)  # fmt: skip
def test_limits(case, what):
    sources = (jax.ShapeDtypeStruct((case.M, case.D), case.dtype),) * case.N
    inputs = check_inputs(sources, jax.ShapeDtypeStruct((case.D,), jnp.float32))
    limit = mosaic_tpu.tpu_limits(inputs)
    assert limit is None if what is None else what in limit
