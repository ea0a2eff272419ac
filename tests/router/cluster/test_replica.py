"""What the decider's process imports: how soon it is back, and how large it is."""

import subprocess
import sys

HEAVY = ("ray.llm", "ray.serve.llm", "torch", "torchvision", "vllm")
DECIDER = f"""
import sys
import kappa_router.cluster.replica
from kappa_router.api.request_body import RequestBody
from kappa_router.api.render import PromptRenderer
kappa_router.cluster.replica.keep_models_away()
body = RequestBody.chat({{"messages": [{{"role": "user", "content": "hello"}}]}})
assert PromptRenderer(sys.argv[1]).render(body).tokens
print([name for name in {HEAVY} if sys.modules.get(name)])
"""


def test_decider_imports_no_engine_or_schema_to_tokenize(renderer):
    done = subprocess.run(
        [sys.executable, "-c", DECIDER, renderer.source], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
