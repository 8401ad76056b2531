"""Splits the digits into three parts: to train models, to choose one of them, and to examine it."""

import io
import sys
from pathlib import Path

import numpy
from common import write
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

folder = Path(sys.argv[1])
images, digits = load_digits(return_X_y=True)
places = numpy.arange(len(digits))
train, others = train_test_split(places, test_size=0.5, random_state=0, stratify=digits)
validation, test = train_test_split(others, test_size=0.5, random_state=0, stratify=digits[others])

for name, part in (("train", train), ("validation", validation), ("test", test)):
    content = io.BytesIO()
    numpy.savez(content, images=images[part], digits=digits[part])
    write(folder / f"{name}.npz", content.getvalue())
    print(f"{len(part)} digits for {name}")
