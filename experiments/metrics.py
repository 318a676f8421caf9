"""What a run writes down: metrics.jsonl and profiles.jsonl (exact, one object per line) and TensorBoard event files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from experiments.files import replace_text

FILE, PROFILES = "metrics.jsonl", "profiles.jsonl"


class MetricsWriter:
    """Appends to <workdir>/metrics.jsonl, <workdir>/profiles.jsonl and <workdir>/tensorboard.

    After a crash the files may be ahead of the last checkpoint, and the last line may be torn. So a writer that starts
    from a step first drops every line after it: what is then written again appears once.
    """

    def __init__(self, workdir: Path, *, from_step: int):
        self._workdir = workdir
        for name in (FILE, PROFILES):
            if (path := workdir / name).exists():
                kept = [json.dumps(record) for record in read_metrics(workdir, name) if record["step"] <= from_step]
                replace_text(path, "".join(line + "\n" for line in kept))
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=from_step + 1, write_to_disk=True)

    def write(self, step: int, **values: Any) -> None:
        """One line {"step": step, **values}; numbers go to TensorBoard too."""
        self._append(FILE, {"step": step, **values})
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def write_profile(self, step: int, profile: Mapping[str, Any]) -> None:
        """A line of profiles.jsonl."""
        self._append(PROFILES, {"step": step, **profile})

    def close(self) -> None:
        self._board.close()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        with open(self._workdir / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_metrics(workdir: Path, name: str = FILE) -> Iterator[dict[str, Any]]:
    """The records of a run, oldest first; stops at a torn line."""
    with open(workdir / name, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)
