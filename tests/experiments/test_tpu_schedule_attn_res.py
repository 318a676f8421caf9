"""The suite tpu_schedule_attn_res: what it makes of the compiler's figures, and that its programs trace."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from experiments import benchmark, tpu_schedule_attn_res
from experiments.tpu_aot import GENERATIONS, Compiled, CompileError, Kernel
from experiments.tpu_schedule_attn_res import MIXES, Mix, find_mix


def kernel(name, **fields):
    figures = dict(grid=(16,), cores=1, hbm_bytes=0, vmem_bytes=2**20, bundles=90, loop_bundles=80, spills=1, fills=2)
    return Kernel(name, **figures | dict(cycles=None, ops={}, utilisation={}, critical_path={}) | fields)


def test_figures_and_table(monkeypatch, capsys):
    """1024 tokens are profiled, times are those of 8192; what fails is said in its row."""
    asked = []

    def compile_for(target, kwargs, generation):
        asked.append((kwargs["mix"]["name"], kwargs["mix"]["M"]))
        if kwargs["mix"]["N"] == 27:
            raise CompileError("no such mix")
        kernels = kernel("attn_res_forward", cycles=175_000), kernel("attn_res_backward")
        return Compiled(GENERATIONS[generation], {k.name: k for k in kernels}, 0, 0, 0, 0, {}, 0.1, None)

    monkeypatch.setattr(tpu_schedule_attn_res, "compile_for", compile_for)
    names = ["kimi_linear_48b-8", "kimi_linear_48b-27"]
    result = benchmark.measure("tpu_schedule_attn_res", generations=["v6e"], mixes=names, jobs=1)
    assert asked == [(name, 1024) for name in names]
    forward, backward, failed = result["rows"]
    assert forward["us"] == pytest.approx(8 * 175_000 / 1750) and forward["cycles_per_64_tokens"] == 10937.5
    assert forward["floor_us"] == pytest.approx(9 * 8192 * 2304 * 2 / 1640e3, abs=0.01)
    assert backward["floor_us"] == pytest.approx(17 * 8192 * 2304 * 2 / 1640e3, abs=0.01)
    assert not backward["profiled"] and backward["cycles_per_64_tokens"] == 16 * 80 / 16
    assert failed["error"] == "no such mix"
    shown = benchmark.table(result)
    assert all(text in shown for text in ("v6e", "attn_res_backward", ">=80", "10938", "1/2", "no such mix", *names))
    assert "v6e kimi_linear_48b-8 in 0.1 s" in capsys.readouterr().out


@pytest.mark.parametrize("mix", [Mix("rows", 2, 128, M=16, output_scale=True), Mix("bank", 3, 128, M=16, buffer=True)])
def test_programs_trace(mix):
    with pltpu.force_tpu_interpret_mode():
        function, arguments = tpu_schedule_attn_res.mix_training(mix._asdict())
        mixture, gradients = jax.eval_shape(function, *arguments)
    assert mixture.dtype == jnp.bfloat16
    leaves = jax.tree.leaves(arguments[2:])
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(gradients)] == [(x.shape, x.dtype) for x in leaves]


def test_mixes_have_names():
    assert len({mix.name for mix in MIXES}) == len(MIXES)
    assert find_mix("kimi_k3-9").D == 7168
    with pytest.raises(ValueError, match="unknown mix 'k3'; mixes: kimi_k3-9"):
        find_mix("k3")
