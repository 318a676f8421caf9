"""Reads what the TPU compiler writes: the text of an optimised program, and the dumps of its kernels' schedules.

Its formats are nobody's promise; they were the same in libtpu 0.0.48 and 0.0.52. HLO names ("kda_forward.3") tell the
calls of one program apart, pallas_call names ("kda_forward") are what a reader knows.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["critical_path", "custom_calls", "estimated_cycles", "other_cycles", "program_text"]


def custom_calls(text: str) -> dict[str, tuple[str, int]]:
    """HLO name -> (pallas_call's name, bytes of VMEM) of every Mosaic kernel in an optimised program.

    VMEM holds the double-buffered windows, scratch and spilled registers; operands that XLA put there are extra.
    """
    found = {}
    for line in text.splitlines():
        if 'custom_call_target="tpu_custom_call"' not in line:
            continue
        hlo_name = re.match(r"\s*(?:ROOT )?%?(\S+) = ", line)[1]
        name = re.search(r'op_name="[^"]*?([^/()"]+)\)*/pallas_call', line)[1]
        used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', line)[1]
        found[hlo_name] = (name, sum(int(n) for n in re.findall(r'"memory_space":"1",[^}]*"size":"(\d+)"', used)))
    return found


def other_cycles(text: str) -> int:
    """XLA's own estimate for everything but the kernels: fusions, copies, transposes. Loop bodies count once."""
    return sum(int(n) for n in re.findall(r'"window_config":\{[^}]*?"estimated_cycles":"(\d+)"', text))


def estimated_cycles(folder: Path) -> dict[str, int]:
    """HLO name -> simulated cycles of the whole call, of those that the profiler could model."""
    found = {}
    for path in folder.glob("*_static_llo_profile.textproto"):
        for block in path.read_text().split("hlo_op_estimate")[1:]:
            name, cycles = re.search(r'hlo_op_name: "([^"]+)"\s+estimated_cycles: (\d+)', block).groups()
            if int(cycles):
                found[name] = int(cycles)
    return found


def program_text(folder: Path, hlo_name: str) -> dict[str, Any]:
    """bundles, loop_bundles, ops, spills, fills and utilisation of one kernel (fields of `tpu_aot.Kernel`)."""
    lines: list[tuple[str, str]] = []
    for path in folder.glob(f"*-{_literal(hlo_name)}-[0-9][0-9]-final_bundles.txt"):
        lines = re.findall(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?: ([> ]*)\{(.*)", path.read_text(), re.M)
    ops: Counter[str] = Counter()
    for _, bundle in lines:
        for instruction in re.sub(r"/\*.*?\*/", "", bundle).split(";;"):
            if op := re.match(r"(?:.*? = )?\s*([a-z]\w*)", instruction.strip(" {}")):
                ops[op[1]] += 1
    used: dict[str, tuple[int, int]] = {}
    for path in folder.glob("*-hlo-static-bundle-profile.txt"):
        for block in path.read_text().split("HLO: "):
            if block.startswith(f"%{hlo_name} "):
                counts = re.findall(r"^ - (.*?): \((\d+)/(\d+)\)", block, re.M)
                used = {unit: (int(n), int(slots)) for unit, n, slots in counts}
    return {
        "bundles": len(lines),
        "loop_bundles": sum(">" in depth for depth, _ in lines),
        "ops": dict(ops.most_common(16)),
        "spills": used.pop("VMEM_SPILL_COUNT", (0, 0))[0],
        "fills": used.pop("VMEM_FILL_COUNT", (0, 0))[0],
        "utilisation": {unit: round(n / slots, 3) for unit, (n, slots) in used.items() if n},
    }


def critical_path(folder: Path, hlo_name: str, top: int = 12) -> dict[str, int]:
    """Where the simulated cycles of one kernel went: instruction (such as vmatmul.f32) -> cycles until the next."""
    path = folder / f"{hlo_name}_critical_path.txt"
    if not path.exists():
        return {}
    spent: Counter[str] = Counter()
    before: tuple[int, str] | None = None
    with path.open(errors="replace") as lines:
        for line in lines:
            entry = re.match(r"Length to end: (\d+), (?:.*? = )?\s*([a-z]\w*)(?:\S*?\.(bf16|f32|s8|f8\w*)\b)?", line)
            if entry:
                left = int(entry[1])
                if before:
                    spent[before[1]] += before[0] - left
                before = left, ".".join(filter(None, entry.groups()[1:]))
    if before:
        spent[before[1]] += before[0]
    return dict(spent.most_common(top))


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
