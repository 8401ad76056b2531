"""``nemo_run_ray.array``: what it sends, and what it refuses."""

from __future__ import annotations

import json
from threading import Lock

import fiddle as fdl
import nemo_run as run
import numpy
import pytest
from fiddle.experimental import serialization
from torchx.specs import Role

from nemo_run_ray import RayExecutor, array
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.plan import array as planning
from tests.array_tasks import Model, train

SCRIPT = run.Script(path="train.py", args=["--seed", "0"], entrypoint="python")
PARTIAL = run.Partial(train, seed=0, model=run.Config(Model, width=1))


def elements(made: planning.Array) -> list[dict[str, object]]:
    return [json.loads(line) for line in made.inline.splitlines()[1:]]


def values(made: planning.Array) -> list[object]:
    return [element["values"] for element in elements(made)]


def test_a_product_and_a_zip():
    over = {"args.1": [1, 2], "env.LR": [0.1, 0.2]}
    pairs = [("1", "0.1"), ("1", "0.2"), ("2", "0.1"), ("2", "0.2")]
    rows = [{"args.1": first, "env.LR": second} for first, second in pairs]
    assert values(array(SCRIPT, over)) == rows
    assert values(array(SCRIPT, over, combine="zip")) == [rows[0], rows[3]]


def test_a_list_and_a_file_give_a_mapping_for_each_element(tmp_path):
    rows = [{"seed": 1, "model.width": 2}, {"model.width": 4, "seed": 3}]
    path = tmp_path / "elements.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    for over in (rows, iter(rows), path, str(path)):
        assert values(array(PARTIAL, over)) == rows


def test_values_of_numpy_are_numbers():
    seeds, rates = numpy.arange(2), numpy.float32([0.5])
    rows = [{"seed": seed, "model.width": 0.5} for seed in (0, 1)]
    assert values(array(PARTIAL, {"seed": seeds, "model.width": rates})) == rows
    assert values(array(PARTIAL, {"seed": [{"at": seeds, "on": numpy.True_}]})) == [
        {"seed": {"at": [0, 1], "on": True}}
    ]
    rows = [{"env.X": text, "args": ["1"]} for text in ("0", "1")]
    assert values(array(SCRIPT, {"env.X": seeds, "args": [[seeds[1]]]})) == rows


def test_a_name_and_a_saved_array_are_those_of_the_task(tmp_path):
    made = array(PARTIAL, {"seed": [1]})
    assert made.get_name() == "tests.array_tasks.train"
    assert array(SCRIPT, {"args.1": [1]}).get_name() == "train.py"


def test_tasks_without_names_have_those_of_nemo_run():
    made = array([SCRIPT, PARTIAL, PARTIAL])
    names = ["train.py", "tests.array_tasks.train_1", "tests.array_tasks.train_2"]
    assert [element["name"] for element in elements(made)] == names
    assert made.get_name() == "train.py-array"


@pytest.mark.parametrize(
    ("tasks", "options", "words"),
    [
        ([], {}, "has no elements"),
        ([SCRIPT, "x"], {}, "task of an array is a str; .* or a list of them"),
        ([SCRIPT], {"over": {"env.X": [1]}}, "has no `over`"),
        ([SCRIPT], {"names": ["a", "b"]}, "a name of its own for each of the 1 tasks"),
        ([SCRIPT, PARTIAL], {"names": ["a", "a"]}, "a name of its own for each of the 2 tasks"),
        (SCRIPT, {"over": {"env.X": [1]}, "names": ["a"]}, "names are for an array of several"),
        ([run.Script(inline="x", env={"X": 1})], {}, "'X' with a value of type int"),
        ([run.Script(inline="x", env={"API_KEY": "v" * 20})], {}, "looks like a credential"),
        ([run.Script(inline="x" * 40_000)], {}, "element 0 of the array has 40"),
    ],
)
def test_bad_lists_of_tasks_are_refused(tasks, options, words):
    with pytest.raises(ConfigError, match=words):
        array(tasks, **options)


BAD = [
    (SCRIPT, None, "`over` is None; expected is a mapping"),
    (PARTIAL, {"seed": 3}, "values of the field 'seed' are 3; expected is a list"),
    (run.Script(path="a.sh"), {"args.0": [1]}, "expected is one of env.NAME, args"),
    (SCRIPT, {}, "element 0 of the array is {}; expected is a mapping"),
    (SCRIPT, [], "has no elements"),
    (SCRIPT, {"env.X": []}, "has no elements"),
    (SCRIPT, {"seed": [1]}, "no field 'seed' .* env.NAME, args, args.0, args.1"),
    (SCRIPT, {"args.2": [1]}, "no field 'args.2'"),
    (SCRIPT, {"args": [[]], "args.0": ["x"]}, "no field 'args.0' .* beside args"),
    (run.Script(inline="true"), {"args": [["x"]]}, "no field 'args' .* env.NAME"),
    (SCRIPT, {"args": ["text"]}, "args of the element 0 is 'text'; expected is a list"),
    (SCRIPT, {"env.X": [None]}, "env.X of the element 0 is None"),
    (PARTIAL, {"sead": [1]}, "no field 'sead' in tests.array_tasks.train: .* seed, model"),
    (PARTIAL, {"model.depth": [1]}, "no field 'model.depth' .* width"),
    (PARTIAL, {"seed.x": [1]}, "a int has no fields"),
    (run.Partial(train, seed=0, model=Model), {"model.width": [1]}, "a type has no fields"),
    (run.Partial(train, seed=Lock()), {"seed": [1]}, "cannot be sent: .*lock"),
    (PARTIAL, {"seed": [object()]}, "element 0 of the array cannot be sent"),
    (PARTIAL, {"seed": ["x" * 40_000]}, "has 40024 bytes, and 32768 are sent"),
    (PARTIAL, [{"seed": 1}, {"model": 2}], "element 1 of the array is .*same fields"),
    (PARTIAL, [1], "element 0 of the array is 1"),
    (PARTIAL, "no-such-file.jsonl", "cannot be read from no-such-file.jsonl"),
    (SCRIPT, {0: [1]}, "element 0 of the array is {0: 1}; expected is a mapping"),
    (PARTIAL, [{"seed": "x" * 30_000}] * 3000, "first [0-9]+ elements .* more than the 64 MiB"),
    (run.Partial(lambda seed: seed, seed=1), {"seed": [1]}, "cannot be sent.*lambda"),
    ("train.py", {"seed": [1]}, "task of an array is a str"),
]


def test_the_configuration_is_read_without_nemo_run():
    shared = run.Config(Model, width=3)
    inner = [shared, shared, run.Partial(train, seed=2), run.Config(dict, a=1)]
    made = array(run.Partial(train, seed=1, model={"inner": inner}), over={"seed": [1]})
    text = json.loads(made.inline.splitlines()[0])["template"]
    assert "nemo_run" not in text
    built = fdl.build(serialization.load_json(text))
    one, same, task, plain = built.keywords["model"]["inner"]
    assert one is same
    assert one == Model(width=3)
    assert (task.func, task.keywords) == (train, {"seed": 2})
    assert plain == {"a": 1}


@pytest.mark.parametrize(("task", "over", "words"), BAD)
def test_bad_input_is_told(task, over, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        array(task, over)


@pytest.mark.parametrize(
    "options",
    [{"combine": "all"}, {"isolation": "threads"}, {"max_failures": -1}, {"max_failures": True}],
)
def test_options_are_checked(options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        array(PARTIAL, {"seed": [1]}, **options)


def test_without_a_ray_it_says_so(tmp_path):
    made = array(SCRIPT, {"args.1": [1]})
    with pytest.raises(ConfigError, match="An array is one job of a Ray"):
        run.run(made)
    with pytest.raises(ConfigError, match="An array is one job of a Ray"):
        made.to_command(filename="/x.sh", is_local=False, substitute_rundir_path="/home/x/job")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 2}, "RayExecutor.nodes is 2, and each element"),
        ({"ports": {"a": 0}}, "RayExecutor.ports is {.a.: 0}"),
        ({"time_s": 3}, "RayExecutor.time_s is 3"),
        ({"launcher": "torchrun"}, "RayExecutor.launcher is torchrun"),
        ({"retries": 300}, "an element has 200 at most"),
    ],
)
def test_what_an_array_has_not_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        planning.array_spec([Role("a", image="")], RayExecutor(**fields))
