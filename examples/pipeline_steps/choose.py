"""Compares the models on the validation part."""

import json
import pickle
import sys
from pathlib import Path

from common import read, write

folder, names = Path(sys.argv[1]), sys.argv[2:]
images, digits = read(folder / "validation.npz")
accuracies = {}
for name in names:
    model = pickle.loads((folder / f"{name}.pkl").read_bytes())
    accuracies[name] = model.score(images, digits)
    print(f"{name}: {accuracies[name]:.3f}")
write(folder / "validation.json", json.dumps(accuracies).encode())
