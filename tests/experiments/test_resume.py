"""A run that is killed, at any moment and as often as one likes, ends as if nothing had happened."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from kimi_jax.checkpoints import load_model

STEPS, EVERY = 80, 9
FLAGS = [
    f"--steps={STEPS}", f"--checkpoint_every={EVERY}", "--eval_every=40", "--eval_tokens=500", "--warmup=5",
    "--batch_size=2", "--sequence_length=16", "--sample_tokens=8", "--optimizer=adamw",
    *(f"--set={assignment}" for assignment in (
        "hidden_size=8", "num_layers=2", "mla_every=2", "kda_num_heads=1", "kda_head_dim=8", "mla_num_heads=1",
        "kv_lora_rank=8", "qk_nope_dim=8", "qk_rope_dim=0", "v_dim=8", "ffn_width=8", "chunk_size=16",
    )),
]  # fmt: skip


class Runner:
    """Starts training programs that share data and a compilation cache."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.flags = [f"--data={folder}/*.txt", *FLAGS]
        rng = np.random.default_rng(0)
        for i in range(100):
            (folder / f"{i}.txt").write_text("".join(rng.choice(["alpha ", "beta ", "gamma\n", "delta, "], 80)))
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as conftest.py has it for the tests' own process
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self, workdir: Path, *flags: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.train", f"--workdir={workdir}", *flags],
            cwd=Path(__file__).parents[2],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, workdir: Path, *flags: str) -> str:
        process = self.start(workdir, *flags)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    return Runner(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def undisturbed(runner) -> Path:
    workdir = runner.folder / "undisturbed"
    output = runner.finish(workdir, *runner.flags)
    assert "validation bits per byte" in output and "byte trigram" in output
    return workdir


def records(workdir: Path) -> list[dict]:
    """All lines, each of which must be whole; without the one number that depends on the clock."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in lines]


def wait_for_step(process: subprocess.Popen, workdir: Path, step: int) -> None:
    """Until metrics.jsonl speaks of the step, or the process has ended."""
    path = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while process.poll() is None:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        assert time.monotonic() < deadline, "the run does not get going"
        time.sleep(0.001)


def assert_same_run(workdir: Path, other: Path) -> None:
    """Every line, every evaluation, the sample and every parameter, to the bit."""
    assert records(workdir) == records(other)
    assert [r["step"] for r in records(workdir) if "loss" in r] == list(range(1, STEPS + 1))
    results = [json.loads((run / "result.json").read_text()) for run in (workdir, other)]
    assert results[0] == results[1]
    mine, theirs = (jax.tree.leaves(nnx.state(load_model(run / "checkpoints"))) for run in (workdir, other))
    for leaf, expected in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.slow
def test_kill_at_random_moments(runner, undisturbed):
    workdir = runner.folder / "killed"
    dice = random.Random()
    # Once before the first checkpoint, then in the midst of steps and saves.
    for earliest, spread in ((2, 3), (30, 25)):
        process = runner.start(workdir, *runner.flags)
        wait_for_step(process, workdir, earliest + dice.randrange(spread))
        time.sleep(dice.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it had ended by itself"
    runner.finish(workdir, *runner.flags)
    assert_same_run(workdir, undisturbed)


@pytest.mark.slow
def test_sigterm_stops_cleanly_and_flags_need_not_be_repeated(runner, undisturbed):
    workdir = runner.folder / "terminated"
    process = runner.start(workdir, *runner.flags)
    wait_for_step(process, workdir, 13)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert f"To go on: --workdir={workdir}" in output
    stopped = max(r["step"] for r in records(workdir))
    assert stopped < STEPS and (workdir / "checkpoints" / str(stopped)).is_dir()
    output = runner.finish(workdir)
    assert f"resumed after step {stopped}" in output
    assert_same_run(workdir, undisturbed)


@pytest.mark.slow
def test_a_finished_run_says_so_and_another_config_is_refused(runner, undisturbed):
    before = (undisturbed / "metrics.jsonl").read_bytes()
    assert "is finished; nothing to do" in runner.finish(undisturbed)
    assert (undisturbed / "metrics.jsonl").read_bytes() == before
    process = runner.start(undisturbed, "--learning_rate=0.5", "--set=hidden_size=16")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "learning_rate (saved 0.005, given 0.5)" in output
    assert "overrides.hidden_size (saved 8, given 16)" in output
    assert "steps" not in output.split("these fields differ")[1]
