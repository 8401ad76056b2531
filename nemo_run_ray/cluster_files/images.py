"""Which nodes run a container image, by their labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from nemo_run_ray.cluster_files import own_format
from nemo_run_ray.cluster_files.load import Loaded
from nemo_run_ray.cluster_files.schema import ClusterFile
from nemo_run_ray.errors import ConfigError
from nemo_run_ray.fields import nearest

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


def check_image(image: str, loaded: Loaded) -> None:
    """Check that one of this package's files says which nodes have an image.

    Raises:
        ConfigError: it says of none, and the task would run on any node.
    """
    file = loaded.file
    if file.images_as != "label" or loaded.reading.format != own_format.NAME:
        return
    if labels_of(image, file) or image in file.image_labels:
        return
    meant = None if image in file.images else nearest(image, [*file.images, *file.image_labels])
    hint = f" Did you mean {meant!r}?" if meant else ""
    raise ConfigError(
        f"The image {image!r} has no labels in {loaded.path}, and would run on any node.{hint} "
        "Add it to `image_labels`, give `image_label_key`, or say `images_as: none`."
    )


def derived_labels(image: str, file: ClusterFile) -> dict[str, str]:
    """Labels that the file derives from an image alone.

    Every entry of ``image_labels`` that matches contributes, and the first one wins a label; but an
    entry of just this name or image comes in place of those of other names of the image. Only
    where none matches, ``image_label_key`` gives a label with the image as its value.

    Raises:
        ConfigError: the image has several names, whose entries disagree.
    """
    asked, image = image, file.images.get(image, image)
    matching = {}
    for key, entry in file.image_labels.items():
        pattern = file.images.get(key, key)
        is_left_out = key in file.images and key != asked and asked in file.image_labels
        if not is_left_out and (image == pattern or fnmatchcase(image, pattern)):
            matching[key] = entry
    _check_agreement(image, {key: matching[key] for key in matching if key in file.images})
    labels: dict[str, str] = {}
    for entry in matching.values():
        labels = {**entry, **labels}
    if not matching and file.image_label_key and image:
        labels = {file.image_label_key: label_value(image)}
    return labels


def _check_agreement(image: str, by_name: Mapping[str, Mapping[str, str]]) -> None:
    first: dict[str, str] = {}
    for name, entry in by_name.items():
        for label, value in entry.items():
            other = first.setdefault(label, name)
            if by_name[other][label] != value:
                raise ConfigError(
                    f"The image {image!r} has the names {other!r} and {name!r}, and they disagree "
                    f"about its nodes: the label {label} is {by_name[other][label]!r} for the one "
                    f"and {value!r} for the other. Ask for one of the names instead of the image."
                )


def label_value(image: str) -> str:
    """An image as the value of a label: ``nvcr.io/a/b:1`` is ``nvcr.io-a-b-1``."""
    text = _HYPHENS.sub("-", _NOT_IN_LABELS.sub("-", image.lower()))
    return text.strip("-._") or "unknown"
