"""A DGX Cloud executor, whatever this NeMo-Run calls its credentials."""

import dataclasses
from typing import Any

from nemo_run.core.execution.dgxcloud import DGXCloudExecutor

NAMES = {field.name for field in dataclasses.fields(DGXCloudExecutor)}
ID, SECRET = ("client_id", "client_secret") if "client_id" in NAMES else ("app_id", "app_secret")


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "base_url": "http://127.0.0.1:9/api/v1",
        "kube_apiserver_url": "",
        ID: "id",
        SECRET: "secret",
        "project_name": "project",
        "container_image": "image",
        "pvc_nemo_run_dir": "/shared/runs",
        "pvcs": [{"path": "/shared", "name": "claim"}],
        **changes,
    }


def make_executor(**changes: Any) -> DGXCloudExecutor:
    return DGXCloudExecutor(**fields(**changes))
