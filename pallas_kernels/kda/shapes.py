"""Shapes of KDA in real models, as data for tests, tuning and benchmarks. Needs nothing but Python.

    Kimi-Linear-48B (arXiv 2510.26692)   32 heads, softplus gate
    Kimi K3                              96 heads, gate bounded at -5 nats a token
    the two papers' scaling ladders      as many heads as layers (12 to 24, 13 and 17 among them), softplus gate
    grouped values                       16 q/k heads and 32 value heads, as in Qwen3-Next's Gated DeltaNet

All have heads of 128 channels. Sequences are one row of T tokens; a decode step (T = 1) has a row per request.
"""

from typing import NamedTuple

__all__ = ["SHAPES", "Shape", "find_shape"]


class Shape(NamedTuple):
    """One call: q, k `[B,T,H,K]`, v `[B,T,HV,V]` in dtype, raw gate logits `[B,T,HV,K]`. T = 1 is one `kda_step`."""

    name: str  # MODEL-T of a sequence, MODEL-decode-B of a step
    B: int
    T: int
    H: int
    HV: int
    K: int = 128
    V: int = 128
    gate: str = "softplus"  # or "bounded"
    lower_bound: float | None = None  # nats, of the bounded gate
    dtype: str = "bfloat16"

    @property
    def decodes(self) -> bool:
        return self.T == 1


def find_shape(name: str) -> Shape:
    """The shape of that name; ValueError that lists them for an unknown one."""
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise ValueError(f"unknown shape {name!r}; shapes: {', '.join(shape.name for shape in SHAPES)}")


_MODELS = {"kimi_linear_48b": 32, "kimi_k3": 96}  # heads
_LADDERS = {  # tokens of context, and heads
    "kda_653m": (4096, 16), "kda_878m": (4096, 18), "kda_1_1b": (4096, 20), "kda_1_4b": (4096, 22),
    "kda_1_7b": (4096, 24), "attn_res_194m": (8192, 12), "attn_res_241m": (8192, 13), "attn_res_296m": (8192, 14),
    "attn_res_436m": (8192, 16), "attn_res_528m": (8192, 17),
}  # fmt: skip


def _shape(model: str, tail: str, B: int, T: int, H: int, HV: int | None = None) -> Shape:
    bound = {"gate": "bounded", "lower_bound": -5.0} if model == "kimi_k3" else {}
    return Shape(f"{model}-{tail}", B, T, H, HV or H, **bound)


SHAPES: tuple[Shape, ...] = (
    *(_shape(model, str(T), 1, T, H) for model, H in _MODELS.items() for T in (4096, 8192, 65536)),
    *(_shape(model, str(T), 1, T, H) for model, (T, H) in _LADDERS.items()),
    _shape("grouped_values", "8192", 1, 8192, 16, 32),
    *(_shape(model, f"decode-{B}", B, 1, H) for model, H in _MODELS.items() for B in (1, 32, 128, 1024)),
    _shape("grouped_values", "decode-32", 32, 1, 16, 32),
)
