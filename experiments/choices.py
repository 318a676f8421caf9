"""Multiple choice by likelihood: which of several texts a model finds likelier, such as BLiMP's pairs of sentences.

    uv run python -m experiments.choices --workdir=runs/... --questions=blimp.jsonl.xz

The file has a JSON object per line, and may be packed as .xz or .gz:

    {"task": "blimp/adjunct_island", "input": "", "choices": ["Who has ...", "Who have ..."], "answer": 0}

A choice counts as much as its tokens' log-probabilities after the input, summed. In training nothing predicts the first
token of a document, so a line end stands before a choice without input. Questions are for measuring with: none of them
may have been in the training text.
"""

import gzip
import json
import lzma
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from tqdm import tqdm

from experiments.files import replace_text
from experiments.generate import load_released, load_run
from experiments.run_directory import saved_settings
from experiments.text import load_corpus
from experiments.tokenization import Tokenizer, get_tokenizer
from experiments.trigram import Trigram
from kimi_jax.model import KimiLM

ROWS, MULTIPLE = 64, 32  # of a batch; lengths are padded to a multiple, so that few programs are compiled
START = "\n"


class Question(NamedTuple):
    task: str
    input: str
    choices: tuple[str, ...]
    answer: int  # the right one, from 0


def read_questions(path: str | Path) -> list[Question]:
    """ValueError names what is wrong, and the line."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"questions={str(path)!r}: no such file")
    opened = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8") as lines:
        questions = [_question(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ValueError(f"questions={str(path)!r} holds no question")
    return questions


def answer_by(score: Callable[[Sequence[tuple[str, str]]], np.ndarray], questions: Sequence[Question]) -> np.ndarray:
    """bool [questions]: whether the right choice alone has the highest of score([(context, continuation), ...])."""
    texts = [(q.input or START, choice) for q in questions for choice in q.choices]
    scores = iter(np.asarray(score(texts)).tolist())
    right = []
    for question in questions:
        own = [next(scores) for _ in question.choices]
        others = own[: question.answer] + own[question.answer + 1 :]
        right.append(own[question.answer] > max(others))
    return np.array(right)


def summary(questions: Sequence[Question], right: np.ndarray) -> dict[str, Any]:
    """{"questions", "accuracy", "standard_error", "chance", "by_task": {task: accuracy}}; accuracies are fractions."""
    tasks = defaultdict(list)
    for question, good in zip(questions, right, strict=True):
        tasks[question.task].append(bool(good))
    accuracy = float(np.mean(right))
    return {
        "questions": len(questions),
        "accuracy": round(accuracy, 5),
        "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / len(questions)), 5),
        "chance": round(float(np.mean([1 / len(q.choices) for q in questions])), 5),
        "by_task": {task: round(float(np.mean(found)), 5) for task, found in sorted(tasks.items())},
    }


def model_scores(model: KimiLM, tokenizer: Tokenizer, texts: Sequence[tuple[str, str]]) -> np.ndarray:
    """Log-probability (natural log) of each continuation after its context, float64 [texts].

    ValueError for a context or continuation without tokens.
    """
    rows = [_tokens(tokenizer, context, continuation) for context, continuation in texts]
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state, tokens_BT, ids_BT, first_B):
        logits_BTV, _ = nnx.merge(graphdef, state).forward(tokens_BT, ids_BT)
        logits_BTV = jax.nn.log_softmax(logits_BTV[:, :-1].astype(jnp.float32))
        found_BT = jnp.take_along_axis(logits_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
        at_T = jnp.arange(1, tokens_BT.shape[1])
        counts_BT = (at_T >= first_B[:, None]) & (ids_BT[:, 1:] >= 0)
        return jnp.sum(jnp.where(counts_BT, found_BT, 0), axis=1)

    scores = np.zeros(len(rows))
    for batch in _batches([len(tokens) for tokens, _ in rows]):
        length = -(-max(len(rows[i][0]) for i in batch) // MULTIPLE) * MULTIPLE
        tokens, ids, first = np.zeros((ROWS, length), np.int32), np.full((ROWS, length), -1, np.int32), np.ones(ROWS)
        ids[:, 0] = 0  # rows that only fill the batch have a token too
        for row, i in enumerate(batch):
            own, first[row] = rows[i]
            tokens[row, : len(own)], ids[row, : len(own)] = own, 0
        scores[batch] = np.asarray(run(state, tokens, ids, first))[: len(batch)]
    return scores


def trigram_scores(trigram: Trigram, texts: Sequence[tuple[str, str]]) -> np.ndarray:
    """The same by a byte trigram, in nats. All texts are one stream, in which two NULs stand before each."""
    streams = [b"\0\0" + (context + continuation).encode() for context, continuation in texts]
    ends = np.cumsum([len(stream) for stream in streams])
    starts = ends - [len(continuation.encode()) for _, continuation in texts]
    sums = np.concatenate([[0.0], np.cumsum(trigram.bits(np.frombuffer(b"".join(streams), np.uint8)))])
    return -math.log(2) * (sums[ends] - sums[starts])


def _question(line: str, where: str) -> Question:
    try:
        fields = json.loads(line)
        question = Question(fields["task"], fields["input"], tuple(fields["choices"]), fields["answer"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: is no question, {error!r}") from error
    if len(question.choices) < 2 or not all(isinstance(choice, str) and choice for choice in question.choices):
        raise ValueError(f"{where}: choices={list(question.choices)!r} is not allowed: two or more texts")
    if question.answer not in range(len(question.choices)):
        raise ValueError(f"{where}: answer={question.answer!r} is not allowed: 0 to {len(question.choices) - 1}")
    return question


def _tokens(tokenizer, context, continuation) -> tuple[np.ndarray, int]:
    """(tokens of both, the first one of the continuation)."""
    parts = [np.asarray(tokenizer.encode(text), np.int32) for text in (context, continuation)]
    if not all(part.size for part in parts):
        raise ValueError(f"{context!r} and {continuation!r}: both need at least one token")
    return np.concatenate(parts), parts[0].size


def _batches(lengths: Iterable[int]) -> Iterator[np.ndarray]:
    """Places of rows of about equal length, ROWS at a time."""
    order = np.argsort(np.array(list(lengths)), kind="stable")
    starts = range(0, len(order), ROWS)
    for start in tqdm(starts, desc="model", unit="batch", leave=False, mininterval=1):
        yield order[start : start + ROWS]


def _says(name: str, found: dict[str, Any]) -> str:
    tasks = sorted(found["by_task"], key=found["by_task"].get)
    ends = "" if len(tasks) < 4 else "".join(
        f"\n  {word} {', '.join(f'{task} {found["by_task"][task]:.3f}' for task in some)}"
        for word, some in (("best: ", tasks[:-4:-1]), ("worst:", tasks[:3]))
    )  # fmt: skip
    said = f"{found['accuracy']:.4f} ± {found['standard_error']:.4f}, chance {found['chance']:.4f}"
    return f"{name}: {said}, {found['questions']} questions{ends}"


def measure(values: flags.FlagValues) -> None:
    """Do what the flags ask for: print accuracies, and write them beside the run."""
    if (values.workdir is None) == (values.weights is None):
        raise app.UsageError("give either --workdir (a run) or --weights (a released folder)")
    if values.trigram and values.workdir is None:
        raise app.UsageError("--trigram goes with --workdir: it learns from the run's training text")
    questions = read_questions(values.questions)
    speaker = load_run(values.workdir) if values.workdir else load_released(values.weights)
    right = answer_by(lambda texts: model_scores(speaker.model, speaker.tokenizer, texts), questions)
    result = {"questions_file": Path(values.questions).name, "model": summary(questions, right)}
    print(_says("model", result["model"]))
    if values.trigram:
        settings = saved_settings(values.workdir)
        tokenizer = get_tokenizer(settings.tokenizer)
        corpus = load_corpus(settings.data, tokenizer, validation_data=settings.validation_data)
        trigram = Trigram.fit(tokenizer.to_bytes(corpus.train))
        right = answer_by(lambda texts: trigram_scores(trigram, texts), questions)
        result["trigram"] = summary(questions, right)
        print(_says("byte trigram of the training text", result["trigram"]))
    if values.workdir:
        path = Path(values.workdir) / "choices.json"
        replace_text(path, json.dumps(result, indent=1) + "\n")
        print(f"all tasks: {path}")


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """The flags of the command."""
    flags.DEFINE_string("workdir", None, "Directory of a run.", flag_values=values)
    flags.DEFINE_string("weights", None, "Folder of released weights.", flag_values=values)
    flags.DEFINE_string("questions", None, "JSON lines, .xz and .gz too.", required=True, flag_values=values)
    text = "Also a byte trigram of the run's training text, to compare with."
    flags.DEFINE_bool("trigram", False, text, flag_values=values)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        measure(flags.FLAGS)
    except (ValueError, NotImplementedError) as error:
        logging.debug("where it happened:", exc_info=True)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    flags.FLAGS.verbosity = logging.WARNING
    app.run(main)
