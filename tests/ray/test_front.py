"""A dashboard behind a proxy with TLS, a CA of its own, a path prefix and a header."""

import nemo_run as run

from nemo_run_ray import ExistingCluster, RayExecutor
from tests.certificates import certificate
from tests.flaky_proxy import FlakyProxy


def test_a_task_runs_and_its_log_is_followed(
    dashboard, token, unique, tmp_path, monkeypatch, capfd
):
    context, ca = certificate(tmp_path / "tls", valid=True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    monkeypatch.setenv("TEAM", "a")
    options = {"prefix": "/team-a", "header": "x-team: a\r\n", "tls": context}
    with FlakyProxy(dashboard.url, **options) as proxy:
        cluster = ExistingCluster(f"{proxy.url}/", headers={"X-Team": "${TEAM}"}, verify=ca)
        script = run.Script(inline="for word in keep drop keep; do echo $word; sleep 1; done")
        run.run(script, executor=RayExecutor(cluster=cluster), name=unique)
        shown = capfd.readouterr().out
        assert [shown.count(f"/0 {word}") for word in ("keep", "drop")] == [2, 1], shown
        assert f"{proxy.url}/#/jobs/" in "".join(shown.split()).replace("scheduler.py:", "")
        assert any("/logs/tail" in line for line in proxy.requests)

        experiment = run.Experiment.from_title(unique)
        experiment.logs(unique, regex="^keep")
        shown = capfd.readouterr().err
        assert (shown.count("keep"), shown.count("drop")) == (2, 0)
        (status,) = experiment.status(return_dict=True).values()
        assert str(status["status"]) == "SUCCEEDED"
