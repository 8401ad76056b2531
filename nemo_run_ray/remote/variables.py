"""Names of environment variables that tell programs of a cluster where they are."""

#: In every process of an embedded Ray: its folder.
EMBEDDED = "NEMO_RUN_RAY_LOCAL"
#: The address of the dashboard in the environment of jobs, where this package has started Ray.
DASHBOARD = "NEMO_RUN_RAY_DASHBOARD"
#: In jobs on an allocation of Slurm: the folder of this run of Slurm's job, and that of the
#: allocation where a client has asked for it by a name.
RUN, LIFE = "NEMO_RUN_RAY_RUN", "NEMO_RUN_RAY_LIFE"
#: In the same jobs: when the allocation ends, in seconds since the epoch by the head's clock; how
#: many seconds it lasts from Ray's start; and ``1`` where another one goes on with jobs.
ENDS_AT, LASTS_S, RENEWS = "NEMO_RUN_RAY_ENDS_AT", "NEMO_RUN_RAY_LASTS_S", "NEMO_RUN_RAY_RENEWS"
