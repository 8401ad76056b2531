"""The changes of NeMo-Run that ``docs/upstream.md`` proposes."""

import os
import subprocess
import zipfile

from nemo_run_ray import patches
from tests.conftest import ROOT

_DIFFS = ROOT / "docs" / "upstream"
#: A wheel of NeMo-Run's main, where there is one.
_WHEELS = [
    *filter(None, [os.environ.get("NEMO_RUN_WHEEL")]),
    *ROOT.glob("../shared/wheels/nemo_run-*.whl"),
]


def test_every_patch_of_nemo_run_has_a_proposal():
    ours = {name for name in patches.status() if name != "skills_executor"}
    text = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
    assert {path.stem for path in _DIFFS.glob("*.patch")} == ours
    assert all(f"`{name}.patch`" in text for name in ours)


def test_every_diff_applies_to_nemo_runs_main(tmp_path):
    for wheel in _WHEELS[:1]:
        zipfile.ZipFile(wheel).extractall(tmp_path)
        for path in _DIFFS.glob("*.patch"):
            subprocess.run(["git", "apply", "--check", str(path)], cwd=tmp_path, check=True)
