"""What a pool tells people does not mix with the results of their program."""

import io

from rich.console import Console

from nemo_run_ray.work import progress
from nemo_run_ray.work.progress import MapProgress, say


def test_lines_for_people_are_on_standard_error(capfd):
    say("waiting for room")
    out, err = capfd.readouterr()
    assert out == ""
    assert "waiting for room" in err


def test_the_bar_counts_the_items(monkeypatch):
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "_err", terminal)
    with MapProgress("verify", 3) as bar:
        for _ in range(2):
            bar.advance()
    assert "verify" in out.getvalue()
    assert "2/3" in out.getvalue()
