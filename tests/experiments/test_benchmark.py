"""The benchmark at toy size: what it times, checks and writes. Its figures mean nothing here."""

import json
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    benchmark,
    benchmark_attn_res,
    benchmark_decode,
    benchmark_kda_gpu,
    benchmark_step,
    benchmark_suites,
)
from experiments.benchmark_kda_gpu import Case
from experiments.benchmark_suites import KDACase

SMALL = dict(
    vocab_size=64, hidden_size=32, num_layers=4, kda_num_heads=2, kda_head_dim=16, mla_num_heads=2, kv_lora_rank=16,
    ffn_width=32, dtype="float32", param_dtype="float32", kernel_backend="reference",
)  # fmt: skip
TOY = KDACase(T=48, H=2, K=16, V=8)


class Suite(NamedTuple):
    name: str
    options: dict[str, Any]
    runs: tuple[str, ...]


SUITES = [
    Suite(
        "kda_cpu",
        dict(case=TOY, compile_T=32),
        ("xla forward", "scan forward", "xla forward and gradient", "scan forward and gradient"),
    ),
    Suite(
        "kda_gpu",
        dict(cases=(Case(1, 48, 2, K=16, V=16), Case(2, 1, 2, K=16, V=16))),
        ("B1-H2-T48 forward: xla", "B1-H2-T48 forward and gradient: xla", "decode-B2-H2 step: xla"),
    ),
    Suite(
        "attn_res",
        dict(cases=(benchmark_attn_res.Case("toy", 3, 16, 8, "float32", reference=True),)),
        ("toy forward: xla", "toy forward: reference", "toy forward and gradient: xla", "toy forward: copy"),
    ),
    Suite(
        "decode",
        dict(cases=(benchmark_decode.Case(48, 2, ("hybrid", "mla"), SMALL),)),
        ("48-B2 step: hybrid", "48-B2 piece: hybrid", "48-B2 step: mla", "48-B2 piece: mla"),
    ),
    Suite(
        "train_step",
        dict(
            cases=(
                benchmark_step.Case(
                    "toy",
                    dict(vocab_size=64, hidden_size=16, num_layers=2, remat="layer", kernel_backend="reference"),
                    1,
                    16,
                    2,
                    "tiny",
                    ("standard", "two_phase"),
                ),
            )
        ),
        ("toy step: standard", "toy step: two_phase"),
    ),
]


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.name)
def test_suite_measures_and_writes(suite, tmp_path):
    result = benchmark.measure(suite.name, repeats=3, **suite.options)
    assert set(suite.runs) <= set(result["ms"])
    for ms in result["ms"].values():
        assert len(ms["all"]) == 3 and min(ms["all"]) > 0 and ms["median"] == sorted(ms["all"])[1]
    assert all(np.isfinite(ratio["value"]) and ratio["value"] > 0 for ratio in result["ratios"].values())
    if differences := result["worst_difference"].values():  # decode compares nothing
        assert 0 < max(differences) < 2e-2
    parts = {
        "kda_gpu": " --cases=B1-H2-T48,decode-B2-H2",
        "attn_res": " --cases=toy",
        "train_step": " --cases=toy",
        "decode": " --cases=48-B2",
    }.get(suite.name, "")
    assert result["command"] == f"python -m experiments.benchmark --suite={suite.name} --repeats=3{parts}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"]) and result["versions"]["jax"] == jax.__version__
    benchmark.write(result, tmp_path / "results" / "x.json")
    assert [p.name for p in (tmp_path / "results").iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "results" / "x.json").read_text()) == result
    shown = benchmark.table(result)
    assert all(name in shown for name in (suite.name, result["card"], *suite.runs, *result["ratios"]))


def test_every_suite_is_tried():
    assert {s.name for s in SUITES} == {*benchmark_suites.SUITES, *benchmark._BY_CASE}


def timed(started, median, **more):
    return {
        "suite": "kda_gpu", "case": {}, "started": started, "date": started, "command": "c", "card": "", "versions": {},
        "ms": {name: {"median": median, "all": [median]} for name in more}, "worst_difference": more,
    }  # fmt: skip


def test_cases_measured_apart_are_kept_together():
    """fla is timed once, our kernels again and again: the newest of each is kept with its date, and compared."""
    what = "B1-H32-T8192 forward"
    step, fla, ours = "decode-B1-H32 step: mosaic_gpu", f"{what}: fla", f"{what}: mosaic_gpu"
    both = benchmark_kda_gpu.merge({}, timed("monday", 2.0, **{step: 0.1, fla: 0.1, ours: 0.1}))
    assert list(both["ms"]) == [fla, ours, step]  # in the suite's order
    assert both["ratios"][f"{ours} to fla"] == {"value": 1.0, "at_most": 1.0, "same_run": True}
    later = benchmark_kda_gpu.merge(both, timed("tuesday", 0.5, **{ours: 0.2}))
    assert {name: entry["date"] for name, entry in later["ms"].items()} == {
        fla: "monday",
        ours: "tuesday",
        step: "monday",
    }
    assert later["worst_difference"] == {fla: 0.1, ours: 0.2, step: 0.1}
    assert later["ratios"][f"{ours} to fla"] == {"value": 0.25, "at_most": 1.0, "same_run": False}
    assert later["ratios"][f"{ours} to the 1.01 ms of FlashKDA on an H200"]["value"] == 0.495
    assert later["ratios"][f"{step} to the 0.0477 ms of fla 0.6.0 on an H200"]["value"] == round(2 / 0.0477, 3)


def test_gpu_cases_that_are_wrong_or_not_here_are_not_timed(monkeypatch):
    case = Case(1, 48, 2, K=16, V=16)
    with pytest.raises(
        ValueError, match=r"implementations: got \['mosaic_gpu'\]; B1-H2-T48 can be run here by \['xla'\]"
    ):
        benchmark_kda_gpu.kda_gpu(1, (case,), ("mosaic_gpu", "xla"))
    scan = benchmark_kda_gpu.kda_reference
    monkeypatch.setattr(
        benchmark_kda_gpu, "kda_reference", lambda *a, **kw: jax.tree.map(lambda x: x * 1.02, scan(*a, **kw))
    )
    with pytest.raises(ArithmeticError, match="B1-H2-T48 xla output: results differ by relL2"):
        benchmark_kda_gpu.kda_gpu(1, (case,))


def test_ratio_and_aim_are_shown():
    result = {
        "suite": "s", "card": "c", "case": {"T": 8}, "ms": {"a": {"median": 12.0}, "b": {"median": 3.0}},
        "ratios": {"forward": {"value": 4.0, "at_least": 2.0}}, "compile": {"T": 9, "seconds": 7.5, "at_most": 20.0},
    }  # fmt: skip
    shown = benchmark.table(result)
    assert "forward: 4.00x (at least 2)" in shown and "T=9: 7.5 s (at most 20)" in shown and "12.000 ms" in shown
    assert benchmark_suites._ratio(result, "a", "b") == 4.0


def test_runs_take_turns():
    order = []
    runs = {name: lambda calls, name=name: order.append((name, calls)) for name in "ab"}
    benchmark_suites._in_turns(runs, repeats=2, calls=5)
    assert order == [("a", 1), ("b", 1), ("a", 5), ("b", 5), ("a", 5), ("b", 5)]


def test_a_wrong_answer_is_not_timed(monkeypatch):
    toy = benchmark_attn_res.Case("toy", 3, 16, 8, "float32")
    reference = benchmark_attn_res.attn_res_reference
    monkeypatch.setattr(benchmark_attn_res, "attn_res_reference", lambda *inputs: 1.01 * reference(*inputs))
    with pytest.raises(ArithmeticError, match="toy forward: xla: results differ by relL2"):
        benchmark_attn_res.attn_res_suite(1, (toy,))
    with pytest.raises(ValueError, match=r"implementations: got \['fla'\]; toy can be run here by \['xla', 'copy'\]"):
        benchmark_attn_res.attn_res_suite(1, (toy,), ("fla",))
    assert benchmark_suites.worst_difference(jnp.array([1.0, jnp.nan]), jnp.ones(2)) == float("inf")


def test_gradient_reaches_every_input():
    function = benchmark_suites.with_initial_state(benchmark_suites.kda_reference)
    _, gradients = jax.jit(benchmark_suites.with_gradient(function))(*benchmark_suites.kda_inputs(TOY))
    assert len(gradients) == 6
    assert all(float(jnp.abs(x).max()) > 0 for x in gradients)


def test_gates_are_strong_and_weak():
    g = np.asarray(benchmark_suites.kda_inputs(TOY)[3])
    assert g.min() < -15 and g.max() > -0.01 and (g <= 0).all()
