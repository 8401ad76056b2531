"""What a pool tells people does not mix with the results of their program."""

from nemo_run_ray.work.progress import say


def test_lines_for_people_are_on_standard_error(capfd):
    say("waiting for room")
    out, err = capfd.readouterr()
    assert out == ""
    assert "waiting for room" in err
