"""The doctor's table in every case that users meet, as it is printed, from a real server."""

import io
import json
import platform
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nemo_run_ray import RayExecutor
from nemo_run_ray.cli import main as cli
from nemo_run_ray.cli.main import checks_table
from nemo_run_ray.cluster_files.check import check
from nemo_run_ray.cluster_files.load import Document, load
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.clusters import Dashboard
from nemo_run_ray.dashboard.jobs import inspect
from tests import rooms
from tests.http_server import Handler, serving
from tests.rooms import GIB, FakeNode

GOLDEN = Path(__file__).parent / "golden"
_FILE = ClusterFile.model_validate(
    {
        "defaults": {"cpus_per_node": 4.0},
        "pools": {
            "gpu": {"label_selector": {"gpu_kind": "h100"}, "gpus_per_node": 4.0},
            "head": {"cpus_per_node": 1.0},
        },
        "preflight": {
            "required_labels": [{"key": "gpu_kind", "value": "h100"}],
            "min_resources": {"GPU": 8.0},
        },
    }
)
FILE = Document(Path("team.yaml"), {}, file=_FILE)
HEAD = FakeNode("head", {"CPU": 16.0, "memory": 64.0 * GIB}, {"CPU": 2.0})
LABELS = {"gpu_kind": "h100"}
GPUS = [FakeNode(f"gpu{n}", {"CPU": 32.0, "GPU": 8.0}, {"GPU": 8.0 * n}, LABELS) for n in (0, 1)]


class Server(Handler):
    """A dashboard: its nodes, version and token, and whether its state API is there."""

    nodes: tuple[FakeNode, ...] = (HEAD, *GPUS)
    version = "2.60.0"
    token = ""
    is_open = True
    delay_s = 0.0

    def answer(self) -> None:
        path = self.path.partition("?")[0]
        time.sleep(self.delay_s)
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(403, "Forbidden: Invalid authentication token.")
        found = self.found(path)
        if found is None:
            return self.send(404, "404: Not Found")
        return self.send(200, json.dumps(found), Content_Type="application/json")

    def found(self, path: str) -> object:
        if path == "/api/version":
            return {"ray_version": self.version, "session_name": "session_1"}
        if path == "/api/jobs/":
            states = ("SUCCEEDED", "RUNNING", "PENDING")
            return [{"submission_id": state, "status": state} for state in states]
        if not self.is_open:
            return None
        if path == "/api/v0/cluster_metadata":
            return {"data": {"pythonVersion": platform.python_version()}}
        return rooms.answer(rooms.tables(*self.nodes)[path.removeprefix("/api/v0/")])


CASES: dict[str, dict] = {
    "healthy": {},
    "lacks_a_label": {"nodes": (HEAD, FakeNode("gpu0", {"CPU": 32.0, "GPU": 16.0}))},
    "too_small": {"nodes": (HEAD, FakeNode("gpu0", {"CPU": 2.0, "GPU": 1.0}, labels=LABELS))},
    "no_room_now": {"nodes": (HEAD, GPUS[1])},
    "wrong_token": {"token": "right"},
    "old_ray": {"version": "2.40.0"},
    "no_state_api": {"is_open": False},
}


def printed(url: str) -> str:
    """What the doctor prints, with an address of the same length for every server."""
    began = time.monotonic()
    rows = list(check(inspect(Dashboard(url, {"Authorization": "Bearer wrong"})), FILE))
    assert time.monotonic() - began < 10
    text = io.StringIO()
    Console(file=text, width=100).print(checks_table(rows))
    port = url.rpartition(":")[2]
    here = ".".join(platform.python_version_tuple()[:2])
    table = text.getvalue().replace(f"Python {here}.", "Python 3.12.")
    lines = table.replace(port, "8265".rjust(len(port), "_")).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("case", CASES)
def test_the_table(case):
    with serving(Server, **CASES[case]) as url:
        assert printed(url) == (GOLDEN / f"doctor_{case}.txt").read_text()


def test_a_token_that_a_file_takes_from_a_variable_names_it(write, monkeypatch):
    monkeypatch.setenv("TEAM_TOKEN", "wrong")
    with serving(Server, token="right") as url:
        write(f"cluster: {{address: '{url}', token_variable: TEAM_TOKEN}}\n")
        done = CliRunner().invoke(cli.build(), ["doctor", "team-a"])
    told = " ".join(done.output.split())
    assert "taken from the variable TEAM_TOKEN: correct it there" in told
    assert "RAY_AUTH_TOKEN" not in told


def test_the_table_of_a_head_that_cannot_be_reached():
    with serving(Server) as url:
        pass  # its port is free again
    assert printed(url) == (GOLDEN / "doctor_unreachable.txt").read_text()


@pytest.mark.parametrize("case", ["healthy", "wrong_token"])
def test_the_command(case, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with serving(Server, **CASES[case]) as url:
        done = CliRunner().invoke(cli.build(), ["doctor", "--address", url])
        as_json = CliRunner().invoke(cli.build(), ["doctor", "--json", "--address", url])
    is_broken = case != "healthy"
    assert done.exit_code == as_json.exit_code == is_broken
    assert ("broken" in done.output) == is_broken
    rows = json.loads(as_json.stdout)
    assert {"check", "state", "message", "next_step"} == rows[0].keys()
    assert any(row["state"] == "broken" for row in rows) == is_broken


def test_the_doctor_of_a_cluster_file(write):
    with serving(Server) as url:
        write(f"cluster: {{address: '{url}'}}\npools: {{big: {{gpus_per_node: 16}}}}\n")
        done = CliRunner().invoke(cli.build(), ["doctor", "--json", "team-a"])
        both = CliRunner().invoke(cli.build(), ["doctor", "team-a", "--address", url])
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert done.exit_code == 1
    assert rows["pool big"]["state"] == "broken"
    assert "16" in rows["pool big"]["message"]
    assert both.exit_code == 1
    assert isinstance(both.exception, SystemExit), "one paragraph, and no traceback"


def test_init_writes_what_the_cluster_has(configs):
    plain = FakeNode("cpu0", {"CPU": 4.0})
    with serving(Server, nodes=(HEAD, *GPUS, plain)) as url:
        done = CliRunner().invoke(cli.build(), ["init", "team-b", "--address", url])
    assert done.exit_code == 0, done.output
    path = Path("cluster_configs/team-b.yaml")
    loaded = load(str(path))
    assert loaded.file.cluster.address == url
    assert loaded.file.pools["h100"].label_selector == LABELS
    assert "# 2 node(s), one with" in path.read_text()
    assert RayExecutor(cluster="team-b", pool="h100").resolved().label_selector == LABELS
    again = CliRunner().invoke(cli.build(), ["init", "team-b"])
    assert again.exit_code == 1, "nothing of the user's is written over"
    assert loaded.file == load(str(path)).file


@pytest.mark.parametrize("name", ["a/b", " ", "../x"])
def test_init_with_a_name_that_is_none(configs, name):
    assert CliRunner().invoke(cli.build(), ["init", name]).exit_code == 1
    assert not Path("cluster_configs").exists()
