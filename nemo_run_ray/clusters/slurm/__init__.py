"""A cluster that is brought up in an allocation of Slurm when it is needed.

``cluster.py`` is what users see, and waits for Ray. ``allocations.py`` judges what
``on_login.py`` answers, which runs where Slurm is; ``login.py`` reaches that host and the dashboard
behind it, and ``script.py`` makes the job's script.

All of them, and the head, meet in the folder of the cluster, ``<job_dir>/<name>``. Allocation N =
``lives/N`` = one Slurm job; a run is one start of it (a requeue makes another). The writer of each
file comes first: a client (by ``on_login.py``), the script of the allocation's job, the script of
the allocation before ("before"), or the program of the nodes (``remote/slurm/``)::

    queue.json      client: the last answer of squeue, and when that was
    dispatches/…    client: chains that may continue in the next allocation, whose head starts
                    them again, see remote/carried_over.py
    lives/.…        client, before: a folder that is renamed to the next number when it is whole
    lives/3/
        claimed     client: its own name; it has made this folder, and it alone submits the job
        renewed     before, in place of claimed: it has made this folder; this allocation continues
                    the dispatches of 2
        users/…     client: one file for each program that uses the allocation
        keep        client: the allocation stays without users; "before" copies users/ and this
        released    client: the last user has left; removed when another one joins; copied too
        ray.sub     client, before: the script of the job
        sbatch/     client, before: made before the job is sent to Slurm; it is made once, so no
                    second job is sent. "before" keeps the output of sbatch in it
        job         client, before, script: Slurm's number of the job
        refused     client, before: the message of sbatch, when Slurm does not take the job
        owner       script: a link to the number of the first job that started in this folder;
                    should Slurm have another one, since an answer was lost, that one ends at once
        over        client: why it is given up, since Slurm has no job of it. A head that another
                    Slurm knows continues
        stop        client, before: why the allocation is over. No client uses it, its head ends the
                    run, and a job that waits in Slurm's queue ends when it starts
        run/871.0/  script, nodes: the run, see remote/slurm/folder.py; 871.1 after a requeue
        logs/       Slurm, script, nodes: what people read
        scripts/, job_ids.json, ray_cluster_info.json
                    script, nodes: files that NeMo-Run's own script has
    lives/4/        allocation 3 was given up, or has ended

These words tell how one allocation follows another:

- ``renew`` is the user's setting: it may happen.
- ``renews``, of a run's end and a file of the run: the script asks for the next allocation.
- ``SlurmAllocation.asks_for_next``: it does so now.
- ``renewed``, the file, and ``SlurmAllocation.is_renewal``: this allocation is that next one.
- ``ClusterArchive.continues``: the jobs of a Ray that is gone continue in the next one.
"""

from nemo_run_ray.clusters.slurm.cluster import SlurmCluster
from nemo_run_ray.clusters.slurm.script import Sidecar

__all__ = ["Sidecar", "SlurmCluster"]
