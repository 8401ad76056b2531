"""The simulated Ray answers as the real one does: the same requests to both."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import httpx

from nemo_run_ray.dashboard.jobs import _REFUSED_LABEL
from nemo_run_ray.remote.dashboard import LOG_FILE, log_query
from nemo_run_ray.remote.status import claim_body
from tests.conftest import wait_for
from tests.fake_ray import fake_ray

Ask = Callable[..., httpx.Response]


def script(ask: Ask, after_a_while: Callable[[], None], title: str) -> list[object]:
    """What each request is answered with, without what differs from cluster to cluster."""
    name = f"{title}-job"
    body = {
        "submission_id": name,
        "entrypoint": "true",
        "runtime_env": {"env_vars": {"A": "1"}},
        "metadata": {"nemo_run_ray": "nonce"},
    }
    found: list[object] = [
        ("version", sorted(ask("GET", "/api/version").json())),
        ("unknown job", ask("GET", f"/api/jobs/{name}").status_code),
        ("its log", ask("GET", f"/api/jobs/{name}/logs").status_code),
        ("its stop", ask("POST", f"/api/jobs/{name}/stop").status_code),
        ("no such page", ask("GET", f"/api/nothing/{name}").status_code),
    ]
    posted = ask("POST", "/api/jobs/", json=body)
    found.append(("job", posted.status_code, posted.json() == {"job_id": name, **ids(name)}))
    for what, other in (
        ("again", body),
        ("a claim of it", claim_body(name, "nonce", "cancelled")),
        ("a label that none has", {**body, "entrypoint_label_selector": _REFUSED_LABEL}),
        ("a body that is wrong", {**body, "submission_id": f"{name}2", "metadata": {"a": 1}}),
        ("a field that is unknown", {**body, "submission_id": f"{name}2", "what": 1}),
    ):
        answer = ask("POST", "/api/jobs/", json=other)
        found.append((what, answer.status_code, last_error(answer.text)))
    after_a_while()
    (row,) = [one for one in ask("GET", "/api/jobs/").json() if one["submission_id"] == name]
    kept = {key: row[key] for key in ("type", "status", "entrypoint", "driver_exit_code")}
    found.append(("row", sorted(row), kept, row["metadata"], type(row["start_time"]).__name__))
    found.append(("the same alone", sorted(ask("GET", f"/api/jobs/{name}").json()) == sorted(row)))
    found.append(("log", list(ask("GET", f"/api/jobs/{name}/logs").json())))
    for lines in (-1, 1):
        told = ask("GET", LOG_FILE, params=log_query(row["driver_node_id"], name, lines))
        found.append(("log file", told.status_code, len(told.text.splitlines()) <= abs(lines) * 9))
    for node, job in ((row["driver_node_id"], "nobody"), ("ab" * 28, name)):
        found.append(("no log", is_nothing(ask("GET", LOG_FILE, params=log_query(node, job, 5)))))
    stopped = ask("POST", f"/api/jobs/{name}/stop")
    found.append(("stop of what has ended", stopped.status_code, stopped.json()))
    package = f"/api/packages/gcs/_ray_pkg_{title}.zip"
    found.append(("no package", ask("GET", package).status_code))
    found.append(("package", ask("PUT", package, content=b"zip").status_code))
    found.append(("that package", ask("GET", package).status_code))
    return found


def is_nothing(answer: httpx.Response) -> bool:
    """Whether it says that there is no such log.

    Beside other requests Ray answers with 200 and no byte where it says why with 500 otherwise (81
    of 320 requests in eight threads, Ray 2.60). A log that is there comes whole.
    """
    return (answer.status_code, bool(answer.text)) in {(500, True), (200, False)}


def ids(name: str) -> dict[str, str]:
    return {"submission_id": name}


def last_error(text: str) -> str:
    """The last line of a traceback that names an error, without the id."""
    lines = [line.split("`")[0] for line in text.splitlines() if "Error: " in line]
    return lines[-1].split("submission_id ")[0] if lines else text


def test_the_simulated_ray_answers_as_the_real_one(dashboard):
    title = uuid.uuid4().hex
    with httpx.Client(headers=dashboard.headers, timeout=60, trust_env=False) as client:

        def ask(method: str, path: str, **content) -> httpx.Response:
            return client.request(method, f"{dashboard.url}{path}", **content)

        def has_ended() -> bool:
            return ask("GET", f"/api/jobs/{title}-job").json()["status"] == "SUCCEEDED"

        real = script(ask, lambda: wait_for(has_ended), title)
    with fake_ray() as ray, httpx.Client(timeout=60, trust_env=False) as client:

        def ask_fake(method: str, path: str, **content) -> httpx.Response:
            return client.request(method, f"{ray.url}{path}", **content)

        def pass_time() -> None:
            for _ in range(3):
                ray.pass_time(1.0)

        assert script(ask_fake, pass_time, title) == real
