"""Labels of the nodes that run an image."""

import pytest

from nemo_run_ray.cluster_files.resolve import labels_of
from nemo_run_ray.cluster_files.schema import ClusterFile

VLLM = "vllm/vllm-openai:v0.10.1"


def _file(**values):
    return ClusterFile.model_validate({"images": {"vllm": VLLM}, **values})


@pytest.mark.parametrize("image", ["vllm", VLLM])
@pytest.mark.parametrize("key", ["vllm", VLLM, "vllm/*", "*:v0.10.?"])
def test_an_entry_is_a_name_an_image_or_a_pattern(image, key):
    assert labels_of(image, _file(image_labels={key: {"pool": "gpu"}})) == {"pool": "gpu"}


def test_the_nearest_entry_counts():
    names = {"vllm": VLLM, "client": VLLM}
    entries = {"vllm/*": {"site": "a"}, "vllm": {"pool": "gpu"}, "client": {"pool": "cpu"}}
    file = ClusterFile(images=names, image_labels=entries)
    assert labels_of("vllm", file) == {"pool": "gpu"}
    assert labels_of("client", file) == {"pool": "cpu"}
    assert labels_of(VLLM, file) == {"site": "a"}
    exact = ClusterFile(images=names, image_labels={**entries, VLLM: {"pool": "tpu"}})
    assert labels_of(VLLM, exact) == {"pool": "tpu"}


def test_the_key_gives_a_label_only_where_no_entry_matches():
    file = _file(image_labels={"vllm": {"pool": "gpu"}}, image_label_key="nemo/image")

    assert labels_of("vllm", file) == {"pool": "gpu"}
    assert labels_of("busybox:1", file) == {"nemo/image": "busybox-1"}
    assert labels_of("vllm", _file(image_labels={"VLLM/*": {"pool": "gpu"}})) == {}


@pytest.mark.parametrize(
    ("image", "value"),
    [
        ("nvcr.io/nvidia/pytorch:25.02-py3", "nvcr.io-nvidia-pytorch-25.02-py3"),
        ("/containers/NeMo RL.sqsh", "containers-nemo-rl.sqsh"),
        ("a--b//c@@d", "a-b-c-d"),
        ("._-x_y-._", "x_y"),
        ("///", "unknown"),
        ("é", "unknown"),
    ],
)
def test_an_image_as_the_value_of_a_label(image, value):
    assert labels_of(image, ClusterFile(image_label_key="k")) == {"k": value}
