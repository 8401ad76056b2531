"""A chain's id, and what its folder must hold."""

import pytest

from nemo_run_ray.errors import JobError
from nemo_run_ray.experiment.dispatch import Dispatch
from nemo_run_ray.ids import ID_MAX, dispatcher_id
from nemo_run_ray.remote.spec import DispatchSpec


def test_a_long_title_gives_an_id_that_files_can_have():
    assert dispatcher_id("pipeline_1") == "pipeline_1.dispatcher"
    long, other = dispatcher_id("x" * 225), dispatcher_id("x" * 226)
    assert len(long) <= ID_MAX
    assert long != other


def test_a_chain_is_saved_when_its_plan_is(tmp_path):
    dispatch = Dispatch(tmp_path, "e.dispatcher")
    dispatch.save(DispatchSpec("e.dispatcher", "nonce", ()), [], [], {})
    assert Dispatch(tmp_path, "e.dispatcher").spec == dispatch.spec


@pytest.mark.parametrize("text", [None, "", "{", '{"version": 99}', '{"kind": "group"}'])
def test_a_plan_that_cannot_be_read_says_what_to_copy(tmp_path, text):
    dispatch = Dispatch(tmp_path, "e.dispatcher")
    if text is not None:
        dispatch.folder.mkdir(parents=True)
        (dispatch.folder / "dispatch.json").write_text(text)
    with pytest.raises(JobError, match="Copy the experiment's whole folder"):
        assert dispatch.spec
