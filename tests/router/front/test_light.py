"""`kappa route` starts without the heavy half of the project."""

import subprocess
import sys

SCRIPT = """
import sys
import kappa_router.front.command
import kappa_router.front.gateway
from kappa.settings.front import load_front_settings
kappa_router.front.gateway.Front(
    load_front_settings(None, backends=[{"url": "http://a", "profile": "pcie"}])
)
heavy = ("ray", "torch", "vllm", "transformers", "fastapi", "tokenizers", "polars", "pandas")
print([name for name in heavy if name in sys.modules])
"""


def test_front_imports_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
