import nemo_run as run
import pytest

from nemo_run_ray import RayExecutor
from nemo_run_ray.errors import ConfigError, NotBuiltError
from nemo_run_ray.plan import safe_id
from nemo_run_ray.scheduler import create_scheduler


@pytest.fixture
def address():
    return "http://ray.example.org:8265"


def test_two_names_that_would_get_one_id_are_refused_before_anything_starts(address):
    with run.Experiment("collide", executor=RayExecutor(address=address)) as experiment:
        experiment.add(run.Script(inline="true"), name="a b")
        experiment.add(run.Script(inline="true"), name=safe_id("a b"))
        with pytest.raises(ConfigError, match="rename one of them"):
            experiment.dryrun(log=False)


def test_a_dry_run_asks_no_cluster(address, unique):
    """There is no such host: a question would raise."""
    task = run.Script(inline="true")
    run.run(task, executor=RayExecutor(address=address), name=unique, dryrun=True)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("nodes", 2, "group driver"),
        ("ntasks_per_node", 2, "group driver"),
        ("retries", 1, "dispatcher"),
        ("max_in_flight", 3, "dispatcher"),
    ],
)
def test_what_is_not_built_is_named(address, unique, field, value, part):
    executor = RayExecutor(address=address, **{field: value})
    with pytest.raises(NotBuiltError, match=f"RayExecutor.{field} is {value}.*{part}"):
        run.run(run.Script(inline="true"), executor=executor, name=unique, dryrun=True)


def test_a_stream_alone_is_refused():
    from torchx.schedulers.api import Stream

    with pytest.raises(ValueError, match="one log"):
        create_scheduler("s").log_iter("x", "y", streams=Stream.STDERR)


def test_a_job_of_nobody_is_not_described():
    assert create_scheduler("s").describe("no.such") is None
