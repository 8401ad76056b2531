"""Source code for tasks on Lepton and DGX Cloud. Archives of Ray jobs are in ``experiment/``."""

from nemo_run_ray.cloud.ship_source import LEFT_OUT, ShipSource, SourcePackager

__all__ = ["LEFT_OUT", "ShipSource", "SourcePackager"]
