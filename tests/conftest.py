"""How the tests are spread over processes, and which examples Hypothesis tries.

Hypothesis tries the same examples in every run; `--hypothesis-profile random` tries others.
"""

import os
from pathlib import Path

# Before anything imports gRPC (`kappa_router.gateway.events`).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Processes that tests start import from `tests`, too; no distribution brings that.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
)

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests import turns

# A deadline would test how busy the machine is.
settings.register_profile(
    "random", settings.get_profile("default"), deadline=None, derandomize=False
)
settings.load_profile("ci")

LIVE = Path(__file__).parent / "live"


class FilesWhole(LoadScopeScheduling):
    """Files stay whole, for their shared engines; all live clusters are one process's.

    Not xdist's own groups: they change node ids by a name that pytest 9.2 no longer has.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "live" if path.startswith("tests/live/") else path


@pytest.hookimpl
def pytest_xdist_make_scheduler(config, log):
    return FilesWhole(config, log)


def pytest_report_header():
    return turns.played(os.environ)


def pytest_collection_modifyitems(items):
    """Live tests first: they take longest, and the other process runs the rest beside them."""
    items.sort(key=lambda item: LIVE not in item.path.parents)
