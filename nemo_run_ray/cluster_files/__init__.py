"""Files that say where and how to run: cluster, defaults, images, pools, variables."""
