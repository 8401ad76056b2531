"""Rules by example, safety on random tables, and an end of every chain in a simulated cluster."""

import copy
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_run_ray.remote.decide import (
    STARTING_MAX,
    STUCK_S,
    Action,
    Decision,
    Do,
    JobExit,
    TimeLeft,
    decide,
    time_left,
)
from nemo_run_ray.remote.spec import DispatchedJobSpec, DispatchSpec, OutsideSpec
from nemo_run_ray.remote.status import (
    CANCELLED,
    NODE_DEAD_S,
    NOT_PLACED,
    Attempt,
    JobState,
    JobStatus,
    Reason,
    attempt_id,
    attempt_of_row,
)

NOW = 100_000.0
PERMANENT = {Reason.RUNTIME_ENV, Reason.UNSCHEDULABLE, Reason.NOT_PLACED}


def job_spec(name: str, *after: str, **fields) -> DispatchedJobSpec:
    return DispatchedJobSpec(name, f"e.{name}", f"nonce-{name}", {}, after, **fields)


def dispatch_of(*job_specs: DispatchedJobSpec, **fields) -> DispatchSpec:
    return DispatchSpec("e.dispatcher", "boss", job_specs, **fields)


def row(state: JobState, job: str, reason: Reason = Reason.NONE, **fields) -> Attempt:
    """A row of a job of ``link``; what has ended did so long ago."""
    fields = {"nonce": f"nonce-{job}", "posted_at": 100.0, **fields}
    if state.is_terminal:
        fields = {"ended_at": 200.0, **fields}
    return Attempt(JobStatus(state, reason), **fields)


def pending(job: str, **fields) -> Attempt:
    return row(JobState.PENDING, job, **fields)


def running(job: str, **fields) -> Attempt:
    return row(JobState.RUNNING, job, **fields)


def succeeded(job: str, **fields) -> Attempt:
    return row(JobState.SUCCEEDED, job, **fields)


def failed(job: str, reason: Reason = Reason.EXIT_CODE, **fields) -> Attempt:
    if reason is Reason.EXIT_CODE:
        fields = {"exit_code": 1, **fields}
    return row(JobState.FAILED, job, reason, **fields)


def claimed(job: str, words: str = CANCELLED, **fields) -> Attempt:
    return row(JobState.SUCCEEDED, job, claim=words, **fields)


def did(decision: Decision, *kinds: Do) -> list[str]:
    """Ids of the actions of these kinds."""
    return [one.submission_id for one in decision.actions if one.do in kinds]


def submitted(plan: DispatchSpec, table: dict[str, Attempt]) -> list[str]:
    return did(decide(plan, table, NOW), Do.SUBMIT)


def status_of(plan: DispatchSpec, table: dict[str, Attempt], name: str) -> JobStatus:
    return decide(plan, table, NOW).statuses[name]


OTHER = OutsideSpec("o.x", ("nonce-x", "nonce-of-an-earlier-run"), "o.dispatcher")
DIRECT = OutsideSpec("o.x", ("nonce-x",))


@pytest.mark.parametrize("outside", [OTHER, DIRECT])
def test_a_job_waits_for_a_job_of_another_experiment(outside):
    plan = dispatch_of(job_spec("a", outside=(outside,)))
    for table in ({}, {"o.x": running("x")}, {"o.x": succeeded("x", nonce="stranger")}):
        assert submitted(plan, table) == []
        assert status_of(plan, table, "a").waits_for == ("o.x",)
    assert submitted(plan, {"o.x": succeeded("x")}) == ["e.a"]


def test_another_experiments_retry_is_waited_for():
    plan = dispatch_of(job_spec("a", outside=(OTHER,)))
    assert not decide(plan, {"o.x": failed("x", retries=1)}, NOW).is_over
    assert decide(plan, {"o.x": failed("x", retries=0)}, NOW).is_over
    table = {"o.x": failed("x", retries=1), "o.x@2": succeeded("x", retries=1)}
    assert submitted(plan, table) == ["e.a"]


def test_a_job_without_a_dispatcher_has_one_attempt():
    plan = dispatch_of(job_spec("a", outside=(DIRECT,)))
    for reason in (Reason.EXIT_CODE, Reason.START_TIMEOUT):
        table = {"o.x": failed("x", reason, retries=3)}
        assert status_of(plan, table, "a").reason is Reason.UPSTREAM


@pytest.mark.parametrize("code", [JobExit.SUCCEEDED, JobExit.SOME_FAILED])
def test_what_another_experiment_never_started_is_cancelled_with_it(code):
    plan = dispatch_of(job_spec("a", outside=(OTHER,)))
    ended = row(JobState.SUCCEEDED if code == 0 else JobState.FAILED, "boss", exit_code=code)
    assert status_of(plan, {"o.dispatcher": ended}, "a").state is JobState.CANCELLED
    assert status_of(plan, {"o.dispatcher": running("boss")}, "a").state is JobState.WAITING
    died = row(JobState.FAILED, "boss", Reason.NODE_DIED)
    assert status_of(plan, {"o.dispatcher": died}, "a").state is JobState.WAITING
    table = {"o.dispatcher": died, "o.dispatcher@2": ended}
    assert status_of(plan, table, "a").state is JobState.CANCELLED


def test_behind_one_that_waits_for_room_only_others_go_on():
    big, small = {"entrypoint_num_gpus": 8}, {"entrypoint_num_cpus": 1}
    plan = dispatch_of(
        *(job_spec(name)._replace(body={"entrypoint": name, **big}) for name in "ab"),
        job_spec("c")._replace(body=small),
    )
    table = {"e.a": pending("a", posted_at=NOW - STUCK_S - 1)}
    assert submitted(plan, table) == ["e.c"]
    assert submitted(plan, {"e.a": pending("a", posted_at=NOW - 1)}) == ["e.b", "e.c"]
    table = {"e.a": failed("a", Reason.START_TIMEOUT)}
    assert submitted(plan, table) == ["e.a@2", "e.c"]
    assert submitted(plan, {**table, "e.a@2": pending("a", posted_at=NOW - 1)}) == ["e.c"]


def test_starts_that_ray_gave_up_belong_to_the_same_wait():
    plan = dispatch_of(job_spec("a", pending_timeout_s=1000.0))
    table = {
        "e.a": failed("a", Reason.START_TIMEOUT, posted_at=NOW, ended_at=NOW + 900),
        "e.a@2": pending("a", posted_at=NOW + 901),
    }
    assert decide(plan, table, NOW + 999).actions == ()
    assert did(decide(plan, table, NOW + 1001), Do.CLAIM) == ["e.a@3"]


def test_a_row_of_rays_table_is_understood():
    found = attempt_of_row(
        {
            "status": "FAILED",
            "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR",
            "driver_exit_code": 3,
            "driver_node_id": "abc",
            "message": "x last available logs (truncated to 20,000 chars):\none\ntwo",
            "start_time": 1500,
            "end_time": 2500,
            "metadata": {
                "nemo_run_ray": "mine",
                "nemo_run_ray_retries": "2",
                "nemo_run_ray_permanent": "3,4",
            },
        }
    )
    assert (found.posted_at, found.ended_at, found.exit_code) == (1.5, 2.5, 3)
    assert (found.nonce, found.retries, found.permanent_exit_codes) == ("mine", 2, (3, 4))
    assert found.status.reason is Reason.EXIT_CODE
    assert "\n" not in found.status.detail
    assert not found.is_live


@dataclass(frozen=True)
class Scene:
    """A chain, and a table that may be impossible."""

    dispatch_of: DispatchSpec
    table: dict[str, Attempt]

    def decide(self) -> Decision:
        return decide(self.dispatch_of, self.table, NOW)

    def own(self, one: DispatchedJobSpec) -> dict[int, Attempt]:
        """Rows at the ids of a job, also strangers'."""
        ids = {attempt_id(one.id, number): number for number in range(1, 10)}
        return {ids[name]: row for name, row in self.table.items() if name in ids}

    def live(self, one: DispatchedJobSpec) -> list[int]:
        return [n for n, row in self.own(one).items() if row.is_live and row.nonce == one.nonce]

    def has_stranger(self, one: DispatchedJobSpec) -> bool:
        return any(row.nonce != one.nonce for row in self.own(one).values())

    def proven(self, one: DispatchedJobSpec | OutsideSpec) -> bool:
        nonces = one.nonces if isinstance(one, OutsideSpec) else (one.nonce,)
        return any(
            row.status.state is JobState.SUCCEEDED and not row.claim and row.nonce in nonces
            for row in self.own(one).values()
        )

    @property
    def cancelled(self) -> bool:
        row = self.table.get(self.dispatch_of.cancel_id)
        return row is not None and bool(row.claim) and row.nonce == self.dispatch_of.nonce

    def submits(self) -> list[tuple[DispatchedJobSpec, int]]:
        job_specs = {one.name: one for one in self.dispatch_of.jobs}
        return [
            (job_specs[one.job], 1 if one.submission_id == job_specs[one.job].id else _number(one))
            for one in self.decide().actions
            if one.do is Do.SUBMIT
        ]


def _number(action: Action) -> int:
    return int(action.submission_id.partition("@")[2])


_KINDS = (
    *(succeeded("") for _ in range(6)),
    failed(""),
    failed("", exit_code=2),
    *(failed("", reason) for reason in (*sorted(PERMANENT), Reason.NOT_STARTED, Reason.SIGNAL)),
    failed("", Reason.START_TIMEOUT),
    failed("", Reason.START_TIMEOUT, posted_at=NOW - 70, ended_at=NOW - 50),
    failed("", Reason.NODE_DIED),
    failed("", Reason.NODE_DIED, ended_at=NOW - NODE_DEAD_S / 2),
    failed("", retries=2),
    row(JobState.CANCELLED, "", Reason.CANCELLED),
    row(JobState.UNKNOWN, "", Reason.OTHER),
    pending("", posted_at=NOW - 1),
    pending("", posted_at=NOW - 30),
    pending("", posted_at=NOW - 100),
    running(""),
    running("", posted_at=NOW - 1),
    claimed(""),
    claimed("", NOT_PLACED),
    row(JobState.PENDING, "", claim="Ray refuses it"),
    row(JobState.FAILED, "", Reason.EXIT_CODE, claim=CANCELLED),
)
_NUMBERS = ((), (), (), (1,), (1,), (1,), (1, 2), (1, 2), (1, 2, 3), (2,), (1, 3), (3, 1, 2, 4))
_OPTIONS = (
    {},
    {},
    {"retries": 1},
    {"retries": 3},
    {"retries": 2, "permanent_exit_codes": (2,)},
    {"pending_timeout_s": 60.0},
    {"pending_timeout_s": 60.0, "retries": 2},
    {"body": {"entrypoint_num_gpus": 1}},
)
_OUTSIDE = (
    OutsideSpec("o.x", ("nonce-x", "older")),
    OutsideSpec("o.y", ("nonce-y",), "o.dispatcher"),
)
_DEPENDS = ((), (), (), (), _OUTSIDE[:1], _OUTSIDE[1:], _OUTSIDE)


@st.composite
def scenes(draw) -> Scene:
    job_specs, table = [], {}
    kinds, who = st.sampled_from(_KINDS), st.integers(0, 15)

    def put(first: str, nonce: str) -> None:
        for number in draw(st.sampled_from(_NUMBERS)):
            mine = "stranger" if draw(who) == 15 else nonce
            table[attempt_id(first, number)] = replace(draw(kinds), nonce=mine)

    for number in range(draw(st.integers(1, 12))):
        before = [draw(st.integers(-2, number - 1)) for _ in range(2)] if number else []
        after = [f"j{one}" for one in sorted(set(before)) if one >= 0]
        options = {"body": {}, **draw(st.sampled_from(_OPTIONS))}
        outside = draw(st.sampled_from(_DEPENDS))
        name = f"j{number}"
        job_specs.append(
            DispatchedJobSpec(
                name, f"e.{name}", name, after=tuple(after), outside=outside, **options
            )
        )
        put(f"e.{name}", name)
    for first, nonce in (("o.x", "nonce-x"), ("o.y", "nonce-y"), ("o.dispatcher", "o")):
        put(first, nonce)
    plan = dispatch_of(*job_specs, max_in_flight=draw(st.sampled_from((None, 1, 3))))
    if draw(who) > 12:
        table[plan.cancel_id] = replace(claimed(""), nonce=draw(st.sampled_from(("boss", "x"))))
    return Scene(plan, table)


def _every_dependency_of_a_submit_is_proven(scene):
    job_specs = {one.name: one for one in scene.dispatch_of.jobs}
    for one, _ in scene.submits():
        assert all(scene.proven(job_specs[name]) for name in one.after)
        assert all(scene.proven(other) for other in one.outside)


def _submits_never_exceed_the_limit(scene):
    limit = scene.dispatch_of.max_in_flight
    live = sum(len(scene.live(one)) for one in scene.dispatch_of.jobs)
    submits = len(scene.submits())
    assert submits <= STARTING_MAX
    assert limit is None or submits <= max(0, limit - live)


def _an_attempt_follows_only_the_failed_last_one(scene):
    for one, number in scene.submits():
        rows = scene.own(one)
        assert scene.live(one) == []
        assert number == max(rows, default=0) + 1
        assert not rows or rows[number - 1].status.state is JobState.FAILED


def _every_id_is_taken_once(scene):
    ids = did(scene.decide(), Do.SUBMIT, Do.CLAIM)
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(scene.table)


def _retries_are_given_only_to_what_has_some(scene):
    for one, number in scene.submits():
        rows = scene.own(one)
        counted = [
            row
            for row in rows.values()
            if row.status.state is JobState.FAILED and row.status.reason is not Reason.START_TIMEOUT
        ]
        assert len(counted) <= one.retries
        if number == 1:
            continue
        last = rows[number - 1]
        assert last.status.reason not in PERMANENT
        assert last.exit_code is None or last.exit_code not in one.permanent_exit_codes
        wait_s = NODE_DEAD_S if last.status.reason is Reason.NODE_DIED else 0
        assert last.ended_at + wait_s <= NOW


def _every_claim_is_final(scene):
    decision = scene.decide()
    for one in scene.dispatch_of.jobs:
        rows = scene.own(one).values()
        if any(row.claim for row in rows):
            runs = any(row.status.state is JobState.RUNNING for row in rows)
            assert runs or decision.statuses[one.name].state.is_terminal
            assert all(job is not one for job, _ in scene.submits())


def _a_cancelled_chain_starts_nothing_and_stops_all(scene):
    table = {**scene.table, scene.dispatch_of.cancel_id: replace(claimed(""), nonce="boss")}
    scene = replace(scene, table=table)
    decision = scene.decide()
    assert did(decision, Do.SUBMIT) == []
    live = {attempt_id(one.id, n) for one in scene.dispatch_of.jobs for n in scene.live(one)}
    assert set(did(decision, Do.STOP)) == live
    if not live:
        assert decision.is_over


def _strangers_fail_their_job_and_are_left_alone(scene):
    decision = scene.decide()
    ids = {one.submission_id for one in decision.actions}
    for one in scene.dispatch_of.jobs:
        if scene.has_stranger(one):
            assert decision.statuses[one.name].state is JobState.FAILED
            assert decision.statuses[one.name].reason is Reason.TAKEN
            assert all(job is not one for job, _ in scene.submits())
            rows = scene.own(one).items()
            assert not ids & {attempt_id(one.id, n) for n, row in rows if row.nonce != one.nonce}


def _what_must_not_go_on_is_stopped_and_nothing_else(scene):
    decision = scene.decide()
    stops = set(did(decision, Do.STOP))
    claims = set(did(decision, Do.CLAIM))
    may = set()
    for one in scene.dispatch_of.jobs:
        over = decision.statuses[one.name].state.is_terminal or scene.cancelled
        for number in scene.live(one):
            name = attempt_id(one.id, number)
            if over or number != max(scene.own(one)):
                assert name in stops
                may.add(name)
            elif attempt_id(one.id, number + 1) in claims:
                assert scene.own(one)[number].status.state is JobState.PENDING
                may.add(name)
    assert stops == may


def _what_is_not_placed_in_time_is_claimed_before_it_is_stopped(scene):
    actions = scene.decide().actions
    for position, action in enumerate(actions):
        if action.do is Do.CLAIM:
            one = next(
                job_spec for job_spec in scene.dispatch_of.jobs if job_spec.name == action.job
            )
            if action.why == NOT_PLACED:
                assert one.pending_timeout_s is not None
            else:
                assert (action.why, scene.cancelled) == (CANCELLED, True)
            later = {(two.do, two.submission_id) for two in actions[position:]}
            assert (Do.STOP, attempt_id(one.id, _number(action) - 1)) in later


def _a_failure_cancels_what_depends_on_it_and_nothing_else(scene):
    statuses = scene.decide().statuses
    assert list(statuses) == [one.name for one in scene.dispatch_of.jobs]
    for one in scene.dispatch_of.jobs:
        status = statuses[one.name]
        ended = [
            name
            for name in one.after
            if statuses[name].state.is_terminal and statuses[name].state is not JobState.SUCCEEDED
        ]
        if ended and not scene.own(one) and not scene.cancelled:
            assert (status.state, status.reason) == (JobState.CANCELLED, Reason.UPSTREAM)
        if status.reason is Reason.UPSTREAM:
            assert ended or one.outside
            assert not all(map(scene.proven, one.outside)) or ended


def _what_can_be_done_is_done(scene):
    decision = scene.decide()
    waiting = {
        one.name: one
        for one in scene.dispatch_of.jobs
        if decision.statuses[one.name].state is JobState.WAITING
    }
    for one in waiting.values():
        status = decision.statuses[one.name]
        if status.reason is Reason.WAITS:
            outside = {other.id for other in one.outside}
            assert status.waits_for
            for name in status.waits_for:
                assert name in outside or not decision.statuses[name].state.is_terminal
    if any(scene.live(one) for one in scene.dispatch_of.jobs):
        return
    for one in waiting.values():
        status = decision.statuses[one.name]
        last = scene.own(one).get(status.attempt)
        died = last is not None and last.status.reason is Reason.NODE_DIED
        wait_s = NODE_DEAD_S if died else 0
        if status.reason is not Reason.WAITS and (not last or last.ended_at + wait_s <= NOW):
            assert did(decision, Do.SUBMIT)


_RULES = (
    _every_dependency_of_a_submit_is_proven,
    _submits_never_exceed_the_limit,
    _an_attempt_follows_only_the_failed_last_one,
    _every_id_is_taken_once,
    _retries_are_given_only_to_what_has_some,
    _every_claim_is_final,
    _a_cancelled_chain_starts_nothing_and_stops_all,
    _strangers_fail_their_job_and_are_left_alone,
    _what_must_not_go_on_is_stopped_and_nothing_else,
    _what_is_not_placed_in_time_is_claimed_before_it_is_stopped,
    _a_failure_cancels_what_depends_on_it_and_nothing_else,
    _what_can_be_done_is_done,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(scenes(), st.randoms(use_true_random=False))
def test_every_decision_keeps_all_rules_and_depends_on_the_rows_alone(scene, chance):
    for rule in _RULES:
        rule(scene)
    before = copy.deepcopy(scene)
    decision = scene.decide()
    assert scene == before
    rows = list(scene.table.items())
    chance.shuffle(rows)
    assert replace(scene, table=dict(rows)).decide() == decision == scene.decide()


def test_what_ends_before_its_allocation_is_started():
    plan = dispatch_of(job_spec("a", time_s=600), job_spec("b", time_s=601), job_spec("c"))
    found = decide(plan, {}, 1000.0, time_left=TimeLeft(600))
    assert [(one.do, one.job) for one in found.actions] == [
        (Do.CLAIM, "b"),
        (Do.SUBMIT, "a"),
        (Do.SUBMIT, "c"),
    ]
    assert "it needs 601 s, and its allocation ends in 600 s" in found.actions[0].why
    assert not found.is_out_of_time


def test_where_another_allocation_goes_on_it_waits_for_that():
    plan = dispatch_of(job_spec("a", time_s=700), job_spec("b", time_s=300), job_spec("c", "a"))
    busy = decide(plan, {"e.b": running("b")}, 1000.0, time_left=TimeLeft(600, renews=True))
    assert (busy.actions, busy.is_out_of_time) == ((), False), "b still runs"
    done = {"e.b": row(JobState.SUCCEEDED, "b")}
    found = decide(plan, done, 1000.0, time_left=TimeLeft(600, renews=True))
    assert (found.actions, found.is_out_of_time) == ((), True)
    assert found.statuses["a"].reason is Reason.TURN
    again = decide(plan, done, 1000.0, time_left=TimeLeft(900, renews=True))
    assert [one.job for one in again.actions] == ["a"]


def test_nothing_begins_while_the_job_table_is_written_down_for_the_next_allocation():
    """What the table lacked would begin there again."""
    plan = dispatch_of(job_spec("a"))
    busy = decide(plan, {}, 1000.0, time_left=TimeLeft(4.0, renews=True))
    assert (busy.actions, busy.is_out_of_time) == ((), True)
    assert decide(plan, {}, 1000.0, time_left=TimeLeft(4.0)).actions, "nothing goes on there"
    assert decide(plan, {}, 1000.0, time_left=TimeLeft(6.0, renews=True)).actions


def test_what_no_allocation_is_long_enough_for_is_given_up():
    plan = dispatch_of(job_spec("a", time_s=4000))
    (claim,) = decide(plan, {}, 1000.0, time_left=TimeLeft(600, 3600, renews=True)).actions
    assert "it needs 4000 s, and each allocation lasts 3600 s" in claim.why


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({}, TimeLeft()),
        ({"NEMO_RUN_RAY_ENDS_AT": "160", "NEMO_RUN_RAY_LASTS_S": "90"}, TimeLeft(60, 90, False)),
    ],
)
def test_the_time_left_is_in_the_environment(env, left):
    assert time_left(env, 100.0) == left
