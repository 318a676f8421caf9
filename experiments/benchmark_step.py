"""The suite train_step: a step of training, time and memory, by how the sub-layers are joined along the depth.

Each case is one hybrid of about 300M parameters, trained with AdamW on rows of several documents; its implementations
are the same model with the plain residual, Block AttnRes (in one phase and in two) and Full AttnRes. Before anything is
timed their losses are compared: at the first step all mixtures are plain means, which the norms behind them undo, so
that all of them must have the plain residual's loss.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments import gpu_timing
from experiments.benchmark_suites import check_difference
from experiments.gpu_timing import Run, in_turns, over
from experiments.input_pipeline import Batch
from experiments.train_config import TrainConfig
from experiments.train_state import start_training
from experiments.turns import alone

__all__ = ["CASES", "IMPLEMENTATIONS", "Case", "merge", "train_step_suite"]

JOINED = {
    "standard": {"residual": "standard"},
    "block": {"residual": "block_attn_res"},
    "two_phase": {"residual": "block_attn_res", "depth_two_phase": True},
    "full": {"residual": "full_attn_res"},
}
IMPLEMENTATIONS = tuple(JOINED)
AT_MOST = {"block": 1.04}  # of the plain residual's time
STEPS = 5  # between looks at the clock
TOLERANCE = 2e-3  # of the first losses, which are about ln(vocabulary)


@dataclass(frozen=True)
class Case:
    """B rows of T tokens, `documents` of equal length in each."""

    name: str
    overrides: Mapping[str, Any]
    B: int = 2
    T: int = 8192
    documents: int = 4
    preset: str = "attn_res_296m"
    implementations: tuple[str, ...] = field(default=IMPLEMENTATIONS)


# The paper's 296M row with one dense feed-forward as wide as its nine active experts, over a vocabulary of 8192: 28
# sub-layers, blocks of 4. Experts and a large head would only add time that all of them share.
_DENSE = {"num_experts": 0, "vocab_size": 8192}
CASES: tuple[Case, ...] = (
    Case("unrolled", {**_DENSE, "scan_layers": False, "remat": "none"}),
    Case("scanned", {**_DENSE, "scan_layers": True, "remat": "layer"}),
)


def train_step_suite(
    repeats: int = 10, cases: Sequence[Case] = CASES, implementations: Sequence[str] | None = None
) -> dict[str, Any]:
    """Milliseconds of each case and implementation ("CASE step: IMPLEMENTATION"), the bytes that its program needs
    besides parameters, and ratios to the plain residual. ArithmeticError if a first loss is another one than its."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    ms, differences, sizes = {}, {}, {}
    for case in cases:
        asked = [name for name in case.implementations if implementations is None or name in implementations]
        with ThreadPoolExecutor() as threads:  # compiling takes minutes, of a core for each
            models = dict(zip(asked, threads.map(partial(_Model, case), asked), strict=True))
        first = {name: model.first_loss for name, model in models.items()}
        for name in asked:
            if "standard" in first and name != "standard":
                difference = abs(first[name] / first["standard"] - 1)
                key = f"{case.name} first loss: {name}"
                differences[key] = check_difference(difference, TOLERANCE, key)
        with alone():
            found = in_turns({name: Run(model.steps, steps=STEPS) for name, model in models.items()}, repeats)
        plain = found.get("standard")
        for name, times in found.items():
            beside = {} if plain is None or name == "standard" else {"standard": plain["median"]}
            ms[f"{case.name} step: {name}"] = {
                **times,
                **beside,  # that of the same run, since implementations may have runs of their own
                "tokens_per_s": round(1e3 * case.B * case.T / times["median"]),
                "temporary_MiB": round(models[name].temporary_bytes / 2**20, 1),
                "parameters": models[name].parameters,
                "compile_s": models[name].compile_s,
            }
        sizes[case.name] = f"B={case.B} T={case.T} {case.preset} " + " ".join(
            f"{key}={value}" for key, value in case.overrides.items()
        )
    at = {name: {**entry, "started": started} for name, entry in ms.items()}
    return {"started": started, "case": sizes, "ms": ms, "worst_difference": differences, "ratios": _ratios(at)}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`gpu_timing.merge` of two results of this suite."""
    merged = gpu_timing.merge(old, new, [case.name for case in CASES], _ratios)
    return {**merged, "case": {**old.get("case", {}), **new["case"]}}


class _Model:
    """A model, its compiled step and its state."""

    def __init__(self, case: Case, implementation: str):
        overrides = {**case.overrides, **JOINED[implementation]}
        if implementation == "two_phase" and overrides.get("remat") == "layer":
            overrides["remat"] = "block"  # the layers of a block are recomputed together
        config = TrainConfig(
            config=case.preset, overrides=overrides, optimizer="adamw", sequence_length=case.T, batch_size=case.B
        )
        model = config.model_config(vocab_size=1)
        training = start_training(config, model, None)
        tokens = jax.random.randint(jax.random.key(0), (case.B, case.T), 0, model.vocab_size)
        ids = jnp.broadcast_to(jnp.arange(case.T, dtype=jnp.int32) * case.documents // case.T, tokens.shape)
        self._batch, self._state = Batch(tokens, ids), training.state
        self.parameters = sum(x.size for x in jax.tree.leaves(training.state.params))
        begun = time.perf_counter()
        self._step = training.step.lower(self._state, self._batch).compile()
        self.compile_s = round(time.perf_counter() - begun, 1)
        print(f"{case.name} {implementation}: compiled in {self.compile_s} s", file=sys.stderr, flush=True)
        self.temporary_bytes = self._step.memory_analysis().temp_size_in_bytes
        self._state, metrics = self._step(self._state, self._batch)
        self.first_loss = float(metrics["loss"])

    def steps(self, calls: int) -> None:
        """STEPS of them for each call, queued up on the device as training does."""
        for _ in range(calls * STEPS):
            self._state, _ = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)


def _ratios(ms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Time over that of the plain residual in the same run, temporary memory over its own."""
    found = {}
    for name, entry in ms.items():
        implementation = name.rpartition(": ")[2]
        if "standard" in entry:
            aim = {"at_most": AT_MOST[implementation]} if implementation in AT_MOST else {}
            value = round(entry["median"] / entry["standard"], 4)
            found[f"{name} to standard"] = {"value": value, "same_run": True, **aim}
    memory = over(ms, "standard", "temporary_MiB")
    return found | {f"{name} to standard, memory": ratio for name, ratio in memory.items()}
