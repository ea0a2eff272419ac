"""Every setting of a cluster, in one validated schema, with the defaults of the demo cluster.

One file per section; `cluster` holds the whole and reads YAML. Environment variables read by the
project are listed here and nowhere else: `KAPPA_HOME` (cache folder, default
`~/.cache/kappa-serve`).
"""

from kappa.settings.access import HttpSettings, TenantSettings
from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings, home, load_settings
from kappa.settings.engine import EngineKind, EngineSettings, PlannerName
from kappa.settings.model import ModelSettings, NodeSettings
from kappa.settings.routing import PolicyName, RouterSettings
from kappa.settings.scheduling import SchedulerName, SchedulerSettings

__all__ = [
    "ClusterSettings", "EngineKind", "EngineSettings", "HttpSettings", "ModelSettings",
    "NodeSettings", "PlannerName", "PolicyName", "RouterSettings", "SchedulerName",
    "SchedulerSettings", "SettingsError", "TenantSettings", "home", "load_settings",
]  # fmt: skip
