"""Examines the best model on the test part, which nothing has seen before."""

import json
import pickle
import sys
from pathlib import Path

from common import read, write

folder = Path(sys.argv[1])
accuracies = json.loads((folder / "validation.json").read_text())
best = max(accuracies, key=accuracies.__getitem__)
model = pickle.loads((folder / f"{best}.pkl").read_bytes())
accuracy = model.score(*read(folder / "test.npz"))
write(folder / "winner.json", json.dumps({"model": best, "accuracy": accuracy}).encode())
print(f"{best} wins, with {accuracy:.3f} on the test part")
