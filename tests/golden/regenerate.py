"""`python -m tests.golden.regenerate [NAME ...]`: make the goldens again, and say what changed.

Without names all of them. Every difference is printed; a golden that cannot be made here is an
error and stays as it is.
"""

import sys

from tests.golden import router_logs
from tests.golden.goldens import GOLDENS, differences, store, stored

NAMES = (*GOLDENS, "router_logs")


def main(names):
    unknown = sorted({*names} - {*NAMES})
    if unknown:
        print(f"no golden named {', '.join(unknown)}: there are {', '.join(NAMES)}")
        return 2
    failed = False
    for name in names or NAMES:
        if name == "router_logs":
            for log in router_logs.CONFIGS:
                print(f"router_logs/{log}: {router_logs.rewrite(log)} decisions changed")
            continue
        then, now = stored(name), GOLDENS[name]()
        if now is None:
            print(f"{name}: cannot be made here (no kubectl or kustomize?); left as it is")
            failed = True
            continue
        lines = ["new"] if then is None else differences(then, now)
        print(f"{name}: {len(lines)} differences", *lines, sep="\n  ")
        if lines:
            store(name, now)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
