"""The application of a Serve config file: what its `args` become, and where they are placed."""

import pytest

from kappa.settings.base import SettingsError
from kappa.shapes import model_shape
from kappa_deploy import front_pod, serve_app
from kappa_deploy.app.model import Model
from kappa_deploy.serve_app import front_door, settings_of

OPEN = {"access": {"allow_open": True}}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("no_ray_starts"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments"),
]


def test_application_settings_are_those_of_a_cluster_file():
    assert settings_of({"dilation": 5, **OPEN}).dilation == 5
    with pytest.raises(SettingsError, match="dilatation"):
        settings_of({"dilatation": 5, **OPEN})
    with pytest.raises(SettingsError, match=r"http\.posts"):
        settings_of({"http": {"posts": 1}, **OPEN})
    with pytest.raises(SettingsError, match="http"):
        settings_of({"http": "tls", **OPEN})


def test_application_is_refused_when_open_beyond_the_machine():
    with pytest.raises(SettingsError, match=r"listens on 0\.0\.0\.0.*allow_open"):
        settings_of({})


def test_front_door_of_a_pod_has_one_decider_for_any_replicas():
    door = front_door(settings_of({"http": {"replicas": 3}, **OPEN}))
    assert (door.folder, door.host, door.port) == (front_pod.FOLDER, "0.0.0.0", 8000)
    assert door == front_door(settings_of(OPEN))


def test_a_decider_is_placed_in_each_front_pod(monkeypatch):
    model = Model("nowhere", model_shape("llama-3.1-8b"), "")
    monkeypatch.setattr(serve_app, "prepare_models", lambda _: [model])
    app = serve_app.app({"http": {"replicas": 3}, **OPEN})
    decider = app._bound_deployment
    options = decider.ray_actor_options
    assert (decider.name, decider.num_replicas) == ("KappaDecider", 3)
    assert (options["num_cpus"], options["resources"]) == (0, {front_pod.RESOURCE: 1.0})
    assert decider.init_kwargs["kappa"].replicas == 3
    assert decider.init_kwargs["spec"].folder == front_pod.FOLDER
