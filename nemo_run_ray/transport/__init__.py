"""Source code to pods that share nothing with us but a folder of their own."""

from nemo_run_ray.transport.ship_source import ShipSource, SourcePackager
from nemo_run_ray.transport.source import LEFT_OUT

__all__ = ["LEFT_OUT", "ShipSource", "SourcePackager"]
