"""Released checkpoints in and out, field cases CK01 and CK02. What loaded models compute: test_golden_models.py."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from kimi_jax import KimiLM, get_config, load_hf, save_hf
from kimi_jax import convert as convert_module
from kimi_jax.convert import load_hf_config
from kimi_jax.hf_config import config_from_hf, config_to_hf
from kimi_jax.hf_files import CONFIG, INDEX, SINGLE
from kimi_jax.hf_tensors import official_tensors
from kimi_jax.mxfp4 import decode
from kimi_jax.sharding import make_mesh, param_shardings
from tests.kimi_jax.small_models import EXPERTS, forward, small_config, small_model, tokens_for
from tests.support import GOLDEN

LINEAR, K3, K3_PACKED = (GOLDEN / name for name in ("kimi_linear_a", "kimi_k3_a", "kimi_k3_b"))

FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, whatever its index says."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def decoded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With codes and scales replaced by the weights that they stand for."""
    whole = {name: value for name, value in tensors.items() if not name.endswith(("_packed", "_scale"))}
    for name in tensors.keys() - whole.keys():
        if name.endswith("_packed"):
            weight = name.removesuffix("_packed")
            whole[weight] = decode(tensors[name], tensors[f"{weight}_scale"]).astype(jnp.bfloat16)
    return whole


def assert_same_bits(tensors: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (value.dtype, value.shape), name
        assert tensors[name].tobytes() == value.tobytes(), name


class RoundTrip(NamedTuple):
    name: str
    folder: Path
    fields: dict[str, Any] = {}
    saving: dict[str, Any] = {}
    files: int = 1


ROUND_TRIPS = [
    RoundTrip("linear", LINEAR),
    RoundTrip("linear_scanned_shard_per_layer", LINEAR, {"scan_layers": True}, {"shard_bytes": 0}, files=7 + 3),
    RoundTrip("k3", K3),
    RoundTrip("k3_sharded", K3, saving={"shard_bytes": 500_000}, files=4),
    RoundTrip("k3_decoded", K3_PACKED),
    RoundTrip("k3_packed_again", K3_PACKED, saving={"mxfp4": True, "shard_bytes": 600_000}, files=2),
]


@pytest.mark.parametrize("case", ROUND_TRIPS, ids=lambda case: case.name)
def test_what_was_read_is_written(case, tmp_path):
    model = load_hf(case.folder, **case.fields)
    save_hf(model, tmp_path, **case.saving)
    assert len(list(tmp_path.glob("*.safetensors"))) == case.files
    assert (tmp_path / INDEX).exists() == (case.files > 1)
    original, written = tensors_of(case.folder), tensors_of(tmp_path)
    if case.saving.get("mxfp4"):
        assert written.keys() == original.keys()
    assert_same_bits(decoded(written), decoded(original))
    assert load_hf_config(tmp_path, **case.fields) == model.config
    if case.files > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in written.values())


@pytest.mark.parametrize("folder", [LINEAR, K3, K3_PACKED], ids=lambda folder: folder.name)
def test_every_variable_is_filled_in_its_dtype(folder):
    model = load_hf(folder, dtype="bfloat16")
    named = official_tensors(model)
    leaves = jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    assert len(leaves) == len({id(tensor.variable) for tensor in named.values()})
    assert all(isinstance(leaf.get_value(), jax.Array) for leaf in leaves)
    wide = {name.rpartition("self_attn.")[2] for name, t in named.items() if t.variable.dtype == jnp.float32}
    wide = {name for name in wide if not name.endswith("gate.e_score_correction_bias")}
    assert wide == {"A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight"}
    assert {tensor.variable.dtype.name for tensor in named.values()} == {"float32", "bfloat16"}


def test_rounding_on_the_way_out_spares_the_float32_tensors(tmp_path):
    save_hf(load_hf(K3), tmp_path, dtype="bfloat16")
    written, original = tensors_of(tmp_path), tensors_of(K3)
    name = "language_model.model.layers.1.self_attn."
    assert written[f"{name}q_proj.weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        written[f"{name}q_proj.weight"], original[f"{name}q_proj.weight"].astype(jnp.bfloat16)
    )
    for kept in ("A_log", "dt_bias", "k_conv1d.weight", "o_norm.weight"):
        np.testing.assert_array_equal(written[name + kept], original[name + kept])
    assert load_hf_config(tmp_path).param_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_float32_tensor_among_bfloat16_ones_stays_so_unless_a_dtype_is_given(dtype, tmp_path):
    shutil.copytree(K3_PACKED, tmp_path / "one")
    head, wide = "language_model.lm_head.weight", load_file(K3_PACKED / SECOND)
    wide[head] = wide[head].astype(np.float32) + 1e-6
    save_file(wide, tmp_path / "one" / SECOND)
    model = load_hf(tmp_path / "one", dtype=dtype)
    assert model.head[...].dtype == (dtype or "float32")
    assert model.embedding[...].dtype == model.layers.layer(1).ffn.gate[...].dtype == "bfloat16"
    if dtype is None:
        save_hf(model, tmp_path / "two")
        assert_same_bits(decoded(tensors_of(tmp_path / "two")), decoded(tensors_of(tmp_path / "one")))


class MeshCase(NamedTuple):
    name: str
    axis_type: AxisType
    scan: bool


@pytest.mark.parametrize(
    "case",
    [MeshCase("auto", AxisType.Auto, False), MeshCase("explicit_scanned", AxisType.Explicit, True)],
    ids=lambda case: case.name,
)
def test_straight_onto_a_mesh(case, tmp_path):
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, axis_type=case.axis_type)
    with jax.set_mesh(mesh):
        model = load_hf(LINEAR, mesh=mesh, scan_layers=case.scan)
    for variable in jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        wanted = param_shardings(variable, mesh)
        assert variable.get_value().sharding.is_equivalent_to(wanted, len(variable.shape))
    assert model.embedding[...].addressable_shards[0].data.shape == (128, 32)
    save_hf(model, tmp_path)
    assert_same_bits(tensors_of(tmp_path), tensors_of(LINEAR))


def test_the_host_holds_one_layer(tmp_path):
    """What Python and numpy hold beside the arrays on the devices, reading and writing four layers.

    Layers are scanned, because a CPU may take over the memory that a whole parameter was read into.
    """
    config = small_config(
        hidden_size=256, num_layers=4, mla_every=2, kda_head_dim=64, scan_layers=True, first_dense_layers=0,
        residual="standard",
        **(EXPERTS | {"expert_width": 128}),
    )  # fmt: skip
    model = KimiLM(config, rngs=nnx.Rngs(0))
    layer = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model.layers.layer(0))))
    assert layer > 2_000_000
    save_hf(model, tmp_path / "warm", shard_bytes=0)  # so that what is cached once is not counted
    load_hf(tmp_path / "warm", scan_layers=True)
    for run in (
        lambda: save_hf(model, tmp_path / "files", shard_bytes=0),
        lambda: load_hf(tmp_path / "warm", scan_layers=True),
    ):
        tracemalloc.start()
        run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.2 * layer


class Released(NamedTuple):
    preset: str
    fields: dict[str, Any]
    tensors: int  # an expert's codes and scales counted as one
    parameters: int
    first_and_last_mla: tuple[int, int]  # counted from 1, as published


RELEASED = [
    Released("kimi_linear_48b", {}, 20_493, 49_122_681_728, (4, 27)),
    # 497,220 tensors in the index, less 168 of vision, less the scales of 92 * 896 * 3 matrices.
    Released(
        "kimi_k3",
        {"hf_root": "language_model.model.", "hf_A_log_shape": (128,), "first_mix": True},
        497_220 - 168 - 92 * 896 * 3,
        2_779_484_478_208,
        (4, 93),
    ),
]


@pytest.mark.parametrize("case", RELEASED, ids=lambda case: case.preset)
def test_the_released_models_are_all_there(case):
    config = get_config(case.preset, **case.fields)
    raw = config_to_hf(config, dtype="bfloat16")
    layers = raw.get("text_config", raw)["linear_attn_config"]["full_attn_layers"]
    assert (layers[0], layers[-1]) == case.first_and_last_mla
    same = {"name": config.name, "scan_layers": True, "remat": "layer", **case.fields}
    assert config_from_hf(json.loads(json.dumps(raw)), same) == config
    tensors = official_tensors(nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0))))
    assert len(tensors) == case.tensors
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors.values()) == case.parameters


@pytest.mark.parametrize("root", ["model.", "language_model.model."])
def test_both_roots(root, tmp_path):
    save_hf(small_model(small_config(hf_root=root)), tmp_path)
    assert f"{root}layers.1.self_attn.kv_b_proj.weight" in tensors_of(tmp_path)
    assert f"{root.removesuffix('model.')}lm_head.weight" in tensors_of(tmp_path)
    assert load_hf(tmp_path).config.hf_root == root


def test_a_dense_layer_as_transformers_saves_it(tmp_path):
    """Its save_pretrained puts the matrices of dense layers where those of experts are."""
    shutil.copytree(LINEAR, tmp_path / "copy")
    tensors = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in load_file(LINEAR / SINGLE).items()}
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in tensors
    save_file(tensors, tmp_path / "copy" / SINGLE)
    save_hf(load_hf(tmp_path / "copy"), tmp_path / "official")
    assert_same_bits(tensors_of(tmp_path / "official"), tensors_of(LINEAR))


def test_where_peers_differ_the_caller_chooses():
    by_default = load_hf(LINEAR).layers.layer(3)
    assert (by_default.ffn.router_weights, by_default.attention.kv_norm.eps) == ("unbiased", 1e-6)
    chosen = load_hf(LINEAR, router_weights="biased", mla_inner_norm_eps=1e-5).layers.layer(3)
    assert (chosen.ffn.router_weights, chosen.attention.kv_norm.eps) == ("biased", 1e-5)


# Field cases. A folder is written, one kind of tensor in it replaced, and read again.


def replace_tensors(folder: Path, change: Callable[[str, np.ndarray], np.ndarray | None]) -> None:
    """Rewrite a folder of one file with change(name, tensor); None drops a tensor."""
    tensors = {name: change(name, value) for name, value in load_file(folder / SINGLE).items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / SINGLE)


class ConvCase(NamedTuple):
    name: str
    heads: int
    head_dim: int
    layout: Callable[[np.ndarray], np.ndarray]  # of [D, W]
    refused: bool = True


CONV_CASES = [
    ConvCase("official_4x4", 2, 2, lambda w: w[:, None, :], refused=False),
    ConvCase("official_256x4", 4, 64, lambda w: w[:, None, :], refused=False),
    ConvCase("no_middle_4x4", 2, 2, lambda w: w),
    ConvCase("no_middle_256x4", 4, 64, lambda w: w),
    ConvCase("taps_first_256x4", 4, 64, lambda w: w.T),
    ConvCase("taps_first_with_middle_256x4", 4, 64, lambda w: w.T[:, None, :]),
    ConvCase("channels_taps_one_4x4", 2, 2, lambda w: w[:, :, None]),
]


@pytest.mark.parametrize("case", CONV_CASES, ids=lambda case: case.name)
def test_field_CK01(case, tmp_path):
    """Only the published layout [D, 1, W] is read, so that nothing is guessed where D = W; its last tap is now."""
    D, W = case.heads * case.head_dim, 4
    config = small_config(num_layers=1, mla_every=0, kda_num_heads=case.heads, kda_head_dim=case.head_dim)
    save_hf(small_model(config), tmp_path / "one")
    w_DW = np.arange(D, dtype=np.float32)[:, None] + np.arange(W, dtype=np.float32) / 10
    stored = np.ascontiguousarray(case.layout(w_DW))
    replace_tensors(tmp_path / "one", lambda name, value: stored if "k_conv1d" in name else value)
    if case.refused:
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.k_conv1d\.weight is \[.*should be \[\d+, 1, 4\]"):
            load_hf(tmp_path / "one")
        return
    model = load_hf(tmp_path / "one")
    impulse_BTD = jnp.zeros((1, 8, D)).at[:, 2].set(1.0)
    y_BTD, _ = model.layers.layer(0).attention.k_conv(impulse_BTD)
    np.testing.assert_array_equal(y_BTD[0, 2 : 2 + W], jax.nn.silu(w_DW[:, ::-1].T))
    save_hf(model, tmp_path / "two")
    assert_same_bits(tensors_of(tmp_path / "two"), tensors_of(tmp_path / "one"))


H, K, MORE = 96, 2, 128


def with_tail(A_log: np.ndarray, tail: float) -> np.ndarray:
    return np.concatenate([A_log, np.full(MORE - H, tail, np.float32)])


class GateCase(NamedTuple):
    name: str
    tensor: str
    store: Callable[[np.ndarray], np.ndarray]
    message: str | None = None


GATE_CASES = [
    GateCase("heads", "A_log", lambda x: x),
    GateCase("1_1_heads_1", "A_log", lambda x: x.reshape(1, 1, H, 1)),
    GateCase("padded", "A_log", lambda x: with_tail(x, 0)),
    GateCase("one_short", "A_log", lambda x: x[:-1], r"A_log is \[95\] and should be \[96\]"),
    GateCase("padded_with_numbers", "A_log", lambda x: with_tail(x, 0.5), "A_log is not 0 behind its first 96 entries"),
    GateCase("column", "A_log", lambda x: x[:, None], r"A_log is \[96, 1\] and should be \[96\]"),
    GateCase("flat", "dt_bias", lambda x: x),
    GateCase("per_head", "dt_bias", lambda x: x.reshape(H, K)),
    GateCase("per_channel", "dt_bias", lambda x: x.reshape(K, H), r"dt_bias is \[2, 96\] and should be \[192\]"),
]


@pytest.mark.parametrize("case", GATE_CASES, ids=lambda case: f"{case.tensor}_{case.name}")
def test_field_CK02(case, tmp_path, caplog):
    config = small_config(num_layers=1, mla_every=0, hidden_size=8, kda_num_heads=H, kda_head_dim=K)
    original = small_model(config)
    save_hf(original, tmp_path / "one")
    replace_tensors(tmp_path / "one", lambda name, value: case.store(value) if name.endswith(case.tensor) else value)
    if case.message:
        with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.{case.message}"):
            load_hf(tmp_path / "one")
        return
    model = load_hf(tmp_path / "one")
    ours, before = (getattr(m.layers.layer(0).attention, case.tensor)[...] for m in (model, original))
    np.testing.assert_array_equal(ours, before)
    assert ("stored with 128 entries, of which the first 96" in caplog.text) == (case.name == "padded")
    save_hf(model, tmp_path / "two")
    assert_same_bits(tensors_of(tmp_path / "two"), tensors_of(tmp_path / "one"))


# Bad input


def edit_json(path: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def cut(path: Path, kept: int) -> None:
    path.write_bytes(path.read_bytes()[:kept])


def spoil_tensors(folder: Path) -> None:
    def change(name, value):
        if name.endswith(("layers.2.self_attn.f_a_proj.weight", "layers.4.block_sparse_moe.experts.7.w2.weight")):
            return None
        return value[:, :-1].copy() if name.endswith("layers.5.self_attn.o_proj.weight") else value

    replace_tensors(folder, change)
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {"model.layers.7.input_layernorm.weight": np.zeros(64)}, folder / SINGLE)


EMBEDDING = "language_model.model.embed_tokens.weight"


class BadFolder(NamedTuple):
    name: str
    source: Path
    spoil: Callable[[Path], Any]
    messages: tuple[str, ...]


BAD_FOLDERS = [
    BadFolder("another_family", LINEAR, lambda f: edit_json(f / CONFIG, lambda c: c.update(model_type="llama")),
              ("model_type='llama'", "kimi_linear, kimi_k3")),
    BadFolder("tensors", LINEAR, spoil_tensors, (
        "missing: model.layers.2.self_attn.f_a_proj.weight, model.layers.4.block_sparse_moe.experts.7.w2.weight;",
        "unused: model.layers.7.input_layernorm.weight;",
        "model.layers.5.self_attn.o_proj.weight is [64, 63] and should be [64, 64]")),
    BadFolder("tensors_of_another_family", LINEAR,
              lambda f: save_file({"transformer.wte.weight": np.zeros((4, 4))}, f / SINGLE),
              ("missing: model.embed_tokens.weight", "and 229 more", "unused: transformer.wte.weight")),
    BadFolder("integers", LINEAR,
              lambda f: replace_tensors(f, lambda n, x: x.astype(np.int8) if n.endswith(".norm.weight") else x),
              ("model.norm.weight is I8",)),
    BadFolder("no_scale", K3_PACKED, lambda f: (
        save_file({name: value for name, value in load_file(f / SECOND).items() if not name.endswith("_scale")},
                  f / SECOND),
        edit_json(f / INDEX, lambda i: [i["weight_map"].pop(name) for name in list(i["weight_map"])
                                        if name.endswith("_scale") and i["weight_map"][name] == SECOND])),
              ("layers.4.block_sparse_moe.experts.0.w1.weight_packed", "experts.0.w1.weight,")),
    BadFolder("truncated_single", LINEAR, lambda f: cut(f / SINGLE, 1_000_000), ("model.safetensors is cut off",)),
    BadFolder("truncated_shard", K3_PACKED, lambda f: cut(f / SECOND, -1), (f"{SECOND} is cut off",)),
    BadFolder("truncated_header", K3_PACKED, lambda f: cut(f / FIRST, 5), (f"{FIRST} is cut off",)),
    BadFolder("absent_shard", K3_PACKED, lambda f: (f / SECOND).unlink(), (f"{SECOND} is absent",)),
    BadFolder("index_names_a_tensor_too_many", K3_PACKED,
              lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].update(ghost=FIRST)), (f"{FIRST} lacks ghost",)),
    BadFolder("index_forgets_a_tensor", K3_PACKED,
              lambda f: edit_json(f / INDEX, lambda i: i["weight_map"].pop(EMBEDDING)),
              (f"{FIRST} holds {EMBEDDING}, which the index does not place there",)),
    BadFolder("index_without_map", K3_PACKED, lambda f: edit_json(f / INDEX, dict.clear), ("has no weight_map",)),
    BadFolder("no_weights", LINEAR, lambda f: (f / SINGLE).unlink(), ("neither model.safetensors nor",)),
    BadFolder("no_config", LINEAR, lambda f: (f / CONFIG).unlink(), ("holds no config.json",)),
    BadFolder("config_not_json", LINEAR, lambda f: cut(f / CONFIG, 40), ("config.json is not JSON",)),
    BadFolder("config_lacks_keys", K3,
              lambda f: edit_json(f / CONFIG, lambda c: [c["text_config"].pop(key) for key in ("kv_lora_rank",
                                                                                              "rms_norm_eps")]),
              ("lacks kv_lora_rank, rms_norm_eps",)),
    BadFolder("config_without_text", K3, lambda f: edit_json(f / CONFIG, lambda c: c.pop("text_config")),
              ("no text_config",)),
    BadFolder("rotated_keys", LINEAR, lambda f: edit_json(f / CONFIG, lambda c: c.update(mla_use_nope=False)),
              ("mla_use_nope=False (supported: True)",)),
    BadFolder("grouped_queries", LINEAR, lambda f: edit_json(f / CONFIG, lambda c: c.update(num_key_value_heads=1)),
              ("num_key_value_heads=1",)),
    BadFolder("layer_zero", LINEAR,
              lambda f: edit_json(f / CONFIG, lambda c: c["linear_attn_config"]["kda_layers"].append(0)),
              ("kda_layers has [0]: layers count from 1",)),
]  # fmt: skip


@pytest.mark.parametrize("case", BAD_FOLDERS, ids=lambda case: case.name)
def test_a_bad_folder_is_refused_before_anything_is_read(case, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(case.source, folder)
    case.spoil(folder)
    monkeypatch.setattr(convert_module, "_place", lambda *_: pytest.fail("arrays were being made"))
    with pytest.raises(ValueError) as error:
        load_hf(folder)
    for message in case.messages:
        assert message in str(error.value)


def test_a_missing_folder_an_unknown_field_and_a_mesh_that_does_not_divide(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        load_hf(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="unknown field 'chunksize'.*chunk_size"):
        load_hf(LINEAR, chunksize=32)
    with pytest.raises(ValueError, match="heads=3 is not divisible by tensor=2"):
        load_hf(K3_PACKED, mesh=make_mesh({"tensor": 2}))


def test_the_vision_tower_is_left_out_and_nothing_else(tmp_path, caplog):
    shutil.copytree(K3, tmp_path / "copy")
    tensors = load_file(K3 / SINGLE)
    tower = {"vision_tower.blocks.0.wqkv.weight": np.zeros((2, 2)), "mm_projector.proj.0.weight": np.zeros((2, 2))}
    save_file(tensors | tower, tmp_path / "copy" / SINGLE)
    load_hf(tmp_path / "copy")
    assert "2 tensors of the vision tower are left out" in caplog.text
    save_file(tensors | {"audio_tower.weight": np.zeros(2)}, tmp_path / "copy" / SINGLE)
    with pytest.raises(ValueError, match="unused: audio_tower.weight"):
        load_hf(tmp_path / "copy")


@pytest.mark.parametrize(
    "field, value",
    [
        ("residual", "mhc"),
        ("residual", "delta_block"),
        ("depth_weights", "static"),
        ("depth_key_norm", False),
        ("depth_query", "hidden"),
        ("kda_gate", "head"),
        ("mla_rope_theta", 1e4),
    ],
)
def test_other_parameters_cannot_be_filled(field, value):
    with pytest.raises(ValueError, match=f"published format has no parameters for {field}="):
        load_hf(K3, **{field: value})


def test_released_weights_can_be_mixed_by_heads():
    """Heads and windows have the same parameters."""
    model, plain = load_hf(K3, depth_heads=2), load_hf(K3)
    assert model.config.first_mix == plain.config.first_mix
    np.testing.assert_array_equal(model.final_mix.query[...], plain.final_mix.query[...])
    tokens = tokens_for(model.config, 1, 5)
    assert np.abs(forward(model)(tokens) - forward(plain)(tokens)).max() > 1e-4


class BadSave(NamedTuple):
    name: str
    fields: dict[str, Any]
    options: dict[str, Any]
    message: str


BAD_SAVES = [
    BadSave("output_gate", {"output_gate": "swish"}, {}, "no place for output_gate='swish'"),
    BadSave("residual", {"residual": "full_attn_res"}, {}, "no place for residual='full_attn_res'"),
    BadSave("delta", {"residual": "delta_block"}, {}, "no place for residual='delta_block'"),
    BadSave("mhc", {"residual": "mhc"}, {}, "no place for residual='mhc'"),
    BadSave("depth_weights", {"depth_weights": "sigmoid"}, {}, "no place for depth_weights='sigmoid'"),
    BadSave("mla_softmax1", {"mla_softmax1": True}, {}, "no place for mla_softmax1=True"),
    BadSave("softmax1", {"depth_weights": "softmax1"}, {}, "no place for depth_weights='softmax1'"),
    BadSave("depth_key_norm", {"depth_key_norm": False}, {}, "no place for depth_key_norm=False"),
    BadSave("depth_query", {"depth_query": "hidden"}, {}, "no place for depth_query='hidden'"),
    BadSave("depth_heads", {"depth_heads": 4}, {}, "no place for depth_heads=4"),
    BadSave("depth_window", {"depth_window": 8}, {}, "no place for depth_window=8"),
    BadSave("block_size", {"block_size": 1}, {}, "no place for block_size=1"),
    BadSave(
        "gate_and_rope", {"kda_gate": "head", "mla_rope_theta": 1e4}, {}, "kda_gate='head', mla_rope_theta=10000.0"
    ),
    BadSave("grouped_values", {"kda_num_value_heads": 8}, {}, "no place for kda_num_value_heads=8"),
    BadSave("dtype", {}, {"dtype": "int8"}, "dtype='int8' is not allowed"),
    BadSave("mxfp4", EXPERTS | {"expert_width": 32}, {"mxfp4": True}, r"layers\.1\..*experts\.0\.w1\.weight cannot"),
]


@pytest.mark.parametrize("case", BAD_SAVES, ids=lambda case: case.name)
def test_what_cannot_be_saved_is_named(case, tmp_path):
    model = small_model(small_config(**case.fields))
    with pytest.raises(ValueError, match=case.message):
        save_hf(model, tmp_path, **case.options)
    assert not (tmp_path / CONFIG).exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        save_hf(small_model(small_config()), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
