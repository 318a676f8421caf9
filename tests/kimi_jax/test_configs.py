"""Presets, overrides, and the errors that name what is wrong."""

import dataclasses
from typing import NamedTuple

import pytest

from kimi_jax import get_config
from kimi_jax.configs import PRESETS, ModelConfig, layer_pattern_from_one_based


def test_every_preset_carries_its_name():
    assert {"tiny", "kimi_linear_48b", "kimi_k3"} < set(PRESETS)
    for name in PRESETS:
        assert get_config(name).name == name


def test_published_layer_patterns():
    linear = get_config("kimi_linear_48b")
    assert [i for i, kind in enumerate(linear.layer_kinds) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]
    assert linear.ffn_kinds == ("dense",) + 26 * ("moe",)
    assert linear.lower_bound is None  # the released configuration has no bound: unbounded, not some default
    k3 = get_config("kimi_k3")
    assert [i for i, kind in enumerate(k3.layer_kinds) if kind == "mla"] == [*range(3, 92, 4), 92]
    assert (k3.layer_kinds.count("kda"), k3.layer_kinds.count("mla")) == (69, 24)
    assert (k3.lower_bound, k3.block_size) == (-5.0, 24)  # 12 transformer layers


def test_patterns_by_period():
    kinds = {every: get_config("tiny", num_layers=4, mla_every=every).layer_kinds for every in (0, 1, 2, 4)}
    assert kinds[0] == ("kda",) * 4
    assert kinds[1] == ("mla",) * 4
    assert kinds[2] == ("kda", "mla") * 2
    assert kinds[4] == ("kda", "kda", "kda", "mla")


def test_overrides_leave_the_preset_alone():
    config = get_config("tiny", hidden_size=96, lower_bound=-5)
    assert (config.hidden_size, config.lower_bound) == (96, -5)
    assert get_config("tiny").hidden_size != 96
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 32


class Bad(NamedTuple):
    name: str
    fields: dict
    message: str


BAD_FIELDS = [
    Bad("odd_block", dict(block_size=3), r"block_size=3 .*1 or an even"),
    Bad("zero_block", dict(block_size=0), r"block_size=0 .*1 or an even"),
    Bad("heads", dict(kda_num_heads=4, kda_num_value_heads=6), r"kda_num_value_heads=6 .*multiple of kda_num_heads=4"),
    Bad("bound", dict(lower_bound=0.5), r"lower_bound=0.5 .*None .*below 0"),
    Bad("kda_gate", dict(kda_gate="scalar"), r"kda_gate='scalar' .*channel.*head"),
    Bad("rope_theta", dict(mla_rope_theta=0), r"mla_rope_theta=0 .*None \(NoPE\) or above 0"),
    Bad("odd_rope", dict(mla_rope_theta=1e4, qk_rope_dim=5), r"qk_rope_dim=5 .*even .*mla_rope_theta=10000"),
    Bad("no_rope", dict(mla_rope_theta=1e4, qk_rope_dim=0), r"qk_rope_dim=0 .*even .*mla_rope_theta=10000"),
    Bad("residual", dict(residual="hyper"), r"residual='hyper' .*standard.*full_attn_res.*block_attn_res"),
    Bad("activation", dict(activation="gelu"), r"activation='gelu' .*swiglu.*situ"),
    Bad("dtype", dict(dtype="float16"), r"dtype='float16' .*float32.*bfloat16.*float64"),
    Bad("remat", dict(remat="full"), r"remat='full' .*none.*layer.*dots.*block"),
    Bad("type", dict(num_layers="4"), r"num_layers='4' .*int"),
    Bad("bool_is_no_int", dict(num_layers=True), r"num_layers=True .*int"),
    Bad("int_is_no_bool", dict(scan_layers=1), r"scan_layers=1 .*bool"),
    Bad("negative", dict(hidden_size=-1), r"hidden_size=-1 .*at least 1"),
    Bad("top_k", dict(num_experts=4, top_k=5, expert_width=8), r"top_k=5 .*1 to num_experts=4"),
    Bad("width", dict(num_experts=4, top_k=2), r"expert_width=0 .*at least 1"),
    Bad("groups", dict(num_experts=4, top_k=2, expert_width=8, num_expert_groups=3), r"num_expert_groups=3 .*divisor"),
    Bad("mla_layers", dict(mla_layers=(1, 4)), r"mla_layers=\(1, 4\) .*below num_layers=4"),
    Bad("root", dict(hf_root="transformer."), r"hf_root='transformer.' .*model\..*language_model"),
    Bad("A_log_short", dict(hf_A_log_shape=(1,)), r"hf_A_log_shape=\(1,\) .*N >= 2 value heads"),
    Bad("A_log_shape", dict(hf_A_log_shape=(2, 1)), r"hf_A_log_shape=\(2, 1\) .*\(1, 1, 2, 1\)"),
    Bad("depth_heads", dict(depth_heads=5), r"depth_heads=5 .*divisor of hidden_size=64"),
    Bad("no_depth_heads", dict(depth_heads=0), r"depth_heads=0 .*at least 1"),
    Bad("depth_weights", dict(depth_weights="relu"), r"depth_weights='relu' .*softmax.*sigmoid.*static.*dense_former"),
    Bad("mla_softmax1", dict(mla_softmax1=True, mla_every=0), r"mla_softmax1=True .*no layer is MLA"),
    Bad("positions_of_none", dict(mla_rope_theta=1e4, mla_every=0), r"mla_rope_theta=10000.0 .*no layer is MLA"),
    Bad("gates_of_none", dict(kda_gate="head", mla_every=1), r"kda_gate='head' .*no layer is KDA.*'channel'"),
    Bad("two_phases_of_softmax1", dict(depth_weights="softmax1", depth_two_phase=True), r"depth_two_phase.*softmax1"),
    Bad("depth_query", dict(depth_query="token"), r"depth_query='token' .*parameter.*hidden"),
    Bad("depth_window", dict(depth_window=0), r"depth_window=0 .*None or at least 1"),
    Bad("depth_streams", dict(residual="mhc", depth_streams=1), r"depth_streams=1 .*at least 2"),
    Bad("streams_of_none", dict(depth_streams=2), r"depth_streams=2 .*only residual='mhc'.*leave it at 4"),
    Bad("weighs_nothing", dict(residual="standard", depth_heads=4), r"depth_heads=4 .*'standard' weighs no sources"),
    Bad(
        "two_phases_of_full", dict(residual="full_attn_res", depth_two_phase=True), r"depth_two_phase=True .*'full_attn"
    ),
    Bad("two_phases_of_sigmoids", dict(depth_weights="sigmoid", depth_two_phase=True), r"depth_two_phase.*'sigmoid'"),
    Bad("two_phases_of_ones", dict(block_size=1, depth_two_phase=True), r"depth_two_phase.*'block_size': 1"),
    Bad("two_phases_by_layer", dict(remat="layer", depth_two_phase=True), r"remat='layer' .*'block', 'dots' or 'none'"),
    Bad("mhc_weighs_nothing", dict(residual="mhc", depth_window=8), r"depth_window=8 .*'mhc' weighs no sources"),
    Bad("static_key", dict(depth_weights="static", depth_key_norm=False), r"depth_key_norm=False .*'static' has no"),
    Bad("static_query", dict(depth_weights="static", depth_query="hidden"), r"depth_query='hidden' .*has no query"),
    Bad("static_heads", dict(depth_weights="dense_former", depth_heads=2), r"depth_heads=2 .*'dense_former' has no"),
    Bad(
        "scalars_added", dict(residual="delta_block", depth_weights="dense_former"), r"depth_weights='dense_former' .*"
    ),
    Bad("first_mix", dict(first_mix=True, depth_weights="sigmoid"), r"first_mix=True .*K3's files"),
    Bad("first_mix_delta", dict(first_mix=True, residual="delta_block"), r"first_mix=True .*K3's files"),
    Bad("mla_order", dict(mla_layers=(2, 1)), r"mla_layers=\(2, 1\) .*rising"),
]


@pytest.mark.parametrize("bad", BAD_FIELDS, ids=lambda b: b.name)
def test_bad_fields_raise(bad):
    with pytest.raises(ValueError, match=bad.message):
        get_config("tiny", **bad.fields)


def test_unknown_names_list_what_exists():
    with pytest.raises(ValueError, match="unknown preset 'kimi_k4'.*did you mean 'kimi_k3'.*kimi_linear_48b.*tiny"):
        get_config("kimi_k4")
    with pytest.raises(ValueError, match="unknown field 'hidden'.*hidden_size.*vocab_size|unknown field 'hidden'"):
        get_config("tiny", hidden=3)
    fields = [field.name for field in dataclasses.fields(ModelConfig)]
    with pytest.raises(ValueError) as error:
        get_config("tiny", nonsense=3)
    assert all(field in str(error.value) for field in fields)


def test_one_based_lists():
    """Field case CK04."""
    assert layer_pattern_from_one_based([1, 2, 3, 5, 6, 7], [4, 8], 8) == (3, 7)


class BadList(NamedTuple):
    name: str
    kda: list[int]
    full: list[int]
    layers: int
    message: str


BAD_LISTS = [
    BadList("zero", [0, 1, 2, 3], [4], 4, r"kda_layers has \[0\].*count from 1 to num_layers=4"),
    BadList("zero_in_full", [1, 2, 3], [0, 4], 4, r"full_attn_layers has \[0\]"),
    BadList("beyond", [1, 2, 3], [4, 5], 4, r"full_attn_layers has \[5\].*num_layers=4"),
    BadList("overlap", [1, 2, 3, 4], [4], 4, r"\[4\] are in both kda_layers and full_attn_layers"),
    BadList("gap", [1, 3], [4], 4, r"\[2\] are in neither"),
    BadList("twice", [1, 2, 2, 3], [4], 4, r"kda_layers=.*twice"),
]


@pytest.mark.parametrize("bad", BAD_LISTS, ids=lambda b: b.name)
def test_bad_lists_raise(bad):
    with pytest.raises(ValueError, match=bad.message):
        layer_pattern_from_one_based(bad.kda, bad.full, bad.layers)
