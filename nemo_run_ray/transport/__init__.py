"""Source code for tasks on Lepton and DGX Cloud. What Ray jobs need is in ``jobs/archives.py``."""

from nemo_run_ray.transport.ship_source import ShipSource, SourcePackager
from nemo_run_ray.transport.source import LEFT_OUT

__all__ = ["LEFT_OUT", "ShipSource", "SourcePackager"]
