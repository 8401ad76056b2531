"""Trains one model."""

import pickle
import sys
from pathlib import Path

from common import read, write
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

MODELS = {
    "logistic": LogisticRegression(max_iter=3000, random_state=0),
    "forest": ExtraTreesClassifier(n_estimators=1000, random_state=0),
    "svm": SVC(gamma=0.001, random_state=0),
}

folder, name = Path(sys.argv[1]), sys.argv[2]
model = MODELS[name].fit(*read(folder / "train.npz"))
write(folder / f"{name}.pkl", pickle.dumps(model))
print(f"{name} is trained")
