"""The files by which nodes talk: whole or absent, and no clock of another host is believed."""

import os
import subprocess

from nemo_run_ray.remote.slurm.folder import (
    LATE_ROUNDS,
    READY,
    HeadAddress,
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
    for name in ("nodes", "beats"):
        (tmp_path / name).mkdir()
    worker.write("nodes/1.json", NodeReport(host="n2", failed="no Ray", left=True))
    (report,) = head.reports().values()
    assert (report.host, report.failed, report.left) == ("n2", "no Ray", True)
    assert worker.read("nodes/0.json", NodeReport) is None
    head.write("nodes/0.json", NodeReport(host="n1", ray=_HEAD))
    assert HeadAddress(*worker.read("nodes/0.json", NodeReport).ray) == _HEAD


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
    assert folder.text(READY)
    script = f'. {tmp_path}/env.sh; env | grep "^RAY_ADDRESS="; echo "$ODD|$ip_head|$head_node_ip"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "RAY_ADDRESS=10.0.0.1:6379\nit's; $HOME|10.0.0.1:6379|10.0.0.1\n"


def test_a_beat_that_does_not_grow_is_a_death_after_some_rounds(tmp_path):
    folder = RunFolder(str(tmp_path), 1)
    (tmp_path / "beats").mkdir()
    for _ in range(3):
        folder.beat()
        assert folder.silent({1, 2}) == set()
    for _ in range(LATE_ROUNDS - 1):
        assert folder.silent({1, 2}) == set()
    assert folder.silent({1, 2}) == {1}
    folder.beat()
    assert folder.silent({1, 2}) == set()
    (tmp_path / "beats" / "1").unlink()
    for _ in range(LATE_ROUNDS + 1):
        assert folder.silent({1, 2}) == set(), "one that cannot be read is not missed"
