"""The example of a group on the embedded Ray; tests/hosts/ runs it on several hosts."""

import re

from tests.conftest import ROOT, python

EXAMPLES = ROOT / "examples"


def test_evaluate_with_server(local_cluster, home):
    done = python(str(EXAMPLES / "evaluate_with_server.py"), cwd=home)

    assert done.returncode == 0, done.stdout + done.stderr
    (accuracy,) = re.findall(r"client/0\| accuracy (\d\.\d\d) on 450 digits$", done.stdout, re.M)
    assert float(accuracy) > 0.9
    fails = re.findall(r"client/0\| fails: (.+?)[,:].* (\S+)$", done.stdout, re.M)
    assert fails == [
        ("median", "AssertionError"),
        ("Collatz steps", "long"),
        ("sum of squares", "MemoryError"),
    ]
    assert re.search(r"client/0\| sandbox 5 of 8 solutions pass$", done.stdout, re.M)


def test_evaluate_with_server_names_a_role_that_there_is_not(home):
    example = str(EXAMPLES / "evaluate_with_server.py")
    wrong = python(example, "--pools", "sever=gpu", cwd=home)
    assert wrong.returncode == 2
    assert "'sever'" in wrong.stderr
