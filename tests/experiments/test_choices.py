"""Multiple choice by likelihood: scores against single rows, questions that are none, the command."""

import json
import lzma
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app, flags
from flax import nnx

import experiments.choices as program
from experiments.choices import Question, answer_by, model_scores, read_questions, summary, trigram_scores
from experiments.generate import Speaker
from experiments.tokenization import ByteTokenizer
from experiments.trigram import Trigram
from kimi_jax import KimiLM, get_config
from tests.kimi_jax.conftest import quick_compile  # noqa: F401 (a fixture for all tests here)
from tests.support import F32_FORWARD, assert_close

TEXTS = [("\n", "ab"), ("one two ", "three"), ("\n", "x" * 40), ("context", "é"), ("o", "ne")]
FIRST = {"task": "letters", "input": "", "choices": ["ab", "ba"], "answer": 1}


@pytest.fixture(scope="module")
def model():
    fields = dict(hidden_size=16, num_layers=1, mla_every=0, kda_num_heads=2, kda_head_dim=8, kernel_backend="xla")
    fields |= dict(ffn_width=16, chunk_size=16, vocab_size=256, residual="standard")
    return KimiLM(get_config("tiny", **fields), rngs=nnx.Rngs(0))


def test_scores_are_those_of_the_logits(model):
    streams = [np.frombuffer((context + continuation).encode(), np.uint8) for context, continuation in TEXTS]
    tokens = np.zeros((len(TEXTS), max(map(len, streams))), np.int32)  # what stands behind a text changes nothing
    for row, stream in zip(tokens, streams, strict=True):
        row[: len(stream)] = stream
    logits = nnx.jit(lambda model: jax.nn.log_softmax(model(jnp.asarray(tokens))))(model)
    found = model_scores(model, ByteTokenizer(), TEXTS)
    for i, (context, continuation) in enumerate(TEXTS):
        own = np.arange(len(context.encode()), len(streams[i]))
        assert_close(found[i], np.float64(logits[i, own - 1, tokens[i, own]].sum()), F32_FORWARD, continuation)


def test_trigram_scores_are_those_of_each_text_alone():
    trigram = Trigram.fit(np.frombuffer(b"one two three\0one\0abba context\0" * 3, np.uint8))
    for score, (context, continuation) in zip(trigram_scores(trigram, TEXTS), TEXTS, strict=True):
        bits = trigram.bits(np.frombuffer((context + continuation).encode(), np.uint8))
        assert_close(score, -math.log(2) * bits[len(context.encode()) :].sum(), 1e-12, continuation)


def test_the_right_choice_must_be_likelier_than_all_others():
    questions = [
        Question("a", "", ("1", "2"), 0),
        Question("a", "in", ("1", "2", "3"), 2),
        Question("b", "", ("1", "1"), 1),
    ]
    asked = []

    def score(texts):
        asked.extend(texts)
        return np.array([len(context) + float(continuation) for context, continuation in texts])

    right = answer_by(score, questions)
    assert right.tolist() == [False, True, False]  # equally likely is not right
    assert asked[0] == ("\n", "1") and asked[2] == ("in", "1")
    found = summary(questions, right)
    assert found["by_task"] == {"a": 0.5, "b": 0.0} and found["questions"] == 3
    assert (found["accuracy"], found["chance"]) == (round(1 / 3, 5), round((0.5 + 1 / 3 + 0.5) / 3, 5))


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: is no question"),
        (json.dumps({**FIRST, "choices": ["ab"]}), r"line 2: choices=\['ab'\] is not allowed: two or more"),
        (json.dumps({**FIRST, "choices": ["ab", ""]}), "line 2: choices=.* is not allowed"),
        (json.dumps({**FIRST, "answer": 2}), "line 2: answer=2 is not allowed: 0 to 1"),
        (json.dumps({"task": "x"}), "line 2: is no question"),
    ],
)
def test_what_is_no_question_is_refused(line, message, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(FIRST) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_questions(path)


def test_files_that_hold_no_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_questions(tmp_path / "none")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="holds no question"):
        read_questions(tmp_path / "empty")


def test_the_command(model, tmp_path, monkeypatch, capsys):
    path = tmp_path / "questions.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.write(json.dumps(FIRST) + "\n")
    monkeypatch.setattr(program, "load_run", lambda workdir: Speaker(model, ByteTokenizer(), ()))
    values = flags.FlagValues()
    program.define_flags(values)
    values(["choices", f"--questions={path}", f"--workdir={tmp_path}"])
    program.measure(values)
    assert "1 questions" in capsys.readouterr().out
    assert json.loads((tmp_path / "choices.json").read_text())["model"]["by_task"].keys() == {"letters"}
    values.workdir = None
    with pytest.raises(app.UsageError, match="either --workdir"):
        program.measure(values)
