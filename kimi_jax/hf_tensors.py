"""What the tensors of a published checkpoint are called, and how they lie compared with our parameters.

One table for Kimi Linear and K3, both directions, layers scanned or not. Published matrices are [out, in], ours [in,
out]; experts are tensors of their own there and stacked here. Layer numbers in names count from 0.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from flax import nnx

from .layers.kda import KDALayer
from .layers.mla import MLA
from .layers.moe import MoE
from .layers.residuals import Site
from .model import KimiLM, Layer

# Kept in float32 in every released file, whatever the other tensors have, and here.
FLOAT32_SUFFIXES = ("A_log", "dt_bias", "_conv1d.weight", ".o_norm.weight", ".e_score_correction_bias")

Index = tuple[slice, ...]


class Layout(Protocol):
    """How a published tensor lies compared with ours."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The published shape of a parameter of ours of this shape."""
        ...

    def read(self, stored: Callable[[Index], np.ndarray], index: Index) -> np.ndarray:
        """A slice of ours; stored(index) gives slices of theirs."""
        ...

    def write(self, ours: np.ndarray) -> np.ndarray:
        """The whole tensor as it is published."""
        ...


class Tensor(NamedTuple):
    """A published tensor's place in a model: variable[group][expert], where those are not None."""

    variable: nnx.Variable
    layout: Layout
    group: int | None  # row of the variable, where layers are stacked for a scan
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The published shape."""
        stacked = (self.group is not None) + (self.expert is not None)
        return self.layout.stored_shape(tuple(self.variable.shape[stacked:]))


def official_tensors(model: KimiLM) -> dict[str, Tensor]:
    """Published name -> place, in the order of the layers, for every parameter of a model (abstract ones too) but those
    of depth mixtures that no published model has."""
    root = model.config.hf_root
    tensors = {f"{root}embed_tokens.weight": Tensor(model.embedding, PLAIN, None)}
    for number in range(model.config.num_layers):
        layer, group = model.layers.locate(number)
        for name, variable, layout, expert in _layer(layer, model.config):
            tensors[f"{root}layers.{number}.{name}"] = Tensor(variable, layout, group, expert)
    tensors[f"{root}norm.weight"] = Tensor(model.final_norm.weight, PLAIN, None)
    for name, variable, layout, _ in _mix("output_attn_res", model.final_mix):
        tensors[root + name] = Tensor(variable, layout, None)
    tensors[f"{root.removesuffix('model.')}lm_head.weight"] = Tensor(model.head, MATRIX, None)
    return tensors


def layer_of(name: str, root: str) -> str:
    """ "layers.12" for a tensor of layer 12; the name itself for one of no layer."""
    parts = name.removeprefix(root).split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else name


class Axes(NamedTuple):
    """The same numbers with the axes reversed, or with one more axis, of size 1, in theirs."""

    reverse: bool = False
    unit_axis: int | None = None

    def stored_shape(self, shape):
        return self._forward(tuple(shape), 1)

    def read(self, stored, index):
        block = stored(self._forward(tuple(index), slice(0, 1)))
        block = block if self.unit_axis is None else block.squeeze(self.unit_axis)
        return block.T if self.reverse else block

    def write(self, ours):
        ours = ours.T if self.reverse else ours
        return ours if self.unit_axis is None else np.expand_dims(ours, self.unit_axis)

    def _forward(self, entries, unit):
        entries = entries[::-1] if self.reverse else entries
        return entries if self.unit_axis is None else (*entries[: self.unit_axis], unit, *entries[self.unit_axis :])


class Reshaped(NamedTuple):
    """A vector of ours that has another shape in theirs, or zeros behind its end. Small: it is always read whole."""

    shape: tuple[int, ...]

    def stored_shape(self, shape):
        return self.shape

    def read(self, stored, index):
        return stored(tuple(slice(0, size) for size in self.shape)).reshape(-1)[index]

    def write(self, ours):
        return np.pad(ours, (0, int(np.prod(self.shape)) - ours.size)).reshape(self.shape)


PLAIN, MATRIX = Axes(), Axes(reverse=True)
ROW, TAPS = Axes(unit_axis=0), Axes(unit_axis=1)  # [1, D] of [D]; [D, 1, W] of [D, W], last tap the current token

_Entry = tuple[str, nnx.Variable, Layout, int | None]


def _layer(layer: Layer, config) -> Iterator[_Entry]:
    yield "input_layernorm.weight", layer.attention_norm.weight, PLAIN, None
    yield from _mix("self_attention_res", layer.attention_mix)
    attention = _kda(layer.attention, config) if isinstance(layer.attention, KDALayer) else _mla(layer.attention)
    for name, variable, layout in attention:
        yield f"self_attn.{name}", variable, layout, None
    yield "post_attention_layernorm.weight", layer.ffn_norm.weight, PLAIN, None
    yield from _mix("mlp_res", layer.ffn_mix)
    if isinstance(layer.ffn, MoE):
        for name, variable, layout, expert in _moe(layer.ffn):
            yield f"block_sparse_moe.{name}", variable, layout, expert
    else:
        yield from _feed_forward("mlp", layer.ffn)


def _mix(site: str, mix: Site | None) -> Iterator[_Entry]:
    for name, attribute, layout in (("norm", "key_scale", PLAIN), ("proj", "query", ROW)):
        if hasattr(mix, attribute):
            yield f"{site}_{name}.weight", getattr(mix, attribute), layout, None


def _kda(kda: KDALayer, config) -> Iterator[tuple[str, nnx.Variable, Layout]]:
    gate = ("g",) if kda.gate_form == "full" else ("g_a", "g_b")
    for matrix in ("q", "k", "v", "f_a", "f_b", "b", *gate, "o"):
        yield f"{matrix}_proj.weight", getattr(kda, matrix), MATRIX
    for stream in "qkv":
        yield f"{stream}_conv1d.weight", getattr(kda, f"{stream}_conv").weight, TAPS
    HV, K = config.value_heads, config.kda_head_dim
    yield "A_log", kda.A_log, Reshaped(config.hf_A_log_shape or (HV,))
    yield "dt_bias", kda.dt_bias, Reshaped((HV, K) if config.hf_dt_bias_per_head else (HV * K,))
    yield "o_norm.weight", kda.o_norm.weight, PLAIN


def _mla(mla: MLA) -> Iterator[tuple[str, nnx.Variable, Layout]]:
    if mla.q_lora_rank is None:
        yield "q_proj.weight", mla.q, MATRIX
    else:
        yield "q_a_proj.weight", mla.q_a, MATRIX
        yield "q_a_layernorm.weight", mla.q_norm.weight, PLAIN
        yield "q_b_proj.weight", mla.q_b, MATRIX
    yield "kv_a_proj_with_mqa.weight", mla.kv_a, MATRIX
    yield "kv_a_layernorm.weight", mla.kv_norm.weight, PLAIN
    yield "kv_b_proj.weight", mla.kv_b, MATRIX
    if mla.output_gate:
        yield "g_proj.weight", mla.g, MATRIX
    yield "o_proj.weight", mla.o, MATRIX


def _moe(moe: MoE) -> Iterator[_Entry]:
    yield "gate.weight", moe.router, MATRIX, None
    yield "gate.e_score_correction_bias", moe.bias, PLAIN, None
    if moe.latent is not None:
        yield "routed_expert_down_proj.weight", moe.latent_down, MATRIX, None
        yield "routed_expert_norm.weight", moe.latent_norm.weight, PLAIN, None
        yield "routed_expert_up_proj.weight", moe.latent_up, MATRIX, None
    if moe.num_shared:
        yield from _feed_forward("shared_experts", moe.shared)
    # Variable by variable, so that a reader of one has all its experts in a row.
    for matrix, variable in (("w1", moe.gate), ("w3", moe.up), ("w2", moe.down)):
        for expert in range(moe.num_experts):
            yield f"experts.{expert}.{matrix}.weight", variable, MATRIX, expert


def _feed_forward(prefix: str, ffn) -> Iterator[_Entry]:
    for matrix in ("gate", "up", "down"):
        yield f"{prefix}.{matrix}_proj.weight", getattr(ffn, matrix), MATRIX, None
