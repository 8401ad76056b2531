"""Which nodes run a container image, by their labels."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from nemo_run_ray.cluster_files.schema import ClusterFile

_NOT_IN_LABELS = re.compile(r"[^a-z0-9_.-]+")
_HYPHENS = re.compile(r"-{2,}")


def labels_of(image: str, file: ClusterFile) -> dict[str, str]:
    """Labels of the nodes for a task with this image.

    A label that ``defaults.label_selector`` gives wins over the one derived from the image.

    Args:
        image: a name in the file's ``images``, or an image.
        file: the cluster file.
    """
    static = file.defaults.get("label_selector") or {}
    return {**derived_labels(image, file), **static}


def derived_labels(image: str, file: ClusterFile) -> dict[str, str]:
    """Labels that the file derives from an image alone.

    Every entry of ``image_labels`` that matches contributes, and the first one wins a label. Only
    where none matches, ``image_label_key`` gives a label with the image as its value.
    """
    image = file.images.get(image, image)
    labels: dict[str, str] = {}
    matched = False
    for key, entry in file.image_labels.items():
        pattern = file.images.get(key, key)
        if image == pattern or fnmatchcase(image, pattern):
            matched = True
            labels = {**entry, **labels}
    if not matched and file.image_label_key and image:
        labels = {file.image_label_key: label_value(image)}
    return labels


def label_value(image: str) -> str:
    """An image as the value of a label: ``nvcr.io/a/b:1`` is ``nvcr.io-a-b-1``."""
    text = _HYPHENS.sub("-", _NOT_IN_LABELS.sub("-", image.lower()))
    return text.strip("-._") or "unknown"
