"""attn_res_put: one more live row. The GPU's kernels are lowered here and run where a Hopper GPU is, the TPU's
interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpu_aot import hopper_mesh, lower_for_hopper
from pallas_kernels import attn_res_put
from pallas_kernels.attn_res.mosaic_tpu.bank import put, take
from tests.pallas_kernels.kda_support import interpreted

ROWS = 4


def arrays(D=24, dtype="float32"):
    numbers = np.random.default_rng(0).normal(size=(ROWS + 1, 3, 5, D))
    *bank, row = (jnp.asarray(x, dtype) for x in numbers)
    return tuple(bank), row


def put_and_pull_back(bank, row, count, bars, replayed=False):
    after, pull_back = jax.vjp(lambda bank, row: attn_res_put(bank, row, count, replayed=replayed), bank, row)
    return after, pull_back(bars)


def check(D, dtype):
    bank, row = arrays(D, dtype)
    run = jax.jit(put_and_pull_back, static_argnames="replayed")
    for count in range(ROWS):
        after, (bank_bar, row_bar) = run(bank, row, jnp.int32(count), bank[::-1])
        for i in range(ROWS):
            np.testing.assert_array_equal(after[i], row if i == count else bank[i])
        np.testing.assert_array_equal(row_bar, bank[::-1][count])
        for found, bar in zip(bank_bar[:count], bank[::-1], strict=False):
            np.testing.assert_array_equal(found, bar)
        after, (_, row_bar) = run(bank, row, jnp.int32(count), bank[::-1], replayed=True)
        np.testing.assert_array_equal(np.stack(after), np.stack(bank))
        np.testing.assert_array_equal(row_bar, bank[::-1][count])
    after = run(bank, row, jnp.int32(ROWS), bank)[0]
    np.testing.assert_array_equal(np.stack(after), np.stack(bank))


def test_a_row_is_put_and_its_cotangent_taken():
    check(24, "float32")


def test_on_a_tpu():
    bank, row = arrays()
    with interpreted():
        for count in range(ROWS + 1):
            after, taken = jax.jit(put)(bank, row, jnp.int32(count)), jax.jit(take)(bank, jnp.int32(count))
            for i in range(ROWS):
                np.testing.assert_array_equal(after[i], row if i == count else bank[i])
            np.testing.assert_array_equal(taken, bank[min(count, ROWS - 1)])


@pytest.mark.gpu
@pytest.mark.parametrize("D, dtype", [(24, "float32"), (1024, "bfloat16"), (1168, "bfloat16"), (2304, "float32")])
def test_on_the_card(D, dtype):
    if getattr(jax.devices()[0], "compute_capability", None) != "9.0":
        pytest.skip("runs on a Hopper GPU")
    bank, row = arrays(D, dtype)
    assert "bank_put" in jax.jit(attn_res_put).lower(bank, row, jnp.int32(1)).as_text()
    check(D, dtype)
    several = jax.vmap(lambda bank, row: attn_res_put(bank, row, jnp.int32(1)))(bank, row)
    np.testing.assert_array_equal(several[1], row)


def test_a_row_of_another_kind_is_refused():
    bank, row = arrays()
    with pytest.raises(ValueError, match=r"row is float32\[5, 24\], the bank's are float32\[3, 5, 24\]"):
        attn_res_put(bank, row[0], 1)
    with pytest.raises(ValueError, match="row is bfloat16"):
        attn_res_put(bank, row.astype("bfloat16"), 1)


@pytest.mark.parametrize("D, dtype, kernels", [(1024, "bfloat16", 2), (24, "float32", 2), (20, "bfloat16", 0)])
def test_hopper_writes_one_row(D, dtype, kernels):
    x = jax.ShapeDtypeStruct((2, 64, D), dtype)
    shapes = (x,) * ROWS, x, jax.ShapeDtypeStruct((), jnp.int32), (x,) * ROWS
    assert lower_for_hopper(put_and_pull_back, *shapes).as_text().count("@mosaic_gpu_v2") == kernels
    mesh = hopper_mesh({"data": 2})
    assert "@mosaic_gpu_v2" not in lower_for_hopper(put_and_pull_back, *shapes, mesh=mesh).as_text()
