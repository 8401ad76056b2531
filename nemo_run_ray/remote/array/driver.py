"""The driver of an array: a Ray program that leases elements to hosts and writes down their ends.

It holds no resources. On every node with room one host runs as many elements as the node can take;
nodes that join get one, and what a dead host had is leased again when it is proven that nothing of
it runs. Killed, the driver is started again and goes on from its journal.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
import zlib
from typing import Any, Dict, List, Mapping, Optional

from ..attempts import first_id
from ..env_error import cause_of
from ..group.actors import forget_runtime_env
from ..group.calls import Calls, Died, Pulled
from ..group.driver import connect
from ..group.machine import name
from ..group.packing import Node, matches, nodes_of
from ..node.output import NO_PROCESS_LEFT, say, write
from ..node.process import Runner
from ..node.rundir import jobs_folder, take_secrets
from ..spec import ArraySpec
from ..states import Cause
from .elements import Elements
from .hosts import Host, HostBook, HostRecord, HostStarts
from .journal import ENDED, GIVEN_BACK, LEASED, Journal, Record
from .progress import ElementState, Lease, Progress
from .room import shares, slots_in
from .status_file import StatusFile, file_of
from .window import Pace

#: Exit code when elements have failed.
SOME_FAILED = 8
#: Seconds between two looks at the nodes.
_LOOK_S = 1.0
#: Seconds until a host that has not come up is given up when its node's room has gone to another.
_PLACED_S = 15.0
#: Seconds until a line says that the array waits for room, and between two.
_TELL_S = 30.0
#: Seconds beyond the grace period until a host that was told to end is given up.
_END_MARGIN_S = 30.0
#: Seconds between two attempts to write to a disk that is full.
_DISK_S = 5.0
#: Failures that get a line in the log.
_TOLD_FAILURES = 20


def run(runner: Runner, spec: ArraySpec, job: str, submission_id: str) -> int:
    """Run an array to its end; its exit code."""
    return _Driver(runner, spec, job, submission_id).run()


class _Driver:
    """One array."""

    def __init__(self, runner: Runner, spec: ArraySpec, job: str, submission_id: str) -> None:
        self._runner = runner
        self._spec = spec
        self._job = job
        self._id = submission_id
        path = os.path.join(jobs_folder(), job, spec.elements)
        self._elements = Elements(path)
        with open(path, "rb") as file:
            key = f"{first_id(submission_id)} {zlib.crc32(file.read())}"
        folder = _log_folder(submission_id)
        journal, hosts, self._results_path = (
            os.path.join(folder or tempfile.gettempdir(), file_of(submission_id, kind))
            for kind in ("journal", "hosts", "results")
        )
        self._journal = Journal(journal, key)
        self._book = HostBook(hosts)
        count = len(self._elements)
        self._progress = Progress(count, spec.retries, spec.permanent_exit_codes)
        held = self._progress.replay(self._journal.found)
        if not self._journal.found:
            self._book.clear()
        #: Hosts of an earlier driver, or that have died, with what they had in hand.
        self._unproven: Dict[int, Dict[int, int]] = {
            record.number: held.get(record.number, {}) for record in self._book.records
        }
        self._status = StatusFile(folder, submission_id)
        self._hosts: Dict[int, Host] = {}
        self._pace = Pace()
        self._nodes: Dict[str, Node] = {}
        self._look_at = self._tell_at = 0.0
        self._told_failures = 0
        self._write_at = 0.0
        self._stopped_by: Optional[str] = None
        self._end_by = float("inf")
        self._broken: Optional[tuple[Cause, str]] = None

    def run(self) -> int:
        config = forget_runtime_env()
        values = take_secrets(self._spec.secrets)
        self._ray = connect()
        self._calls = Calls(self._ray)
        count = len(self._elements)
        if self._journal.found:
            ended = self._progress.ended_count
            say(f"the driver goes on: {ended} of {count} elements have ended")
        self._starts = HostStarts(self._ray, self._spec, self._job, values, config, count)
        try:
            while not self._is_done():
                self._turn()
            return self._outcome()
        finally:
            living = [host for host in self._hosts.values() if self._answers(host)]
            self._calls.close([host.actor for host in living])
            self._status.write(self._progress, 0, is_over=True)
            self._ray.shutdown()

    # ------------------------------------------------------------------ one turn

    def _turn(self) -> None:
        self._obey()
        self._calls.repeat()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look(now)
        for answer in self._calls.answers():
            if isinstance(answer, Died):
                self._died(answer)
            else:
                self._hear(answer)
        self._check_failures()
        self._feed(now)
        running = sum(min(len(host.in_hand), host.slots) for host in self._hosts.values())
        self._status.write(self._progress, running, is_over=False)

    def _is_done(self) -> bool:
        if self._stopped_by is not None:
            return not self._unproven and all(host.is_idle for host in self._hosts.values())
        return self._progress.is_over and not self._unproven

    def _outcome(self) -> int:
        self._commit()
        failed = self._progress.number(ElementState.FAILED)
        succeeded = self._progress.number(ElementState.SUCCEEDED)
        say(f"{succeeded} of {self._progress.count} elements have succeeded, {failed} have failed")
        if self._broken is not None:
            cause, words = self._broken
            self._runner.ending = f"[{cause.value}] {words}"
            return 1
        if self._stopped_by == "":
            self._runner.cancelled = True
            self._runner.ending = f"cancelled; {NO_PROCESS_LEFT}"
            return 143
        code = SOME_FAILED if failed else 0
        self._runner.ending = f"exit code {code}"
        return code

    def _obey(self) -> None:
        order = self._runner.order()
        if order == b"":
            say("our first process was killed; Ray ends what the array runs")
            os._exit(1)  # with the driver end its actors, and with them all processes
        if order is not None:
            self._stop("")

    def _stop(self, why: str) -> None:
        """End what runs, and lease no more.

        Args:
            why: in words; empty when the job was cancelled.
        """
        if self._stopped_by is not None:
            return
        self._stopped_by = why
        self._progress.cancel_waiting()
        self._end_by = time.monotonic() + self._spec.grace_s + _END_MARGIN_S
        for host in list(self._hosts.values()):
            if host.is_ready:
                self._calls.order(host.replica, {"do": "end"})
            elif not host.sweeps:
                self._give_up(host)

    def _check_failures(self) -> None:
        failed, limit = self._progress.number(ElementState.FAILED), self._spec.max_failures
        if limit is not None and failed > limit and self._stopped_by is None:
            words = f"more than {limit} elements have failed (max_failures)"
            say(f"ending the array: {words}")
            self._stop(words)

    # ------------------------------------------------------------------ hosts

    def _look(self, now: float) -> None:
        """Start hosts where there is room, end idle ones, and prove that dead ones are dead."""
        rows = self._ray.nodes()
        alive = nodes_of(rows)
        self._nodes = {node.node_id: node for node in alive}
        for host in list(self._hosts.values()):
            if host.replica.node.node_id not in self._nodes:
                self._lost(host)
            elif (now >= self._end_by and not host.is_idle) or self._has_lost_its_room(host, now):
                self._give_up(host)
        self._prove()
        if self._stopped_by is None and self._progress.number(ElementState.WAITING):
            self._grow(now)
        elif self._stopped_by is None:
            for host in list(self._hosts.values()):
                if host.is_ready and not host.in_hand:
                    self._close(host)

    def _has_lost_its_room(self, host: Host, now: float) -> bool:
        """Whether Ray cannot place a host that was to be started, since others were quicker."""
        if host.actor.answers or not host.slots or now - host.started_at < _PLACED_S:
            return False
        free = _available(self._ray).get(host.record.node_id, {})
        return slots_in(free, self._spec.host.resources) < host.slots

    def _grow(self, now: float) -> None:
        wanted = self._progress.number(ElementState.WAITING)
        if self._spec.max_in_flight is not None:
            used = sum(host.slots for host in self._hosts.values())
            wanted = min(wanted, self._spec.max_in_flight - used)
        starting = {host.record.node_id for host in self._hosts.values() if not host.is_ready}
        available = {
            node_id: resources
            for node_id, resources in _available(self._ray).items()
            if node_id in self._nodes
            and node_id not in starting
            and matches(self._spec.host.label_selector, self._nodes[node_id].labels)
        }
        found = shares(available, self._spec.host.resources, wanted)
        if found:
            number = len(self._book.records)
            records = [self._record(number + at, one.node_id) for at, one in enumerate(found)]
            self._book.add(records)
            for record, share in zip(records, found):
                self._start(record, share.slots)
        self._tell(now)

    def _record(self, number: int, node_id: str) -> HostRecord:
        tag = f"{first_id(self._id)}/{secrets.token_hex(8)}.{number}"
        return HostRecord(number, node_id, tag, f"{first_id(self._id)}~host-{number}")

    def _start(self, record: HostRecord, slots: int) -> Host:
        host = self._starts.start(record, self._nodes[record.node_id], slots)
        self._hosts[record.number] = host
        self._calls.pull(host.actor)
        if slots:
            self._calls.order(host.replica, self._starts.prepare(host))
        return host

    def _tell(self, now: float) -> None:
        if any(host.slots for host in self._hosts.values()):
            self._tell_at = now + _TELL_S
        elif now >= self._tell_at:
            self._tell_at = now + _TELL_S
            need = self._spec.host.resources
            say(f"no node has room for an element, which needs {json.dumps(need)}; waiting")

    def _close(self, host: Host) -> None:
        """Give the resources of a host back."""
        if not host.is_closing:
            host.is_closing = True
            self._calls.order(host.replica, {"do": "end"})

    def _give_up(self, host: Host) -> None:
        self._ray.kill(host.actor.handle, no_restart=True)
        host.actor.dead = True
        self._lost(host)

    def _lost(self, host: Host) -> None:
        """A host is dead, or its actor is: what it had may run until that is proven."""
        del self._hosts[host.record.number]
        self._unproven.setdefault(host.record.number, {}).update(host.in_hand)

    def _prove(self) -> None:
        """End what dead hosts have left: by their nodes' death, or by another host there."""
        records = {record.number: record for record in self._book.records}
        sweeping = {number for host in self._hosts.values() for number in host.sweeps}
        by_node: Dict[str, List[HostRecord]] = {}
        for number in list(self._unproven):
            record = records[number]
            if record.node_id not in self._nodes:
                self._proven(number)
            elif number not in sweeping:
                by_node.setdefault(record.node_id, []).append(record)
        for node_id, dead in by_node.items():
            record = self._record(len(self._book.records), node_id)
            self._book.add([record])
            host = self._start(record, 0)
            host.sweeps = {one.number: one for one in dead}
            self._calls.order(host.replica, {"do": "sweep", "hosts": [_place(one) for one in dead]})

    def _proven(self, number: int) -> None:
        """Nothing of a host runs any more: what it had and is not known to have ended is given
        back."""
        for element, attempt in self._unproven.pop(number).items():
            lease = Lease(element, attempt)
            if self._stopped_by is not None:
                self._progress.cancelled(lease)
            elif self._progress.given_back(lease, has_run=True):
                self._journal.add(Record(element, GIVEN_BACK, attempt, code=1, host=number))

    def _answers(self, host: Host) -> bool:
        return host.actor.answers and not host.actor.dead

    # ------------------------------------------------------------------ reports

    def _died(self, answer: Died) -> None:
        for host in [one for one in self._hosts.values() if one.actor is answer.actor]:
            if answer.is_env:
                self._break(Cause.RUNTIME_ENV, answer.words)
            self._lost(host)

    def _hear(self, answer: Pulled) -> None:
        for host in [one for one in self._hosts.values() if one.actor is answer.actor]:
            first, reports = answer.reports.get(name(host.replica.replica_id), (0, []))
            for number, report in enumerate(reports, start=first):
                if number == host.replica.seen:
                    host.replica.seen += 1
                    self._report(host, json.loads(report))
            if host.record.number in self._hosts:
                self._calls.pull(host.actor)

    def _report(self, host: Host, report: Mapping[str, Any]) -> None:
        kind = report["at"]
        if kind == "text":
            prefix = f"{report['element']}| "
            write(prefix + str(report["text"])[:-1].replace("\n", f"\n{prefix}") + "\n")
        elif kind == "ended":
            self._ended(host, report["row"])
        elif kind == "prepared":
            host.is_ready = True
            say(f"{host.replica.node.host} runs {host.slots} element(s) at a time")
            if self._stopped_by is not None:
                self._calls.order(host.replica, {"do": "end"})
        elif kind == "unprepared":
            self._break(Cause.NOT_PREPARED, f"on {host.replica.node.host}: {report['words']}")
        elif kind == "threads":
            say(
                f"on {host.replica.node.host} the imports have started the threads "
                f"{', '.join(report['names'])}, which a fork does not have; "
                "array(..., isolation='process') starts a new process for each element"
            )
        elif kind == "swept":
            self._swept(host, report)
        elif kind == "idle":
            self._idle(host)
        elif kind in ("failed", "gone"):
            say(f"the host on {host.replica.node.host} has died: {report.get('words', kind)}")
            self._give_up(host)

    def _ended(self, host: Host, row: List[Any]) -> None:
        element, attempt, code, seconds, words = row[:5]
        host.in_hand.pop(element, None)
        lease = Lease(element, attempt)
        if self._stopped_by is not None and code:
            self._progress.cancelled(lease)
            return
        if not self._progress.ended(lease, code, words):
            return
        self._journal.add(Record(element, ENDED, attempt, code, host.record.number, seconds))
        self._pace.measured(seconds)
        if len(row) > 5 and row[5] is not None:
            with open(self._results_path, "a", encoding="utf-8") as file:
                file.write(json.dumps([element, row[5]]) + "\n")
        if code and self._told_failures < _TOLD_FAILURES:
            self._told_failures += 1
            again = self._progress.state(element) is ElementState.WAITING
            say(f"element {element} has failed: {words}{'; it is tried again' if again else ''}")

    def _swept(self, host: Host, report: Mapping[str, Any]) -> None:
        number = int(report["host"])
        held = self._unproven.get(number, {})
        for row in report["ended"]:
            element, attempt, code, seconds, words = row[:5]
            if held.get(element) == attempt:
                del held[element]
                if self._progress.ended(Lease(element, attempt), code, words):
                    self._journal.add(Record(element, ENDED, attempt, code, number, seconds))
        self._proven(number)
        host.sweeps.pop(number, None)
        if not host.sweeps:
            del self._hosts[host.record.number]
            self._ray.kill(host.actor.handle, no_restart=True)

    def _idle(self, host: Host) -> None:
        if self._stopped_by is not None:
            for element, attempt in host.in_hand.items():
                self._progress.cancelled(Lease(element, attempt))
            host.in_hand.clear()
            host.is_idle = True
            return
        for element, attempt in host.in_hand.items():  # it came when the host was told to end
            if self._progress.given_back(Lease(element, attempt), has_run=False):
                self._journal.add(Record(element, GIVEN_BACK, attempt, host=host.record.number))
        del self._hosts[host.record.number]
        self._calls.close([host.actor])
        self._ray.kill(host.actor.handle, no_restart=True)

    def _break(self, cause: Cause, words: str) -> None:
        """The array cannot be run at all."""
        if self._broken is None:
            last = words.strip().splitlines()[-1]  # of a traceback it is the error
            self._broken = cause, cause_of(words) if cause is Cause.RUNTIME_ENV else last
            write(f"{words}\n")
            self._stop(words)

    # ------------------------------------------------------------------ leases

    def _feed(self, now: float) -> None:
        """Lease elements to the hosts; the disk has it before a host hears of it."""
        if self._stopped_by is not None or now < self._write_at:
            return
        given: Dict[int, List[List[Any]]] = {}
        for host in self._hosts.values():
            room = self._pace.held(host.slots) if host.is_ready and not host.is_closing else 0
            while len(host.in_hand) < room:
                lease = self._progress.take()
                if lease is None:
                    break
                host.in_hand[lease.element] = lease.attempt
                number = host.record.number
                self._journal.add(Record(lease.element, LEASED, lease.attempt, host=number))
                given.setdefault(number, []).append([*lease, self._elements[lease.element]])
        if self._commit():
            for number, elements in given.items():
                order = {"do": "run", "elements": elements}
                self._calls.order(self._hosts[number].replica, order)
            return
        for number, elements in given.items():
            for element, attempt, _ in elements:
                del self._hosts[number].in_hand[element]
                self._progress.given_back(Lease(element, attempt), has_run=False)
                self._journal.add(Record(element, GIVEN_BACK, attempt, host=number))

    def _commit(self) -> bool:
        try:
            self._journal.commit()
        except OSError as error:
            say(f"the head cannot write its journal ({error}); no element is started meanwhile")
            self._write_at = time.monotonic() + _DISK_S
            return False
        return True


def _available(ray: Any) -> Dict[str, Dict[str, float]]:
    """What every node has free."""
    found: Dict[str, Dict[str, float]] = ray._private.state.available_resources_per_node()
    return found


def _place(record: HostRecord) -> List[Any]:
    return [record.number, record.tag, record.run_dir]


def _log_folder(submission_id: str) -> Optional[str]:
    """Ray's folder of logs; ``None`` when the output goes elsewhere."""
    log = os.readlink("/proc/self/fd/1")
    is_rays = os.path.basename(log) == f"job-driver-{submission_id}.log"
    return os.path.dirname(log) if is_rays else None
