"""The scaling study: which models it trains at which sizes, on how much, at what rate.

Sizes: heads of 64 channels, width 64 times their number, four layers (three KDA to one MLA) more for every second head,
so that depth and width grow together as in both papers' Table 2. They are called by their parameters without embedding
and head, in the hybrid.

Tokens: 10 for each of those parameters, the same for all models of a size. With that the largest of the four default
sizes should take about four minutes on an H200, as `guessed_seconds` guesses; the two beyond them take 10 and 15.

Rows: 1024 tokens, for attention has then a sixth to a third of the all-MLA model's operations. In the paper's smallest,
of 1216 channels and 4096 tokens, it has a fifth; in longer rows of so narrow models the hybrid would win by that alone.

Memory: nothing is recomputed. What the backward pass keeps is 24 to 43 GiB at 22M, 40 to 87 GiB at 52M, most with Full
AttnRes; half with --batch_size=32, of which twice as many steps are made.

Learning rate: falls as one over the width, as the rates of both papers' Table 2 do to a few percent (2.4 / D and
2.6 / D), from the 5e-3 that our tables train 256 channels with. It is not tuned for any model, and the same for all.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.flops import PEAKS, training_flops
from experiments.tokenization import get_tokenizer
from experiments.train_config import TrainConfig
from experiments.training_runs import TrainingRun, training_fields
from kimi_jax.configs import ModelConfig, get_config
from kimi_jax.model import active_parameter_count

GUESSED_CARD = "NVIDIA H200"
GUESSED_SHARE = 0.4  # of its peak, in wide models; a guess, as is how it falls with the width
HALF_WIDTH = 512  # where half of that share is left

HEAD = 64
VALIDATION = 1 << 24  # tokens of it that are read: all; domains share it, and each has less than its share
RATE_WIDTH = 256  # the width at which Study.learning_rate is the rate
OF_RUN = ("model", "size", "seed", "overrides", "of_size")  # what may differ between runs that are compared

MODELS: dict[str, dict[str, Any]] = {
    "mla": {"mla_every": 1, "residual": "standard"},
    "hybrid": {"mla_every": 4, "residual": "standard"},
    "block": {"mla_every": 4, "residual": "block_attn_res"},
    "full": {"mla_every": 4, "residual": "full_attn_res"},
}


class Size(NamedTuple):
    heads: int
    layers: int
    block_size: int  # sub-layers: 8, 6 and 8 blocks for 8, 12 and 16 layers; the paper has 8

    @property
    def width(self) -> int:
        return HEAD * self.heads

    def overrides(self, model: str) -> dict[str, Any]:
        """Fields of ModelConfig."""
        blocks = {"block_size": self.block_size} if model == "block" else {}
        return {
            "hidden_size": self.width, "num_layers": self.layers, "kda_num_heads": self.heads, "kda_head_dim": HEAD,
            "mla_num_heads": self.heads, "kv_lora_rank": self.width // 2, "qk_nope_dim": 48, "qk_rope_dim": 16,
            "v_dim": HEAD, "ffn_width": 11 * self.width // 4, "scan_layers": True, **MODELS[model], **blocks,
        }  # fmt: skip

    @functools.cache  # noqa: B019  (sizes live as long as the module)
    def parameters(self) -> int:
        """Of the hybrid, without embedding and head."""
        return active_parameter_count(get_config("tiny", **self.overrides("hybrid")))


SIZES = {
    "4M": Size(3, 8, 2), "7M": Size(4, 8, 2), "16M": Size(5, 12, 4), "22M": Size(6, 12, 4), "40M": Size(7, 16, 4),
    "52M": Size(8, 16, 4),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Study:
    """What is asked for. fields replace others of TrainConfig, for all runs.

    Raises ValueError for an unknown or repeated model or size, no seed, or settings that TrainConfig refuses.
    """

    models: tuple[str, ...] = tuple(MODELS)
    sizes: tuple[str, ...] = ("4M", "7M", "16M", "22M")
    seeds: int = 3
    tokens_per_parameter: float = 10.0
    learning_rate: float = 5e-3  # at 256 channels
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, allowed in (("models", MODELS), ("sizes", SIZES)):
            values = getattr(self, name)
            if not values or len({*values}) != len(values):
                raise ValueError(f"{name}={list(values)} is not allowed: at least one, each once")
            if unknown := [value for value in values if value not in allowed]:
                raise ValueError(f"{name}={unknown} is unknown; allowed: {', '.join(allowed)}")
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds} is not allowed: at least 1")
        for name in ("tokens_per_parameter", "learning_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: above 0 and finite")
        self.runs()  # all that is wrong with any run is said before the first begins

    def runs(self) -> list[TrainingRun]:
        """Small sizes first; all seeds of a model one after the other, since they share its compiled programs."""
        sizes = [size for size in SIZES if size in self.sizes]
        return [self.run(m, size, seed) for size in sizes for m in self.models for seed in range(self.seeds)]

    def run(self, model: str, size: str, seed: int) -> TrainingRun:
        """One run of the study."""
        settings = self.settings(model, size, seed)
        of_size = {name: getattr(settings, name) for name in ("steps", "warmup", "learning_rate")}
        training = training_fields(settings, without=("overrides", *of_size))
        training |= {
            "tokens_per_parameter": self.tokens_per_parameter,
            f"learning_rate_at_{RATE_WIDTH}": self.learning_rate,
        }
        training["vocab_size"] = _vocab_size(settings.tokenizer)
        what = {"model": model, "size": size, "seed": seed, "overrides": settings.overrides, "of_size": of_size}
        return TrainingRun(f"{model} {size}, seed {seed}", {**what, "training": training}, settings)

    def settings(self, model: str, size: str, seed: int) -> TrainConfig:
        """One run for `train`; a twentieth of its steps is warm-up."""
        shape = SIZES[size]
        shared = {"sequence_length": 1024, "batch_size": 64, "eval_tokens": VALIDATION, "checkpoint_every": 500}
        shared |= {"eval_every": 0, "sample_tokens": 0, **self.fields}
        plain = TrainConfig(**shared)  # refuses what the division below would choke on
        tokens = self.tokens_per_parameter * shape.parameters()
        steps = math.ceil(tokens / (plain.batch_size * plain.sequence_length))
        return dataclasses.replace(
            plain,
            overrides=shape.overrides(model),
            seed=seed,
            steps=steps,
            warmup=steps // 20,
            learning_rate=self.learning_rate * RATE_WIDTH / shape.width,
        )


def model_of(config: Mapping[str, Any]) -> ModelConfig:
    """The model of a run, from its config in the store."""
    return get_config("tiny", vocab_size=config["training"]["vocab_size"], **config["overrides"])


def tokens_of(config: Mapping[str, Any]) -> int:
    """How many tokens a run trains on."""
    training = config["training"]
    return config["of_size"]["steps"] * training["batch_size"] * training["sequence_length"]


def flops_of(config: Mapping[str, Any]) -> float:
    """Operations of a whole run, forward and backward."""
    return tokens_of(config) * training_flops(model_of(config), config["training"]["sequence_length"])


def guessed_seconds(config: Mapping[str, Any]) -> float:
    """Of a run on an H200, without compilation: 40% of its peak for wide models, less for narrow ones."""
    width = config["overrides"]["hidden_size"]
    return flops_of(config) / (PEAKS[GUESSED_CARD] * GUESSED_SHARE * width / (width + HALF_WIDTH))


@functools.cache
def _vocab_size(tokenizer: str) -> int:
    return get_tokenizer(tokenizer).vocab_size
