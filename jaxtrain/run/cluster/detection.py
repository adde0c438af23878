"""Cluster detection: flags, Slurm, MPI, Kubernetes, TPU metadata, in order."""

from collections.abc import Mapping
from pathlib import Path

from jaxtrain.run.cluster.cluster import Cluster, Flags
from jaxtrain.run.cluster.launchers import cluster_from_flags, kubernetes, mpich, open_mpi, slurm
from jaxtrain.run.cluster.tpu_hosts import gke_tpu, tpu_vm


def detect(
    environment: Mapping[str, str], flags: Flags | None = None, *, root: Path = Path("/")
) -> Cluster:
    """The processes that this one belongs to; one process where nothing says otherwise.

    Asked in this order: flags; JAX_NUM_PROCESSES; the variables of GKE's TPUs; a Kubernetes job;
    the metadata server of a TPU VM; Open MPI and MPICH; Slurm. MPI comes before Slurm because
    mpirun in an allocation leaves in every process the variables of the step that started mpirun's
    daemons, while srun sets none of mpirun's.

    Args:
      environment: `os.environ`, or one made for a test.
      flags: what the command line says.
      root: where device files are looked for.

    Raises:
      UserError: half of what is needed is there.
    """
    return (
        cluster_from_flags(environment, flags or Flags())
        or gke_tpu(environment)
        or kubernetes(environment)
        or tpu_vm(environment, root)
        or open_mpi(environment)
        or mpich(environment)
        or slurm(environment)
        or Cluster()
    )
