"""The Envoy of a cluster, without the cluster."""

import socket

import httpx
import pytest

from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape
from kappa_deploy.app.build import build_app
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.front_door import FrontDoor, front_door_spec
from kappa_deploy.app.model import Model
from kappa_router.cluster.paths import ASKED


def settings_of(**http):
    return load_settings(None, http={"port": 0, **http})


def test_the_front_door_is_as_the_settings_say(tmp_path):
    access = {"max_headers": 20, "max_header_bytes": 5000, "body_timeout_s": 3}
    settings = load_settings(
        None, http={"port": 8443, "host": "::1"}, access=access,
        router={"max_body_bytes": 5000, "request_timeout_s": 7},
        model={"id": "org/m", "source": "/models/m"},
    )  # fmt: skip
    spec = front_door_spec(settings, tmp_path)
    assert (spec.host, spec.port, spec.decided, spec.foreign) == ("::1", 8443, ASKED, False)
    bounds = spec.bounds
    assert (bounds.headers, bounds.header_bytes, bounds.body_bytes) == (20, 5000, 5000)
    assert (bounds.body_s, bounds.silent_s) == (3, 7)
    assert "/v1/models/org/m" in spec.own


def test_workers_and_their_decider_share_a_secret(no_ray_starts, tmp_path):
    settings = settings_of()
    model = Model("nowhere", model_shape("llama-3.1-8b"), "")
    app = build_app(settings, [model], front_door_spec(settings, tmp_path))
    decider = app._bound_deployment
    secret = decider.init_kwargs["secret"]
    pools = decider.init_kwargs["pools"].values()
    plans = [pool._bound_deployment.init_kwargs["plan"] for pool in pools]
    assert decider.name == "KappaDecider" and len(secret) == 64
    assert {plan.front_secret for plan in plans} == {secret}


def test_every_decider_is_on_the_machine_of_its_envoy(no_ray_starts, monkeypatch, tmp_path):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setattr("kappa_deploy.app.build._front_secret", lambda: "secret")
    settings = settings_of(replicas=3)
    spec = front_door_spec(settings, tmp_path)
    app = build_app(settings, [Model("nowhere", model_shape("llama-3.1-8b"), "")], door=spec)
    decider = app._bound_deployment
    assert decider.num_replicas == spec.deciders == len(spec.slots) == 3
    # In a cluster that is joined Ray would place it anywhere.
    assert decider.ray_actor_options["resources"] == {"node:10.0.0.7": 0.001}


def test_envoy_runs_from_start_to_stop():
    door = FrontDoor(settings_of())
    door.start()
    try:
        answer = httpx.get(f"{door.spec.url}/nowhere", timeout=10)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        away = httpx.post(f"{door.spec.url}{ASKED[0]}", json={}, timeout=10)
        assert (away.status_code, away.json()["error"]["code"]) == (503, "decider_away")
        assert door.ended() == ""
    finally:
        door.stop(0.0)
    door.stop(0.0)
    assert not door.spec.folder.exists()
    with pytest.raises(httpx.ConnectError):
        httpx.get(door.spec.url, timeout=1)


def test_a_port_that_is_taken_stops_the_start():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        door = FrontDoor(settings_of(port=taken.getsockname()[1]))
        try:
            with pytest.raises(StartError, match="already in use"):
                door.start()
        finally:
            door.stop(0.0)
