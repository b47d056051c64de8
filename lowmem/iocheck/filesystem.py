"""Which file system a folder lies on, and whether that is a disk at all."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["disk", "ram", "network", "cloud-drive", "fuse", "overlay", "host-share", "unknown"]

_RAM = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "zram"}
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "coda", "davfs"),
    *("glusterfs", "lustre", "beegfs", "gpfs", "orangefs", "pvfs2", "fuse.sshfs"),
    *("fuse.s3fs", "fuse.gcsfuse", "fuse.rclone", "fuse.glusterfs", "fuse.ceph-fuse"),
    *("fuse.blobfuse", "fuse.blobfuse2", "fuse.juicefs", "fuse.goofys", "fuse.davfs2"),
}
_HOST_SHARE = {"9p", "virtiofs", "vboxsf", "vmhgfs", "fuse.vmhgfs-fuse", "fuse.grpcfuse", "drvfs"}
_LOCAL_FUSE = {"fuseblk", "fuse.ntfs-3g", "fuse.exfat", "fuse.lxcfs"}
_CLOUD_FOLDER = re.compile(
    r"(^|/)(content/drive|Library/CloudStorage|Google ?Drive[^/]*|OneDrive[^/]*|Dropbox)(/|$)"
)

_WORDS: dict[Kind, str] = {
    "disk": "",
    "ram": "this folder is RAM, not a disk: what is stored here takes memory away",
    "network": "a network file system: every missing row is a trip over the network",
    "cloud-drive": "a cloud drive folder (Google Drive and its like): made for whole files, "
    "not for rows, and it uploads what is written",
    "fuse": "a FUSE file system: a user-space program answers, and what lies behind it is unknown",
    "overlay": "a container's overlay: the figures are those of the disk below it",
    "host-share": "a folder shared by the host: the host may cache what looks like disk here",
    "unknown": "the kind of file system could not be determined on this system",
}


@dataclass(frozen=True)
class FileSystem:
    """The file system below a folder, as this machine tells it."""

    path: str
    type: str
    kind: Kind
    mount_point: str
    source: str
    free_bytes: int
    total_bytes: int

    @property
    def is_disk(self) -> bool:
        """False where a figure measured here says nothing about a disk of this machine."""
        return self.kind in ("disk", "overlay", "unknown", "fuse")

    @property
    def warning(self) -> str:
        """One sentence about what this file system does to a row store; empty for a plain disk."""
        return _WORDS[self.kind]


def file_system(directory: str | os.PathLike[str], mountinfo: str | None = None) -> FileSystem:
    """What ``directory`` lies on.

    Args:
        directory: an existing folder.
        mountinfo: the text of ``/proc/self/mountinfo``; read from there by default.
    """
    path = os.path.realpath(directory)
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            mountinfo = ""
    mount_point, kind_name, source = _find_mount(path, mountinfo)
    usage = shutil.disk_usage(path)
    kind = _classify(path, kind_name, source, mount_point)
    return FileSystem(path, kind_name, kind, mount_point, source, usage.free, usage.total)


def _find_mount(path: str, mountinfo: str) -> tuple[str, str, str]:
    best = ("", "unknown", "")
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, options = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(options) < 2:
            continue
        point = _unescape(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one covers the earlier one.
        if inside and len(point) >= len(best[0]):
            best = (point, options[0], _unescape(options[1]))
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _classify(path: str, type_name: str, source: str, mount_point: str) -> Kind:
    portable = path.replace(os.sep, "/")
    fuse = type_name.startswith("fuse")
    if _CLOUD_FOLDER.search(portable) and (fuse or type_name == "unknown"):
        return "cloud-drive"
    if fuse and (source in ("drive", "DriveFS") or "drivefs" in type_name.lower()):
        return "cloud-drive"
    if type_name in _RAM:
        return "ram"
    if type_name in _NETWORK or (sys.platform == "win32" and portable.startswith("//")):
        return "network"
    if type_name in _HOST_SHARE:
        return "host-share"
    if type_name in _LOCAL_FUSE:
        return "disk"
    if fuse:
        return "fuse"
    if type_name in ("overlay", "aufs"):
        return "overlay"
    return "unknown" if type_name == "unknown" else "disk"
