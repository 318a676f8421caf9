"""What a run writes down: metrics.jsonl (exact, one object per line) and TensorBoard event files (to look at)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from experiments.files import replace_text

FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends to <workdir>/metrics.jsonl and <workdir>/tensorboard.

    After a crash the files may be ahead of the last checkpoint, and the last line may be torn. So a writer that starts
    from a step first drops every line after it: what is then written again appears once.
    """

    def __init__(self, workdir: Path, *, from_step: int):
        path = workdir / FILE
        if path.exists():
            kept = [json.dumps(record) for record in read_metrics(workdir) if record["step"] <= from_step]
            replace_text(path, "".join(line + "\n" for line in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close())
        self._board = SummaryWriter(str(workdir / "tensorboard"), purge_step=from_step + 1, write_to_disk=True)

    def write(self, step: int, **values: Any) -> None:
        """One line {"step": step, **values}; numbers go to TensorBoard too."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read_metrics(workdir: Path) -> Iterator[dict[str, Any]]:
    """The records of a run, oldest first; stops at a torn line."""
    with open(workdir / FILE, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)
