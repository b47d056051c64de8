"""Which file system a folder lies on, read from mount tables of many machines."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowmem.iocheck import filesystem
from lowmem.iocheck.filesystem import file_system


def mounts(point: str, kind: str, source: str) -> str:
    return (
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        f"30 27 0:45 / {point} rw,nosuid shared:7 master:1 - {kind} {source} rw\n"
        "31 27 0:46 / /elsewhere rw - tmpfs tmpfs rw\n"
    )


@pytest.mark.parametrize(
    ("kind", "source", "expected"),
    [
        ("ext4", "/dev/sda1", "disk"),
        ("xfs", "/dev/nvme0n1p1", "disk"),
        ("fuseblk", "/dev/sdb1", "disk"),
        ("tmpfs", "tmpfs", "ram"),
        ("ramfs", "none", "ram"),
        ("overlay", "overlay", "overlay"),
        ("nfs4", "server:/export", "network"),
        ("cifs", "//server/share", "network"),
        ("fuse.sshfs", "me@there:", "network"),
        ("fuse.gcsfuse", "bucket", "network"),
        ("fuse", "drive", "cloud-drive"),
        ("fuse.drivefs", "x", "cloud-drive"),
        ("fuse.mergerfs", "a:b", "fuse"),
        ("9p", "share", "host-share"),
        ("virtiofs", "share", "host-share"),
    ],
)
def test_kinds(tmp_path: Path, kind: str, source: str, expected: str) -> None:
    found = file_system(tmp_path, mounts(str(tmp_path), kind, source))
    assert (found.type, found.kind, found.source) == (kind, expected, source)
    assert found.mount_point == str(tmp_path)
    assert bool(found.warning) == (expected != "disk")


def test_names_with_blanks_and_a_later_mount_on_the_same_point(tmp_path: Path) -> None:
    folder = tmp_path / "my drive"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    table = mounts(point, "ext4", "/dev/a") + mounts(point, "nfs", "b:/")
    assert file_system(folder, table).kind == "network"


def test_a_neighbour_with_the_same_beginning_is_another_place(tmp_path: Path) -> None:
    (tmp_path / "data2").mkdir()
    table = mounts(str(tmp_path / "data"), "nfs", "b:/")
    assert file_system(tmp_path / "data2", table).kind == "disk"


@pytest.mark.parametrize("table", ["", "garbage\n\n - \n1 2 3 - x\n"])
def test_no_mount_table_is_no_error(tmp_path: Path, table: str) -> None:
    assert file_system(tmp_path, table).kind == "unknown"


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    table = mounts(str(tmp_path / "real"), "nfs", "b:/")
    assert file_system(tmp_path / "link", table).kind == "network"


@pytest.mark.parametrize(
    "path",
    [
        "/content/drive/MyDrive/x",
        "/Users/me/Library/CloudStorage/GoogleDrive-me/x",
        "/Users/me/Google Drive/x",
    ],
)
def test_cloud_folders_are_known_by_their_path(path: str) -> None:
    assert filesystem._classify(path, "unknown", "", "/") == "cloud-drive"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_this_machine() -> None:
    assert file_system("/dev/shm").kind == "ram"
