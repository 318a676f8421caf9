"""The scaling study: which runs it consists of, what they cost, how they go on, what the report says of them."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl import flags

from experiments import report_scaling, scaling_study, training_runs
from experiments.configs import SOURCES
from experiments.flops import depth_sources, tokens_at_peak, training_flops
from experiments.loop import TrainingDiverged
from experiments.report import report
from experiments.run_store import RunStore
from experiments.scaling import define_flags, plan, run_study, study_from_flags
from experiments.scaling_study import HEAD, MODELS, SIZES, Size, Study, flops_of, guessed_seconds, model_of, tokens_of
from experiments.stopping import StopRequest
from experiments.training_runs import read_corpus
from kimi_jax.configs import get_config
from kimi_jax.model import active_parameter_count

LAWS = {"mla": (2.00, 0.050), "hybrid": (1.98, 0.050), "block": (1.95, 0.051), "full": (1.96, 0.050)}


@pytest.fixture
def texts(tmp_path):
    """Five documents to train on, one to validate on."""
    (tmp_path / "train.txt").write_bytes(b"\0".join(b"one two three %d" % i for i in range(5)))
    (tmp_path / "val.txt").write_bytes(b"two three four")
    return {"data": str(tmp_path / "train.txt"), "validation_data": str(tmp_path / "val.txt"), "dtype": "float32"}


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "scaling.json", sources=SOURCES, runs=tmp_path / "runs", command="python -m it")


@pytest.fixture
def trained(monkeypatch):
    """What the training loop was asked for, and what it answers: losses of LAWS, less a little for each seed."""
    asked, answers = [], {}

    def train(settings, *, limit_minutes, take_turns):
        asked.append(settings)
        overrides = settings.overrides
        model = next(m for m, fields in MODELS.items() if fields.items() <= overrides.items())
        tokens = settings.steps * settings.batch_size * settings.sequence_length
        compute = tokens * training_flops(settings.model_config(vocab_size=256), settings.sequence_length)
        A, alpha = LAWS[model]
        nats = A * (compute / 8.64e19) ** -alpha * (1 - 0.001 * settings.seed)
        answer = answers.get(len(asked), nats / math.log(2))
        if isinstance(answer, Exception):
            raise answer
        Path(settings.workdir).mkdir(parents=True, exist_ok=True)
        Path(settings.workdir, "metrics.jsonl").write_text('{"step": 1, "tokens_per_second": 1e6}\n')
        return SimpleNamespace(
            finished=answer is not None, validation_bits_per_byte=answer, trigram_bits_per_byte=2.6, domains=None
        )  # fmt: skip

    monkeypatch.setattr(training_runs, "train", train)
    return SimpleNamespace(asked=asked, answers=answers)


def test_sizes_are_what_they_are_called_and_grow_in_depth_and_width():
    assert list(SIZES) == [f"{size.parameters() / 1e6:.0f}M" for size in SIZES.values()]
    for name, size in SIZES.items():
        model = get_config("tiny", **size.overrides("block"))
        assert model.layer_kinds == ("kda", "kda", "kda", "mla") * (size.layers // 4), name
        assert model.kda_head_dim == model.v_dim == model.qk_nope_dim + model.qk_rope_dim == HEAD
        assert 6 <= 2 * model.num_layers / model.block_size <= 8
    small, *_, large = SIZES.values()
    assert large.layers > small.layers and large.width > small.width
    for before, after in zip(SIZES.values(), list(SIZES.values())[1:], strict=False):
        assert after.width > before.width and after.layers >= before.layers


def test_models_of_a_size_differ_in_nothing_else():
    study = Study(seeds=2, fields={"dtype": "bfloat16"})
    runs = study.runs()
    assert [r.name for r in runs[:5]] == [
        "mla 4M, seed 0",
        "mla 4M, seed 1",
        "hybrid 4M, seed 0",
        "hybrid 4M, seed 1",
        "block 4M, seed 0",
    ]
    assert len(runs) == len({r.name for r in runs}) == 4 * 4 * 2 and runs[8].name == "mla 7M, seed 0"
    for run in runs:
        s, size = run.settings, SIZES[run.what["size"]]
        of_size = study.run("hybrid", run.what["size"], s.seed).settings
        assert (s.steps, s.learning_rate, s.warmup) == (of_size.steps, of_size.learning_rate, of_size.warmup)
        assert s.learning_rate * size.width == pytest.approx(5e-3 * 256) and 0 < s.warmup < s.steps / 10
        assert 0 <= tokens_of(run.what) - 10 * size.parameters() < s.batch_size * s.sequence_length
        differing = {k for k, v in s.overrides.items() if of_size.overrides.get(k) != v}
        assert differing <= {"mla_every", "residual", "block_size"}
        assert model_of(run.what) == dataclasses.replace(s.model_config(vocab_size=256), dtype="float32")
    assert 120 < max(guessed_seconds(run.what) for run in runs) < 300  # on an H200
    assert runs[0].what["training"]["eval_tokens"] > 3 * 3.1e6  # all of each domain of data.build
    twice = Study(tokens_per_parameter=20, learning_rate=1e-2).run("mla", "7M", 0)
    assert twice.settings.learning_rate == 1e-2 and tokens_of(twice.what) > 19.9 * SIZES["7M"].parameters()


def test_the_share_of_a_peak_is_known_where_both_numbers_are():
    plain, mhc = (get_config("tiny", residual=r) for r in ("standard", "mhc"))
    assert tokens_at_peak(plain, 100, "NVIDIA H200") == pytest.approx(989e12 / training_flops(plain, 100))
    assert tokens_at_peak(plain, 100, "cpu") is None and tokens_at_peak(mhc, 100, "NVIDIA H200") is None


def test_operations_are_those_of_the_papers_formulas():
    plain = get_config("tiny", num_layers=4, residual="standard", kda_num_heads=3, kda_head_dim=128)
    without = 6.0 * (active_parameter_count(plain) + 256 * 64)
    memory = 3 * 3 * 126976  # three layers of three heads, 126,976 for one of 128
    attention = 2 * 100 * 2 * (48 + 32) / 2  # two heads of 48 and 32
    assert training_flops(plain, 100) == pytest.approx(without + 3 * (memory + attention))
    full, block = (get_config("tiny", num_layers=2, residual=r) for r in ("full_attn_res", "block_attn_res"))
    assert depth_sources(full) == 2 + 3 + 4 + 5 and depth_sources(block) == 2 + 2 + 3 + 3
    assert depth_sources(plain) == 0
    two = get_config("tiny", num_layers=2, residual="standard")
    more = active_parameter_count(full) - active_parameter_count(two)
    assert training_flops(full, 8) - training_flops(two, 8) == pytest.approx(6 * more + 3 * 4 * 64 * 14)
    with pytest.raises(NotImplementedError, match="residual='mhc'"):
        training_flops(get_config("tiny", residual="mhc"), 8)


@pytest.mark.parametrize("flag, message", [
    ("--sizes=4M,9M", r"sizes=\['9M'\] is unknown; allowed: 4M, 7M"),
    ("--sizes=", r"sizes=\[\] is not allowed: at least one"),
    ("--models=mla,mla", r"models=\['mla', 'mla'\] is not allowed: at least one, each once"),
    ("--models=kda", r"models=\['kda'\] is unknown; allowed: mla, hybrid, block, full"),
    ("--seeds=0", "seeds=0 is not allowed: at least 1"),
    ("--tokens_per_parameter=0", "tokens_per_parameter=0.0 is not allowed: above 0"),
    ("--tokens_per_parameter=nan", "tokens_per_parameter=nan is not allowed"),
    ("--learning_rate=-1", "learning_rate=-1.0 is not allowed: above 0"),
    ("--batch_size=0", "batch_size=0 is not allowed: at least 1"),
    ("--sequence_length=1", "sequence_length=1 is not allowed: at least 2"),
    ("--tokenizer=none.json", "tokenizer='none.json': no such file"),
])  # fmt: skip
def test_flags_that_are_not_allowed(flag, message):
    with pytest.raises(ValueError, match=message):
        study_from_flags(parsed(flag))


def test_flags_make_a_study():
    study = study_from_flags(parsed("--sizes=16M,4M", "--models=hybrid", "--seeds=1", "--batch_size=8"))
    assert [run.name for run in study.runs()] == ["hybrid 4M, seed 0", "hybrid 16M, seed 0"]
    assert study.runs()[0].settings.batch_size == 8 and study_from_flags(parsed()).sizes == ("4M", "7M", "16M", "22M")


def parsed(*arguments):
    values = flags.FlagValues()
    define_flags(values)
    values(["scaling", *arguments])
    return values


def test_the_plan_says_what_is_left_and_learns_from_what_was_measured(texts, store, trained):
    study = Study(sizes=("4M", "7M"), models=("hybrid", "full"), seeds=1, fields=texts)
    corpus, configs = read_corpus(study.runs()[0].settings), [run.what for run in study.runs()]
    said = plan(study, corpus, store)
    guess = sum(map(guessed_seconds, configs)) / 60
    assert said.startswith(f"4 runs: 0 finished, 4 left\n{guess:.0f} minutes, ") and "(guessed for an H200)" in said
    assert "besides compiling 4 programs" in said
    assert f"{sum(map(flops_of, configs)) / 1e15:.4g} PFLOP" in said
    tokens = tokens_of(configs[-1])
    assert f"reads {tokens / 1e6:.4g}M tokens, the training text {tokens / corpus.training_tokens:.2g} times" in said
    trained.answers[2] = None  # stopped
    assert not run_study(study, corpus, store, StopRequest())
    assert plan(study, corpus, store).startswith("4 runs: 1 finished, 3 left\n") and len(store.entries()) == 1
    pace = tokens_of(configs[0]) / 1e6 / guessed_seconds(configs[0])  # it made 1e6 tokens per second
    minutes = sum(guessed_seconds(c) for c in configs[1:]) * pace / 60
    said = plan(study, corpus, store)
    assert f"\n{minutes:.0f} minutes" in said and "pace of 1 finished on" in said
    assert run_study(study, corpus, store, StopRequest()) and run_study(study, corpus, store, StopRequest())
    assert len(trained.asked) == 5 and trained.asked[1].workdir == trained.asked[2].workdir
    assert plan(study, corpus, store) == "4 runs: 4 finished, 0 left"
    Path(texts["data"]).write_bytes(b"something else\0")
    with pytest.raises(ValueError, match="train corpus: its tokens have the sha256"):
        plan(study, read_corpus(study.runs()[0].settings), store)


def test_the_report_fits_what_was_measured(texts, store, trained):
    study = Study(seeds=2, fields=texts)
    corpus = read_corpus(study.runs()[0].settings)
    trained.answers.update({31: TrainingDiverged("the loss is nan"), 32: MemoryError("no room")})  # full, 22M
    assert not run_study(study, corpus, store, StopRequest())
    text = "\n".join(report_scaling.section(store.path))
    assert (store.path.parent / "scaling.png").stat().st_size > 10_000 and "![Loss by compute](scaling.png)" in text
    assert "| hybrid (3 KDA : 1 MLA) | 1.9790 [1.97" in text and "| 0.0500 [0.0" in text
    assert "0.0527 (Kimi Linear, arXiv 2510.26692); 0.0570 (Attention Residuals, arXiv 2603.15031) |" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| hybrid") and " against " in line]
    ours = {row[0]: (float(row[2].split()[0]), *row[3:5]) for row in rows}
    assert ours["| hybrid (3 KDA : 1 MLA) against all MLA"] == (
        pytest.approx((2.00 / 1.98) ** 20, abs=0.006), "1.16", "ahead: as in the paper",
    )  # fmt: skip
    block = ours["| hybrid + Block AttnRes against hybrid (3 KDA : 1 MLA)"]
    compute = flops_of(study.run("hybrid", "22M", 0).what) / 8.64e19
    assert block[0] == pytest.approx((1.98 / 1.95 * compute**0.001) ** 20, abs=0.006) and block[1] == "1.25"
    full = ours["| hybrid + Full AttnRes against hybrid (3 KDA : 1 MLA)"]
    assert full[0] == pytest.approx((1.98 / 1.96) ** 20, abs=0.006) and full[1] == "1.27 (by its laws)"
    assert "3 sizes, 6 runs of each |" in text and "4 sizes, 8 runs of each |" in text
    assert "| 1 diverged, 1 failed |  |" in text and "- full 22M 1: MemoryError: no room" in text
    assert (
        f"| 22M | all MLA | 12 x 384 | {active_parameter_count(model_of(study.run('mla', '22M', 0).what)) / 1e6:.2f}M"
        in text
    )


def test_the_report_refuses_a_law_of_two_sizes(texts, store, trained):
    study = Study(sizes=("4M", "7M"), models=("mla", "hybrid"), seeds=1, fields=texts)
    assert run_study(study, read_corpus(study.runs()[0].settings), store, StopRequest())
    text = report(store.path.parent).read_text()
    assert "No law for all MLA: a fit needs at least 3 sizes, got 2 (4M, 7M)." in text
    assert "No advantage of hybrid (3 KDA : 1 MLA) against all MLA: a fit needs at least 3 sizes" in text
    assert "| alpha" not in text and "draws above 1" not in text and "| 7M | all MLA | 8 x 256 |" in text


@pytest.mark.exhaustive
def test_tiny_sizes_are_trained(texts, store, monkeypatch):
    monkeypatch.setattr(scaling_study, "SIZES", {"4M": Size(1, 4, 2), "7M": Size(2, 4, 2)})
    Path(texts["data"]).write_bytes(b"\0".join(b"one two three %d" % i for i in range(500)))
    fields = {**texts, "batch_size": 2, "sequence_length": 64}
    for sizes, models in ((("4M", "7M"), ("mla",)), (("4M",), ("block",))):
        study = Study(models, sizes, seeds=1, tokens_per_parameter=0.005, fields=fields)
        assert run_study(study, read_corpus(study.runs()[0].settings), store, StopRequest())
    assert len(store.entries()) == 3
    assert all(e.result["ended"] == "steps" and e.result["tokens_per_second"] > 0 for e in store.entries())
    assert "| 4M | all MLA | 4 x 64 |" in "\n".join(report_scaling.section(store.path))
