"""Calls vLLM's benchmark client as a module, since CPU builds have no `vllm` command that starts.

Arguments are those of `vllm bench serve`. Run by path, in the interpreter that has vLLM.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
