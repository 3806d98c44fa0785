"""What hardware costs: devices, clusters and their links, collectives, operations. Knows nothing of JAX.

>>> cluster = parse_cluster("8xH100")
>>> link = cluster.mesh((8,)).links[0]
>>> bool(collective_time_s("all-reduce", link, 8, 1e9) > 1e-3)
True
"""

from .cluster import Cluster, ClusterError, cluster_of, parse_cluster
from .collectives import collective_time_s, over_axes_s, wire_bytes
from .compute import compute_time_s
from .cpu import cpu_device
from .devices import DEVICES, DeviceSpec
from .efficiency import MatmulTable, StreamTable
from .links import COLLECTIVE_KINDS, AxisPoints, CollectivePoints, Link, MeshLinks
from .profile import WHATS, Measurement, Profile, ProfileError, calibrate
from .topology import Level

__all__ = [
    "COLLECTIVE_KINDS",
    "DEVICES",
    "WHATS",
    "AxisPoints",
    "Cluster",
    "ClusterError",
    "CollectivePoints",
    "DeviceSpec",
    "Level",
    "Link",
    "MatmulTable",
    "Measurement",
    "MeshLinks",
    "Profile",
    "ProfileError",
    "StreamTable",
    "calibrate",
    "cluster_of",
    "collective_time_s",
    "compute_time_s",
    "cpu_device",
    "over_axes_s",
    "parse_cluster",
    "wire_bytes",
]
