"""What the planner answers with: a ``Plan`` of one ``Choice`` an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowmem.plan.machine import RESOURCE_NAMES, RESOURCES, Machine
from lowmem.units import short_bytes, short_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Choice:
    """One optimizer: what it takes, and whether that is there.

    Attributes:
        name: ``"Adam"``, ``"SparseAdam"``, ``"DSA"``, ``"AdamW"`` or ``"SlimAdamW"``.
        bytes: by resource (``"vram"``, ``"ram"``, ``"disk"``) and part (``"weights"``,
            ``"gradients"``, ``"moments"``, ``"working"``, ``"runtime"``).
        missing: bytes that are short, by resource; empty where it fits.
        most: the largest number of rows (or parameters) that fits; 0 where none does.
    """

    name: str
    bytes: dict[str, dict[str, int]]
    missing: dict[str, int]
    most: int

    @property
    def fits(self) -> bool:
        return not self.missing

    def total(self, resource: str) -> int:
        """Bytes of ``"vram"``, ``"ram"`` or ``"disk"``."""
        return sum(self.bytes[resource].values())

    @property
    def verdict(self) -> str:
        """``"fits"``, or by how much not: ``"no: 5.12 GB of VRAM short"``."""
        if self.fits:
            return "fits"
        short = (f"{short_bytes(n)} of {RESOURCE_NAMES[r]}" for r, n in self.missing.items())
        return f"no: {' and '.join(short)} short"


@dataclass(frozen=True, repr=False)
class Plan:
    """What fits where. Printing it gives a table; ``figure()`` a picture; ``code`` the lines.

    Attributes:
        machine: the machine that was planned for.
        rows, dim: the table; for a dense model ``rows`` is its parameter count, ``dim`` None.
        dtype: of the weights.
        weights: where they lie, ``"cpu"`` or ``"cuda"``.
        batch: ids in one step; ``None`` for a dense model.
        choices: one ``Choice`` an optimizer; ``plan["DSA"]`` picks one.
        recommended: the choice to take, or ``None`` where nothing fits.
        page_cache: bytes of RAM that DSA leaves for the page cache.
        cached_share: the share of rows that DSA then finds in memory, by access pattern.
        notes: what the figures leave out.
    """

    machine: Machine
    rows: int
    dim: int | None
    dtype: str
    weights: str
    batch: int | None
    choices: tuple[Choice, ...]
    recommended: Choice | None
    page_cache: int | None = None
    cached_share: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Choice:
        for choice in self.choices:
            if choice.name == name:
                return choice
        raise KeyError(f"no choice {name!r}; there are {', '.join(c.name for c in self.choices)}")

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def title(self) -> str:
        where = "VRAM" if self.weights == "cuda" else "RAM"
        if self.dim is None:
            return f"{short_count(self.rows)} {self.dtype} parameters in {where}"
        return (
            f"{self.rows:,} × {self.dim} {self.dtype} table in {where}, "
            f"{short_count(self.batch or 0)} ids a step"
        )

    @property
    def resources(self) -> list[str]:
        """The resources that any choice uses."""
        return [r for r in RESOURCES if any(c.total(r) for c in self.choices)]

    @property
    def sentence(self) -> str:
        """The advice, in one or two sentences."""
        unit = "parameters" if self.dim is None else "rows"
        if self.recommended is None:
            best = max(self.choices, key=lambda c: c.most)
            if best.most == 0:
                return "Nothing fits: one step's batch alone takes more than this machine has."
            return f"Nothing fits. {best.name} goes furthest here: {short_count(best.most)} {unit}."
        name = self.recommended.name
        others = [c for c in self.choices if c is not self.recommended and not c.fits]
        virtue = "needs no disk" if name == "SparseAdam" else "takes the least memory"
        start = f"All fit here; take {name}, which {virtue}."
        if others:
            failing = " and ".join(c.name for c in others)
            start = f"Take {name}: {failing} {'does' if len(others) == 1 else 'do'} not fit."
        return " ".join(part for part in (start, self.cache_sentence) if part)

    @property
    def cache_sentence(self) -> str:
        """What the page cache does for DSA; empty where that does not matter."""
        if self.recommended is None or self.recommended.name != "DSA":
            return ""
        uniform, zipf = self.cached_share["uniform"], self.cached_share["zipf"]
        if uniform >= 1:
            return "Its moments fit in the page cache, so the disk's speed will hardly matter."
        return (
            f"The page cache serves {uniform:.0%} of uniform and {zipf:.0%} of Zipf(1.05) row "
            "accesses; the rest wait for the disk: run lowmem iocheck."
        )

    def text(self) -> str:
        """The table, the sentence and the notes as plain text."""
        from lowmem.plan.render import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from lowmem.plan.render import plan_html

        return plan_html(self)

    def figure(self) -> Figure:
        """Stacked bars, one a choice, with the machine's limits as lines."""
        from lowmem.plan.picture import plan_figure

        return plan_figure(self)

    @property
    def alt(self) -> str:
        """What the picture shows, in words, for those who do not see it."""
        bars = []
        for choice in self.choices:
            sizes = ", ".join(
                f"{short_bytes(choice.total(r))} {RESOURCE_NAMES[r]}" for r in self.resources
            )
            bars.append(f"{choice.name} {sizes} ({choice.verdict})")
        return f"Bars for a {self.title}: {'; '.join(bars)}. Limits: {self.machine}."

    @property
    def code(self) -> str:
        """The lines to write for the recommended choice; they run when pasted."""
        from lowmem.plan.code import plan_code

        return plan_code(self)

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain types and plain bytes, for JSON."""
        return {
            "machine": {"name": self.machine.name, "note": self.machine.note}
            | {f"{r}_bytes": self.machine.limit(r) for r in RESOURCES},
            "rows" if self.dim is not None else "parameters": self.rows,
            "dim": self.dim,
            "dtype": self.dtype,
            "weights": self.weights,
            "batch": self.batch,
            "choices": [
                {
                    "name": c.name,
                    "fits": c.fits,
                    "bytes": c.bytes,
                    "total_bytes": {r: c.total(r) for r in RESOURCES},
                    "missing_bytes": c.missing,
                    "most_rows" if self.dim is not None else "most_parameters": c.most,
                }
                for c in self.choices
            ],
            "recommended": self.recommended.name if self.recommended else None,
            "page_cache_bytes": self.page_cache,
            "cached_share": self.cached_share,
            "advice": self.sentence,
            "notes": list(self.notes),
            "code": self.code,
        }
