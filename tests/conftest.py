"""How the tests are spread over processes, and which examples Hypothesis tries.

Hypothesis tries the same examples in every run; `--hypothesis-profile random` tries others.
"""

from pathlib import Path

import pytest
from hypothesis import settings

# A deadline would test how busy the machine is.
settings.register_profile(
    "random", settings.get_profile("default"), deadline=None, derandomize=False
)
settings.load_profile("ci")

LIVE = Path(__file__).parent / "live"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Files stay whole, for their shared engines; all live clusters are one process's."""
    for item in items:
        group = "live" if LIVE in item.path.parents else item.path.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
