"""What a compile's own process tells its parent, with a child that compiles nothing; and what every program tells."""

import os
import sys
from typing import NamedTuple

import pytest

from experiments import aot_process
from experiments.aot_process import CompileError, Crash


def no_facts(spec):
    if spec["crash"]:
        print("Check failed: no such core", file=sys.stderr, flush=True)
        os.abort()
    raise NotImplementedError("heads of 96 channels")


def ask(folder, crash, **options):
    return aot_process.ask("tests.experiments.test_aot_process", {"crash": crash}, folder, "toy", {}, 60, **options)


def test_what_a_child_raises(tmp_path):
    with pytest.raises(CompileError, match="^toy: raised NotImplementedError: heads of 96 channels$") as caught:
        ask(tmp_path, crash=False, explain=lambda error: f"raised {error}")
    assert caught.value.kind == "NotImplementedError" and not isinstance(caught.value, Crash)


def test_the_last_words_of_a_child(tmp_path):
    with pytest.raises(Crash, match="^toy: the compiler ended its process: no such core") as caught:
        ask(tmp_path, crash=True, last_words=lambda stderr: stderr.partition("Check failed: ")[2])
    assert caught.value.kind == "abort" and caught.value.last_words.startswith("no such core")


class Line(NamedTuple):
    name: str
    text: str
    expected: dict[str, int]


LINES = [
    Line("reduce", "%a = f32[8,128]{1,0} all-reduce(%b), channel_id=1", {"all-reduce": 4096}),
    Line("start", "%a = (bf16[2]{0}, bf16[4]{0}) all-gather-start(%b), channel_id=1", {"all-gather": 8}),
    Line("tuple", "  ROOT %a = (f32[2]{0}, pred[3]{0}) all-to-all(%b, %c)", {"all-to-all": 11}),
    Line("done", "%a = bf16[4]{0} all-gather-done(%b)", {}),
    Line("operand", "%a = f32[] add(%all-reduce.1, %b)", {}),
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_collectives_of_a_text(line):
    assert aot_process.collectives(line.text) == line.expected


if __name__ == "__main__":
    aot_process.answer(no_facts)
