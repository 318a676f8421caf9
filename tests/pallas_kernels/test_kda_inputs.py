"""Bad input to the KDA functions is refused by name, before anything is traced; odd but legal input is accepted."""

import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    bounded_gate,
    delta_net,
    gated_delta_net,
    kda,
    kda_reference,
    kda_step,
    linear_attention,
    machine,
    segment_ids_from_cu_seqlens,
    softplus_gate,
    which_backend,
)

B, T, H, HV, K, V, S, POOL = 2, 4, 2, 4, 3, 5, 2, 6
GOOD = {
    "q": np.ones((B, T, H, K), np.float32),
    "k": np.ones((B, T, H, K), np.float32),
    "v": np.ones((B, T, HV, V), np.float32),
    "g": np.full((B, T, HV, K), -1.0, np.float32),
    "beta": np.ones((B, T, HV), np.float32),
}
STEP = {n: x[:, 0] for n, x in GOOD.items()} | {"state": np.zeros((B, HV, K, V), np.float32)}
PACKED = {"segment_ids": np.array([[0, 0, 1, 1], [0, -1, 1, -1]], np.int32), "num_segments": S}
IDS = PACKED["segment_ids"]


def ones(*shape):
    return np.ones(shape, np.float32)


class Bad(NamedTuple):
    name: str
    changes: dict  # what differs from GOOD (or STEP)
    says: str  # the argument, what was given, what is allowed


TOKENS = [
    Bad("q_rank", {"q": ones(B, T, K)}, r"q: got float32 of shape \(2, 4, 3\); allowed .*\[B, T, H, K\]"),
    Bad("q_is_a_number", {"q": 1.0}, r"q: got 1.0; allowed .*\[B, T, H, K\]"),
    Bad("q_integers", {"q": np.ones((B, T, H, K), np.int32)}, r"q: got int32 .*allowed is a float array"),
    Bad("k_heads", {"k": ones(B, T, 1, K)}, r"k: got float32 of shape \(2, 4, 1, 3\); .*as in q.* = \(2, 4, 2, 3\)"),
    Bad("k_size", {"k": ones(B, T, H, V)}, r"k: got .*\(2, 4, 2, 5\); .* = \(2, 4, 2, 3\)"),
    Bad("v_rank", {"v": ones(B, T, V)}, r"v: got .*\(2, 4, 5\); allowed is \[B, T, HV, V\]"),
    Bad("v_batch", {"v": ones(1, T, HV, V)}, r"v: got .*\(1, 4, 4, 5\); .*\(2, 4\) as in q"),
    Bad("v_length", {"v": ones(B, T + 1, HV, V)}, r"v: got .*\(2, 5, 4, 5\); .*\(2, 4\) as in q"),
    Bad("v_none", {"v": None}, r"v: got None; allowed is \[B, T, HV, V\]"),
    Bad("HV_not_a_multiple", {"v": ones(B, T, 3, V), "g": -ones(B, T, 3, K), "beta": ones(B, T, 3)},
        r"v: got HV = 3 value heads for H = 2 heads of q and k; allowed is a multiple"),
    Bad("HV_below_H", {"v": ones(B, T, 1, V), "g": -ones(B, T, 1, K), "beta": ones(B, T, 1)},
        r"v: got HV = 1 value heads for H = 2"),
    Bad("no_heads", {"q": ones(B, T, 0, K), "k": ones(B, T, 0, K)}, r"v: got HV = 4 value heads for H = 0"),
    Bad("no_channels", {"q": ones(B, T, H, 0), "k": ones(B, T, H, 0), "g": ones(B, T, HV, 0)},
        r"q, v: got head sizes K = 0, V = 5; allowed is at least 1"),
    Bad("g_per_head", {"g": -ones(B, T, HV)},
        r"g: got shape \(2, 4, 4\), one decay per head; .*\(2, 4, 4, 3\).*gated_delta_net"),
    Bad("g_of_q_heads", {"g": -ones(B, T, H, K)}, r"g: got .*\(2, 4, 2, 3\); .*HV of v.*\(2, 4, 4, 3\)"),
    Bad("g_of_V", {"g": -ones(B, T, HV, V)}, r"g: got .*\(2, 4, 4, 5\); .*K of q.*\(2, 4, 4, 3\)"),
    Bad("beta_per_channel", {"beta": ones(B, T, HV, V)}, r"beta: got .*\(2, 4, 4, 5\); .*\(2, 4, 4\)"),
    Bad("beta_of_q_heads", {"beta": ones(B, T, H)}, r"beta: got .*\(2, 4, 2\); .*HV of v.*\(2, 4, 4\)"),
    Bad("beta_none", {"beta": None}, r"beta: got None; allowed .*\(2, 4, 4\)"),
]  # fmt: skip

OPTIONS = [
    Bad("gate", {"gate": "sigmoid"}, r"gate: got 'sigmoid'; allowed is one of 'log', 'softplus', 'bounded'"),
    Bad("backend", {"backend": "triton"}, r"backend: got 'triton'; allowed is one of 'auto', .*'mosaic_gpu'"),
    Bad("positive_gate", {"g": ones(B, T, HV, K)},
        r"g: got 1.0; allowed is a log-decay in nats, <= 0 .*gate='softplus'"),
    Bad("bounded_without_bound", {"gate": "bounded"}, r"lower_bound: got None with gate='bounded'; pass the bound"),
    Bad("softplus_with_bound", {"gate": "softplus", "lower_bound": -5.0},
        r"lower_bound: got -5.0 with gate='softplus'.*no bound"),
    Bad("bound_zero", {"gate": "bounded", "lower_bound": 0.0}, r"lower_bound: got 0.0; allowed is a finite .*below 0"),
    Bad("bound_positive", {"gate": "bounded", "lower_bound": 5}, r"lower_bound: got 5; .*below 0"),
    Bad("bound_infinite", {"gate": "bounded", "lower_bound": -np.inf}, r"lower_bound: got -inf; .*finite"),
    Bad("bound_nan", {"lower_bound": np.nan}, r"lower_bound: got nan; .*finite"),
    Bad("bound_array", {"lower_bound": np.array([-5.0])},
        r"lower_bound: got array\(\[-5.\]\); allowed is a finite number"),
    Bad("broken_promise", {"lower_bound": -0.5},
        r"g: got -1.0, below the promised lower_bound = -0.5; drop lower_bound"),
    Bad("A_log_of_a_log_gate", {"A_log": ones(HV)}, r"A_log: given with gate='log'.*pass gate='softplus' or 'bounded'"),
    Bad("dt_bias_of_a_log_gate", {"dt_bias": ones(HV, K)}, r"dt_bias: given with gate='log'"),
    Bad("A_log_of_q_heads", {"gate": "softplus", "A_log": ones(H)}, r"A_log: got .*\(2,\); allowed .*\[HV\] = \(4,\)"),
    Bad("A_log_number", {"gate": "softplus", "A_log": 1.0}, r"A_log: got 1.0; allowed .*\[HV\] = \(4,\)"),
    Bad("A_log_integers", {"gate": "softplus", "A_log": np.ones(HV, np.int32)}, r"A_log: got int32 .*float array"),
    Bad("dt_bias_per_head", {"gate": "bounded", "lower_bound": -5.0, "dt_bias": ones(HV)},
        r"dt_bias: got .*\(4,\); allowed is \[HV, K\] = \(4, 3\) or \[HV\*K\] = \(12,\)"),
    Bad("dt_bias_transposed", {"gate": "softplus", "dt_bias": ones(K, HV)},
        r"dt_bias: got .*\(3, 4\); allowed .*\(4, 3\)"),
    Bad("scale_array", {"scale": ones(H)}, r"scale: got float32 of shape \(2,\); allowed is a static number"),
    Bad("scale_nan", {"scale": np.nan}, r"scale: got nan; allowed is a finite number"),
]  # fmt: skip

SEQUENCES = [
    Bad("chunk_size", {"chunk_size": 48}, r"chunk_size: got 48; allowed is one of 16, 32, 64, 128"),
    Bad("state_V_before_K", {"initial_state": ones(B, HV, V, K)},
        r"initial_state: got .*\(2, 4, 5, 3\); .*K before V.* = \(2, 4, 3, 5\)"),
    Bad("state_of_q_heads", {"initial_state": ones(B, H, K, V)},
        r"initial_state: got .*\(2, 2, 3, 5\); .*\(2, 4, 3, 5\)"),
    Bad("state_integers", {"initial_state": np.zeros((B, HV, K, V), np.int32)},
        r"initial_state: got int32 .*float array"),
    Bad("state_without_segments", {"initial_state": ones(B, HV, K, V), **PACKED},
        r"initial_state: got .*\(2, 4, 3, 5\); .*num_segments.*\(2, 2, 4, 3, 5\)"),
    Bad("state_with_segments", {"initial_state": ones(B, S, HV, K, V), "segment_ids": IDS},
        r"initial_state: got .*\(2, 2, 4, 3, 5\); .*\(2, 4, 3, 5\)"),
    Bad("num_segments_alone", {"num_segments": 2}, r"num_segments: got 2 without segment_ids; pass .*\(2, 4\)"),
    Bad("num_segments_zero", {"num_segments": 0, "segment_ids": IDS}, r"num_segments: got 0; .*at least 1"),
    Bad("num_segments_array", {"num_segments": np.array(2), "segment_ids": IDS},
        r"num_segments: got array\(2\); .*static int"),
    Bad("num_segments_true", {"num_segments": True, "segment_ids": IDS}, r"num_segments: got True; .*static int"),
    Bad("ids_rank", {"segment_ids": IDS[0]}, r"segment_ids: got int32 of shape \(4,\); allowed .*\[B, T\] = \(2, 4\)"),
    Bad("ids_float", {"segment_ids": ones(B, T)}, r"segment_ids: got float32 .*; allowed is an integer array"),
    Bad("ids_number", {"segment_ids": 0}, r"segment_ids: got 0; allowed is an integer array"),
    Bad("ids_decrease", {"segment_ids": np.array([[0, 0, 0, 0], [0, 2, 1, 1]])},
        r"segment_ids: got 1 after 2 at row 1, token 2; .*must not decrease"),
    Bad("ids_decrease_across_padding", {"segment_ids": np.array([[0, 0, 0, 0], [3, -1, -1, 2]])},
        r"segment_ids: got 2 after 3 at row 1, token 3"),
    Bad("ids_past_the_end", {"segment_ids": np.array([[0, 0, 1, 1], [0, 0, 2, -1]]), "num_segments": 2},
        r"segment_ids: got 2; allowed is below num_segments = 2"),
    Bad("positive_gate_at_a_token", {"g": np.where(np.arange(T)[:, None, None] == 2, ones(B, T, HV, K), -1), **PACKED},
        r"g: got 1.0; allowed is a log-decay"),
]  # fmt: skip

STEPS = [
    Bad("with_time", {"q": GOOD["q"]}, r"q: got .*\(2, 4, 2, 3\); allowed .*\[B, H, K\]"),
    Bad("g_per_head", {"g": -ones(B, HV)}, r"g: got shape \(2, 4\), one decay per head"),
    Bad("HV_not_a_multiple", {"v": ones(B, 3, V), "g": -ones(B, 3, K), "beta": ones(B, 3)}, r"v: got HV = 3"),
    Bad(
        "state_V_before_K",
        {"state": ones(B, HV, V, K)},
        r"state: got .*\(2, 4, 5, 3\); .*K before V.* = \(2, 4, 3, 5\)",
    ),
    Bad("state_rows", {"state": ones(POOL, HV, K, V)}, r"state: got .*\(6, 4, 3, 5\); .*\(2, 4, 3, 5\)"),
    Bad("state_none", {"state": None}, r"state: got None; allowed .*\(2, 4, 3, 5\)"),
    Bad("state_integers", {"state": np.zeros((B, HV, K, V), np.int32)}, r"state: got int32 .*float array"),
]

POOLS = [
    Bad(
        "pool_V_before_K", {"state": ones(POOL, HV, V, K)}, r"state: got .*\(6, 4, 5, 3\); .*K before V.*\(P, 4, 3, 5\)"
    ),
    Bad("pool_integers", {"state": np.zeros((POOL, HV, K, V), np.int32)}, r"state: got int32 .*float array"),
    Bad(
        "slots_per_token",
        {"slots": np.zeros((B, 1), np.int32)},
        r"slots: got int32 of shape \(2, 1\); .*\[B\] = \(2,\)",
    ),
    Bad("slots_float", {"slots": ones(B)}, r"slots: got float32 .*; allowed is an integer array"),
    Bad("slots_bool", {"slots": np.ones(B, bool)}, r"slots: got bool .*; allowed is an integer array"),
    Bad(
        "past_the_pool", {"slots": np.array([0, POOL])}, r"slots: got 6; the pool has slots 0 to 5, negative is padding"
    ),
    Bad("twice", {"slots": np.array([3, 3])}, r"slots: got \[3, 3\]; a live slot may appear once"),
    Bad("positive_gate_of_a_live_row", {"g": ones(B, HV, K), "slots": np.array([-1, 2])}, r"g: got 1.0; allowed"),
]


def refused(function, arguments, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        function(**arguments)


@pytest.mark.parametrize("function", [kda, kda_reference], ids=["kda", "kda_reference"])
@pytest.mark.parametrize("case", TOKENS + OPTIONS + SEQUENCES, ids=lambda c: c.name)
def test_refused(case, function):
    if case.name == "backend" and function is kda_reference:
        refused(function, GOOD | case.changes, "backend: kda_reference has one way to compute")
    else:
        refused(function, GOOD | case.changes, case.says)


@pytest.mark.parametrize(
    "case", [c for c in TOKENS + OPTIONS + SEQUENCES if c.name not in ("g_per_head", "beta_none")], ids=lambda c: c.name
)
def test_refused_by_linear_attention(case):
    refused(linear_attention, GOOD | case.changes, case.says)


@pytest.mark.parametrize("case", STEPS + [c for c in OPTIONS if c.name != "positive_gate"], ids=lambda c: c.name)
def test_refused_by_kda_step(case):
    changes = {n: x[:, 0] if n in GOOD else x for n, x in case.changes.items()} if case in OPTIONS else case.changes
    refused(kda_step, STEP | changes, case.says)


@pytest.mark.parametrize("case", POOLS, ids=lambda c: c.name)
def test_refused_by_kda_step_with_slots(case):
    pool = {"state": np.zeros((POOL, HV, K, V), np.float32), "slots": np.array([4, -1])}
    refused(kda_step, STEP | pool | case.changes, case.says)


def test_shapes_are_checked_under_jit_too():
    for name, x in (("g", -ones(B, T, HV)), ("initial_state", ones(B, HV, V, K))):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            jax.jit(kda)(**GOOD | {name: x})
    with pytest.raises(ValueError, match="^slots: got"):
        jax.jit(kda_step)(**STEP, slots=ones(B))


def test_a_traced_scale_is_refused():
    for function, arguments in ((kda, GOOD), (kda_step, STEP)):
        with pytest.raises(ValueError, match="^scale: got .*static number"):
            jax.jit(lambda scale, f=function, a=arguments: f(**a, scale=scale))(0.5)
    assert jax.eval_shape(lambda: kda(**GOOD, scale=np.float32(0.5))).output.shape == (B, T, HV, V)


class Gate(NamedTuple):
    name: str
    call: object
    says: str


GATES = [
    Gate("vector", lambda: softplus_gate(jnp.ones(K)), r"x: got shape \(3,\); allowed is \[..., HV, K\]"),
    Gate("A_log", lambda: softplus_gate(jnp.ones((HV, K)), jnp.ones(K)), r"A_log: got .*\(3,\); allowed .*\(4,\)"),
    Gate("dt_bias", lambda: softplus_gate(jnp.ones((HV, K)), None, jnp.ones(HV)), r"dt_bias: got .*\(4,\); .*\(12,\)"),
    Gate("bounded_A_log", lambda: bounded_gate(jnp.ones((HV, K)), jnp.ones(K)),
        r"A_log: got .*\(3,\); allowed .*\(4,\)"),
    Gate("bound", lambda: bounded_gate(jnp.ones((HV, K)), lower_bound=0), r"lower_bound: got 0; allowed .*below 0"),
    Gate("bound_none", lambda: bounded_gate(jnp.ones((HV, K)), lower_bound=None), r"lower_bound: got None; allowed"),
    Gate("linear_logits", lambda: linear_attention(GOOD["q"], GOOD["k"], GOOD["v"], gate="softplus"),
        r"g: got None with gate='softplus'"),
    Gate("linear_beta", lambda: linear_attention(GOOD["q"], GOOD["k"], GOOD["v"], beta_sigmoid=True),
        r"beta: got None with beta_sigmoid"),
    Gate("linear_g", lambda: linear_attention(GOOD["q"], GOOD["k"], GOOD["v"], -ones(B, T, H)),
        r"g: got .*\(2, 4, 2\); .*\(2, 4, 4\)"),
    Gate("linear_q", lambda: linear_attention(1.0, GOOD["k"], GOOD["v"]), r"q: got 1.0; allowed"),
    Gate("linear_v", lambda: linear_attention(GOOD["q"], GOOD["k"], None), r"v: got None; allowed"),
    Gate("delta_q", lambda: delta_net(None, GOOD["k"], GOOD["v"], GOOD["beta"]), r"q: got None; allowed"),
    Gate("gated_delta_none", lambda: gated_delta_net(**GOOD | {"g": None}), r"g: got None; .*\(2, 4, 4\)"),
    Gate("delta_beta", lambda: delta_net(GOOD["q"], GOOD["k"], GOOD["v"], ones(B, T)),
        r"beta: got .*\(2, 4\); .*\(2, 4, 4\)"),
    Gate("delta_v", lambda: delta_net(GOOD["q"], GOOD["k"], ones(B, HV, V), GOOD["beta"]),
        r"v: got .*\(2, 4, 5\); allowed"),
    Gate("gated_delta_g", lambda: gated_delta_net(**GOOD),
        r"g: got float32 of shape \(2, 4, 4, 3\); allowed is one log-decay per .*\(2, 4, 4\)"),
    Gate("gated_delta_v", lambda: gated_delta_net(**GOOD | {"v": ones(V), "g": -ones(B, T, HV)}),
        r"v: got .*\(5,\); allowed"),
]  # fmt: skip


@pytest.mark.parametrize("case", GATES, ids=lambda c: c.name)
def test_refused_by_gates_and_lineage(case):
    with pytest.raises(ValueError, match=f"^{case.says}"):
        case.call()


@pytest.mark.parametrize(
    "cu, says",
    [
        ([1, 4], r"cu_seqlens: got \[1, 4\]; .*rise from 0 to at most T = 8"),
        ([0, 5, 3], r"cu_seqlens: got \[0, 5, 3\]; .*rise"),
        ([0, 9], r"cu_seqlens: got \[0, 9\]; .*T = 8"),
        ([], r"cu_seqlens: got .*shape \(0,\); allowed is an integer array \[N\+1\]"),
        ([[0, 4]], r"cu_seqlens: got int32 of shape \(1, 2\); allowed is an integer array \[N\+1\]"),
        ([0.0, 4.0], r"cu_seqlens: got float32 .*; allowed is an integer array"),
    ],
)
def test_refused_offsets(cu, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        segment_ids_from_cu_seqlens(jnp.asarray(cu), 8)


def test_offsets_become_ids():
    got = segment_ids_from_cu_seqlens([0, 0, 3, 3, 7], 9)
    np.testing.assert_array_equal(got, [[1, 1, 1, 3, 3, 3, 3, -1, -1]])
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(segment_ids_from_cu_seqlens(np.array([0]), 2), [[-1, -1]])
    assert segment_ids_from_cu_seqlens(np.array([0, 0, 0]), 0).shape == (1, 0)


def test_field_LY04_bounded_and_unbounded_are_two_models():
    """A_log = ln 4: neither gate is the other one clamped, and asking for the bound on the wrong one is an error."""
    x, A_log = jnp.array([[1.0, -1.0]]), jnp.log(jnp.array([4.0]))
    np.testing.assert_allclose(bounded_gate(x, A_log, None, -5.0), [[-4.910069, -0.0899310]], rtol=1e-6)
    np.testing.assert_allclose(softplus_gate(x, A_log), [[-5.2530467, -1.2530467]], rtol=1e-6)
    refused(kda, GOOD | {"gate": "softplus", "lower_bound": -5.0}, "lower_bound: got -5.0 with gate='softplus'")
    refused(kda, GOOD | {"gate": "bounded"}, "lower_bound: got None with gate='bounded'")


class Limit(NamedTuple):
    name: str
    says: str
    function: object = kda
    changes: dict = {}
    kind: str = "TPU v5 lite"
    auto_axes: tuple = ()
    backend: str = "mosaic_tpu"


WIDE = {n: np.ones((1, 2, 1, 257), np.float32) for n in "qk"}
WIDE |= {"v": ones(1, 2, 1, V), "g": -ones(1, 2, 1, 257), "beta": ones(1, 2, 1)}
LIMITS = [
    Limit("float16", "an argument is float16 and the kernel reads", changes={"v": np.ones((B, T, HV, V), np.float16)}),
    Limit("chunk_size", "chunk_size is 32 and the kernel's chunks have 64 tokens", changes={"chunk_size": 32}),
    Limit("head_size", "K = 257, V = 5 and the kernel holds states up to 256 x 256", changes=WIDE),
    Limit("no_erase_step", "no mode without the erase step", function=linear_attention),
    Limit("older_chip", "the device is a TPU v4 and the kernel is built for v5e", kind="TPU v4"),
    Limit("auto_axes", r"mesh axes \['tensor'\] are Auto .* wrap the call in pallas_kernels.sharded", auto_axes=(2,)),
    Limit("step_head_size", "head sizes 64, 128 and 256, not K = 3, V = 5", function=kda_step),
]
HALF = {n: np.ones((1, 2, 1, 64), jnp.bfloat16) for n in "qkv"}
HALF |= {"g": -ones(1, 2, 1, 64), "beta": ones(1, 2, 1)}
HALF_STEP = {n: x[:, 0] for n, x in HALF.items()} | {"state": ones(1, 1, 64, 64)}
GPU = dict(changes=HALF, kind="NVIDIA H200", backend="mosaic_gpu")
GPU_STEP = GPU | {"function": kda_step, "changes": HALF_STEP}
LIMITS += [
    Limit("gpu_float32", "v is float32 and the kernel multiplies in 16 bits",
          **GPU | {"changes": HALF | {"v": ones(1, 2, 1, 64)}}),
    Limit("gpu_float16_gate", "an argument is float16 and the kernel reads float32 and bfloat16",
          **GPU | {"changes": HALF | {"g": HALF["g"].astype(np.float16)}}),
    Limit("gpu_float16_state", "an argument is float16",
          **GPU | {"changes": HALF | {"initial_state": np.ones((1, 1, 64, 64), np.float16)}}),
    Limit("gpu_head_size", "K = 64, V = 5 and the kernel's are 64 and 128",
          **GPU | {"changes": HALF | {"v": np.ones((1, 2, 1, 5), jnp.bfloat16)}}),
    Limit("gpu_chunk_size", "chunk_size is 16", **GPU | {"changes": HALF | {"chunk_size": 16}}),
    Limit("gpu_no_erase_step", "no mode without the erase step", **GPU | {"function": linear_attention}),
    *(Limit(f"gpu_{kind}", f"the device is a {kind} and the kernel is built for Hopper", **GPU | {"kind": kind})
      for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA L4", "AMD Instinct MI300X")),
    Limit("gpu_auto_axes", r"mesh axes \['tensor'\] are Auto and jax cannot split a GPU kernel .*sharded",
          **GPU | {"auto_axes": (2,)}),
    Limit("gpu_step_float16_state", "takes float32 and bfloat16 arrays, not float16",
          **GPU_STEP | {"changes": HALF_STEP | {"state": np.ones((1, 1, 64, 64), np.float16)}}),
    Limit("gpu_step_head_size", "head sizes 64 and 128, not K = 3, V = 5", **GPU_STEP | {"changes": {}}),
    Limit("gpu_step_older_chip", "the device is a NVIDIA A100", **GPU_STEP | {"kind": "NVIDIA A100-PCIE-40GB"}),
]  # fmt: skip


@pytest.mark.parametrize("case", LIMITS, ids=lambda c: c.name)
def test_field_TL04_limits_of_the_kernels(case, caplog):
    """Named, the kernel refuses and says why; "auto" says the same once and takes the XLA path."""
    arguments = (STEP if case.function is kda_step else GOOD) | case.changes
    platform = {"mosaic_tpu": "tpu", "mosaic_gpu": "gpu"}[case.backend]
    device = jax.sharding.AbstractDevice(device_kind=case.kind, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh(
        case.auto_axes or (1,), ("tensor",), (jax.sharding.AxisType.Auto,), abstract_device=device
    )
    machine.say_once.cache_clear()
    with jax.sharding.use_abstract_mesh(mesh), caplog.at_level("WARNING", "absl"):
        with pytest.raises(
            NotImplementedError, match=f"backend '{case.backend}': .*{case.says}.*; backend='xla' serves"
        ):
            case.function(**arguments, backend=case.backend)
        for _ in range(2):
            assert which_backend(case.function.__name__, **arguments) == "xla"
    logged = [r.getMessage() for r in caplog.records if r.name == "absl"]
    assert len(logged) == 1 and re.search(f"falls back to the XLA path: .*{case.says}", logged[0])


@pytest.mark.parametrize("rows, pool", [("data", None), (None, "data")], ids=["rows_cut", "pool_cut"])
def test_field_TL04_a_pool_over_several_devices(rows, pool):
    """Each device would write its own copy of the slots; split over heads alone the kernel serves the call."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def call(rows, pool):
        put = lambda shape, *spec: jax.device_put(  # noqa: E731
            jnp.zeros(shape, jnp.bfloat16), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        )
        tokens = {n: put((4, 4, 64), rows, "tensor") for n in "qkvg"} | {"beta": put((4, 4), rows, "tensor")}
        slots = jax.device_put(jnp.arange(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(rows)))
        return tokens | {"state": put((6, 4, 64, 64), pool, "tensor"), "slots": slots}

    with jax.set_mesh(mesh):
        for platform, backend in (("tpu", "mosaic_tpu"), ("cuda", "mosaic_gpu")):
            with pytest.raises(NotImplementedError, match=f"'{backend}': rows or slots lie over several devices"):
                kda_step(**call(rows, pool), backend=backend)
            assert which_backend("kda_step", **call(rows, pool), platform=platform) == "xla"
            assert which_backend("kda_step", **call(None, None), platform=platform) == backend


def test_field_TL04_a_wider_type_than_the_tpu_kernels_read():
    with jax.enable_x64(True):
        wide = {n: x.astype(np.float64) for n, x in GOOD.items()}
        with pytest.raises(NotImplementedError, match="an argument is float64"):
            kda(**wide, backend="mosaic_tpu")


def test_field_TL04_which_backend():
    for op, arguments in (("kda", HALF), ("linear_attention", HALF), ("kda_step", HALF_STEP)):
        for platform in (None, "cpu", "rocm"):
            assert which_backend(op, **arguments, platform=platform) == "xla"
        for platform, kernels in (("tpu", "mosaic_tpu"), ("gpu", "mosaic_gpu"), ("cuda", "mosaic_gpu")):
            served = "xla" if op == "linear_attention" else kernels
            assert which_backend(op, **arguments, platform=platform) == served
        assert which_backend(op, **arguments, backend="reference") == "reference"
        assert which_backend(op, *arguments.values()) == "xla"
        with pytest.raises(ValueError, match="^platform: got 'npu'; allowed is None, 'cpu'"):
            which_backend(op, **arguments, platform="npu")
        with pytest.raises(ValueError, match="^backend: got 'triton'; allowed is one of 'auto'"):
            which_backend(op, **arguments, backend="triton")
    with pytest.raises(ValueError, match="^op: got 'kda_reference'; allowed is one of 'kda', 'kda_step'"):
        which_backend("kda_reference", **GOOD)


class Card(NamedTuple):
    """What jax says of a GPU that is there."""

    device_kind: str
    compute_capability: str


@pytest.mark.parametrize("card, served", [
    (Card("NVIDIA H100 80GB HBM3", "9.0"), True), (Card("NVIDIA Graphics Device", "9.0"), True),
    (Card("NVIDIA A100-SXM4-80GB", "8.0"), False), (Card("NVIDIA B200", "10.0"), False),
    (Card("AMD Instinct MI300X", "gfx942"), False),
])  # fmt: skip
def test_field_TL04_the_card_that_is_there(card, served, monkeypatch):
    """Its compute capability decides, whatever it is called."""
    monkeypatch.setattr(jax, "devices", lambda: [card])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for op, arguments in (("kda", HALF), ("kda_step", HALF_STEP)):
        assert which_backend(op, **arguments) == ("mosaic_gpu" if served else "xla")
    if not served:
        says = f"the device is a {card.device_kind} of compute capability {card.compute_capability} .*; backend='xla'"
        with pytest.raises(NotImplementedError, match=says):
            kda(**HALF, backend="mosaic_gpu")


@pytest.mark.parametrize("kind", ["NVIDIA H100 NVL", "NVIDIA H200", "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200 480GB"])
def test_field_TL04_the_card_of_an_abstract_mesh(kind):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    auto = (jax.sharding.AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("_",), auto, abstract_device=device)):
        assert which_backend("kda", **HALF) == which_backend("kda_step", **HALF_STEP) == "mosaic_gpu"


def test_field_TL04_a_jax_without_mosaic_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
    machine.without_mosaic_gpu.cache_clear()
    try:
        for function, arguments in ((kda, HALF), (kda_step, HALF_STEP)):
            with pytest.raises(NotImplementedError, match="'mosaic_gpu': this jax comes without Mosaic GPU .*'xla'"):
                function(**arguments, backend="mosaic_gpu")
            assert which_backend(function.__name__, **arguments, platform="gpu") == "xla"
    finally:
        machine.without_mosaic_gpu.cache_clear()


# --- Odd but legal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_values_at_padding_are_not_looked_at(backend):
    """Positive gates, gates under a promised bound and NaN are legal where the ids say padding."""
    values = np.broadcast_to(np.array([-1, 7, np.nan, -1], np.float32)[:, None, None], (B, T, HV, K))
    ids = np.array([[0, -1, -1, 0]] * B)
    arguments = GOOD | {"g": values, "segment_ids": ids, "lower_bound": -2.0, "backend": backend}
    out, state = kda(**arguments)
    assert np.isfinite(out).all() and np.isfinite(state).all()
    assert (np.asarray(out)[:, 1:3] == 0).all() and np.any(np.asarray(out)[:, 3])
    kda(**arguments | {"g": np.where(values == 7, -9, values)})
    slots = {"state": np.zeros((POOL, HV, K, V), np.float32), "slots": np.array([4, -1]), "lower_bound": -2.0}
    out, _ = kda_step(**STEP | slots | {"g": np.stack([GOOD["g"][0, 0], ones(HV, K)])})
    assert np.any(out[0]) and (np.asarray(out[1]) == 0).all()


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("rows, length", [(2, 0), (0, 4), (0, 0)])
def test_field_SV03_nothing_to_compute(rows, length, backend):
    """T = 0 and B = 0: empty outputs; the state passes by to the bit and so does its cotangent."""
    empty = {n: jnp.asarray(x[:rows, :length]) for n, x in GOOD.items()}
    r = np.random.default_rng(0)
    for packed in ({}, {"segment_ids": IDS[:rows, :length], "num_segments": S}):
        h0 = r.standard_normal((rows, *([S] if packed else []), HV, K, V)).astype(np.float32)
        dS = r.standard_normal(h0.shape).astype(np.float32)

        def final(h0, tokens, packed=packed):
            return kda(**tokens, **packed, initial_state=h0, backend=backend).state

        out, state = kda(**empty, **packed, initial_state=h0, backend=backend)
        assert out.shape == (rows, length, HV, V) and out.dtype == jnp.float32
        np.testing.assert_array_equal(state, h0)
        dh0, dtokens = jax.vjp(final, h0, empty)[1](jnp.asarray(dS))
        np.testing.assert_array_equal(dh0, dS)
        assert jax.tree.map(jnp.shape, dtokens) == jax.tree.map(jnp.shape, empty)
        zeros = kda(**empty, **packed, backend=backend).state
        assert zeros.shape == h0.shape and not np.any(zeros)


def test_a_step_of_no_rows():
    empty = {n: x[:0] for n, x in STEP.items()}
    out, state = kda_step(**empty)
    assert out.shape == (0, HV, V) and state.shape == (0, HV, K, V)
    pool = np.random.default_rng(0).standard_normal((POOL, HV, K, V)).astype(np.float32)
    out, state = kda_step(**empty | {"state": pool, "slots": np.zeros(0, np.int32)})
    assert out.shape == (0, HV, V)
    np.testing.assert_array_equal(state, pool)


def test_numpy_inputs_and_lists():
    """numpy arrays and lists do as well as jax arrays, to the bit."""
    arguments = GOOD | {"segment_ids": IDS}
    got = kda(**arguments | {"segment_ids": IDS.tolist()})
    want = kda(**jax.tree.map(jnp.asarray, arguments))
    step, wanted = kda_step(**STEP), kda_step(**jax.tree.map(jnp.asarray, STEP))
    for a, b in zip((*got, *step), (*want, *wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(softplus_gate(GOOD["g"]), softplus_gate(jnp.asarray(GOOD["g"])))
