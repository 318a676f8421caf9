"""The training loop in one process: what it writes, what it refuses, meshes, experts, flags."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
from absl import flags
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import experiments.generate
from experiments.data.bpe import train_bpe
from experiments.depth_profile import ROWS, depth_profile
from experiments.evaluate import make_evaluate
from experiments.flops import PEAKS, training_flops
from experiments.generate import load_run, sample_text, stream_text
from experiments.input_pipeline import validation_batches
from experiments.loop import TrainingDiverged, train
from experiments.metrics import PROFILES, MetricsWriter, read_metrics
from experiments.run_directory import open_run
from experiments.text import load_corpus
from experiments.tokenization import get_tokenizer
from experiments.train import config_from_flags, define_flags, report
from experiments.train_config import TrainConfig, parse_overrides
from experiments.trigram import Trigram
from experiments.turns import turn
from kimi_jax import KimiLM, get_config, load_hf, save_hf
from kimi_jax.checkpoints import load_model
from kimi_jax.layers import RouterBias

SMALL = dict(
    hidden_size=8, num_layers=2, mla_every=2, kda_num_heads=2, kda_head_dim=4, mla_num_heads=2, kv_lora_rank=8,
    qk_nope_dim=4, qk_rope_dim=0, v_dim=4, ffn_width=8, chunk_size=16,
)  # fmt: skip

QUICK = {**SMALL, "num_layers": 1, "mla_every": 1, "residual": "standard"}


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """Many tests compile the same step; a cache on disk spares all but the first."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("cache")))
    jax.config.update(names[1], 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for i in range(100):
        (folder / f"{i}.txt").write_text("".join(rng.choice(["alpha ", "beta ", "gamma\n", "delta, "], 40)))
    return str(folder / "*.txt")


def small_config(text: str, workdir: Path, **changes) -> TrainConfig:
    settings = dict(
        data=text, workdir=str(workdir), overrides=SMALL, steps=12, warmup=2, batch_size=4, sequence_length=16,
        eval_every=6, eval_tokens=300, checkpoint_every=4, sample_tokens=5, optimizer="adamw", learning_rate=1e-2,
    )  # fmt: skip
    return TrainConfig(**{**settings, **changes})


def losses(workdir: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(workdir) if "loss" in record]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    return train(small_config(text, workdir)), small_config(text, workdir)


def test_a_run_leaves_everything_behind(finished):
    result, _ = finished
    assert result.finished and result.step == 12
    assert 0 < result.validation_bits_per_byte < 9 and 0 < result.trigram_bits_per_byte < 9
    assert (
        result.sample.startswith("import os\n\n\nclass ")
        and (result.workdir / "sample.txt").read_text() == result.sample
    )
    records = list(read_metrics(result.workdir))
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in records if "validation_bits_per_byte" in r] == [6, 12]
    assert not any("mfu" in r for r in records)  # nobody knows the peak of this processor
    assert losses(result.workdir)[-1] < losses(result.workdir)[0]
    assert (result.workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((result.workdir / "tensorboard").glob("events.*"))
    assert sorted(p.name for p in (result.workdir / "checkpoints").iterdir()) == ["12", "8"]


def test_each_domain_of_the_validation_text_is_measured(tmp_path, capsys, monkeypatch):
    """By a tokenizer that has more bytes to a token in one of them; on a device whose peak is known."""
    monkeypatch.setitem(PEAKS, "cpu", 1e6)
    for name, content in (("code", "gamma delta\n" * 60), ("docs", "zyx")):
        (tmp_path / f"train.{name}.txt").write_text(f"gamma delta\n {content}" * 9 + "\0")
        (tmp_path / f"val.{name}.txt").write_text(content + "\0")
    train_bpe(tmp_path, 265).save(str(tmp_path / "bpe.json"))
    config = small_config(
        f"{tmp_path}/train.*.txt", tmp_path / "run", validation_data=f"{tmp_path}/val.*.txt", eval_tokens=90, steps=3,
        tokenizer=str(tmp_path / "bpe.json"), sample_tokens=0, overrides=QUICK,
    )  # fmt: skip
    result = train(config)
    assert list(result.domains) == ["code", "docs"] and train(config) == result
    tokenizer = get_tokenizer(config.tokenizer)
    corpus = load_corpus(config.data, tokenizer, validation_data=config.validation_data)
    graphdef, state = nnx.split(load_model(tmp_path / "run" / "checkpoints"))
    evaluate, trigram = make_evaluate(graphdef, lambda batch: batch), Trigram.fit(tokenizer.to_bytes(corpus.train))
    sums = {"bits_per_byte": 0.0, "trigram_bits_per_byte": 0.0}
    sizes = {}
    for name, tokens in corpus.evaluated(90).items():
        text, found = tokenizer.to_bytes(tokens), result.domains[name]
        sizes[name] = len(text)
        batches = validation_batches(tokens, sequence_length=16, batch_size=4)
        assert found["bits_per_byte"] == pytest.approx(evaluate(state, batches, len(text) / len(tokens)), rel=1e-4)
        assert found["trigram_bits_per_byte"] == trigram.bits_per_byte(text)
        sums = {key: total + len(text) * found[key] for key, total in sums.items()}
    assert sizes["code"] > 100 and sizes["docs"] == 4
    whole = result.validation_bits_per_byte, result.trigram_bits_per_byte
    assert whole == pytest.approx([total / sum(sizes.values()) for total in sums.values()])
    last = [r for r in read_metrics(tmp_path / "run") if "validation_bits_per_byte/code" in r][-1]
    assert last["validation_bits_per_byte/docs"] == result.domains["docs"]["bits_per_byte"]
    flops = training_flops(config.model_config(vocab_size=265), 16)
    speeds = [(r["tokens_per_second"], r["mfu"]) for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert all(share == pytest.approx(speed * flops / 1e6, rel=1e-3) for speed, share in speeds) and len(speeds) == 3
    report(result)
    assert re.search(r"\n +docs   model [\d.]+   byte trigram [\d.]+   \(", capsys.readouterr().out)


def test_profiles_are_of_the_steps_asked_for_and_are_written_once(text, tmp_path):
    fields = dict(overrides={**QUICK, "residual": "full_attn_res"}, steps=5, checkpoint_every=2, sample_tokens=0)
    config = small_config(text, tmp_path, profile_every=2, eval_every=0, **fields)
    train(config)
    before = list(read_metrics(tmp_path, PROFILES))
    assert [profile["step"] for profile in before] == [2, 4, 5]
    model = load_model(tmp_path / "checkpoints")
    corpus = load_corpus(text, get_tokenizer("byte"))
    rows = next(validation_batches(corpus.validation, sequence_length=16, batch_size=ROWS))
    expected = depth_profile(model, *rows)
    assert before[-1].keys() == expected.keys() | {"step"}
    for name in ("loss", "output_rms", "gradient_rms"):
        assert before[-1][name] == pytest.approx(expected[name], rel=1e-5), name
    assert before[0]["output_rms"] != before[-1]["output_rms"]
    # Killed behind the last profile, before the last checkpoint.
    (tmp_path / "result.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    train(config)
    assert list(read_metrics(tmp_path, PROFILES)) == before
    with pytest.raises(ValueError, match="profile_every=2 is not allowed: 0 with scan_layers=True"):
        dataclasses.replace(config, overrides={**QUICK, "scan_layers": True})


def test_runs_that_differ_in_their_seed_share_their_programs(text, tmp_path, caplog):
    said, found = [], []
    for seed in range(2):
        caplog.clear()
        with jax.log_compiles():
            settings = small_config(text, tmp_path / str(seed), seed=seed, overrides=QUICK, sample_tokens=0)
            found.append(train(settings).validation_bits_per_byte)
        said.append(caplog.text)
    assert all(f"jit({name})" in said[0] for name in ("step", "sums"))
    assert not any(f"jit({name})" in said[1] for name in ("step", "sums", "init_fn")) and found[0] != found[1]


def test_a_finished_run_can_be_loaded_and_sampled(finished):
    result, config = finished
    model = load_model(result.workdir / "checkpoints")
    assert model.config.hidden_size == 8 and model(np.ones((1, 3), np.int32)).shape == (1, 3, 256)
    speaker = load_run(config.workdir)
    first, second = (sample_text(*speaker[:2], "be", 6, temperature=1.0, seed=seed) for seed in (1, 1))
    assert first == second and first.startswith("be")
    with pytest.raises(ValueError, match="holds no run"):
        load_run(str(result.workdir / "checkpoints"))


def test_the_generate_command_prints_texts_one_after_the_other(finished, capsys):
    _, config = finished
    prompts = ("be", "alpha")
    said = zip(*stream_text(load_run(config.workdir), prompts, 50, temperature=0), strict=True)
    first, second = (prompt + "".join(new) for prompt, new in zip(prompts, said, strict=True))
    values = flags.FlagValues()
    experiments.generate.define_flags(values)
    values(["", f"--workdir={config.workdir}", "--prompt=be", "--prompt=alpha", "--tokens=50", "--temperature=0"])
    experiments.generate.speak(values)
    printed = capsys.readouterr()
    assert printed.out == f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n"
    assert re.fullmatch(r"first token after .* s, .*; then [\d.]+ tokens/s, 2 at a time\n", printed.err)


def test_a_finished_run_is_not_trained_again(finished):
    result, config = finished
    before = (result.workdir / "metrics.jsonl").read_bytes()
    assert train(config) == result
    assert (result.workdir / "metrics.jsonl").read_bytes() == before


class Refusal(NamedTuple):
    name: str
    changes: dict
    message: str


REFUSALS = [
    Refusal("model", dict(overrides={**SMALL, "ffn_width": 16}), r"overrides.ffn_width \(saved 8, given 16\)"),
    Refusal("seed_and_steps", dict(seed=1, steps=13), r"seed \(saved 0, given 1\), steps \(saved 12, given 13\)"),
    Refusal("preset", dict(config="tinny"), "unknown preset 'tinny'.*tiny"),
    Refusal("field", dict(overrides={"hidden": 8}), "unknown field 'hidden'.*hidden_size"),
    Refusal("data", dict(data="nowhere/*.txt", workdir=None), "data='nowhere/\\*.txt' matches no file"),
    Refusal("optimizer", dict(optimizer="sgd"), "optimizer='sgd' is not allowed: muon or adamw"),
    Refusal("mesh", dict(mesh="data:2"), "mesh='data:2' is not allowed"),
    Refusal("batch", dict(batch_size=0), "batch_size=0 is not allowed: at least 1"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
def test_bad_settings_are_named(finished, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=case.message):
        train(dataclasses.replace(finished[1], **case.changes))


def test_changed_data_is_refused(text, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for path in Path(text).parent.glob("*.txt"):
        (data / path.name).write_text(path.read_text())
    config = small_config(str(data / "*.txt"), tmp_path / "run")
    train(config)
    (tmp_path / "run" / "result.json").unlink()
    (data / "0.txt").write_text("something else")
    with pytest.raises(ValueError, match=r"data.train_sha256 \(saved"):
        train(config)


def test_an_infinite_loss_stops_the_run_and_keeps_the_last_checkpoint(text, tmp_path):
    config = small_config(text, tmp_path, learning_rate=3e38, warmup=0, checkpoint_every=1, grad_clip=0.0)
    with pytest.raises(TrainingDiverged, match=r"step (\d+): (loss|gradient_norm) is (nan|inf).*of step \d") as error:
        train(config)
    bad = int(str(error.value).split()[1].rstrip(":"))
    steps = sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert steps[-1] == bad - 1 and len(losses(tmp_path)) == bad - 1
    assert np.isfinite(losses(tmp_path)).all()
    assert not (tmp_path / "result.json").exists()


def test_a_run_waits_for_its_turn(text, tmp_path, finished, monkeypatch):
    """Not before it has compiled, and not beyond its limit; what it computes stays the same."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(tmp_path))  # nobody else's turn
    config = small_config(text, tmp_path)
    with turn() as mine:
        waited = train(config, limit_minutes=0.02, take_turns=True)
    assert mine and not waited.finished and waited.step == 1
    assert train(config, take_turns=True)[1:] == finished[0][1:]
    assert losses(tmp_path) == losses(finished[0].workdir)
    with turn(iter([False, True]).__next__) as mine:  # one attempt: the run has given it back
        assert mine


class MeshCase(NamedTuple):
    name: str
    mesh: str
    changes: dict


MOE = {**SMALL, "num_experts": 4, "top_k": 2, "expert_width": 8, "num_shared_experts": 1}
MESHES = [
    MeshCase("data_tensor", "data=2,tensor=2", {}),
    MeshCase("fsdp_muon", "fsdp=4", dict(optimizer="muon")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [MESHES[0], pytest.param(MESHES[1], marks=pytest.mark.exhaustive)], ids=lambda case: case.name
)
def test_a_mesh_trains_the_same_model(text, tmp_path, case):
    changes = dict(steps=6, sample_tokens=0, **case.changes)
    train(small_config(text, tmp_path / "one", **changes))
    config = small_config(text, tmp_path / "mesh", mesh=case.mesh, **changes)
    train(config)
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "one"), rtol=2e-4)
    # And what was saved on the mesh is gone on from on one device.
    (tmp_path / "mesh" / "result.json").unlink()
    result = train(dataclasses.replace(config, mesh=""))
    assert result.finished and len(losses(tmp_path / "mesh")) == 6


@pytest.mark.slow
def test_selection_biases_move_towards_balance(text, tmp_path):
    train(small_config(text, tmp_path, overrides=MOE, steps=5, router_bias_rate=0.01, sample_tokens=0))
    biases = jax.tree.leaves(nnx.state(load_model(tmp_path / "checkpoints"), RouterBias))
    assert len(biases) == 1
    values = np.asarray(biases[0]).ravel()
    assert np.abs(values).max() > 0 and np.abs(values).max() <= 0.05 + 1e-6
    np.testing.assert_allclose(values / 0.01, np.round(values / 0.01), atol=1e-4)


def test_without_workdir_every_run_gets_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (open_run(TrainConfig()) for _ in range(2))
    assert first != second and first.parent == second.parent == Path("runs")
    assert json.loads((first / "run.json").read_text())["config"] == "tiny"


def test_metrics_drop_what_is_ahead_and_what_is_torn(tmp_path):
    writer = MetricsWriter(tmp_path, from_step=0)
    for step in (1, 2, 3):
        writer.write(step, loss=0.1 * step)
    writer.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    writer = MetricsWriter(tmp_path, from_step=2)
    writer.write(3, loss=0.5)
    writer.close()
    assert list(read_metrics(tmp_path)) == [
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": 0.2},
        {"step": 3, "loss": 0.5},
    ]


class Assignment(NamedTuple):
    text: str
    value: object


ASSIGNMENTS = [
    Assignment("hidden_size=256", 256),
    Assignment("norm_eps=1e-6", 1e-6),
    Assignment("scan_layers=true", True),
    Assignment("residual=full_attn_res", "full_attn_res"),
    Assignment("lower_bound=-5", -5.0),
    Assignment("lower_bound=none", None),
    Assignment("mla_layers=1,3", (1, 3)),
]


@pytest.mark.parametrize("case", ASSIGNMENTS, ids=lambda case: case.text)
def test_overrides_are_typed(case):
    parsed = parse_overrides([case.text])
    assert parsed == {case.text.split("=")[0]: case.value}
    assert type(next(iter(parsed.values()))) is type(case.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("hidden_size", "is no assignment"),
        ("width=3", "unknown field; fields: .*hidden_size"),
        ("hidden_size=big", "hidden_size='big' is not allowed: int"),
        ("scan_layers=perhaps", "scan_layers='perhaps' is not allowed: bool"),
    ],
)
def test_bad_overrides_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_overrides([text])


def test_flags_are_the_settings(tmp_path):
    values = flags.FlagValues()
    define_flags(values)
    values(["train", "--steps=7", "--set=hidden_size=32", "--set=num_layers=8", "--optimizer=adamw", "--warmup=0"])
    expected = TrainConfig(steps=7, warmup=0, optimizer="adamw", overrides={"hidden_size": 32, "num_layers": 8})
    assert config_from_flags(values) == expected
    # In the directory of a run, flags that are not given are that run's.
    open_run(dataclasses.replace(expected, workdir=str(tmp_path)))
    again = flags.FlagValues()
    define_flags(again)
    again(["train", f"--workdir={tmp_path}", "--eval_every=3"])
    assert config_from_flags(again) == dataclasses.replace(expected, workdir=str(tmp_path), eval_every=3)
    for field in dataclasses.fields(TrainConfig):
        name = "set" if field.name == "overrides" else field.name
        default = [] if name == "set" else field.default
        assert again[name].default == default and len(again[name].help) > 10, name


def released_folder(folder: Path, **fields) -> Path:
    """A released checkpoint of a model as small as the others here, of another seed than theirs."""
    config = get_config("tiny", **(SMALL | fields), residual="standard")
    save_hf(KimiLM(config, rngs=nnx.Rngs(99)), folder)
    return folder


def test_a_released_checkpoint_is_where_training_begins(text, tmp_path):
    """With a learning rate of nothing the run also ends there."""
    folder, workdir = released_folder(tmp_path / "released", num_layers=1), tmp_path / "run"
    quick = {"kernel_backend": "reference"}
    config = small_config(
        text, workdir, init_from=str(folder), overrides=quick, steps=2, warmup=0, learning_rate=1e-30, sample_tokens=0
    )
    assert train(config).finished
    begun, ended = load_hf(folder, **quick), load_model(workdir / "checkpoints")
    assert ended.config == begun.config
    chex.assert_trees_all_equal(nnx.state(ended), nnx.state(begun))


def test_a_released_folder_that_will_not_do_leaves_no_run_behind(text, tmp_path):
    folder, workdir = released_folder(tmp_path / "released"), tmp_path / "run"
    for changes, message in (
        ({"init_from": str(tmp_path)}, "holds no config.json"),
        ({"init_from": str(folder), "overrides": {"hidden_size": 16}}, r"embed_tokens.weight is \[256, 8\] and should"),
        ({"init_from": str(folder), "config": "kda_653m"}, "config='kda_653m' is not allowed: left out"),
    ):
        with pytest.raises(ValueError, match=message):
            train(small_config(text, workdir, **({"overrides": {}} | changes)))
    assert not workdir.exists()
