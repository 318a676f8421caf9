"""The suite decode: what a context costs, in bytes and in time per token, for the 48B model's layers and for others.

The models have Kimi Linear 48B's layers, 8 of its 27 and random weights, each mixture of experts replaced by one
feed-forward as wide as the nine experts that a token uses: at batch 1 a step reads as much as the real layers do.

    hybrid     three KDA layers to one of MLA
    mla        MLA layers alone
    kda        KDA layers alone
    block      the hybrid with Block AttnRes, six sub-layers a block; two_phase: by the two-phase schedule

Each case is a context and a number of rows; a batch of None is the largest that memory has room for. Measured are a
decode step, and a piece of a prompt that ends at that context. The cache's slots are filled by no prompt: its lengths
are set, since time does not depend on what lies there. Bytes of caches, also of all 27 layers, are counted from their
shapes.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments import gpu_timing
from experiments.gpu_timing import Run, alone, in_turns, over
from kimi_jax import KimiLM, ModelConfig, get_config
from kimi_jax.cache import set_length

__all__ = ["CASES", "IMPLEMENTATIONS", "Case", "cache_bytes", "decode_suite", "merge"]

IMPLEMENTATIONS = ("hybrid", "mla", "kda", "block", "two_phase")
LAYERS, STEPS = 8, 16
PIECE, MOST_TOKENS = 2048, 16384  # of a prompt: a row's, and all rows' together
ROOM = 0.8  # of the device's memory, for parameters and caches; the rest is for what a step needs besides
MOST_ROWS = 512
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "hybrid": {"mla_every": 4},
    "mla": {"mla_every": 1},
    "kda": {"mla_every": 0},
    "block": {"mla_every": 4, "residual": "block_attn_res", "block_size": 6},
    "two_phase": {"mla_every": 4, "residual": "block_attn_res", "block_size": 6, "depth_two_phase": True},
}


@dataclass(frozen=True)
class Case:
    """A context in tokens and rows of it. overrides are fields of the model, for a smaller one."""

    context: int
    batch: int | None = 1
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{_short(self.context)}-B{self.batch or 'max'}"


CASES: tuple[Case, ...] = tuple(
    Case(context << 10, batch, IMPLEMENTATIONS if batch else IMPLEMENTATIONS[:3])
    for batch in (1, None)
    for context in (4, 32, 128, 512, 1024)
)


def decode_suite(
    repeats: int = 10, cases: Sequence[Case] = CASES, implementations: Sequence[str] | None = None
) -> dict[str, Any]:
    """Milliseconds of a decode step and of a prompt's last piece ("CASE step: IMPLEMENTATION"), with the rows, the time
    per token and the bytes of the cache; and ratios of the other models to the hybrid.

    implementations: of IMPLEMENTATIONS; None is all that a case names. A model whose cache has no room for one row is
    left out, and said so.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    ms, bytes_, sizes = {}, {}, {}
    for case in cases:
        for name in IMPLEMENTATIONS[:3]:
            whole = get_config("kimi_linear_48b")
            fields = {"num_layers": whole.num_layers, **({"mla_layers": whole.mla_layers} if name == "hybrid" else {})}
            bytes_[f"{_short(case.context)} {name}"] = cache_bytes(_config(name, case, **fields), 1, case.context)
        for name in case.implementations:
            if implementations is not None and name not in implementations:
                continue
            config = _config(name, case)
            batch = case.batch or largest_batch(config, case.context)
            if batch < 1 or (case.batch and largest_batch(config, case.context) < batch):
                print(f"{case.name} {name}: no room for its cache, left out", file=sys.stderr, flush=True)
                continue
            model = _Model(config, batch, case.context)
            with alone():
                found = in_turns({"step": Run(model.decode, STEPS), "piece": Run(model.prefill)}, repeats)
            for part, times in found.items():
                tokens = batch if part == "step" else batch * model.piece
                ms[f"{case.name} {part}: {name}"] = {
                    **times,
                    "rows": batch,
                    "ms_per_token": round(times["median"] / tokens, 6),
                    "cache_bytes": model.cache_bytes,
                }
            del model
        sizes[case.name] = f"context={case.context} batch={case.batch or 'largest'}"
    ratios = _ratios({name: {**entry, "started": started} for name, entry in ms.items()})
    return {
        "started": started, "case": sizes, "ms": ms, "cache_bytes_of_27_layers": bytes_, "worst_difference": {},
        "ratios": ratios,
    }  # fmt: skip


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`gpu_timing.merge` of two results of this suite."""
    merged = gpu_timing.merge(old, new, [case.name for case in CASES], _ratios)
    name = "cache_bytes_of_27_layers"
    return {**merged, "case": {**old.get("case", {}), **new["case"]}, name: {**old.get(name, {}), **new[name]}}


def cache_bytes(config: ModelConfig, batch: int, max_len: int) -> int:
    """Of a model's cache; nothing is allocated."""
    model = nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0)))
    cache = jax.eval_shape(lambda: model.init_cache(batch, max_len))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))


def largest_batch(config: ModelConfig, max_len: int) -> int:
    """Rows of a cache that the device has room for beside the parameters; MOST_ROWS where it does not say."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return MOST_ROWS
    model = nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0)))
    parameters = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model)))
    return min(MOST_ROWS, int((ROOM * limit - parameters) // cache_bytes(config, 1, max_len)))


class _Model:
    """A model and the cache of a context, with the compiled decode loop and the compiled piece of a prompt."""

    def __init__(self, config: ModelConfig, batch: int, context: int):
        begun = time.perf_counter()
        graphdef = nnx.split(nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0))))[0]
        self._state = jax.jit(lambda: nnx.split(KimiLM(config, rngs=nnx.Rngs(0)))[1])()
        self.piece = min(PIECE, context // 2, MOST_TOKENS // batch)
        self._length = jnp.full(batch, context - max(STEPS, self.piece), jnp.int32)
        self._cache = nnx.merge(graphdef, self._state).init_cache(batch, context)
        self.cache_bytes = sum(x.nbytes for x in jax.tree.leaves(self._cache))

        def decode(state, cache, length):
            model = nnx.merge(graphdef, state)

            def step(_, carry):
                ids_B, cache = carry
                logits, cache = model.extend(ids_B[:, None], cache)
                return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache

            ids_B, cache = jax.lax.fori_loop(0, STEPS, step, (jnp.zeros(batch, jnp.int32), set_length(cache, length)))
            return ids_B, cache

        def prefill(state, cache, length):
            tokens = jnp.zeros((batch, self.piece), jnp.int32)
            logits, cache = nnx.merge(graphdef, state).extend(tokens, set_length(cache, length), last_only=True)
            return logits, cache

        arguments = self._state, self._cache, self._length
        self._decode, self._prefill = (
            jax.jit(f, donate_argnums=1).lower(*arguments).compile() for f in (decode, prefill)
        )
        print(f"B{batch} {context}: made in {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)

    def decode(self, count: int) -> None:
        """`count` times STEPS steps, each time from the same length on."""
        self._run(self._decode, count)

    def prefill(self, count: int) -> None:
        self._run(self._prefill, count)

    def _run(self, function, count):
        for _ in range(count):
            result, self._cache = function(self._state, self._cache, self._length)
        jax.block_until_ready(result)


def _config(name: str, case: Case, **fields) -> ModelConfig:
    sizes = dict(num_layers=LAYERS, num_experts=0, mla_layers=None, scan_layers=False, remat="none")
    sizes |= dict(param_dtype="bfloat16", residual="standard")
    return get_config("kimi_linear_48b", **{**sizes, **CHANGES[name], **case.overrides, **fields})


def _short(tokens: int) -> str:
    """4K, 1M; other numbers as they are."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _ratios(ms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Time per token over the hybrid's."""
    return {f"{name} to hybrid": ratio for name, ratio in over(ms, "hybrid", "ms_per_token").items()}
