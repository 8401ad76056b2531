"""How the command line prints: tables, characters and errors."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from typer import Exit

from nemo_run_ray.cli import status_report
from nemo_run_ray.cli.main import guarded, out, show
from nemo_run_ray.errors import VARIABLE

_LONG = "an-experiment-with-a-long-title_" + "1" * 120


def test_no_value_of_a_table_is_cut_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"experiment": _LONG, "cluster": "the embedded Ray"}
    show([row, {"experiment": "short", "cluster": "x"}], tuple(row))
    table = Table("job", "node", box=None)
    table.add_row(_LONG, "a-node")
    out.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{_LONG}  the embedded Ray"
    assert [line for line in lines[:3] if line.endswith(" ")] == []
    assert lines[-1].split() == [_LONG, "a-node"]


def test_characters_that_the_terminal_lacks_are_printed_all_the_same(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    guarded(lambda: out.print("Cancelling …"))()
    assert stdout.buffer.getvalue() == b"Cancelling \\u2026\n"


def _open_nothing():
    Path("/nowhere/at/all").read_text()


@pytest.mark.parametrize("shows", ["", "1"])
def test_the_traceback_is_printed_for_who_asks_for_it(monkeypatch, capsys, shows):
    monkeypatch.setenv(VARIABLE, shows)
    with pytest.raises(Exit):
        guarded(_open_nothing)()
    printed = capsys.readouterr().err
    assert "/nowhere/at/all" in printed.splitlines()[-1]
    assert ("Traceback" in printed) == bool(shows)


def test_a_table_folds_a_long_name_on_a_narrow_terminal():
    table = status_report._table("job", "state")
    table.add_row("x" * 60, "FAILED")
    console = Console(width=40, file=io.StringIO())
    console.print(table)
    assert console.file.getvalue().count("x") == 60
