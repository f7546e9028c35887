"""What one GPU does, measured: run the matrices beside this file and the loop's benchmark, and keep the tables.

    python benchmarks/gpu/run.py --workspace /tmp/gpu [--out docs/results]

Writes OUT/DATE-GPU/: summary.json and the tables of each matrix, what the machine is (HOST.json), and loop.txt.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

from shardlab import files, host

HERE = Path(__file__).parent
LOOP = ("--workload", "gpt2-large", "--seq-len", "1024", "--steps", "10", "--rounds", "5")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, required=True, help="where the runs go")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where they are kept (default: docs/results)")
    arguments = parser.parse_args()
    machine = host.observe()
    if not machine.gpus:
        print(f"there is no GPU here: {machine.gpu_why_absent}", file=sys.stderr)
        return 2
    name = re.sub(r"[^a-z0-9]+", "-", machine.gpus[0].name.lower()).strip("-")
    out: Path = arguments.out / f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}"
    files.make_folder(out)
    files.write_json(out / "HOST.json", machine)
    worst = 0
    for matrix in sorted(HERE.glob("*.yaml")):
        workspace = str(arguments.workspace / matrix.stem)
        for command in (
            ["jobs", "submit", "--matrix", str(matrix), "--wait", "--workspace", workspace],
            ["collect", "fetch", "--workspace", workspace],
            ["collect", "summarize", "--workspace", workspace],
        ):
            worst = max(worst, subprocess.run([sys.executable, "-m", *command], check=False).returncode)
        report = Path(workspace, "report")
        files.make_folder(out / matrix.stem)
        for found in (report / "summary.json", *sorted(report.glob("tables/*.csv"))):
            if found.exists():
                shutil.copy(found, out / matrix.stem / found.name)
    with (out / "loop.txt").open("w") as loop:
        subprocess.run([sys.executable, str(HERE.parent / "loop.py"), *LOOP], stdout=loop, check=False)
    print(f"kept in {out}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
