"""Every setting of a cluster, in one validated schema, with the defaults of the demo cluster.

One file per section; `cluster` holds the whole and reads YAML. Environment variables for people:
`KAPPA_HOME` (cache folder, default `~/.cache/kappa-serve`) and `KAPPA_API_KEY` (what commands send
to a cluster that wants a key). Those that a replica sets for its own engine are listed in
`workers/kappa_workers/vllm_plugin.py`.
"""
