"""The suite decode: what a context costs, in bytes and in time per token, for the 48B model's layers and for others.

The models have Kimi Linear 48B's layers, 8 of its 27 and random weights, each mixture of experts replaced by one
feed-forward as wide as the nine experts that a token uses: at batch 1 a step reads as much as the real layers do.

    hybrid     three KDA layers to one of MLA
    mla        MLA layers alone
    kda        KDA layers alone; what they keep and read is the same at any context, so only the shortest is measured
    block      the hybrid with Block AttnRes, six sub-layers a block; two_phase: by the two-phase schedule

Each case is a context and a number of rows; a batch of None is the largest that memory has room for. Measured are a
decode step and, unless the batch is the largest (a prompt's tokens fill the machine by themselves), a piece of a prompt
that ends at that context. The cache's slots are filled by no prompt: its lengths
are set, since time does not depend on what lies there. Bytes of caches, also of all 27 layers, are counted from their
shapes.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments import gpu_timing
from experiments.gpu_timing import Run, in_turns, over
from experiments.turns import alone
from kimi_jax import KimiLM, ModelConfig, get_config
from kimi_jax.cache import set_length

__all__ = ["CASES", "IMPLEMENTATIONS", "Case", "cache_bytes", "decode_suite", "merge"]

IMPLEMENTATIONS = ("hybrid", "mla", "kda", "block", "two_phase")
LAYERS, STEPS = 8, 16
COMPILERS = 4  # threads
PIECE = 2048  # tokens of a prompt
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


_ALONG, _DEPTH = ("hybrid", "mla"), ("block", "two_phase")  # the latter at three contexts of batch 1
CASES: tuple[Case, ...] = (
    Case(4 << 10, 1, (*_ALONG, "kda", *_DEPTH)),
    Case(32 << 10, 1, _ALONG),
    Case(128 << 10, 1, (*_ALONG, *_DEPTH)),
    Case(512 << 10, 1, _ALONG),
    Case(1024 << 10, 1, (*_ALONG, *_DEPTH)),
    Case(4 << 10, None, (*_ALONG, "kda")),
    *(Case(context << 10, None, _ALONG) for context in (32, 128, 512, 1024)),
)


def decode_suite(
    repeats: int = 10, cases: Sequence[Case] = CASES, implementations: Sequence[str] | None = None
) -> dict[str, Any]:
    """Milliseconds of a decode step and of a prompt's last piece ("CASE step: IMPLEMENTATION"), with the rows, the time
    per token and the bytes of the cache; and ratios of the other models to the hybrid.

    implementations: of IMPLEMENTATIONS; None is all that a case names. A model whose cache has no room for one row is
    left out, and said so. All programs of a case are compiled side by side, before any is timed.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    ms, bytes_, sizes = {}, {}, {}
    for case in cases:
        for name in IMPLEMENTATIONS[:3]:
            whole = get_config("kimi_linear_48b")
            fields = {"num_layers": whole.num_layers, **({"mla_layers": whole.mla_layers} if name == "hybrid" else {})}
            bytes_[f"{_short(case.context)} {name}"] = cache_bytes(_config(name, case, **fields), 1, case.context)
        asked = [name for name in case.implementations if implementations is None or name in implementations]
        programs = {}
        for name in asked:
            config = _config(name, case)
            room = largest_batch(config, case.context)
            if room < (case.batch or 1):
                print(f"{case.name} {name}: no room for its cache, left out", file=sys.stderr, flush=True)
            else:
                programs[name] = _Programs(config, case.batch or room, case.context, prompts=case.batch is not None)
        _compile(programs)
        for name, program in programs.items():
            with alone():
                found = _measure(program, repeats)
            for part, times in found.items():
                tokens = program.batch * (1 if part == "step" else program.piece)
                ms[f"{case.name} {part}: {name}"] = {
                    **times,
                    "rows": program.batch,
                    "ms_per_token": round(times["median"] / tokens, 6),
                    "cache_bytes": cache_bytes(program.config, program.batch, case.context),
                }
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


class _Programs:
    """Of a model and a context's cache: what makes both, the decode loop, and the piece of a prompt."""

    def __init__(self, config: ModelConfig, batch: int, context: int, prompts: bool = True):
        self.config, self.batch = config, batch
        self.piece = min(PIECE, context // 2)
        graphdef = nnx.split(nnx.eval_shape(lambda: KimiLM(config, rngs=nnx.Rngs(0))))[0]

        def begin():
            model = KimiLM(config, rngs=nnx.Rngs(0))
            return nnx.split(model)[1], model.init_cache(batch, context)

        def at(cache):
            return set_length(cache, jnp.full(batch, context - max(STEPS, self.piece), jnp.int32))

        def step(state, cache):
            model = nnx.merge(graphdef, state)

            def one(_, carry):
                ids_B, cache = carry
                logits, cache = model.extend(ids_B[:, None], cache)
                return jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32), cache

            return jax.lax.fori_loop(0, STEPS, one, (jnp.zeros(batch, jnp.int32), at(cache)))

        def piece(state, cache):
            tokens = jnp.zeros((batch, self.piece), jnp.int32)
            return nnx.merge(graphdef, state).extend(tokens, at(cache), last_only=True)

        shapes = jax.eval_shape(begin)
        self._lowerings = {"begin": lambda: jax.jit(begin).lower()}
        for part in (piece, step) if prompts else (step,):
            self._lowerings[part.__name__] = lambda part=part: jax.jit(part, donate_argnums=1).lower(*shapes)
        self.compiled: dict[str, Any] = {}

    def compilations(self) -> list[Callable[[], None]]:
        """One for each part, in any order."""

        def compile(part):
            self.compiled[part] = self._lowerings[part]().compile()

        return [partial(compile, part) for part in reversed(self._lowerings)]


def _compile(programs: Mapping[str, _Programs]) -> None:
    """All parts of all programs, side by side."""
    begun = time.perf_counter()
    with alone(or_with_others=True), ThreadPoolExecutor(COMPILERS) as threads:
        parts = [part for program in programs.values() for part in program.compilations()]
        list(threads.map(lambda part: part(), parts))
    print(f"{', '.join(programs)}: compiled in {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def _measure(program: _Programs, repeats: int) -> dict[str, dict[str, Any]]:
    """Times of "step" and, where it is compiled, "piece"; the model and its cache are there only for so long."""
    state, kept = program.compiled["begin"]()
    caches = [kept]
    del kept

    def run(part):
        def call(count):
            for _ in range(count):
                result, cache = program.compiled[part](state, caches.pop())
                caches.append(cache)
            jax.block_until_ready(result)

        return call

    parts = {part: Run(run(part), STEPS if part == "step" else 1) for part in program.compiled if part != "begin"}
    return in_turns(parts, repeats)


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
