"""What users see when ``ShipSource`` or a platform refuses, and when a pod cannot start."""

import random

import nemo_run as run
import pytest
from nemo_run.core.execution import dgxcloud

from nemo_run_ray.cloud import ShipSource
from nemo_run_ray.errors import SourceTooLarge, TransportError
from tests.cloud.runs import finished, launch
from tests.conftest import wait_for
from tests.patches.dgxcloud import SECRET


def test_a_changed_piece_stops_the_pod_with_one_line(platform, project, unique):
    class Liar(dict):
        def get(self, key, value):
            return value[:100] + "zzzz" + value[104:] if key.endswith("_SRC_0") else value

    platform.cluster.tamper = Liar()
    launch(platform, run.Script(inline="echo started"), project, unique)
    wait_for(lambda: finished(platform))
    log = platform.jobs()[-1].log()
    assert platform.jobs()[-1].codes() == [1], log
    assert log.count("nemo-run-ray:") == 1
    assert "changed on its way" in log
    assert "Traceback" not in log
    assert "started" not in log
    assert list(platform.cluster.shared.glob("runs/.source/*")) == []


def test_an_image_without_python(platform, project, unique):
    programs = platform.cluster.image.folder / "few"
    programs.mkdir()
    for name in ("sh", "bash", "rm", "mkdir", "base64", "tar", "gzip", "ln", "tee", "cat"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    platform.cluster.image.path = (str(programs),)
    launch(platform, run.Script(inline="echo started"), project, unique)
    wait_for(lambda: finished(platform))
    log = platform.jobs()[-1].log()
    assert platform.jobs()[-1].codes() == [127], log
    assert "the image has no python3" in log
    assert "started" not in log


def test_too_large_a_tree_is_refused_before_anything_is_sent(platform, project, unique):
    for number in range(12):
        noise = random.Random(number).randbytes(110_000 + number)
        (project.package / f"noise{number}.txt").write_text(noise.hex())
    with pytest.raises(SourceTooLarge) as caught:
        launch(platform, run.Script(inline="true"), project, unique, nodes=2)
    text = str(caught.value)
    assert platform.name in text
    assert "Nothing was sent" in text
    assert "1,441,792" in text  # the limit
    listed = [line.split()[-1] for line in text.splitlines() if line.startswith("  ")]
    assert listed[0] == "src/shippable/noise11.txt"
    assert len(listed) == 10
    assert platform.server.requests == []


def test_a_link_out_of_the_tree(platform, project, tmp_path, unique):
    (tmp_path / "secret").write_text("x")
    (project.package / "link.py").symlink_to(tmp_path / "secret")
    with pytest.raises(
        TransportError, match=r"link\.py is a link to .*secret, which is out of the tree"
    ):
        launch(platform, run.Script(inline="true"), project, unique)
    assert platform.server.requests == []


def test_two_ways_of_sending_code(platform, project, unique):
    packager = run.PatternPackager(include_pattern="src", relative_path=".")
    with pytest.raises(TransportError, match="PatternPackager, which sends code too"):
        launch(platform, run.Script(inline="true"), project, unique, packager=packager)


def test_a_command_of_the_users_in_custom_spec(runai, project, unique):
    with pytest.raises(TransportError, match="custom_spec has command"):
        launch(
            runai, run.Script(inline="true"), project, unique, custom_spec={"command": "sleep 1"}
        )


def test_wrong_credentials_on_lepton(lepton_ai, project, unique, monkeypatch, capfd):
    monkeypatch.setenv("LEPTON_WORKSPACE_TOKEN", "wrong-token")
    with pytest.raises(Exception, match="does not know this token"):
        launch(lepton_ai, run.Script(inline="true"), project, unique)
    assert lepton_ai.jobs() == lepton_ai.movers() == []
    assert [status for _, _, status in lepton_ai.server.requests] == [401]
    seen = capfd.readouterr()
    shown = " ".join(f"{seen.out} {seen.err}".split())
    assert shown.count("does not know this token") == 1


def test_wrong_credentials_on_dgx_cloud(runai, project, unique, caplog, monkeypatch):
    """The platform's reason, once; NeMo-Run alone asks three times and logs it each time."""
    # Whether NeMo-Run's loggers pass records on depends on whether an experiment ran before.
    monkeypatch.setattr(dgxcloud.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(dgxcloud.logger, "propagate", False)
    with pytest.raises(RuntimeError, match="auth token"):
        launch(
            runai,
            run.Script(inline="true"),
            project,
            unique,
            ship=ShipSource(project.root),
            **{SECRET: "wrong"},
        )
    assert caplog.text.count("credentials are invalid or were revoked") == 1
    assert [path for _, path, _ in runai.server.requests] == [f"{runai.server.prefix}/token"]
    assert runai.cluster.submitted == []
