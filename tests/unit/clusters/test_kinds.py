"""Kinds of clusters in ledgers, whose modules a program may not have imported."""

import subprocess
import sys

import pytest

from nemo_run_ray.clusters import from_record
from nemo_run_ray.errors import ConfigError

_READS = """
import sys
import nemo_run_ray
from nemo_run_ray.clusters import from_record
assert "nemo_run_ray.clusters.slurm" not in sys.modules
found = from_record({"kind": "slurm", "name": "team", "tunnel": {"job_dir": sys.argv[1]}})
print(type(found) is nemo_run_ray.SlurmCluster, found.name)
"""


def test_a_ledger_that_names_slurm_is_read_by_a_program_that_does_not(tmp_path):
    words = [sys.executable, "-c", _READS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True team\n", done.stderr


def test_a_kind_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'moon'.* knows existing, local, slurm"):
        from_record({"kind": "moon"})
