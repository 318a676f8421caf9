"""Tables of ablations: which runs they are, what is refused, how they stop and go on, what the report says of them."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import report_ablation, training_runs
from experiments.ablate import Ablation, run_table
from experiments.configs import SOURCES, TABLES
from experiments.loop import TrainingDiverged
from experiments.run_directory import CHECKPOINTS
from experiments.run_store import RunStore
from experiments.stopping import StopRequest
from experiments.training_runs import read_corpus
from kimi_jax.model import active_parameter_count

TABLE = TABLES["kda_table1"]
ROWS = ("3:1", "no convolution")


@pytest.fixture
def corpus(tmp_path):
    """Five documents to train on, one to validate on."""
    (tmp_path / "train.txt").write_bytes(b"\0".join(b"one two three %d" % i for i in range(5)))
    (tmp_path / "val.txt").write_bytes(b"two three four")
    return {"data": str(tmp_path / "train.txt"), "validation_data": str(tmp_path / "val.txt")}


@pytest.fixture
def store(tmp_path):
    return RunStore(tmp_path / "kda_table1.json", sources=SOURCES, runs=tmp_path / "runs", command="python -m it")


@pytest.fixture
def trained(monkeypatch):
    """What the training loop was asked for, and what it shall answer: bits per byte by (row's fields, seed)."""
    asked, limits, turns, answers = [], [], [], {}

    def train(settings, *, limit_minutes, take_turns):
        asked.append(settings)
        turns.append(take_turns)
        limits.append(limit_minutes)
        Path(settings.workdir, CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        speeds = '{"step": 1, "tokens_per_second": 7000.0, "mfu": 0.125}\n'
        Path(settings.workdir, "metrics.jsonl").write_text(speeds)
        Path(settings.workdir, "profiles.jsonl").write_text('{"step": 1, "output_rms": [0.123456789]}\n')
        answer = answers.get(len(asked), 2.0 + 0.01 * settings.seed + 0.1 * (settings.overrides.get("conv_width") == 0))
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(
            finished=answer is not None, validation_bits_per_byte=answer, trigram_bits_per_byte=2.6,
            domains=answer and dict.fromkeys(("code", "docs"), {"bits_per_byte": answer, "trigram_bits_per_byte": 2.6}),
        )  # fmt: skip

    monkeypatch.setattr(training_runs, "train", train)
    return SimpleNamespace(asked=asked, limits=limits, turns=turns, answers=answers)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_tables_fit_their_models_and_the_papers_rows(table):
    assert set(table.paper) in (set(table.rows), set())
    models = {row: table.train_config(row, 0).model_config(vocab_size=256) for row in table.rows}
    assert len({*models.values()}) == len(models)  # every row is another model
    for row, model in models.items():
        differing = {f.name for f in dataclasses.fields(model)
                     if getattr(model, f.name) != getattr(models[table.baseline], f.name)}  # fmt: skip
        assert differing <= set(table.rows[row]) | {"residual"}
        assert model.num_layers == table.rows[row].get("num_layers", 16)
    with pytest.raises(ValueError, match="row='no head' is unknown; allowed in"):
        table.train_config("no head", 0)
    with pytest.raises(ValueError, match="baseline='none' is no row"):
        dataclasses.replace(table, baseline="none")
    with pytest.raises(ValueError, match=r"paper: \['none'\] are no rows"):
        dataclasses.replace(table, paper={"none": 1.0})
    with pytest.raises(ValueError, match="paper: lacks baseline="):
        dataclasses.replace(table, paper={row: 1.0 for row in table.rows if row != table.baseline})
    with pytest.raises(ValueError, match="unknown field 'no_field'"):
        dataclasses.replace(table, rows={**table.rows, "more": {"no_field": 1}})


def test_published_ratios_are_those_of_the_layers():
    for row, kda in (("3:1", 3), ("0:1 (all MLA)", 0), ("1:1", 1), ("7:1", 7), ("15:1", 15)):
        kinds = TABLE.train_config(row, 0).model_config(vocab_size=256).layer_kinds
        assert kinds == (("kda",) * kda + ("mla",)) * (16 // (kda + 1))


def test_depth_is_traded_for_width_at_equal_parameters():
    table = TABLES["depth_width"]
    models = {row: table.train_config(row, 0).model_config(vocab_size=256) for row in table.rows}
    plain = {row: model for row, model in models.items() if model.residual == "standard"}
    counts = {row: active_parameter_count(model) for row, model in plain.items()}
    assert len(plain) == 5 and max(counts.values()) < 1.03 * min(counts.values())
    for row, model in models.items():
        twin = models[row.replace("Full", "PreNorm")]
        assert dataclasses.replace(model, residual="standard") == twin
        assert 4 * model.kda_num_heads == 4 * model.mla_num_heads == model.num_layers
        assert 2.5 < model.ffn_width / model.hidden_size < 2.8


def test_runs_are_made_once_and_go_on_after_a_stop(corpus, store, trained):
    ablation = Ablation(TABLE, ROWS, 2, {**corpus, "dtype": "float32"})
    trained.answers[2] = None  # stopped
    assert not run_table(ablation, store, StopRequest())
    assert run_table(ablation, store, StopRequest()) and run_table(ablation, store, StopRequest())
    seen = [(s.seed, s.overrides.get("conv_width", 4), s.workdir) for s in trained.asked]
    assert [run[:2] for run in seen] == [(0, 4), (1, 4), (1, 4), (0, 0), (1, 0)]
    assert seen[1][2] == seen[2][2] and len({workdir for *_, workdir in seen}) == 4
    entries = {(e.config["row"], e.config["seed"]): e.result["bits_per_byte"] for e in store.entries()}
    assert entries == {("3:1", 0): 2.0, ("no convolution", 0): 2.1, ("3:1", 1): 2.01, ("no convolution", 1): 2.11}
    for workdir in {workdir for *_, workdir in seen}:
        assert not Path(workdir, CHECKPOINTS).exists()
    more = Ablation(TABLE, ROWS, 3, ablation.fields)
    assert not run_table(more, store, StopRequest(limit_minutes=0)) and len(trained.asked) == 5
    assert run_table(more, store, StopRequest(limit_minutes=5))
    assert trained.limits[:5] == [math.inf] * 5 and 4 < trained.limits[6] < trained.limits[5] < 5
    assert StopRequest(limit_minutes=0).minutes_left() == 0


def test_processes_share_the_runs_of_a_table(corpus, store, trained):
    ablation = Ablation(TABLE, ROWS, 2, {**corpus, "dtype": "float32"})
    first = ablation.runs()[0].config(read_corpus(ablation.runs()[0].settings))
    elsewhere = RunStore(store.path, sources=SOURCES, runs=store.directory(first).parents[1])
    with elsewhere.claim(first):
        assert not run_table(ablation, store, StopRequest())  # the rest is done, and that one left to whoever has it
    assert len(trained.asked) == 3 and store.finished(first) is None
    assert run_table(ablation, store, StopRequest()) and len(trained.asked) == 4


def test_a_second_process_begins_with_another_program(corpus, store, trained):
    ablation = Ablation(TABLE, ROWS, 2, {**corpus, "dtype": "float32"})
    facts = read_corpus(ablation.runs()[0].settings)
    first = ablation.runs()[0].config(facts)
    elsewhere = RunStore(store.path, sources=SOURCES, runs=store.directory(first).parents[1])
    with elsewhere.claim(first):
        run_table(ablation, store, StopRequest())
    seen = [(s.seed, s.overrides.get("conv_width", 4)) for s in trained.asked]
    assert seen == [(0, 0), (1, 0), (1, 4)]


def test_runs_take_turns_when_told_to_and_keep_no_speeds(corpus, store, trained):
    ablation = Ablation(TABLE, ("3:1",), 1, {**corpus, "dtype": "float32"})
    assert run_table(ablation, store, StopRequest(), take_turns=True)
    assert run_table(dataclasses.replace(ablation, seeds=2), store, StopRequest())
    assert trained.turns == [True, False]
    first, second = sorted(store.entries(), key=lambda e: e.config["seed"])
    assert "tokens_per_second" not in first.result and second.result["tokens_per_second"] == 7000.0


def test_another_corpus_is_refused_and_a_moved_one_is_not(corpus, store, trained, tmp_path):
    fields = {**corpus, "dtype": "float32"}
    assert run_table(Ablation(TABLE, ROWS, 1, fields), store, StopRequest())
    moved = tmp_path / "moved.txt"
    moved.write_bytes((tmp_path / "val.txt").read_bytes())
    assert run_table(Ablation(TABLE, ROWS, 1, {**fields, "validation_data": str(moved)}), store, StopRequest())
    assert len(trained.asked) == 2
    moved.write_bytes(b"two three five")
    with pytest.raises(ValueError, match="validation corpus: its tokens have the sha256 .* give the same data"):
        run_table(Ablation(TABLE, ROWS, 1, {**fields, "validation_data": str(moved)}), store, StopRequest())
    with pytest.raises(ValueError, match="seeds=0"):
        Ablation(TABLE, ROWS, 0, fields)
    with pytest.raises(ValueError, match="row='4:1' is unknown"):
        Ablation(TABLE, ("4:1",), 1, fields)
    with pytest.raises(ValueError, match="steps=0"):
        Ablation(TABLE, ROWS, 1, {**fields, "steps": 0})


def test_the_same_text_in_other_domains_is_another_corpus(corpus, store, trained, tmp_path):
    fields = {**corpus, "dtype": "float32"}
    (tmp_path / "val.txt").write_bytes(b"two\0three")
    assert run_table(Ablation(TABLE, ROWS[:1], 1, fields), store, StopRequest())
    for name, text in (("a", b"two"), ("b", b"three")):
        (tmp_path / f"part.{name}.txt").write_bytes(text)
    fields["validation_data"] = str(tmp_path / "part.*.txt")
    with pytest.raises(ValueError, match="validation corpus: its tokens have the sha256"):
        run_table(Ablation(TABLE, ROWS[:1], 1, fields), store, StopRequest())


def test_profiles_are_part_of_a_result_where_they_are_asked_for(corpus, store, trained):
    fields = {**corpus, "dtype": "float32"}
    assert run_table(Ablation(TABLES["attn_res_dynamics"], ("Full",), 1, fields), store, StopRequest())
    (entry,) = store.entries()
    assert entry.result["profiles"] == [{"step": 1, "output_rms": [0.12346]}]
    assert entry.config["training"]["profile_every"] == 200
    plain = Ablation(TABLE, ROWS, 1, fields).run("3:1", 0)
    assert "profile_every" not in plain.what["training"] and plain.what["training"]["eval_tokens"] == 3 << 18


def test_the_report_compares_with_the_baseline(corpus, store, trained):
    trained.answers.update({8: TrainingDiverged("the loss is nan"), 3: MemoryError("no room")})
    ablation = Ablation(TABLE, (*ROWS, "1:1"), 3, {**corpus, "dtype": "float32"})
    trained.answers[7] = 2.0  # 1:1, seed 0: the baseline's own
    assert not run_table(ablation, store, StopRequest())
    kept = [Path(s.workdir, CHECKPOINTS).exists() for s in trained.asked]
    assert kept == [False] * 2 + [True] + [False] * 6  # what failed goes on when it is tried again
    text = "\n".join(report_ablation.section(TABLE, store.path))
    assert "| 3:1 | 2.0050 ± 0.0071 (2), 1 failed |  | 5.65 |  |  |  |" in text
    assert "| no convolution | 2.1100 ± 0.0100 (3) | +0.1000 ± 0.0000 | 5.7 | +0.050 | worse: as in the paper |" in text
    assert "| 1:1 | 2.0100 ± 0.0141 (2), 1 diverged | +0.0000 | 5.66 | +0.010 | the same: not as in the paper |" in text
    assert "(model FLOPs utilisation): 3:1 7,000 (12.5%); 1:1 7,000 (12.5%); no convolution 7,000 (12.5%)." in text
    assert "| 3:1 | 2.0050 | 2.0050 |" in text and "| byte trigram | 2.6000 | 2.6000 |" in text
    assert "- 3:1 2: MemoryError: no room" in text and "| 7:1 | not run |  | 5.7 | +0.050 |  |  |" in text
    text = "\n".join(report_ablation.section(dataclasses.replace(TABLE, paper={}), store.path))
    assert "The paper's validation perplexity does not compare: `experiments/configs/kda_table1.py` says why." in text
    assert "| no convolution | 2.1100 ± 0.0100 (3) | +0.1000 ± 0.0000 | worse | the same in all 2 pairs |" in text
    assert run_table(ablation, store, StopRequest())  # what failed is tried again; what diverged is not
    assert len(trained.asked) == 10
