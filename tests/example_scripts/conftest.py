"""Two hosts on one machine: as processes alone, and with a network, a name and a table of hosts for each."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["Host", "hosts"]


class Host(NamedTuple):
    """How to run a command on it, and how others reach it."""

    enter: list[str]
    name: str
    address: str
    variables: dict[str, str]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(params=["processes", "network namespaces"])
def hosts(request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    """Namespaces are joined by a pair of virtual interfaces; what `ip netns exec` runs reads the files of /etc/netns."""
    if request.param == "processes":
        yield [Host([], "localhost", "127.0.0.1", {})] * 2
        return
    names = [f"vescale-{os.getpid()}-{host}" for host in "ab"]
    links = [f"vs{os.getpid()}{host}" for host in "ab"]
    addresses = ["10.213.77.1", "10.213.77.2"]
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        for name in made:
            ip("netns", "del", name)
        pytest.skip(
            f"hosts are network namespaces, which only root with iproute2 and util-linux can make; here: {error}. The same "
            f"launchers run as processes of one host in the variant 'processes'"
        )
    folders = [Path("/etc/netns") / name for name in names]
    try:
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address, folder in zip(names, links, addresses, folders, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            for up in ("lo", link):
                ip("-n", name, "link", "set", up, "up")
            folder.mkdir(parents=True)
            lines = [f"{known} {other}" for known, other in zip(addresses, names, strict=True)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        yield [
            Host(
                ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"],
                name,
                address,
                {"GLOO_SOCKET_IFNAME": link},
            )
            for name, link, address in zip(names, links, addresses, strict=True)
        ]
    finally:
        for name, folder in zip(names, folders, strict=True):
            ip("netns", "del", name)
            shutil.rmtree(folder, ignore_errors=True)
