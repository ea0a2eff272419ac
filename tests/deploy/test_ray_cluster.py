"""Ray as we start or join it: what does not come up, or stands open, is refused with a remedy."""

import os
import signal
import stat
from threading import Thread
from types import SimpleNamespace

import pytest

from kappa.host import free_port
from kappa.settings.cluster import load_settings
from kappa.shapes import model_shape
from kappa_deploy.app import ray_cluster
from kappa_deploy.app.cluster import Cluster, set_environment
from kappa_deploy.app.errors import StartError
from kappa_deploy.app.model import Model
from kappa_deploy.app.ray_cluster import JoinedRay, OwnRay, reachable

pytestmark = pytest.mark.ray

NICENESS = "RAY_worker_niceness"


@pytest.fixture(autouse=True)
def token_path(monkeypatch, tmp_path):
    """Where Ray's token is kept, in a folder of this test's own."""
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path / "home"))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
    return tmp_path / "home" / "ray" / "auth_token"


def test_workers_of_a_ray_of_ours_are_not_put_behind_others(monkeypatch):
    monkeypatch.delenv(NICENESS, raising=False)
    set_environment("WARNING")
    assert os.environ[NICENESS] == "0"
    monkeypatch.setenv(NICENESS, "5")
    set_environment("WARNING")
    assert os.environ[NICENESS] == "5"


def test_a_ray_that_does_not_come_up_is_reported_with_its_logs(monkeypatch):
    import ray

    stopped = []

    def late(**_):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", late)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    with pytest.raises(StartError, match=r"timed out during startup.*logs.*try again"):
        OwnRay(workers=2).start("WARNING")
    assert stopped, "the parts that had started are stopped"


@pytest.mark.parametrize("mode", ["disabled", "", "k8s"])
def test_a_ray_whose_environment_undoes_its_token_is_not_started(monkeypatch, mode):
    import ray

    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("started"))
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(StartError, match=f"RAY_AUTH_MODE is '{mode}'. Unset RAY_AUTH_MODE"):
        OwnRay(workers=2).start("WARNING")


def test_a_ray_that_came_up_without_its_token_is_stopped(monkeypatch):
    import ray
    from ray._private.authentication import authentication_utils

    stopped = []
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: stopped.append(True))
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: False)
    with pytest.raises(StartError, match="started without one"):
        OwnRay(workers=2).start("WARNING")
    assert stopped


def started(monkeypatch):
    """What Ray is started with, and its own address meanwhile."""
    import ray
    from ray._private import services
    from ray._private.authentication import authentication_utils

    given = {}

    def init(**options):
        given.update(options, host=services.get_node_ip_address())

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: True)
    OwnRay(workers=2).start("WARNING")
    return given


def test_ray_is_started_on_loopback(monkeypatch):
    from ray._private import ray_constants

    given = started(monkeypatch)
    assert given["address"] == "local", "never another Ray of this machine, alive or dead"
    assert given["host"] == "127.0.0.1"
    assert ray_constants.ENABLE_RAY_CLUSTER, "one that is joined later has its own address"


def test_rays_token_is_made_for_its_user_alone(monkeypatch, token_path):
    before = os.umask(0)
    try:
        started(monkeypatch)
    finally:
        os.umask(before)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(token_path)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (token_path, token_path.parent)]
    assert modes == [0o600, 0o700]
    made = token_path.read_text()
    assert len(made) == 64 and list(token_path.parent.iterdir()) == [token_path]
    started(monkeypatch)
    assert token_path.read_text() == made, "a cluster may run by it"


def test_starts_at_once_have_one_token(token_path):
    seen = []

    def start():
        ray_cluster.private_token(token_path)
        seen.append(token_path.read_text())

    threads = [Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(seen) == 8 and len(set(seen)) == 1


def test_a_token_of_the_environment_needs_no_file(monkeypatch, token_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)
    started(monkeypatch)
    assert not token_path.exists()


def test_what_ray_left_open_in_its_own_folder_is_not_used(monkeypatch, tmp_path, token_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    left = tmp_path / ".ray" / "auth_token"
    left.parent.mkdir()
    left.write_text("read by others")
    left.chmod(0o644)
    started(monkeypatch)
    assert token_path.read_text() != left.read_text() == "read by others"


@pytest.mark.parametrize(
    ("mode", "folder_mode", "text", "says"),
    [
        (0o644, 0o700, "t", "read by others, .*chmod 600 {path}; if it was read, rm {path}"),
        (0o640, 0o755, "t", "read by others"),
        (0o600, 0o770, "t", "replaced by others, .*chmod 700 {folder}"),
        (0o600, 0o700, "", "is empty, .*rm {path}"),
        (0o600, 0o755, "t", None),
        (0o600, 0o1777, "t", None),
    ],
)
def test_a_token_that_others_may_read_is_refused(
    monkeypatch, tmp_path, mode, folder_mode, text, says
):
    path = tmp_path / "named" / "token"
    path.parent.mkdir()
    path.write_text(text)
    path.chmod(mode)
    path.parent.chmod(folder_mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    if says is None:
        started(monkeypatch)
        return
    with pytest.raises(StartError, match=says.format(path=path, folder=path.parent)):
        started(monkeypatch)


def test_a_token_of_another_user_is_refused(monkeypatch, token_path):
    ray_cluster.private_token(token_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(ray_cluster, "_ROOT", os.getuid() + 2)
    with pytest.raises(StartError, match=r"another user's, .*RAY_AUTH_TOKEN_PATH"):
        ray_cluster.private_token(token_path)


def test_where_no_token_can_be_kept_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("KAPPA_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match=r"token cannot be kept in .*Set KAPPA_HOME"):
        started(monkeypatch)


class Joined(JoinedRay):
    """A cluster that is joined, with everything but the question what its Ray Serve serves."""

    def __init__(self):
        super().__init__("auto")

    def start(self, log_level):
        pass


class Door:
    """A front door that listens nowhere."""

    def __init__(self, settings):
        http = settings.http
        self.spec = SimpleNamespace(scheme="http", host=http.host, port=http.port)

    def start(self):
        pass


@pytest.fixture
def joined(monkeypatch):
    """`joined(applications)`: the URL of a cluster that joins a Ray Serve with these, or with what
    `details` says."""
    import ray.serve.context

    import kappa_deploy.app.cluster
    import kappa_deploy.app.front_door

    def start(*applications, details=None):
        named = {"applications": dict.fromkeys(applications)}
        client = SimpleNamespace(get_serve_details=details or (lambda: named))
        monkeypatch.setattr(ray.serve.context, "_get_global_client", lambda **_: client)
        model = Model("", model_shape("qwen2.5-7b"), "")
        monkeypatch.setattr(kappa_deploy.app.cluster, "models_here", lambda _: [(model, "")])
        monkeypatch.setattr(kappa_deploy.app.cluster, "machines", lambda: [])
        monkeypatch.setattr(kappa_deploy.app.front_door, "FrontDoor", Door)
        settings = load_settings(None, http={"host": "0.0.0.0", "port": free_port("0.0.0.0")},
                                 access={"allow_open": True})  # fmt: skip
        cluster = Cluster(settings, address="auto")
        cluster._ray = Joined()
        monkeypatch.setattr(cluster, "_deploy", lambda *_: deployed.append(True))
        monkeypatch.setattr(cluster, "_warm_up", lambda: None)
        deployed = []
        try:
            cluster._start()
        finally:
            assert bool(deployed) == bool(cluster.url)
        return cluster.url, settings.http.port

    return start


def test_a_joined_cluster_has_its_front_door_on_this_machine(joined):
    url, port = joined("another")
    assert url == f"http://127.0.0.1:{port}"


def test_join_refuses_a_cluster_that_serves_ours_with_a_remedy(joined):
    with pytest.raises(StartError, match=r"serves an application 'kappa' already: .*shutdown"):
        joined("another", "kappa")


def test_join_refuses_a_serve_that_does_not_say_what_it_serves(joined):
    def broken():
        raise ModuleNotFoundError("No module named 'theirs'")

    with pytest.raises(StartError, match=r"does not say what it serves: No module named 'theirs'"):
        joined(details=broken)


def test_rays_client_protocol_is_refused():
    with pytest.raises(StartError, match="HOST:PORT or auto"):
        Cluster(load_settings(), address="ray://somewhere:10001")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:many", "127.0.0.1:99999"])
def test_where_nobody_listens_nothing_is_joined(address):
    with pytest.raises(StartError, match=f"can be joined at {address}: .*HOST:PORT"):
        JoinedRay(address).start("WARNING")
    import ray

    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("host", "in_url"),
    [
        ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("[::]", "[::1]"), ("10.0.0.7", "10.0.0.7"),
        ("fe80::1", "[fe80::1]"), ("localhost", "localhost"),
    ],
)  # fmt: skip
def test_an_endpoint_on_every_address_is_reached_by_loopback(host, in_url):
    assert reachable(host) == in_url


def test_serve_reports_the_death_of_rays_head_and_exits_with_1(monkeypatch, capsys):
    from kappa_deploy.commands import serve as command

    stopped, ended = [], []

    class Ending:
        url = "http://127.0.0.1:1"

        def __init__(self, *_):
            self.looks = iter(["", "", "Ray's gcs_server has ended"])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            stopped.append(True)

        def ended(self):
            return next(self.looks)

    monkeypatch.setattr("kappa_deploy.app.cluster.Cluster", Ending)
    monkeypatch.setattr(command, "print_ready", lambda *_: None)
    monkeypatch.setattr(command, "_LOOK_S", 0.0)
    monkeypatch.setattr(command.os, "_exit", lambda code: ended.append((code, *stopped)))
    command.serve()
    assert ended == [(1, True)], "after all that was started has been stopped"
    assert "gcs_server has ended" in capsys.readouterr().err


def test_a_ray_whose_head_is_dead_is_killed_without_a_call(monkeypatch):
    import subprocess
    import sys

    import ray._private.worker
    import ray.serve

    import kappa_deploy.app.ray_cluster

    def process(code):
        return subprocess.Popen([sys.executable, "-c", code])

    head, raylet = process(""), process("import time; time.sleep(600)")
    head.wait()
    gone = [("gcs_server", head)]
    node = SimpleNamespace(dead_processes=lambda: gone)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.serve, "shutdown", lambda: pytest.fail("asked"))
    monkeypatch.setattr(
        kappa_deploy.app.ray_cluster.psutil.Process, "children",
        lambda self, recursive: [kappa_deploy.app.ray_cluster.psutil.Process(raylet.pid)],
    )  # fmt: skip
    ours = OwnRay(workers=1)
    assert ours.dead() == "gcs_server"
    ours.stop()
    assert not kappa_deploy.app.ray_cluster.psutil.pid_exists(raylet.pid)
    gone[:] = [("log_monitor", head)]
    assert ours.dead() == "", "Ray goes on without its log monitor"


def test_init_keeps_our_sigterm_handler_instead_of_rays(monkeypatch):
    def ours(*_):
        """Of `kappa serve`: an interrupt."""

    def init(**_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Ray puts its own there

    monkeypatch.setattr("ray.init", init)
    before = signal.signal(signal.SIGTERM, ours)
    try:
        ray_cluster._init("ERROR")
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
