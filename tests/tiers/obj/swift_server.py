# SPDX-License-Identifier: Apache-2.0
"""OpenStack Swift with its S3 layer, whole and small: ``servers.swift`` starts it.

Runs on the system's Python, which has Debian's python3-swift. Takes one argument, JSON: see
``servers.swift``. The proxy is this process; account, container and object server and memcached,
without which Swift's tempauth does not work, are its children and die with it.
"""

import configparser
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from swift.common import utils, wsgi
from swift.common.ring import RingBuilder

HOST = "127.0.0.1"
FILTERS = (
    "catch_errors",
    "gatekeeper",
    "cache",
    "listing_formats",
    "s3api",
    "tempauth",
    "container_quotas",
)
STORAGE = ("account", "container", "object")
PR_SET_PDEATHSIG = 1


def write(path: Path, sections: dict[str, dict[str, str]]) -> None:
    """A configuration file."""
    file = configparser.ConfigParser()
    file.read_dict(sections)
    with path.open("w") as out:
        file.write(out)


def write_ring(path: Path, port: int) -> None:
    """Where everything is: on the one device of one server."""
    builder = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
    place = {"region": 1, "zone": 1, "ip": HOST, "port": port, "device": "one"}
    builder.add_dev({**place, "weight": 1, "meta": ""})
    builder.rebalance()
    builder.get_ring().save(str(path))


def configure(
    folder: Path, ports: dict[str, int], access_key: str, secret_key: str, domain: str, page: int
) -> None:
    """Configuration of all servers, their rings, and one device."""
    (folder / "devices" / "one").mkdir(parents=True)
    hashing = {"swift_hash_path_prefix": "a", "swift_hash_path_suffix": "b"}
    write(folder / "swift.conf", {"swift-hash": hashing, "storage-policy:0": {"name": "one"}})
    common = {
        "swift_dir": str(folder),
        "devices": str(folder / "devices"),
        "mount_check": "false",
        "bind_ip": HOST,
        "workers": "0",  # no process besides the server's own, nor another user
        "fallocate_reserve": "0",
        # A machine that stalls is no reason for an error, nor for a listing without an object:
        # there is no second copy, and no updater that would put it right.
        "conn_timeout": "10",
        "node_timeout": "30",
        "container_update_timeout": "30",
        "error_suppression_interval": "0",
    }
    for server in STORAGE:
        write(
            folder / f"{server}.conf",
            {
                "DEFAULT": {**common, "bind_port": str(ports[server])},
                "pipeline:main": {"pipeline": f"{server}-server"},
                f"app:{server}-server": {"use": f"egg:swift#{server}"},
            },
        )
        write_ring(folder / f"{server}.ring.gz", ports[server])
    filters = {name: {"use": f"egg:swift#{name}"} for name in FILTERS}
    filters["cache"] = {
        "use": "egg:swift#memcache",
        "memcache_servers": f"{HOST}:{ports['memcached']}",
    }
    filters["s3api"] |= {"storage_domain": domain, "max_bucket_listing": str(page)}
    account, user = access_key.split(":")
    filters["tempauth"][f"user_{account}_{user}"] = f"{secret_key} .admin"
    write(
        folder / "proxy.conf",
        {
            "DEFAULT": {**common, "bind_port": str(ports["proxy"])},
            "pipeline:main": {"pipeline": " ".join([*FILTERS, "proxy-server"])},
            "app:proxy-server": {"use": "egg:swift#proxy", "account_autocreate": "true"},
            **{f"filter:{name}": filter for name, filter in filters.items()},
        },
    )


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    settings = json.loads(sys.argv[1])
    folder, ports = Path(settings.pop("folder")), settings["ports"]
    die_with_parent()
    configure(folder, **settings)
    utils.set_swift_dir(str(folder))
    parent = os.getpid()
    serves = "proxy"
    for child in (*STORAGE, "memcached"):
        if os.fork() == 0:
            die_with_parent()
            if os.getppid() != parent:
                return 1
            serves = child
            break
    if serves == "memcached":
        # It does not run as root unless it is told to.
        user = () if os.geteuid() else ("-u", "root")
        port = str(ports["memcached"])
        os.execlp(serves, serves, *user, "-l", HOST, "-p", port, "-U", "0")
    return wsgi.run_wsgi(str(folder / f"{serves}.conf"), f"{serves}-server", verbose=True)


if __name__ == "__main__":
    sys.exit(main())
