"""The settings of a training run: one dataclass that is the flags, the saved run.json and the argument of `train`."""

import dataclasses
import types
import typing
from typing import Any

from kimi_jax.configs import ModelConfig, get_config
from kimi_jax.convert import load_hf_config


def _setting(default: Any, text: str, *, choices: tuple[str, ...] | None = None, free: bool = False) -> Any:
    """A field with its help text. free: may differ when a run is resumed, as it does not change the losses."""
    metadata = {"help": text, "choices": choices, "free": free}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and how. The defaults are the two-minute run of the README."""

    config: str = _setting("tiny", "Model preset, for example tiny or kda_653m. An unknown name lists what exists.")
    overrides: dict[str, Any] = _setting(
        {}, "Fields of the preset to replace: --set hidden_size=256 --set num_layers=8. An unknown field lists all."
    )
    init_from: str | None = _setting(
        None,
        "Folder of a released checkpoint (config.json and safetensors) to fine-tune. It says what the model is, in "
        "place of --config; --tokenizer has to be the one that it was trained with.",
    )
    workdir: str | None = _setting(
        None,
        "Directory of the run. One that holds a run is resumed from its last checkpoint. Without this flag a fresh "
        "directory under runs/ is made.",
        free=True,
    )

    data: str = _setting(
        "stdlib",
        "Training text: 'stdlib' (the source of Python's standard library), a quoted glob of text files such as "
        "'corpus/train.*.txt', or one prepared .npy or .bin file of token ids. Token 0 ends a document.",
    )
    validation_data: str | None = _setting(
        None,
        "Text to validate on, given like --data; up to 16 files of a glob are a domain each, such as code of "
        "'corpus/val.*.txt', and measured one by one. Without it, about 3% of the documents of --data are held out.",
    )
    tokenizer: str = _setting("byte", "'byte' (256 tokens, no file needed) or the path of a tokenizers JSON file.")
    sequence_length: int = _setting(256, "Tokens per row. Rows are packed: one may hold several documents.")
    batch_size: int = _setting(8, "Rows per step.")
    seed: int = _setting(0, "Seed of the initial parameters, the order of the data and the samples.")

    steps: int = _setting(800, "Length of the run in optimiser steps.")
    optimizer: str = _setting(
        "muon", "'muon' (matrices by Muon, the rest by AdamW) or 'adamw'.", choices=("muon", "adamw")
    )
    per_head_muon: bool = _setting(False, "Orthogonalise each head's block of the q, k and v projections by itself.")
    learning_rate: float = _setting(5e-3, "Highest learning rate.")
    schedule: str = _setting(
        "wsd", "'wsd' (warm up, hold, fall linearly) or 'cosine' (warm up, fall).", choices=("wsd", "cosine")
    )
    warmup: int = _setting(20, "Steps over which the learning rate rises to its highest.")
    decay_fraction: float = _setting(0.5, "Share of the run over which --schedule=wsd falls to zero, at its end.")
    weight_decay: float = _setting(0.1, "Decay of matrices, embedding and head, times the learning rate.")
    grad_clip: float = _setting(1.0, "Largest global norm of the gradient; 0 for no clipping.")
    router_bias_rate: float = _setting(
        1e-3, "Step by which a mixture of experts moves its selection biases towards equal load."
    )
    dtype: str | None = _setting(
        None,
        "Type of the computation: float32 or bfloat16. Parameters and optimiser stay float32. By default float32 on a "
        "CPU and bfloat16 elsewhere.",
        choices=("float32", "bfloat16"),
    )
    mesh: str = _setting(
        "", "Devices to spread over, for example 'data=2,tensor=4' (axes: data, fsdp, tensor). Empty: one.", free=True
    )

    eval_every: int = _setting(200, "Steps between evaluations; one always ends the run. 0: only that one.", free=True)
    eval_tokens: int = _setting(
        1 << 17, "How much of the validation text an evaluation reads, in tokens. Domains have equal shares.", free=True
    )
    profile_every: int = _setting(
        0,
        "Steps between profiles of the depth (outputs, gradients and mixing weights, in profiles.jsonl); one then ends "
        "the run. 0: none.",
        free=True,
    )
    checkpoint_every: int = _setting(200, "Steps between checkpoints; one always ends the run.", free=True)
    keep_checkpoints: int = _setting(2, "How many of the latest checkpoints stay on disk.", free=True)
    sample_tokens: int = _setting(400, "Length of the sample that ends the run; 0: none.", free=True)
    prompt: str = _setting("import os\n\n\nclass ", "How the sample begins.", free=True)
    temperature: float = _setting(0.8, "Of the sample: 0 takes the likeliest token each time.", free=True)

    def __post_init__(self):
        _require(self, "sequence_length", self.sequence_length >= 2, "at least 2")
        for name in ("batch_size", "steps", "eval_tokens", "checkpoint_every", "keep_checkpoints"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("warmup", "eval_every", "profile_every", "sample_tokens", "seed"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        for name in ("weight_decay", "grad_clip", "temperature", "router_bias_rate"):
            _require(self, name, getattr(self, name) >= 0, "at least 0")
        _require(self, "learning_rate", self.learning_rate > 0, "above 0")
        _require(self, "prompt", bool(self.prompt) or not self.sample_tokens, "at least one character")
        for field in dataclasses.fields(self):
            if (choices := field.metadata["choices"]) and (value := getattr(self, field.name)) is not None:
                _require(self, field.name, value in choices, " or ".join(choices))
        if self.init_from is None:
            self.model_config(vocab_size=1)  # raises for an unknown preset or field
        else:  # read when a run begins; its result outlives the folder
            _require(self, "config", self.config == TrainConfig.config, "left out: init_from says what the model is")
        self.mesh_sizes()

    def model_config(self, *, vocab_size: int) -> ModelConfig:
        """The model: the preset with the vocabulary of the tokenizer, or the released one; the dtype; the overrides."""
        if self.init_from is not None:
            model = load_hf_config(self.init_from, **self.init_fields())
            fits = model.vocab_size >= vocab_size
            _require(self, "tokenizer", fits, f"one of at most {model.vocab_size} ids, as init_from has")
            return self._allowed(model)
        settings: dict[str, Any] = {"vocab_size": vocab_size}
        if self.dtype is not None:
            settings["dtype"] = self.dtype
        model = get_config(self.config, **{**settings, **self.overrides})
        _require(self, "overrides", model.vocab_size >= vocab_size, f"vocab_size at least the tokenizer's {vocab_size}")
        return self._allowed(model)

    def _allowed(self, model: ModelConfig) -> ModelConfig:
        readable = not (self.profile_every and model.scan_layers)
        _require(self, "profile_every", readable, "0 with scan_layers=True, whose sub-layers are not seen one by one")
        return model

    def init_fields(self) -> dict[str, Any]:
        """What is changed in the model of init_from: parameters are float32, as those of every run."""
        return {"dtype": self.dtype, "param_dtype": "float32", **self.overrides}

    def mesh_sizes(self) -> dict[str, int]:
        """{"data": 2, "tensor": 4} for "data=2,tensor=4"; empty for one device."""
        sizes = {}
        for part in filter(None, self.mesh.split(",")):
            axis, _, size = part.partition("=")
            ok = axis.strip() not in sizes and size.strip().isdigit()
            _require(self, "mesh", ok, "axis=size for each axis once, such as data=2,tensor=4")
            sizes[axis.strip()] = int(size)
        return sizes

    def binding(self) -> dict[str, Any]:
        """The settings that a resumed run must share with its beginning, because they change the losses."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata["free"]}


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """["hidden_size=256", "residual=standard"] -> {"hidden_size": 256, "residual": "standard"}, by the fields' types.

    Raises ValueError for a part that is no assignment, an unknown field (listing all), or a value of another type.
    """
    hints = typing.get_type_hints(ModelConfig)
    values = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r} is no assignment; write --set FIELD=VALUE")
        if name not in hints:
            raise ValueError(f"--set {name}: unknown field; fields: {', '.join(hints)}")
        values[name] = _parse(name, text, hints[name])
    return values


def _parse(name: str, text: str, hint: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in kinds and text.lower() == "none":
        return None
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if typing.get_origin(kind) is tuple:
            return tuple(int(part) for part in text.strip("()[]").split(",") if part.strip())
        return kind(text)
    except (ValueError, KeyError):
        names = ["none" if kind is types.NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds]
        allowed = " or ".join(names)
        raise ValueError(f"--set {name}={text!r} is not allowed: {allowed}") from None


def _require(config: Any, field: str, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{field}={getattr(config, field)!r} is not allowed: {allowed}")
