"""The synthetic study: one run and how it goes on, the order of all runs, what the report makes of them."""

import dataclasses
import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from experiments import report, report_synthetic, synthetic
from experiments.comparison import difference
from experiments.paper import SYNTHETIC_PEAK
from experiments.report_parts import verdict
from experiments.run_store import RunStore
from experiments.synthetic import define_flags, plan, run_study, study_from_flags
from experiments.synthetic_study import SOURCES, Study, best_entry, peak, steps_to
from experiments.synthetic_training import Programs, Run, task_loss, train_run

RUN = Run(
    task="palindrome", model="softmax", length=8, learning_rate=1e-2, seed=0, steps=40, batch=4, dtype="float32",
    window=10, warmup=5, head_dim=4,
)  # fmt: skip
STUDY = Study(
    tasks=("palindrome",), models=("kda", "softmax"), lengths=(8, 16), grid_length=8, learning_rates=(1e-3, 1e-2),
    seeds=2, steps=40, batch=4, dtype="float32", window=10, warmup=5, head_dim=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def programs():
    programs = Programs()
    yield programs
    programs.close()


@pytest.fixture(scope="module")
def whole(programs, tmp_path_factory):
    return train_run(RUN, programs, tmp_path_factory.mktemp("whole") / "run")


def test_a_run_learns_and_leaves_no_checkpoint(whole, programs, tmp_path):
    assert whole["ended"] == "steps" and whole["steps"] == 40 and whole["tokens_per_second"] > 0
    assert len(whole["accuracy"]) == len(whole["loss"]) == 4 and all(0 <= a <= 1 for a in whole["accuracy"])
    # From guessing over the whole vocabulary on the way to guessing among the symbols of the task.
    assert whole["loss"][0] > 6.9 and 5.6 > whole["loss"][-1] > math.log(64)
    other = train_run(dataclasses.replace(RUN, seed=1), programs, tmp_path / "other")
    assert other["loss"] != whole["loss"] and not (tmp_path / "other").exists()
    slow = train_run(dataclasses.replace(RUN, learning_rate=1e-5), programs, tmp_path / "slow")
    assert slow["loss"][-1] > 6.9


def test_no_row_is_seen_twice(programs, tmp_path):
    seen = []

    class Recording:
        def get(self, run):
            program = programs.get(run)

            def train(state, batches, rate):
                seen.append(np.asarray(batches.tokens))
                return program.train(state, batches, rate)

            return program._replace(train=train)

    train_run(RUN, Recording(), tmp_path / "run")
    rows = np.concatenate(seen).reshape(-1, RUN.length)
    assert len(rows) == RUN.steps * RUN.batch == len({row.tobytes() for row in rows})


def test_a_run_that_is_stopped_goes_on_bit_for_bit(whole, programs, tmp_path):
    steps, folder = [], tmp_path / "run"

    def report(step, accuracy, loss):
        steps.append(step)

    assert train_run(RUN, programs, folder, stop=lambda: len(steps) == 2, report=report) is None
    assert steps == [10, 20] and any(folder.iterdir())
    result = train_run(RUN, programs, folder, report=report)
    assert steps == [10, 20, 30, 40]
    assert result["loss"] == whole["loss"] and result["accuracy"] == whole["accuracy"]
    assert not folder.exists()


def test_a_run_that_crashed_goes_on_from_its_last_checkpoint(whole, programs, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.synthetic_training.CHECKPOINT_SECONDS", 0)
    steps = []

    def report(step, accuracy, loss):
        steps.append(step)
        if step == 30 and len(steps) == 3:
            raise SystemError("power is gone")

    with pytest.raises(SystemError):
        train_run(RUN, programs, tmp_path / "run", report=report)
    result = train_run(RUN, programs, tmp_path / "run", report=report)
    assert steps == [10, 20, 30, 30, 40] and result["loss"] == whole["loss"]


def test_a_run_ends_when_it_has_learned_its_task_or_diverged(programs, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.synthetic_training.SOLVED", 0.0)
    solved = train_run(RUN, programs, tmp_path / "a")
    assert solved["ended"] == "solved" and solved["steps"] == 20 and len(solved["loss"]) == 2
    diverged = train_run(dataclasses.replace(RUN, learning_rate=1e30), programs, tmp_path / "b")
    assert diverged["ended"] == "diverged" and diverged["steps"] == 0 and diverged["accuracy"] == []


def test_only_targets_count():
    logits = jnp.zeros((1, 3, 4)).at[0, 0, 2].set(5.0).at[0, 1, 1].set(5.0)
    loss, sums = task_loss(logits, jnp.array([[2, 3, -1]]))
    per_token = math.log(math.exp(5) + 3)
    assert float(loss) == pytest.approx((per_token - 5 + per_token) / 2, rel=1e-6)
    assert int(sums["correct"]) == 1 and int(sums["asked"]) == 2
    loss, sums = task_loss(logits, jnp.full((1, 3), -1))
    assert float(loss) == 0 and int(sums["correct"]) == int(sums["asked"]) == 0


def invented(accuracy, ended="steps"):
    return {
        "accuracy": accuracy,
        "loss": accuracy,
        "steps": 10 * len(accuracy),
        "ended": ended,
        "tokens_per_second": 1e6,
    }


def open_store(folder):
    return RunStore(folder / "synthetic.json", sources=SOURCES, runs=folder / "runs", command="python -m it")


def cell(run):
    return run.model, run.length, run.learning_rate, run.seed


def test_the_grid_comes_first_and_its_best_rate_goes_on(tmp_path):
    store = open_store(tmp_path)
    grid = [("kda", 8, 1e-2, 0), ("kda", 8, 1e-3, 0), ("softmax", 8, 1e-2, 0), ("softmax", 8, 1e-3, 0)]
    assert [cell(run) for run in STUDY.pending(store)] == grid and STUDY.size() == 8 and len(STUDY.waiting(store)) == 4
    fast, slow = STUDY.grid("palindrome", "kda")
    store.record(fast.config(), invented([0.1, 0.5, 0.1, 0.1]), seconds=1)
    store.record(slow.config(), invented([0.0, 0.0, 0.1, 0.6]), seconds=1)  # a higher peak
    follow = [("kda", 8, 1e-3, 1), ("kda", 16, 1e-3, 0)]
    assert [cell(run) for run in STUDY.pending(store)] == follow + grid[2:] and len(STUDY.waiting(store)) == 2
    assert plan(STUDY, store).startswith("8 runs: 2 finished, 4 can be run now, 2 wait for them\nat most")
    for run in STUDY.pending(store):
        store.record(run.config(), invented([0.2, 0.3, 0.4, 0.5]), seconds=1)
    for run in STUDY.pending(store):
        store.record(run.config(), invented([0.2, 0.3, 0.4, 0.5]), seconds=1)
    assert plan(STUDY, store) == "8 runs: 8 finished, 0 can be run now, 0 wait for them"
    assert run_study(STUDY, store)  # nothing is left to do


def test_the_best_rate_is_that_of_the_peak_and_then_of_the_earlier_one(tmp_path):
    store, runs = open_store(tmp_path), STUDY.grid("palindrome", "kda")

    def better(first, second):
        for run, result in zip(runs, (first, second), strict=True):
            store.record(run.config(), result, seconds=0)
        entries = [store.finished(run.config()) for run in runs]
        return entries.index(best_entry(entries))

    assert better(invented([0.5, 0.9, 0.9, 0.9]), invented([0.9, 0.9, 0.9, 0.9002])) == 1
    assert better(invented([1.0, 1.0], "solved"), invented([0.0, 0.9, 1.0, 1.0], "solved")) == 0
    assert better(invented([0.9, 0.95], "diverged"), invented([0.0, 0.5, 0.9, 0.95])) == 1
    assert better(invented([], "diverged"), invented([0.0] * 4)) == 0  # nothing between them: the higher rate
    assert peak(invented([])) == 0 and steps_to(invented([0.1, 0.99, 0.5]), 0.99, 10) == 20
    assert steps_to(invented([0.1]), 0.99, 10) is None


def test_runs_stop_go_on_and_fail_without_taking_others_along(tmp_path, monkeypatch, capsys):
    study, asked = dataclasses.replace(STUDY, models=("softmax",), seeds=1, lengths=(8,)), []

    def train(run, programs, directory, *, stop, report):
        asked.append((run.learning_rate, directory))
        if run.learning_rate == 1e-2 and len(asked) == 1:
            raise MemoryError("no room\nfor it")
        report(10, 0.5, 1.0)
        return None if stop() else invented([0.5] * 4)

    monkeypatch.setattr(synthetic, "train_run", train)
    monkeypatch.setattr(synthetic.Programs, "prepare", lambda self, runs: None)
    store = open_store(tmp_path)
    assert not run_study(study, store, stop=lambda: True) and not asked
    assert not run_study(study, store)  # one failed
    assert [rate for rate, _ in asked] == [1e-2, 1e-3]
    failed = [entry for entry in store.entries() if entry.error]
    assert [entry.error for entry in failed] == ["MemoryError: no room"] and "no room" in capsys.readouterr().out
    stops = iter([False, True])
    assert not run_study(study, store, stop=lambda: next(stops)) and len(asked) == 3
    assert run_study(study, store) and len(asked) == 4 and asked[3] == asked[2] == asked[0]
    assert not [entry for entry in store.entries() if entry.error]


def test_processes_share_the_runs_and_wait_for_grids(tmp_path, monkeypatch):
    study, store = dataclasses.replace(STUDY, models=("softmax",), lengths=(8,)), open_store(tmp_path)
    fast, slow = study.grid("palindrome", "softmax")
    made, other = [], open_store(tmp_path)

    def train(run, programs, directory, *, stop, report):
        made.append(run)
        return invented([0.5] * 4)

    monkeypatch.setattr(synthetic, "train_run", train)
    monkeypatch.setattr(synthetic.Programs, "prepare", lambda self, runs: None)
    claim = other.claim(fast.config())
    assert claim.__enter__()

    def sleep(seconds):  # meanwhile the other process ends its run
        assert made == [slow]
        other.record(fast.config(), invented([0.9] * 4), seconds=1)
        claim.__exit__(None, None, None)

    monkeypatch.setattr(synthetic.time, "sleep", sleep)
    assert run_study(study, store)
    assert made == [slow, dataclasses.replace(fast, seed=1)]


def test_what_is_asked_for_is_checked_before_anything_runs():
    for fields, message in (
        (dict(tasks=("copy",)), "task='copy' is unknown; allowed: palindrome, mqar, stack"),
        (dict(models=("kda", "rwkv")), "model='rwkv' is unknown; allowed: kda"),
        (dict(lengths=(8, 2)), "length=2 is not allowed: palindrome needs at least 4"),
        (dict(learning_rates=(1e-3, -1.0)), "learning_rate=-1.0 is not allowed"),
        (dict(learning_rates=(1e-3, 1e-3)), "learning_rates=.* each once"),
        (dict(learning_rates=()), "learning_rates=.* at least one"),
        (dict(seeds=0), "seeds=0 is not allowed"),
        (dict(steps=45), "steps=45 is not allowed: a multiple of window=10"),
        (dict(warmup=40), "warmup=40"),
        (dict(batch=0), "batch=0 is not allowed"),
        (dict(dtype="float16"), "dtype='float16' is not allowed: float32 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(STUDY, **fields)


def test_flags_are_the_study():
    def parse(*arguments):
        values = flags.FlagValues()
        define_flags(values)
        values(["synthetic", *arguments])
        return study_from_flags(values)

    assert parse() == dataclasses.replace(Study(), dtype="float32")  # on a CPU
    study = parse("--tasks=stack,mqar", "--models=kda", "--learning_rates=1e-4", "--lengths=512", "--dtype=bfloat16")
    assert study == Study(("stack", "mqar"), ("kda",), (512,), learning_rates=(1e-4,))
    assert parse("--seeds=5", "--length_seeds=2", "--steps=600", "--batch=7", "--head_dim=64", "--grid_length=128",
                 "--window=50", "--warmup=9", "--dtype=bfloat16") == Study(
        seeds=5, length_seeds=2, steps=600, batch=7, head_dim=64, grid_length=128, window=50, warmup=9
    )  # fmt: skip
    with pytest.raises(ValueError, match="learning_rates=fast is not allowed: numbers"):
        parse("--learning_rates=fast")


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A study that is not complete, with invented numbers, beside an older one and another file."""
    folder = tmp_path_factory.mktemp("results")
    store = open_store(folder)
    study = Study(tasks=("mqar",), models=("kda", "gated_delta_net"), lengths=(1024, 2048), learning_rates=(1e-3, 2e-3),
                  steps=20, window=10, warmup=5)  # fmt: skip
    accuracies = {
        "kda": ([0.5, 0.995], [0.7, 0.999], [0.6, 1.0]),
        "gated_delta_net": ([0.1, 0.7], [0.1, 0.8], [0.1, 0.9]),
    }
    for model, curves in accuracies.items():
        for seed, curve in enumerate(curves):
            store.record(study.run("mqar", model, 1024, 1e-3, seed).config(), invented(list(curve)), seconds=60)
        store.record(study.run("mqar", model, 1024, 2e-3, 0).config(), invented([0.25], "diverged"), seconds=60)
    store.record(study.run("mqar", "delta_net", 1024, 2e-3, 0).config(), invented([0.123]), seconds=60)
    store.record_failure(study.run("mqar", "kda", 2048, 1e-3, 0).config(), "MemoryError: no room", seconds=60)
    runs = json.loads((folder / "synthetic.json").read_text())["runs"]
    runs += [{**run, "sources": "0" * 64, "key": run["key"][::-1]} for run in runs if run["config"]["model"] == "kda"]
    (folder / "synthetic.json").write_text(json.dumps({"runs": runs}))
    (folder / "kda_gpu.json").write_text(
        json.dumps({"ms": {"a": {"command": "python -m x", "card": "H200", "date": "2026-01-02"}}})
    )
    report.report(folder)
    return folder, (folder / "README.md").read_text()


def test_the_report_sets_ours_beside_the_papers(reported):
    folder, text = reported
    assert "| mqar | KDA | 99.8 ± 0.3 (3); paper 100.0 | 1 failed; paper 47.6 | 20, 20, 20; paper 6000 |" in text
    assert "| mqar | Gated DeltaNet | 80.0 ± 10.0 (3); paper 78.7 | not run; paper 29.1 | never, never, never;" in text
    gap = SYNTHETIC_PEAK["mqar"]["kda"][1024] - SYNTHETIC_PEAK["mqar"]["gated_delta_net"][1024]
    (row,) = [line for line in text.splitlines() if "KDA - Gated DeltaNet" in line]
    assert row.startswith(f"| mqar | KDA - Gated DeltaNet | 1024 | +19.8 ± 9.8 | {gap:+.1f} | not resolved | p = 0.072")
    assert "| mqar | KDA | 99.5 | 25.0 |" in text  # the grid
    assert "- mqar kda 2048 0.001 0: MemoryError: no room" in text
    assert "| [kda_gpu.json](kda_gpu.json) | `python -m x` | H200 | 2026-01-02 |" in text
    assert (folder / "synthetic.png").stat().st_size > 10_000


def test_the_papers_curve_is_drawn_at_its_own_length_alone(reported, tmp_path, monkeypatch):
    group = report_synthetic.groups_of(reported[0] / "synthetic.json")[0]
    shorter = [dataclasses.replace(e, config={**e.config, "length": e.config["length"] // 8}) for e in group.entries]
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    for some in (group, report_synthetic.Group(tuple(shorter), True)):
        report_synthetic.draw(some, tmp_path / "figure.png")
    labels = [" ".join(figure.axes[0].get_legend_handles_labels()[1]) for figure in drawn]
    assert ["paper" in label for label in labels] == [True, False] and "KDA" in labels[1]


def test_results_of_other_code_are_marked_and_not_mixed(reported):
    folder, text = reported
    assert "(synthetic-2.png)" in text and (folder / "synthetic-2.png").stat().st_size > 10_000
    present, earlier = text.split("**† By earlier code** (sources 000000000000)")
    assert "| mqar | KDA † | 99.8 ± 0.3 (3)" in earlier and "†" not in present and "KDA -" not in earlier
    assert "7 runs" not in present and "10 runs" in present and "5 runs" in earlier


def test_a_grid_that_is_not_finished_says_so_and_is_not_compared(reported):
    _, text = reported
    assert "| mqar | DeltaNet, 1 of 2 rates | 12.3 (1) |" in text
    assert "KDA - DeltaNet" not in text


def test_verdicts_agree_with_the_paper_or_not():
    say = functools.partial(verdict, words=("behind", "alike", "ahead"), tie=1.0, paper_tie=1.0)
    clear, behind = (difference({0: a, 1: a + 1, 2: a}, {0: 50, 1: 50, 2: 50}) for a in (90, 10))
    alike = difference({0: 50.0, 1: 50.5}, {0: 50, 1: 50})
    unclear = difference({0: 50.0, 1: 90.0}, {0: 50, 1: 50})
    assert say(clear, 30.0) == "ahead: as in the paper" and say(clear, 0.3) == "ahead: not as in the paper"
    assert say(behind, 30.0) == "behind: not as in the paper" and say(behind, None) == "behind"
    assert say(alike, 0.0) == "alike: as in the paper" and say(unclear, 30.0) == "not resolved"
