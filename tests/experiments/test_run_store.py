"""What experiments.run_store keeps apart, and what it lets through."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments.comparison import difference, mean_and_std
from experiments.run_store import RunStore, fingerprint

CONFIG = {"task": "stack", "rate": 1e-3, "seed": 0}


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text('"""What it is."""\n\n\ndef f(x):\n    return x + 1\n')
    (tmp_path / "room" / "b.py").write_text("Y = 'text'\n")
    return tmp_path


def open_store(tree, **options):
    return RunStore(tree / "runs.json", sources=["room/*.py"], root=tree, runs=tree / "work", **options)


def test_a_finished_run_is_found_again_whatever_the_order_of_its_fields(tree):
    store = open_store(tree, command="python -m this --seed=0")
    assert store.finished(CONFIG) is None
    store.record(CONFIG, {"accuracy": [0.5, 1.0]}, seconds=1.234)
    found = open_store(tree).finished(dict(reversed(CONFIG.items())))
    assert found.result == {"accuracy": [0.5, 1.0]} and found.config == CONFIG and found.seconds == 1.23
    assert found.command == "python -m this --seed=0" and found.card and found.versions["jax"] and found.date
    assert open_store(tree).finished(CONFIG | {"seed": 1}) is None


def test_a_result_that_is_no_json_fails_its_own_run_alone(tree):
    store = open_store(tree)
    entry = store.attempt(CONFIG, lambda: {"kurtosis": float("nan")})
    assert entry.error.startswith("ValueError: Out of range float values") and store.finished(CONFIG) is None


def test_a_run_is_made_by_one_process_at_a_time(tree):
    here, there = open_store(tree), open_store(tree)  # locks tell open files apart, as they do processes
    with here.claim(CONFIG) as mine, there.claim(CONFIG) as theirs, there.claim(CONFIG | {"seed": 1}) as other:
        assert mine and not theirs and other
        here.record(CONFIG, {"accuracy": [1.0]}, seconds=1)  # needs no claim
    with there.claim(CONFIG) as theirs, here.claim(CONFIG | {"seed": 1}) as mine:
        assert not theirs and mine  # it is finished meanwhile


@pytest.mark.parametrize("text, same", [
    ('"""Said otherwise."""\n\ndef f(x):\n    # why\n    return x + 1  # so\n', True),
    ('def f(x):\n    """Of f."""\n    return (\n        x + 1\n    )\n', False),  # brackets are code
    ("def f(x):\n    return x + 2\n", False),
    ("def f(x):\n  return x + 1\n", True),
    ("if f:\n    g()\n    h()\n", False),
])  # fmt: skip
def test_code_decides_and_comments_do_not(tree, text, same):
    before = open_store(tree)
    before.record(CONFIG, {"accuracy": [1.0]}, seconds=1)
    (tree / "room" / "a.py").write_text(text)
    after = open_store(tree)
    assert (after.finished(CONFIG) is not None) is same
    assert len(after.entries()) == same and len(after.entries(present=False)) == (not same)
    after.record(CONFIG, {"accuracy": [0.5]}, seconds=1)
    assert len(json.loads((tree / "runs.json").read_text())["runs"]) == 2 - same  # the older result stays


def test_structure_and_names_of_files_decide(tree):
    path = tree / "room" / "a.py"
    prints = set()
    for text in ("if f:\n    g()\n    h()\n", "if f:\n    g()\nh()\n", "if f: g(); h()\n", "'g()'\n"):
        path.write_text(text)
        prints.add(fingerprint(["room/*.py"], tree))
    path.rename(path.with_name("c.py"))
    prints.add(fingerprint(["room/*.py"], tree))
    assert len(prints) == 5
    with pytest.raises(ValueError, match="'romo/.*' matches no file"):
        fingerprint(["room/*.py", "romo/*.py"], tree)


def test_a_failed_run_is_tried_again_and_says_why(tree):
    store = open_store(tree)
    store.record_failure(CONFIG, "no memory", seconds=2)
    assert store.finished(CONFIG) is None and store.entries()[0].error == "no memory"
    store.record(CONFIG, {"accuracy": []}, seconds=2)
    assert store.finished(CONFIG).error is None and len(store.entries()) == 1
    assert store.record_failure(CONFIG, "too late", seconds=2).error is None  # a result is not lost to a failure
    assert len(store.entries()) == 1


def test_what_cannot_be_kept_or_read_is_refused(tree):
    store = open_store(tree)
    with pytest.raises(ValueError):
        store.record(CONFIG, {"loss": float("nan")}, seconds=1)
    assert not (tree / "runs.json").exists()
    for text in ("{", '{"suite": "kda_gpu"}', '{"runs": [{"key": "0"}]}'):
        (tree / "runs.json").write_text(text)
        with pytest.raises(ValueError, match="runs.json is not a file of runs"):
            open_store(tree)


def test_many_may_record_side_by_side(tree):
    with ThreadPoolExecutor(8) as threads:  # each opens files of its own, as processes do
        list(threads.map(lambda seed: open_store(tree).record({"seed": seed}, {"seed": seed}, seconds=0), range(16)))
    assert {entry.result["seed"] for entry in open_store(tree).entries()} == set(range(16))


def test_differences_are_paired_by_seed():
    found = difference({0: 90.0, 1: 94.0, 2: 98.0, 3: 50.0}, {0: 88.0, 1: 91.0, 2: 97.0})
    assert found.mean == 2 and found.std == 1 and found.pairs == 3
    assert found.p_value == pytest.approx(0.0742, abs=1e-4)  # t = 2 sqrt(3), two degrees of freedom
    assert found.direction(tie=1.0) is None and found.direction(tie=2.0) == 0
    assert found.certainty() == "p = 0.074, 3 pairs"
    assert difference({0: 1.0}, {1: 1.0}) is None
    alike = difference({0: 2.0, 1: 3.0}, {0: 0.0, 1: 1.0})
    assert alike.p_value is None and alike.direction(tie=1.0) == 1 and "the same in all 2" in alike.certainty()
    assert difference({0: 2.0}, {0: 9.0}).certainty() == "one seed: no test"
    clear = difference({0: 9.0, 1: 9.1, 2: 9.2}, {0: 0.0, 1: 0.0, 2: 0.1})
    assert clear.p_value < 0.01 and clear.direction(tie=1.0) == 1
    assert mean_and_std([3.0]) == (3.0, None)
