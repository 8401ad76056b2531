"""The dispatcher against a server that answers as Ray's Jobs API does, over simulated jobs."""

import contextlib
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO

import pytest

from nemo_run_ray.plan.job import entrypoint
from nemo_run_ray.remote import dispatcher
from nemo_run_ray.remote.dispatcher import (
    ABSENT_MAX_S,
    STOP_TRUST_S,
    Dispatcher,
    WrongCluster,
    find_dashboard,
)
from nemo_run_ray.remote.end_record import PREFIX, EndRecord, lock_of, proof_of
from nemo_run_ray.remote.node.rundir import KEY, SECRETS
from nemo_run_ray.remote.spec import (
    LOCK_KEY,
    NONCE_KEY,
    SUBMISSION_ID,
    DispatchedJobSpec,
    DispatchSpec,
)
from nemo_run_ray.remote.status import (
    CLAIM_KEY,
    DISPATCHER_KEY,
    NODE_DEAD_S,
    NOT_PLACED,
    PERMANENT_KEY,
    RETRIES_KEY,
    JobExit,
)
from tests.fake_ray import (
    EXIT_CODE_IS_LOST,
    FAILS,
    FINDS_NO_ROOM,
    NODE_DIES,
    OWN,
    SESSION,
    START_TIMES_OUT,
    STOPPED,
    SUCCEEDS,
    FakeRay,
    Trouble,
    fake_ray,
)

pytestmark = pytest.mark.usefixtures("user_home")


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeRay]]:
    """Start a server for a chain, or for none."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(fake_ray(*given, **options))


@pytest.fixture
def told(capfd) -> Callable[[], list[str]]:
    """Our lines in the dispatcher's log since the last time."""

    def read() -> list[str]:
        return [one for one in capfd.readouterr().out.splitlines() if one.startswith(PREFIX)]

    return read


def job_spec(name: str, *after: str, **fields) -> DispatchedJobSpec:
    nonce = f"nonce-{name}"
    metadata = {NONCE_KEY: nonce, "nemo_run_job": name, DISPATCHER_KEY: OWN, PERMANENT_KEY: ""}
    body = {
        "submission_id": f"e.{name}",
        "entrypoint": entrypoint(None, ["task", name, SUBMISSION_ID, nonce]),
        "runtime_env": {"py_modules": ["gcs://_ray_pkg_jobs.zip"], "env_vars": {"A": "1"}},
        "metadata": {**metadata, RETRIES_KEY: str(fields.get("retries", 0))},
        "entrypoint_num_cpus": 1,
    }
    return DispatchedJobSpec(name, f"e.{name}", nonce, body, after, **fields)


def dispatch_of(*job_specs: DispatchedJobSpec, **fields) -> DispatchSpec:
    return DispatchSpec(OWN, "boss", job_specs, **{"session": SESSION, **fields})


def own_part(ray: FakeRay, body: dict) -> tuple[dict[str, bytes], str]:
    """The files of an attempt's own archive, and what the proof of its end must fit."""
    name = body["runtime_env"]["py_modules"][-1].removeprefix("gcs://")
    with zipfile.ZipFile(BytesIO(ray.packages[name])) as archive:
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o600}
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    return files, body["metadata"][LOCK_KEY]


def dispatcher_of(plan: DispatchSpec, ray: FakeRay, **options) -> Dispatcher:
    values = {"own_id": OWN, "secrets": {}, "clock": lambda: ray.now, **options}
    return Dispatcher(plan, api=ray.api(), **values)


def rounds(one: Dispatcher, ray: FakeRay, count: int, seconds: float = 1.0) -> int | None:
    """Let time pass and look, so many times; the exit code if it is over before."""
    for _ in range(count):
        code = one.round()
        if code is not None:
            return code
        ray.pass_time(seconds)
    return None


def test_what_failed_is_started_again_under_an_id_of_its_own(serve):
    plan = dispatch_of(job_spec("a", retries=2), job_spec("b", "a"))
    ray = serve(plan)
    ray.fates.update({"e.a": FAILS, "e.a@2": NODE_DIES})
    assert dispatcher_of(plan, ray).run(ray.pass_time) == JobExit.SUCCEEDED
    assert ray.started == ["e.a", "e.a@2", "e.a@3", "e.b"]
    assert ray.overlaps == []
    for number, body in enumerate(ray.bodies[:3], 1):
        given = json.loads(json.dumps(plan.jobs[0].body))
        name = "e.a" if number == 1 else f"e.a@{number}"
        given["submission_id"] = name
        given["entrypoint"] = entrypoint(None, ["task", "a", name, "nonce-a"])
        given["runtime_env"]["env_vars"] = {"A": "1", "NEMO_RUN_ATTEMPT": str(number)}
        own, lock = own_part(ray, body)
        assert lock_of(proof_of(own[KEY].decode(), 0)) == lock
        given["runtime_env"]["py_modules"].append(body["runtime_env"]["py_modules"][-1])
        assert body == {**given, "metadata": {**given["metadata"], LOCK_KEY: lock}}
    assert len({body["metadata"][LOCK_KEY] for body in ray.bodies[:3]}) == 3


def test_an_end_that_ray_has_lost_is_taken_from_the_jobs_log(serve):
    plan = dispatch_of(job_spec("a", retries=1), job_spec("b", "a"))
    ray = serve(plan)
    ray.fates.update(dict.fromkeys(("e.a", "e.a@2", "e.b"), EXIT_CODE_IS_LOST))

    def write_logs() -> None:
        for body in ray.bodies:
            code = 3 if body["submission_id"] == "e.a" else 0
            key = own_part(ray, body)[0][KEY].decode()
            key = "another's" if body["submission_id"] == "e.b" else key
            cause = "EXIT_CODE" if code else "NONE"
            record = EndRecord(code, cause, f"exit code {code}", proof=proof_of(key, code))
            line = record.line("nonce-" + body["metadata"]["nemo_run_job"])
            ray.logs[body["submission_id"]] = f"words\n{line}"

    ray.before_table = write_logs
    began_at = ray.now
    assert dispatcher_of(plan, ray).run(ray.pass_time) == JobExit.SOME_FAILED
    assert ray.started == ["e.a", "e.a@2", "e.b"], "b's log proves nothing"
    assert ray.now - began_at < NODE_DEAD_S, "what has ended needs no wait for a node"


@pytest.mark.parametrize(("given", "wait_s"), [(None, NODE_DEAD_S), ("5", 20.0)])
def test_an_attempt_after_a_nodes_death_waits_so_long_as_this_ray_takes_to_notice(
    serve, monkeypatch, given, wait_s
):
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", given)
    plan = dispatch_of(job_spec("a", retries=1))
    ray = serve(plan)
    ray.fates["e.a"] = NODE_DIES
    one = dispatcher_of(plan, ray)
    rounds(one, ray, 3)
    died_at = ray.rows["e.a"]["end_time"] / 1000
    ray.now = died_at + wait_s - 0.1
    one.round()
    assert ray.started == ["e.a"]
    ray.now = died_at + wait_s
    one.round()
    assert ray.started == ["e.a", "e.a@2"]


def test_no_attempt_until_the_old_supervisors_stop_has_arrived(serve):
    plan = dispatch_of(job_spec("a"))
    ray = serve(plan)
    ray.fates["e.a"] = START_TIMES_OUT
    ray.trouble = lambda method, path: Trouble(500, "oops") if path.endswith("/stop") else None
    one = dispatcher_of(plan, ray)
    rounds(one, ray, 6)
    assert ray.started == ["e.a"]
    ray.trouble = lambda method, path: None
    assert rounds(one, ray, 6) == JobExit.SUCCEEDED
    assert ray.started == ["e.a", "e.a@2"]


def test_a_job_whose_answer_was_lost_is_not_started_again(serve):
    plan = dispatch_of(job_spec("a", retries=3), job_spec("b", "a"))
    ray = serve(plan)
    lost = iter([Trouble(is_carried_out=True), Trouble(502, "bad gateway", True)])
    ray.trouble = lambda method, path: next(lost, None) if method == "POST" else None
    assert dispatcher_of(plan, ray).run(ray.pass_time) == JobExit.SUCCEEDED
    assert ray.started == ["e.a", "e.b"]
    assert ray.claims == {}


def test_what_ray_refuses_becomes_a_claim_that_says_why(serve, told):
    plan = dispatch_of(job_spec("a", retries=5), job_spec("b", "a"), job_spec("x"))
    plan.jobs[0].body["entrypoint_memory"] = "much"
    ray = serve(plan)
    assert dispatcher_of(plan, ray).run(ray.pass_time) == JobExit.SOME_FAILED
    assert list(ray.claims) == ["e.a"]
    assert "entrypoint_memory must be an integer" in ray.claims["e.a"]
    assert "HTTP 400" in ray.claims["e.a"]
    assert ray.started == ["e.x"]
    assert ray.posts() == 3
    (line,) = [line for line in told() if " FAILED e.a " in line]
    assert ray.claims["e.a"] in line


def test_a_table_without_the_dispatcher_is_believed_after_a_while(serve):
    plan = dispatch_of(job_spec("a"))
    ray = serve(plan)
    del ray.rows[OWN]
    one = dispatcher_of(plan, ray)
    for _ in range(2):
        assert one.round() is None
        ray.now += ABSENT_MAX_S / 2
    assert one.round() is None
    ray.now += 0.1
    with pytest.raises(WrongCluster, match="does not have this dispatcher"):
        one.round()
    assert {method for method, _ in ray.requests} == {"GET"}


@pytest.mark.parametrize("end", [FAILS, STOPPED, SUCCEEDS])
def test_a_dispatcher_that_ray_calls_ended_does_nothing_more(serve, end):
    plan = dispatch_of(job_spec("a"), job_spec("b", "a"))
    ray = serve(plan)
    one = dispatcher_of(plan, ray)
    rounds(one, ray, 2)
    ray.rows[OWN].update(end)
    with pytest.raises(WrongCluster, match="this dispatcher is"):
        one.round()
    assert ray.started == ["e.a"]


def _eventful() -> tuple[DispatchSpec, dict[str, dict]]:
    """A chain in which much happens, and how its attempts end."""
    plan = dispatch_of(
        job_spec("a", retries=2),
        job_spec("b", "a"),
        job_spec("c", "a", retries=1),
        job_spec("d", "b", "c"),
        job_spec("e", retries=1),
        job_spec("f", "e"),
        job_spec("g"),
        max_in_flight=3,
    )
    fates = {"e.a": FAILS, "e.a@2": NODE_DIES, "e.c": FAILS, "e.e": FAILS, "e.e@2": FAILS}
    return plan, {**fates, "e.g": START_TIMES_OUT}


_EVENTS = ["a", "a@2", "a@3", "b", "c", "c@2", "d", "e", "e@2", "g", "g@2"]


def _check_events(ray: FakeRay) -> None:
    assert sorted(ray.started) == [f"e.{one}" for one in _EVENTS]
    assert ray.overlaps == []
    assert ray.claims == {}


def test_two_dispatchers_at_once_start_everything_once(serve, told):
    plan, fates = _eventful()
    ray = serve(plan)
    ray.fates.update(fates)
    ray.add(f"{OWN}@2", {NONCE_KEY: plan.nonce}, status="RUNNING")
    # Both read the table before either acts, so that both want the same.
    together = threading.Barrier(2, timeout=5)

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()

    ray.before_table = meet
    codes: list[int] = []

    def run(own_id: str) -> None:
        codes.append(dispatcher_of(plan, ray, own_id=own_id).run(ray.pass_time))
        together.abort()

    threads = [threading.Thread(target=run, args=(one,)) for one in (OWN, f"{OWN}@2")]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert codes == [JobExit.SOME_FAILED, JobExit.SOME_FAILED]
    _check_events(ray)
    assert len(ray.taken) >= 3
    assert "asking again" not in "".join(told())


class Killed(Exception):
    """The dispatcher's process ends here."""


def test_a_dispatcher_that_is_killed_at_any_moment_is_replaced_by_another(serve):
    whole, moments = None, 1
    while whole is None:
        plan, fates = _eventful()
        ray = serve(plan)
        ray.fates.update(fates)
        left = [moments]

        def clock(ray: FakeRay = ray, left: list[int] = left) -> float:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return ray.now

        try:
            whole = dispatcher_of(plan, ray, clock=clock).run(ray.pass_time)
        except Killed:
            code = dispatcher_of(plan, ray).run(ray.pass_time)
            assert code == JobExit.SOME_FAILED
        _check_events(ray)
        moments += 17
    assert whole == JobExit.SOME_FAILED
    assert moments > 50


def test_what_finds_no_room_in_timeis_claimed_then_stopped_then_left_to_ray(serve):
    plan = dispatch_of(job_spec("a", pending_timeout_s=60, retries=3), job_spec("b", "a"))
    ray = serve(plan)
    ray.fates["e.a"] = FINDS_NO_ROOM
    one = dispatcher_of(plan, ray)
    assert rounds(one, ray, 3, seconds=30) is None
    assert ray.claims == {}
    ray.requests.clear()
    began_at = ray.now
    assert rounds(one, ray, 99, seconds=0.5) == JobExit.SOME_FAILED
    assert ray.now - began_at == STOP_TRUST_S
    assert ray.claims == {"e.a@2": NOT_PLACED}
    asked = [path for method, path in ray.requests if method == "POST"]
    assert asked == ["/api/jobs/", *["/api/jobs/e.a/stop"] * 3]
    assert ray.started == ["e.a"]


def test_a_job_whose_secret_did_not_come_is_given_up_in_words(serve):
    plan = dispatch_of(job_spec("a", secrets=("KEY",)), job_spec("b"))
    ray = serve(plan)
    assert dispatcher_of(plan, ray, secrets={}).run(ray.pass_time) == JobExit.SOME_FAILED
    assert "without KEY" in ray.rows["e.a"]["metadata"][CLAIM_KEY]
    assert ray.rows["e.b"]["status"] == "SUCCEEDED"


def test_the_dashboard_of_the_right_session_is_found(serve):
    closed = serve()
    silent, other = serve(), serve(session="session_of_somebody_else")
    silent.trouble = lambda method, path: Trouble()
    no_ray, busy, right = serve(), serve(), serve()
    no_ray.trouble = lambda method, path: Trouble(200, "<html>Welcome</html>")
    busy.trouble = lambda method, path: Trouble(503)
    tried = (silent, other, no_ray, busy, right)
    plan = dispatch_of(dashboards=tuple(one.url for one in (*tried, closed)))
    found = find_dashboard(plan)
    assert found is not None
    assert found.url == right.url
    assert found.session() == SESSION


def test_no_other_port_is_shown_the_token_where_the_dashboard_is_known(serve, monkeypatch):
    own, given = serve(session="session_of_the_next_allocation"), serve()
    monkeypatch.setenv("NEMO_RUN_RAY_DASHBOARD", own.url)
    assert find_dashboard(dispatch_of(dashboards=(given.url,))).url == own.url
    assert given.requests == []
    monkeypatch.setenv("NEMO_RUN_RAY_LOCAL", "/an/embedded/ray/inside")
    assert find_dashboard(dispatch_of(dashboards=(given.url,))).url == given.url


@pytest.fixture
def files(tmp_path, monkeypatch) -> str:
    """The archives of the dispatcher as Ray unpacked them; the file with the secrets."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'code'}{os.pathsep}{tmp_path}")
    path = tmp_path / SECRETS
    path.write_text(json.dumps({"KEY": "hidden"}))
    return str(path)


def test_the_secrets_are_gone_when_all_is_decided(serve, files, told):
    plan = dispatch_of(job_spec("a", secrets=("KEY",)))
    ray = serve(plan)
    plan = plan._replace(dashboards=(ray.url,))
    ray.add("e.a", {NONCE_KEY: "nonce-a"}, **SUCCEEDS, end_time=1)
    assert dispatcher.run(plan, OWN) == JobExit.SUCCEEDED
    assert not os.path.exists(files)
    assert "all is decided" in told()[-1]


@pytest.mark.parametrize(
    ("given", "memory_gib", "limit"), [(7, 0, 7), (None, 0, 4), (None, 16, 78)]
)
def test_a_dispatcher_without_an_owner_ends_with_a_code_of_its_own(
    serve, files, told, monkeypatch, given, memory_gib, limit
):
    """Its first line has the limit, by default for half of the head's memory."""
    monkeypatch.setattr(dispatcher, "memory_bytes", lambda: memory_gib * 2**30)
    plan = dispatch_of(job_spec("a", secrets=("KEY",)), max_in_flight=given)
    ray = serve(plan)
    plan = plan._replace(dashboards=(ray.url,))
    ray.rows[OWN].update(STOPPED)
    assert dispatcher.run(plan, OWN) == JobExit.WRONG_CLUSTER
    assert not os.path.exists(files)
    first, *_, last = told()
    assert first.endswith(f"1 jobs, at most {limit} at once")
    assert "nothing more is started" in last
    assert ray.posts() == 0
