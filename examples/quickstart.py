"""Train a small classifier of handwritten digits on Ray.

``python examples/quickstart.py`` runs it on an embedded Ray, and needs scikit-learn;
``python examples/quickstart.py http://ray-head:8265`` on a cluster whose nodes have nemo-run and
scikit-learn.
"""

import sys
from pathlib import Path

import nemo_run as run
from nemo_run.config import get_nemorun_home

from nemo_run_ray import RayExecutor


def train(hidden: int, model_path: str) -> None:
    """Fit, report the accuracy on unseen digits, write the model."""
    import pickle

    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
        from sklearn.neural_network import MLPClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        sys.exit(f"{error}. This task needs scikit-learn on its node: pip install scikit-learn")

    images, digits = load_digits(return_X_y=True)
    seen, unseen, seen_digits, unseen_digits = train_test_split(
        images, digits, test_size=0.25, random_state=0
    )
    model = make_pipeline(StandardScaler(), MLPClassifier((hidden,), max_iter=300, random_state=0))
    model.fit(seen, seen_digits)
    accuracy = model.score(unseen, unseen_digits)
    Path(model_path).parent.mkdir(parents=True, exist_ok=True)
    Path(model_path).write_bytes(pickle.dumps(model))
    print(f"accuracy {accuracy:.3f} on {len(unseen)} unseen digits, model in {model_path}")


def main(address: str | None) -> bool:
    """Run it; whether it succeeded."""
    model = Path(get_nemorun_home()) / "quickstart" / "digits.pkl"
    with run.Experiment("quickstart", executor=RayExecutor(address=address)) as experiment:
        task = run.Partial(train, hidden=64, model_path=str(model))
        experiment.add(task, name="quickstart", tail_logs=True)
        experiment.run()
    return experiment.status(return_dict=True)["quickstart"]["status"].name == "SUCCEEDED"


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1] if len(sys.argv) > 1 else None))
