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


REHEARSED = """
import sys
from dataclasses import replace
import numpy as np
from kappa.settings.routing import RouterSettings
from kappa_router.api.start import DeciderSettings, router_config
from kappa_router.decision import RouteRequest
from kappa_router.front.command import rehearse
from kappa_router.router import Router
from kappa_router.standalone import StandaloneRouter

def compiled():
    loops = {
        value
        for name, module in list(sys.modules.items()) if name.startswith("kappa")
        for value in vars(module).values() if hasattr(value, "nopython_signatures")
    }
    return sorted((loop.__name__, len(loop.nopython_signatures)) for loop in loops)

rehearse("priced")
before = compiled()
settings = DeciderSettings(models=(), secret="00" * 16, router=RouterSettings())
router = Router(router_config(settings))
for worker in "ab":
    router.join(replace(StandaloneRouter(policy="priced")._unannounced, worker=worker), 1.0)
router.route(RouteRequest("it", np.arange(3000), 100), 1.0)
print([one for one in compiled() if one not in before])
"""


def test_rehearsal_compiles_what_a_first_request_needs():
    """An event loop that compiles answers neither probes nor requests meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", REHEARSED], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
