"""Builds a text corpus from named, versioned packages, bit for bit the same on every machine.

    python -m experiments.data.build --out corpus
    python -m experiments.data.build --out corpus --max_mb general=95,docs=95,code=60 --pack xz
    python -m experiments.data.build --out free --permissive

No text lies in this repository: packages.lock.json names Debian, PyPI and npm packages with their sha256, and their
ordinary clients (apt-get, pip, npm) fetch them. The result is train.DOMAIN.txt and val.DOMAIN.txt for the domains
general, docs and code: UTF-8 documents, each ended by one NUL byte, so that the bytes are a token stream whose token 0
ends a document. manifest.json says what is in them: counts, sha256, and every package with its licence.

A smaller --max_mb gives a prefix of the larger corpus, with the same validation files. To train on it:

    python -m experiments.train --data 'corpus/train.*.txt' --validation_data 'corpus/val.*.txt'
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.data import packages
from experiments.data.corpus import build, parse_max_mb
from experiments.data.packages import PackageError

_OUT = flags.DEFINE_string("out", None, "Directory to make; it appears whole or not at all.", required=True)
_CACHE = flags.DEFINE_string("cache", None, "Where downloads are kept (default: in the user's cache directory).")
_MAX_MB = flags.DEFINE_string("max_mb", "", "Training text of each domain, 10^6 bytes: general=95,docs=95,code=60.")
_PERMISSIVE = flags.DEFINE_bool("permissive", False, "Leave copyleft packages out.")
_KINDS = flags.DEFINE_list("kinds", list(packages.KINDS), "Kinds of packages to use (deb needs Debian 12).")
_WITHOUT = flags.DEFINE_list("without", [], "Names of packages to leave out, such as one whose version is gone.")
_PACK = flags.DEFINE_enum("pack", None, ["xz"], "Also write each file compressed (minutes).")
_JOBS = flags.DEFINE_integer("jobs", os.cpu_count(), "Processes that read packages.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    started = time.monotonic()
    try:
        chosen = packages.select(
            packages.load_lock(), permissive=_PERMISSIVE.value, kinds=_KINDS.value, without=_WITHOUT.value
        )
        cache = Path(_CACHE.value) if _CACHE.value else packages.default_cache()
        limits = parse_max_mb(_MAX_MB.value)
        manifest = build(Path(_OUT.value), chosen, cache, max_mb=limits, pack=_PACK.value, jobs=_JOBS.value)
    except (PackageError, ValueError) as problem:
        raise SystemExit(f"error: {problem}") from None
    for name, info in manifest["files"].items():
        packed = f", {info['xz']['bytes'] / 1e6:.1f} MB as xz" if "xz" in info else ""
        print(f"{name:18}{info['documents']:8} documents {info['bytes'] / 1e6:8.2f} MB{packed}  {info['sha256']}")
    copyleft = sum(p["bytes"] for p in manifest["packages"] if not p["permissive"])
    everything = sum(p["bytes"] for p in manifest["packages"])
    print(
        f"{len(manifest['packages'])} packages, {everything / 1e6:.1f} MB, {copyleft / max(1, everything):.0%} of it "
        f"copyleft (licences: manifest.json); {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    app.run(main)
