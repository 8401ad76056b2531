"""A sweep: a classifier of handwritten digits with 42 settings, as one job of a Ray.

``python examples/sweep.py`` runs it on an embedded Ray of this machine, and leaves a picture of the
results in ``sweep.svg``; ``python examples/sweep.py http://ray-head:8265`` runs it on a cluster
whose nodes have nemo-run and scikit-learn.
"""

import sys
from collections.abc import Mapping

import nemo_run as run
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

import nemo_run_ray
from nemo_run_ray import RayExecutor

#: What differs between the elements.
GAMMAS = [0.00001, 0.0001, 0.0005, 0.001, 0.003, 0.01, 0.1]
COSTS = [0.01, 0.1, 1.0, 3.0, 10.0, 100.0]


def fit(gamma: float, cost: float) -> float:
    """The share of unseen digits that the classifier gets right."""
    images, digits = load_digits(return_X_y=True)
    seen, unseen, seen_digits, unseen_digits = train_test_split(
        images, digits, test_size=0.25, random_state=0
    )
    accuracy = SVC(gamma=gamma, C=cost).fit(seen, seen_digits).score(unseen, unseen_digits)
    print(f"gamma {gamma:g} and cost {cost:g}: {accuracy:.3f}")
    return float(accuracy)


def picture(accuracies: Mapping[int, float]) -> Table:
    """A table whose cells are the greener the better."""
    table = Table("gamma", *(f"cost {cost:g}" for cost in COSTS), title="accuracy of the digits")
    for row, gamma in enumerate(GAMMAS):
        found = [accuracies.get(row * len(COSTS) + column) for column in range(len(COSTS))]
        table.add_row(f"{gamma:g}", *map(cell, found))
    return table


def cell(accuracy: float | None) -> str:
    if accuracy is None:
        return "failed"
    return f"[on rgb(0,{int(150 * accuracy**4)},0)] {accuracy:.3f} "


def main(address: str | None) -> bool:
    """Run it and show the results; whether there is one of every element."""
    sweep = nemo_run_ray.array(
        run.Partial(fit, gamma=0.001, cost=1.0), over={"gamma": GAMMAS, "cost": COSTS}
    )
    executor = RayExecutor(address=address, cpus_per_node=1, retries=1)
    with run.Experiment("sweep", executor=executor) as experiment:
        experiment.add(sweep, name="fit", tail_logs=False)
        experiment.run()
    (job,) = nemo_run_ray.find(experiment._id)
    console = Console(record=True, width=90)
    accuracies = job.results()
    console.print(picture(accuracies))
    console.save_svg("sweep.svg", title="sweep")
    return len(accuracies) == len(GAMMAS) * len(COSTS)


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1] if len(sys.argv) > 1 else None))
