"""The processes that the driver of a group or an array keeps on nodes."""
