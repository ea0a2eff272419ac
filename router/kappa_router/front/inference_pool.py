"""The servers of an InferencePool, as Kubernetes' API tells them: pods that its selector takes, at
each of its ports, which are data-parallel ranks.

Two watches say that something changed; then pool and pods are read again as a whole, so nothing
hangs on the order of changes. While the API does not answer, the servers known before stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from kappa.hardware import CATALOGUE
from kappa.settings.front import BackendSettings, InferencePoolSettings
from kappa_router.front.front import Front

log = structlog.get_logger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
_PODS = "/api/v1/namespaces/{}/pods"
PRODUCT_LABEL = "nvidia.com/gpu.product"
# At least and at most between two readings; a watch may be cut without a word.
_LEAST_S, _MOST_S = 0.2, 300.0
_ANSWER_S, _RETRY_S = 10.0, 2.0
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_MOST_COST = 2**31 - 1
# Between two annotations of a pod: each is a write to the API.
_COST_S = 60.0
_MOST_PORTS = 8
_FAULTS = (aiohttp.ClientError, TimeoutError, OSError, ValueError)
_RIGHTS = (
    "get, list and watch inferencepools and pods in its namespace, and, where a node's label "
    "gives the profile, get nodes"
)


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """Kubernetes' API as a pod reaches it. token: a file that is read for each request, since it
    is renewed; ca: certificates of the API, None for plain HTTP."""

    url: str
    token: Path
    ca: Path | None

    @classmethod
    def in_cluster(cls) -> KubernetesApi:
        """The API of the cluster that this process runs in. Raises OSError where it is in none."""
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{one}") for one in ("HOST", "PORT"))
        if not host or not port or not (_ACCOUNT / "token").is_file():
            raise OSError(
                "epp.pool: there is no Kubernetes here: run in a pod with a service account, or "
                "name the servers under backends"
            )
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", _ACCOUNT / "token", _ACCOUNT / "ca.crt")

    def session(self) -> aiohttp.ClientSession:
        """A way to ask it."""
        context = ssl.create_default_context(cafile=str(self.ca)) if self.ca else None
        connector = aiohttp.TCPConnector(ssl=context if context is not None else True)
        return aiohttp.ClientSession(self.url, connector=connector, read_bufsize=1 << 20)


class InferencePool:
    """Keeps a front's servers those of a pool; `follow` runs it."""

    def __init__(self, settings: InferencePoolSettings, front: Front, api: KubernetesApi) -> None:
        self._settings, self._front, self._api = settings, front, api
        self._namespace, self._name = settings.name.split("/")
        self._products: dict[str, str] = {}
        self._faults: set[str] = set()
        self._unread = ""
        # Names of pods, by those of their servers.
        self._pods: dict[tuple[str, ...], str] = {}

    async def follow(self) -> None:
        """Follow it until cancelled."""
        async with self._api.session() as http, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(http))
            if self._settings.deletion_costs:
                tasks.create_task(self._cost(http))

    async def _follow(self, http: aiohttp.ClientSession) -> None:
        while True:
            pause_s = _LEAST_S
            try:
                await self._changed(http, *await self._taken(http))
                self._unread = ""
            except _FAULTS as error:
                self._not_read(error)
                pause_s = _RETRY_S
            await asyncio.sleep(pause_s)

    async def _cost(self, http: aiohttp.ClientSession) -> None:
        """Annotate pods with what would be lost with them, to two digits, where it has changed."""
        told, known = dict[tuple[str, ...], int](), set[str]()
        while True:
            await asyncio.sleep(_COST_S)
            faults = set[str]()
            reused = self._front.live.records.reused_tokens()
            for servers, pod in list(self._pods.items()):
                cost = min(int(float(f"{sum(reused[one] for one in servers):.1e}")), _MOST_COST)
                if told.get(servers) == cost:
                    continue
                try:
                    await self._annotate(http, pod, cost)
                    told[servers] = cost
                except _FAULTS as error:
                    faults.add(str(error) or repr(error))
            if faults - known:
                log.error(
                    "pods_not_annotated", pool=self._settings.name, count=len(faults),
                    why=min(faults - known), remedy="its service account needs the right to patch "
                    "pods in its namespace, or set epp.pool.deletion_costs false",
                )  # fmt: skip
            known = faults
            told = {servers: cost for servers, cost in told.items() if servers in self._pods}

    def _not_read(self, error: Exception) -> None:
        """Say once that the API does not tell what it is asked."""
        why = str(error) or repr(error)
        if why != self._unread:
            log.error(
                "inference_pool_not_read", pool=self._settings.name, why=why,
                remedy=f"its service account needs the right to {_RIGHTS}; until then the servers "
                "that were known stay",
            )  # fmt: skip
        self._unread = why

    # -- the API ------------------------------------------------------------------------------

    async def _get(self, http: aiohttp.ClientSession, path: str, **asked: str) -> Any:
        """Raises ValueError for any other answer than an object."""
        async with asyncio.timeout(_ANSWER_S):
            async with http.get(path, params=asked, headers=self._headers()) as answer:
                if answer.status != 200:
                    raise ValueError(f"{path} answered {answer.status}")
                found = await answer.json(content_type=None)
        if not isinstance(found, dict):
            raise ValueError(f"{path} answered no object")
        return found

    async def _annotate(self, http: aiohttp.ClientSession, pod: str, cost: int) -> None:
        """Raises ValueError where that is refused; a pod that is gone by now needs none."""
        path, patch = f"{_PODS.format(self._namespace)}/{pod}", {DELETION_COST: str(cost)}
        headers = self._headers() | {"content-type": "application/merge-patch+json"}
        async with asyncio.timeout(_ANSWER_S):
            async with http.patch(
                path, json={"metadata": {"annotations": patch}}, headers=headers
            ) as answer:
                if answer.status not in (200, 404):
                    raise ValueError(f"annotating {path} was answered {answer.status}")

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._api.token.read_text(encoding='utf-8').strip()}"}

    async def _taken(self, http: aiohttp.ClientSession) -> tuple[dict[str, str], dict[str, str]]:
        """Read pool and pods, and take their servers; what to watch for a change of either."""
        pools, pods = (path.format(self._namespace) for path in (_POOLS, _PODS))
        pool = await self._get(http, f"{pools}/{self._name}")
        try:
            labels, ports = pool["spec"]["selector"]["matchLabels"], pool["spec"]["targetPorts"]
            selector = ",".join(f"{key}={value}" for key, value in labels.items())
            numbers = [int(one["number"]) for one in ports[:_MOST_PORTS]]
            version = pool["metadata"]["resourceVersion"]
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"{self._settings.name} has no selector or no targetPorts") from None
        listed = await self._get(http, pods, labelSelector=selector)
        await self._take(http, [one for one in listed["items"] if _serves(one)], numbers)
        watched = {"fieldSelector": f"metadata.name={self._name}", "resourceVersion": version}
        after = str(listed["metadata"]["resourceVersion"])
        return watched, {"labelSelector": selector, "resourceVersion": after}

    async def _changed(
        self, http: aiohttp.ClientSession, pool: dict[str, str], pods: dict[str, str]
    ) -> None:
        """Wait until the API tells of a change, or ends a watch."""
        paths = (_POOLS.format(self._namespace), pool), (_PODS.format(self._namespace), pods)
        watches = [asyncio.create_task(self._told(http, path, asked)) for path, asked in paths]
        try:
            await asyncio.wait(watches, timeout=_MOST_S, return_when="FIRST_COMPLETED")
            for watch in watches:
                if watch.done():
                    watch.result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _told(self, http: aiohttp.ClientSession, path: str, asked: Mapping[str, str]) -> None:
        async with http.get(
            path, params={**asked, "watch": "1"}, headers=self._headers(),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as answer:  # fmt: skip
            if answer.status != 200:
                raise ValueError(f"watching {path} was answered {answer.status}")
            await answer.content.readany()

    # -- servers ------------------------------------------------------------------------------

    async def _take(
        self, http: aiohttp.ClientSession, pods: list[dict[str, Any]], ports: list[int]
    ) -> None:
        """These pods' servers are the front's, from now on."""
        wanted, faults = list[tuple[BackendSettings, None]](), set[str]()
        found: dict[tuple[str, ...], str] = {}
        for pod in pods:
            try:
                made = self._servers(pod, await self._profile(http, pod), ports)
            except ValueError as error:
                faults.add(f"pod {pod['metadata']['name']}: {error}")
                continue
            # At a port of its own a rank is named by nothing else.
            wanted += [(one, None) for one in made]
            found[tuple(str(one.name) for one in made)] = pod["metadata"]["name"]
        for fault in sorted(faults - self._faults):
            log.error("pod_not_used", why=fault)
        self._faults, self._pods = faults, found
        self._front.have(wanted)

    def _servers(
        self, pod: dict[str, Any], profile: str, ports: list[int]
    ) -> list[BackendSettings]:
        given, host = self._settings, pod["status"]["podIP"]
        host = f"[{host}]" if ":" in host else host
        return [
            BackendSettings(
                # A pod that is made again under its name is another one.
                name=f"{pod['metadata']['name'][:40]}-{pod['metadata']['uid'][:8]}-{rank}",
                url=f"http://{host}:{port}", profile=profile, host_tokens=given.host_tokens,
                shape=given.shape,
                events=(f"tcp://{host}:{given.events_port + rank}",) if given.events_port else (),
            )
            for rank, port in enumerate(ports)
        ]  # fmt: skip

    async def _profile(self, http: aiohttp.ClientSession, pod: dict[str, Any]) -> str:
        """The profile that a pod's label names, else its node's product; ValueError if none."""
        label = self._settings.profile_label
        told = pod["metadata"].get("labels", {}).get(label)
        if told is None:
            told, label = await self._product(http, pod["spec"].get("nodeName", "")), PRODUCT_LABEL
        found = self._settings.profiles.get(told) or profile_of(told)
        if found is None:
            raise ValueError(
                f"{label} {told!r} names no profile: label it {self._settings.profile_label} with "
                f"one of {', '.join(CATALOGUE)}, or give epp.pool.profiles its name"
            )
        return found

    async def _product(self, http: aiohttp.ClientSession, node: str) -> str:
        if node and node not in self._products:
            with contextlib.suppress(ValueError):  # Without the right to see nodes.
                about = await self._get(http, f"/api/v1/nodes/{node}")
                self._products[node] = about["metadata"].get("labels", {}).get(PRODUCT_LABEL, "")
        return self._products.get(node, "")


def profile_of(told: str) -> str | None:
    """The catalogue's node of that name, or of that product as NVIDIA's discovery labels it
    (`NVIDIA-H100-80GB-HBM3`); None for a part of a GPU, and for others."""
    words = told.lower().split("-")
    if told.lower() in CATALOGUE:
        return told.lower()
    named = (name for name in CATALOGUE if name.split("-")[0] in words)
    return next(named, None) if words[0] == "nvidia" and "mig" not in words else None


def _serves(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready and stays."""
    status = pod.get("status", {})
    ready = any(
        one.get("type") == "Ready" and one.get("status") == "True"
        for one in status.get("conditions", ())
    )
    stays = "deletionTimestamp" not in pod["metadata"]
    return ready and stays and bool(status.get("podIP"))
