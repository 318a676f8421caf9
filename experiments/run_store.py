"""Runs that are kept under what decides their numbers: asked for again, a finished one is read and not run.

    store = RunStore("results/synthetic.json", sources=("pallas_kernels/kda/**/*.py", ...), command="python -m ...")
    if (entry := store.finished(config)) is None:
        entry = store.attempt(config, run)             # its result, or why it failed

The key of a run is the sha256 of its config (what it is, data included, in JSON types) and of the source files that its
numbers come from. Other sources make another key: older results stay in the file, `RunStore.entries` says which they
are, and nothing averages over both. Only code counts: comments, docstrings and empty lines may change.

The file holds one run per line, and is replaced whole. What a run needs to go on after a kill lies apart, in the
directory that `RunStore.directory` names.
"""

import fcntl
import hashlib
import json
import os
import platform
import time
import tokenize
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from absl import logging

from experiments.benchmark_suites import card, versions
from experiments.files import replace_text

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Entry:
    """A run as it is written down. Exactly one of result and error is there."""

    key: str
    config: Mapping[str, Any]
    sources: str  # sha256 of the code that made it
    result: Mapping[str, Any] | None
    error: str | None
    seconds: float  # of the call that ended it, compilation included
    card: str
    versions: Mapping[str, str]
    date: str
    command: str


class RunStore:
    """The runs in one JSON file.

    Args:
      path: the file; made when the first run is recorded.
      sources: patterns, relative to root, of the files that decide numbers; each must match something.
      command: what one types to get these runs, written beside them.
      runs: where unfinished runs keep what they need to go on.

    Raises:
      ValueError: a pattern that matches nothing, or a file that is no store.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sources: Sequence[str],
        command: str = "",
        runs: str | Path = "runs",
        root: Path = ROOT,
    ):
        self.path, self.command = Path(path), command
        self._runs = Path(runs) / self.path.stem
        self.sources = fingerprint(sources, root)
        self._known: tuple[Any, dict[str, Entry]] = (None, {})  # the file as it was last read
        self._read()

    def key(self, config: Mapping[str, Any]) -> str:
        """The sha256, in hex, of a config and the present sources; the order of fields does not matter."""
        text = json.dumps({"config": config, "sources": self.sources}, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def entries(self, *, present: bool = True) -> list[Entry]:
        """All runs made by the present sources, failed ones included; present=False: those of other sources."""
        return [entry for entry in self._read().values() if (entry.sources == self.sources) == present]

    def finished(self, config: Mapping[str, Any]) -> Entry | None:
        """The run of this config by the present sources, if it has a result. A failed run is to be tried again."""
        entry = self._read().get(self.key(config))
        return None if entry is None or entry.error is not None else entry

    def record(self, config: Mapping[str, Any], result: Mapping[str, Any], *, seconds: float) -> Entry:
        """Write down a result, in JSON types without NaN. Several processes may record into one file."""
        return self._write(config, seconds, result=result)

    def record_failure(self, config: Mapping[str, Any], error: str, *, seconds: float) -> Entry:
        """Write down that a run failed, and why; a result that is already there stays."""
        return self.finished(config) or self._write(config, seconds, error=error)

    def attempt(self, config: Mapping[str, Any], run: Callable[[], Mapping[str, Any] | None]) -> Entry | None:
        """Make a run and write down its result, or why it failed, so that one run leaves the others theirs.

        None if run() returned None: it was stopped, and nothing is written down.
        """
        started = time.monotonic()
        try:
            result = run()
            return None if result is None else self.record(config, result, seconds=time.monotonic() - started)
        except Exception as error:
            logging.debug("where it happened: %s", traceback.format_exc())
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return self.record_failure(config, reason, seconds=time.monotonic() - started)

    @contextmanager
    def claim(self, config: Mapping[str, Any]) -> Iterator[bool]:
        """True while this process alone may make this run; False if it is finished or another process makes it.

        So the same command can be started once per device: each takes the next run that nobody has.
        """
        with self._lock(self.directory(config).name, wait=False) as alone:
            yield alone and self.finished(config) is None

    def claimed(self, config: Mapping[str, Any]) -> bool:
        """Whether another process makes this run now."""
        with self._lock(self.directory(config).name, wait=False) as alone:
            return not alone

    def comparable(self, varying: Sequence[str]) -> list[tuple[Entry, ...]]:
        """All runs, in groups that agree in code and in every field of their config but the varying ones.

        Groups of the present code come first, then the larger ones.
        """
        groups = defaultdict(list)
        for entry in self._read().values():
            rest = {name: value for name, value in entry.config.items() if name not in varying}
            groups[entry.sources, json.dumps(rest, sort_keys=True)].append(entry)
        return sorted(map(tuple, groups.values()), key=lambda group: (group[0].sources != self.sources, -len(group)))

    def directory(self, config: Mapping[str, Any]) -> Path:
        """Where a run of this config keeps its checkpoints while it is not finished; not made here."""
        return self._runs / self.key(config)[:16]

    def _write(self, config, seconds, *, result=None, error=None) -> Entry:
        entry = Entry(
            key=self.key(config),
            config=config,
            sources=self.sources,
            result=result,
            error=error,
            seconds=round(seconds, 2),
            card=card(),
            versions={"python": platform.python_version(), **versions()},
            date=datetime.now(UTC).date().isoformat(),
            command=self.command,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock("file", wait=True):  # not the file itself, since it is replaced
            entries = {**self._read(), entry.key: entry}
            replace_text(self.path, _as_lines(entries.values()))
        return entry

    def _read(self) -> dict[str, Entry]:
        if not self.path.exists():
            return {}
        stat = self.path.stat()
        state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if state != self._known[0]:
            try:
                entries = {fields["key"]: Entry(**fields) for fields in json.loads(self.path.read_text())["runs"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path} is not a file of runs: {error!r}") from error
            self._known = (state, entries)
        return self._known[1]

    @contextmanager
    def _lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        """Whether no other process has this name; it is kept until this ends, or the process does."""
        self._runs.mkdir(parents=True, exist_ok=True)
        with (self._runs / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
            else:
                yield True


def keep_programs(runs: str | Path) -> None:
    """Keep compiled programs beside unfinished runs, for other seeds and processes; or where jax has been told to."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(Path(runs, "compilation_cache")))


def fingerprint(patterns: Sequence[str], root: Path = ROOT) -> str:
    """The sha256, in hex, of the code of all files that the patterns match: their paths and tokens.

    ValueError names a pattern that matches nothing, since it watches over nothing.
    """
    paths = set()
    for pattern in patterns:
        found = [path for path in root.glob(pattern) if path.is_file()]
        if not found:
            raise ValueError(f"sources: {pattern!r} matches no file under {root}")
        paths.update(found)
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        digest.update(json.dumps([name, _code(path)]).encode())
    return digest.hexdigest()


def _code(path: Path) -> list[Any]:
    """The logical lines of a Python file as lists of tokens, without comments and strings that stand by themselves."""
    lines, line = [], []
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.INDENT, tokenize.DEDENT):
                lines.append(tokenize.tok_name[token.type])
            elif token.type == tokenize.NEWLINE:
                if [t.type for t in line] != [tokenize.STRING]:
                    lines.append([t.string for t in line])
                line = []
            elif token.type not in (tokenize.COMMENT, tokenize.NL):
                line.append(token)
    return lines


def _as_lines(entries: Iterable[Entry]) -> str:
    ordered = sorted(entries, key=lambda entry: (json.dumps(entry.config, sort_keys=True), entry.date, entry.key))
    lines = ",\n".join(json.dumps(asdict(entry), allow_nan=False) for entry in ordered)
    return f'{{"runs": [\n{lines}\n]}}\n'
