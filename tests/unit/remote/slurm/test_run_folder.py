"""The files by which nodes talk: whole or absent, and no clock of another host is believed."""

import os
import subprocess

from nemo_run_ray.remote.slurm.folder import (
    HEAD,
    LATE_ROUNDS,
    READY,
    HeadAddress,
    Heartbeats,
    NodeReport,
    RunEnd,
    RunFolder,
)

_HEAD = HeadAddress("10.0.0.1", 6379, 8265)


def test_what_one_node_says_the_others_read(tmp_path):
    head, worker = RunFolder(str(tmp_path), 0), RunFolder(str(tmp_path), 1)
    assert worker.text("job") is None
    (tmp_path / "job").write_text("1")
    assert worker.text("job") == "1"
    assert head.reports() == {}
    head.prepare()
    worker.prepare()
    report = NodeReport(host="n2", reached=("10.0.0.1",), ready=("box",))
    worker.publish_report(report)
    assert head.reports() == {1: report}
    assert worker.read(HEAD, HeadAddress) is None
    head.publish(HEAD, _HEAD)
    assert worker.read(HEAD, HeadAddress) == _HEAD


def test_the_step_beside_speaks_for_its_sidecars(tmp_path):
    folder = RunFolder(str(tmp_path), 1)
    folder.prepare()
    beside = RunFolder(str(tmp_path / "beside"), 1)
    beside.prepare()
    beside.publish_report(NodeReport(host="n2", ready=("box",)))
    assert folder.reports() == {}, "the node itself has not begun"
    folder.publish_report(NodeReport(host="n2", address="a", ready=("own",)))
    assert folder.reports()[1] == NodeReport(host="n2", address="a", ready=("own", "box"))
    beside.publish_report(NodeReport(host="n2", failed="it died"))
    assert folder.reports()[1].failed == "it died"


def test_a_file_that_is_not_whole_is_not_there_yet(tmp_path):
    folder = RunFolder(str(tmp_path), 0)
    folder.prepare()
    (tmp_path / "nodes" / "2.json").write_text('{"host": "n')
    (tmp_path / "nodes" / "2.json.77-1").write_text("{}")
    (tmp_path / "head.json").write_text("")
    assert folder.reports() == {}
    assert folder.read(HEAD, HeadAddress) is None


def test_the_first_end_holds(tmp_path):
    folder = RunFolder(str(tmp_path), 0)
    assert folder.end() is None
    assert folder.publish_end(RunEnd(3, "the driver")) == RunEnd(3, "the driver")
    assert folder.publish_end(RunEnd(143, "cancelled")) == RunEnd(3, "the driver")
    assert (tmp_path / "exit_code").read_text() == "3\n"


def test_a_shell_reads_where_the_cluster_is(tmp_path):
    folder = RunFolder(str(tmp_path), 0)
    folder.publish_ready(
        _HEAD, {"RAY_ADDRESS": "10.0.0.1:6379", "ODD": "it's; $HOME"}, {"PORT": "6379"}
    )
    assert folder.exists(READY)
    script = f'. {tmp_path}/env.sh; env | grep "^RAY_ADDRESS="; echo "$ODD|$ip_head|$head_node_ip"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "RAY_ADDRESS=10.0.0.1:6379\nit's; $HOME|10.0.0.1:6379|10.0.0.1\n"


def test_a_beat_that_does_not_grow_is_a_death_after_some_rounds(tmp_path):
    folder = RunFolder(str(tmp_path), 1)
    folder.prepare()
    heartbeats = Heartbeats()
    for _ in range(3):
        folder.beat()
        assert heartbeats.round(folder.beats({1, 2}), {1, 2}) == set()
    for _ in range(LATE_ROUNDS - 1):
        assert heartbeats.round(folder.beats({1, 2}), {1, 2}) == set()
    assert heartbeats.round(folder.beats({1, 2}), {1, 2}) == {1}
    folder.beat()
    assert heartbeats.round(folder.beats({1, 2}), {1, 2}) == set()
