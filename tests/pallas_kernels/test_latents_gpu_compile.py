"""Attention over cached latents lowered for a Hopper GPU that is not there; compiled where its compiler is.

What it computes is the matter of test_latents_gpu.py and, on a GPU, of test_latents_gpu_device.py.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from experiments.gpu_aot import compile_for, has_compiler, hopper_mesh, lower_for_hopper
from pallas_kernels.latents import attend_latents, latent_backend
from pallas_kernels.latents.decode import FIXED, PROGRAMS, SLOTS, pieces_of

needs_plugin = pytest.mark.skipif(not has_compiler(), reason="compiling for GPU needs jax's CUDA plugin")
HERE = "tests.pallas_kernels.test_latents_gpu_compile"


def arrays(B=2, T=1, N=32, C=512, R=64, L=4104, groups=5, dtype="bfloat16"):
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    whole = (groups, B, L) if groups else (B, L)
    numbers = array(B, dtype="int32"), array(B, T, dtype="int32"), *([array(dtype="int32")] if groups else [])
    return array(B, T, N, C), array(B, T, N, R), array(*whole, C), array(*whole, R), *numbers


def program(**sizes):
    def run(q, q_rope, latent, k_rope, length, position, group=None):
        return attend_latents(q, q_rope, latent, k_rope, length, position, scale=0.1, group=group)

    return run, arrays(**sizes)


@pytest.mark.parametrize("groups", [5, 0], ids=["stacked", "one_layer"])
def test_the_kernel_reads_the_cache_in_place(groups):
    run, shapes = program(groups=groups, T=3)
    lowered = lower_for_hopper(run, *shapes)
    (call,) = re.findall(r"@mosaic_gpu_v2\(.*", lowered.as_text())
    assert f"tensor<{groups or 1}x2x4104x512xbf16>" in call and f"tensor<{groups or 1}x2x4104x64xbf16>" in call
    assert lowered.out_info.shape == (2, 3, 32, 512) and lowered.out_info.dtype == jnp.bfloat16


UNSERVED = {
    "float32": (dict(dtype="float32"), "is float32 and the kernel multiplies in 16 bits"),
    "latents": (dict(C=576), "C = 576 and R = 64"),
    "rope": (dict(R=32), "C = 512 and R = 32"),
    "short_cache": (dict(L=56), "56 slots"),
    "odd_cache": (dict(L=4097), "4097 slots and the kernel's have a multiple of 8"),
}


@pytest.mark.parametrize("sizes, says", UNSERVED.values(), ids=UNSERVED)
def test_what_the_kernel_cannot_serve(sizes, says):
    run, shapes = program(**sizes)
    with pytest.raises(NotImplementedError, match=says):
        lower_for_hopper(run, *shapes)
    with jax.sharding.use_abstract_mesh(hopper_mesh({"_": 1}, AxisType.Auto)):
        assert latent_backend(*shapes[:4]) == "xla"


WRONG = {
    "rope": (1, (2, 1, 31, 64), r"q_rope: got shape \(2, 1, 31, 64\); allowed is \(2, 1, 32, 64\)"),
    "rows": (2, (5, 3, 4104, 512), r"latent: got shape \(5, 3, 4104, 512\); allowed is \(5, 2, 4104, 512\)"),
    "slots": (3, (5, 2, 4096, 64), r"k_rope: got shape .*4096"),
    "stack": (2, (2, 4104, 512), r"allowed are .* and \[groups, B, L, C\], with a group"),
    "length": (4, (3,), r"length: got shape \(3,\)"),
    "position": (5, (2, 2), r"position: got shape \(2, 2\)"),
}


@pytest.mark.parametrize("which, shape, says", WRONG.values(), ids=WRONG)
def test_shapes_that_do_not_go_together(which, shape, says):
    run, shapes = program()
    shapes = [jax.ShapeDtypeStruct(shape, x.dtype) if i == which else x for i, x in enumerate(shapes)]
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(run, *shapes)


def test_where_the_kernel_runs():
    run, shapes = program()
    assert latent_backend(*shapes[:4]) == "xla"  # on the CPU of this test
    with jax.sharding.use_abstract_mesh(hopper_mesh({"rows": 2})):
        assert latent_backend(*shapes[:4]) == "mosaic_gpu"
        with pytest.raises(NotImplementedError, match=r"\['rows'\] may cut the arrays; call it under jax.shard_map"):
            jax.eval_shape(run, *shapes)


def test_a_row_is_shared_by_as_many_programs_as_run_at_once():
    assert pieces_of(1, 2**20) * 1 > 0.95 * PROGRAMS
    assert pieces_of(1, 4096) <= 4096 // SLOTS  # none is without tiles
    assert pieces_of(PROGRAMS, 2**20) == 1 and pieces_of(4 * PROGRAMS, 100) == 1
    for rows, L in ((11, 2**20), (91, 2**17), (367, 2**15)):
        tiles, pieces = L // SLOTS, pieces_of(rows, L)
        rounds = -(-rows * pieces // PROGRAMS)
        assert rounds * (-(-tiles // pieces) + FIXED) < 1.1 * rows * tiles / PROGRAMS + 2 * FIXED


# --- Compiled, where jax's CUDA plugin is --------------------------------------------------------------------------


@needs_plugin
@pytest.mark.parametrize("sizes", [{}, {"T": 3, "N": 96, "groups": 0}, {"C": 128, "N": 5}], ids=str)
def test_two_programs_fit_a_multiprocessor(sizes):
    compiled = compile_for(f"{HERE}:program", sizes)
    kernel = compiled.kernels["latent_decode"]
    assert kernel.blocks_per_sm >= 2 and kernel.spill_store_bytes == kernel.spill_load_bytes == 0, kernel
