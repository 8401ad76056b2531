"""What the answers of actors mean: events for the machine, and lines for the job's log."""

from __future__ import annotations

import json
from typing import Any, Iterator, Mapping

from ..hosts.actors import ReplicaHandle, actor_of, name
from ..hosts.calls import Answer, Died, Pulled
from ..node.output import say, write
from ..states import Reason
from . import machine


def events_of(answer: Answer) -> Iterator[machine.Event]:
    """What has happened, as an answer tells; what the replicas print goes to the log on the way."""
    if isinstance(answer, Died):
        for replica in answer.actor.replicas:
            cause = Reason.RUNTIME_ENV if answer.is_env else Reason.NOT_STARTED
            yield from losses(replica, answer.words, cause)
    else:
        yield from _events_of_reports(answer)


def losses(
    replica: ReplicaHandle, why: str, cause: Reason = Reason.NOT_STARTED
) -> Iterator[machine.Event]:
    """The events of a replica that is lost.

    A dead actor means that a replica which is awaited still cannot be prepared, for Ray's own
    reason: a runtime_env that cannot be built, an image that is not there. For other replicas the
    machine ignores that event.
    """
    where = f"node {replica.node.host} ({replica.node.address})"
    if actor_of(replica).dead:
        yield machine.Unprepared(replica.replica_id, f"no worker on {where}: {why}", cause)
    yield machine.Lost(replica.replica_id, f"{where}: {why}")


def _events_of_reports(answer: Pulled) -> Iterator[machine.Event]:
    for replica in answer.actor.replicas:
        if replica.node.node_id != answer.node_id:
            words = f"Ray has moved the replica to the node {answer.node_id} since"
            yield from losses(replica, words)
        first, reports = answer.reports.get(name(replica.replica_id), (0, []))
        for number, report in enumerate(reports, start=first):
            if number == replica.seen:
                replica.seen += 1
                yield from _events_of_report(replica, json.loads(report))


def _events_of_report(replica: ReplicaHandle, report: Mapping[str, Any]) -> Iterator[machine.Event]:
    replica_id, kind = replica.replica_id, report["at"]
    if kind == "text":
        text = str(report["text"])
        prefix = replica.prefix
        write(prefix + text[:-1].replace("\n", f"\n{prefix}") + "\n")
    elif kind == "prepared":
        replica.ports = report["ports"]
        yield machine.Prepared(replica_id)
    elif kind == "unprepared":
        yield machine.Unprepared(replica_id, report["words"])
    elif kind == "waiting":
        say(f"{name(replica_id)} is {report['words']}")
        yield machine.Waiting(replica_id, report["words"])
    elif kind == "ready":
        yield machine.Ready(replica_id)
    elif kind == "unready":
        yield machine.Unready(replica_id, report["words"])
    elif kind == "exited":
        replica.end_by = None
        say(f"{name(replica_id)} on {replica.node.host} ended: {report['words']}")
        yield machine.Exited(replica_id, report["code"], report["words"])
    elif kind == "failed":
        yield from losses(replica, report["words"])
    elif kind == "gone":
        others = f", and {report['left']} others with it" if report["left"] else ""
        yield from losses(replica, f"our process there was killed{others}")
