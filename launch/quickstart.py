"""The quickstart: one small hybrid, trained in FP8 and in NVFP4 on the same batches, and the gap between the two.

Run it through `make quickstart`. A run that was interrupted goes on where it stopped; a finished one is not
trained again.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path("runs") / "quickstart"
BASELINE, RUN = "fp8_block", "nvfp4"


def module(name: str, *arguments: str) -> None:
    """Run one of the project's commands and leave with its exit code when it fails."""
    command = [sys.executable, "-m", f"nvfp4_train.{name}", *arguments]
    print("\n$ python " + " ".join(command[1:]), flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        print(f"quickstart: {name} ended with exit code {code}", file=sys.stderr)
        sys.exit(code)


def main() -> None:
    """Train the pair, compare it and say where the pictures are."""
    os.chdir(Path(__file__).resolve().parent.parent)
    start = time.monotonic()
    for precision in (BASELINE, RUN):
        module("train", "experiment=quickstart", f"precision={precision}", f"run_dir={FOLDER / precision}")
    out = FOLDER / "comparison"
    module("compare", str(FOLDER / BASELINE), str(FOLDER / RUN), "--out", str(out))
    # ru_maxrss is in KiB on Linux and is the largest single process among the children
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"\nquickstart: {time.monotonic() - start:.0f} s, peak memory of a run {peak:.2f} GiB")
    for name in ("loss.png", "gap.png", "report.html"):
        print(f"  {out.resolve() / name}")


if __name__ == "__main__":
    main()
