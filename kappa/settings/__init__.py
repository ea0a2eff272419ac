"""Every setting of a cluster, in one validated schema, with the defaults of the demo cluster.

One file per section; `cluster` holds the whole and reads YAML. Environment variables read by the
project are listed here and nowhere else: `KAPPA_HOME` (cache folder, default
`~/.cache/kappa-serve`).
"""
