"""`python -m benchmarks.offload`: the bench of load plans on a machine with nothing but torch.

Progress goes to standard error, one JSON object to standard output. Exit status 2: what was asked
for cannot be run here; 1: it was begun, and nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.offload.rounds import LEAST_REPEATS
from benchmarks.offload.run import Options, run
from benchmarks.offload.settings import SETTINGS
from engine.arena import ArenaTooLarge


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    add = parser.add_argument
    add("--setting", action="append", help=f"as often as wanted: {', '.join(SETTINGS)}")
    add("--repeats", type=int, default=LEAST_REPEATS, help="rounds, beside a warm-up")
    add("--only", action="append", default=[], help="part of a cell's name: 64x128, column, ttft")
    add("--limit-s", type=float, default=float("inf"), help="begin no cell that exceeds it")
    add("--out", type=Path, help="write the JSON object here, after every cell")
    asked = parser.parse_args(arguments)
    try:
        options = Options(asked.repeats, tuple(asked.only), asked.limit_s, asked.out)
        result = run(
            asked.setting or ["cpu-small"], options, lambda line: print(line, file=sys.stderr)
        )
    except (ArenaTooLarge, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, allow_nan=False))
    return 0 if result["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
