"""Where a cluster file's name is looked for."""

import pytest

from nemo_run_ray.cluster_files import load as search
from nemo_run_ray.errors import ConfigError


@pytest.fixture
def everywhere(tmp_path, configs, monkeypatch):
    """One folder of each kind, in the order in which they are looked through."""
    monkeypatch.setenv("NEMO_SKILLS_CONFIG_DIR", str(tmp_path / "skills"))
    found = [
        configs,
        tmp_path / "cwd" / "cluster_configs",
        tmp_path / "xdg" / "nemo_run_ray",
        tmp_path / "skills",
    ]
    for folder in found:
        folder.mkdir(parents=True, exist_ok=True)
    return found


def test_every_folder_is_looked_through_and_the_first_wins(everywhere):
    for folder in reversed(everywhere):
        path = folder / "gpu.yaml"
        path.touch()
        assert search.find("gpu") == (path, "")


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".toml"])
def test_a_name_has_no_suffix_and_a_path_has_one(write, configs, suffix, monkeypatch):
    path = write("", f"one{suffix}")
    assert search.find("one") == (path, "")
    assert search.find(str(path)) == (path, "")
    monkeypatch.chdir(configs)
    assert search.find(f"one{suffix}") == (path, "")


def test_an_unknown_name_gets_the_nearest_and_the_folders(write, configs):
    write("", "team-gpu.yaml")
    with pytest.raises(ConfigError, match="did you mean 'team-gpu'") as caught:
        search.find("team-gpus")
    assert str(configs) in str(caught.value)
    assert "nemo-run-ray init" in str(caught.value)


ENV_TOML = '[gpu]\nexecutor = "ray"\nray_address = "http://head:8265"\n[wandb]\nproject = "x"\n'


def test_a_profile_of_an_env_toml(write, tmp_path):
    path = tmp_path / "cwd" / "env.toml"
    path.write_text(ENV_TOML)
    assert search.find("gpu") == (path, "gpu")
    assert search.find(f"{path}:gpu") == (path, "gpu")
    with pytest.raises(ConfigError, match="did you mean 'gpu'"):
        search.find("gpus")
    with pytest.raises(ConfigError, match="has profiles"):
        search.find(str(path))
    file = write("", "gpu.yaml")
    assert search.find("gpu") == (file, ""), "a file of its own comes first"
    path.write_text("")
    with pytest.raises(ConfigError, match="no cluster file of the name 'gpus'"):
        search.find("gpus")
