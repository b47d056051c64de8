"""Write the repository's address into every badge, link and install line.

    python scripts/stamp.py                                   write the address of pyproject.toml
    python scripts/stamp.py https://github.com/you/lowmem     take another address, and write it
    python scripts/stamp.py https://github.com/you/lowmem v1  and another branch or tag
    python scripts/stamp.py --check                           change nothing; 1 if a file disagrees

The address lives in pyproject.toml (``project.urls.Repository`` and ``tool.lowmem.ref``);
everything else is a copy that this script makes. Which text counts as a copy: Colab badges,
``git+`` and ``git clone`` addresses, fenced off by their form, the fields of CITATION.cff,
the links of CHANGELOG.md, and the lines ``REPO = "..."`` and ``REF = "..."`` of notebooks.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PART = r"[A-Za-z0-9._-]+"
HOME = rf"https://github\.com/{PART}/{PART}"


@dataclass(frozen=True)
class Address:
    """Where the repository is (``https://github.com/OWNER/NAME``) and which branch or tag."""

    url: str
    ref: str

    def __post_init__(self) -> None:
        if not re.fullmatch(HOME, self.url) or self.url.endswith(".git"):
            raise ValueError(
                f"the address must look like https://github.com/OWNER/NAME, not {self.url!r}"
            )
        if not re.fullmatch(rf"{PART}(/{PART})*", self.ref):
            raise ValueError(f"the branch or tag must be one git name, not {self.ref!r}")

    @property
    def slug(self) -> str:
        """``OWNER/NAME``."""
        return self.url.removeprefix("https://github.com/")


def read_address(root: Path) -> Address:
    """The address that pyproject.toml states."""
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return Address(data["project"]["urls"]["Repository"], data["tool"]["lowmem"]["ref"])


def stamp_text(text: str, to: Address) -> str:
    """``text`` with every form of the address that prose uses set to ``to``."""
    colab = rf"(https://colab\.research\.google\.com/github/){PART}/{PART}/blob/.+?(/notebooks/)"
    text = re.sub(colab, rf"\g<1>{to.slug}/blob/{to.ref}\g<2>", text)
    # A git name ends where the address does: at a space, a quote, a bracket or a line's end.
    pinned = rf"git\+{HOME}@{PART}(?:/{PART})*"
    text = re.sub(pinned, f"git+{to.url}@{to.ref}", text)
    text = re.sub(rf"git\+{HOME}(?!@)(?![A-Za-z0-9._-])", f"git+{to.url}", text)
    return re.sub(rf"git clone {HOME}", f"git clone {to.url}", text)


def stamp_pyproject(text: str, to: Address) -> str:
    text = re.sub(r'(?m)^(Repository = )".*"$', rf'\g<1>"{to.url}"', text)
    return re.sub(r'(?m)^(ref = )".*"$', rf'\g<1>"{to.ref}"', text)


def stamp_citation(text: str, to: Address) -> str:
    return re.sub(r'(?m)^((?:repository-code|url): )".*"$', rf'\g<1>"{to.url}"', text)


def stamp_changelog(text: str, to: Address) -> str:
    links = rf"(?m)^(\[[^\]]+\]: ){HOME}(/(?:compare|releases|commits)/)"
    return re.sub(links, rf"\g<1>{to.url}\g<2>", text)


def stamp_notebook(text: str, to: Address) -> str:
    """The notebook with its badge and install cell set; its form is kept if nothing changed."""
    notebook = json.loads(text)
    changed = False
    for cell in notebook["cells"]:
        source = cell["source"]
        whole = source if isinstance(source, str) else "".join(source)
        new = stamp_text(whole, to)
        if cell["cell_type"] == "code":
            new = re.sub(r'(?m)^(\s*REPO = )"https?://[^"]*"', rf'\g<1>"{to.url}"', new)
            new = re.sub(r'(?m)^(\s*REPO = )"(?!https?://)[^"]*"', rf'\g<1>"{to.slug}"', new)
            new = re.sub(r'(?m)^(\s*REF = )"[^"]*"', rf'\g<1>"{to.ref}"', new)
        if new != whole:
            cell["source"] = new if isinstance(source, str) else new.splitlines(keepends=True)
            changed = True
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" if changed else text


def stale_files(root: Path, to: Address) -> dict[Path, str]:
    """The files that do not state ``to``, each with the text that does."""
    jobs = [
        (root / "pyproject.toml", stamp_pyproject),
        (root / "CITATION.cff", stamp_citation),
        (root / "CHANGELOG.md", stamp_changelog),
        *((path, stamp_text) for path in [root / "README.md", *sorted(root.glob("docs/*.md"))]),
        *((path, stamp_notebook) for path in sorted(root.glob("notebooks/*.ipynb"))),
    ]
    stale = {}
    for path, stamp in jobs:
        if path.exists():
            text = path.read_text(encoding="utf-8")
            new = stamp(text, to)
            if new != text:
                stale[path] = new
    return stale


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """0: every file agrees, or now does; 1: ``--check`` found one that does not; 2: bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", help="https://github.com/OWNER/NAME")
    parser.add_argument("ref", nargs="?", help="branch or tag")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a file is stale")
    args = parser.parse_args(argv)
    try:
        known = read_address(root)
        address = Address((args.url or known.url).rstrip("/"), args.ref or known.ref)
    except ValueError as error:
        print(f"stamp: {error}", file=sys.stderr)
        return 2
    stale = stale_files(root, address)
    for path, text in stale.items():
        name = path.relative_to(root)
        if args.check:
            print(f"{name} does not state {address.url} at {address.ref}; run scripts/stamp.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"stamped {name}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
