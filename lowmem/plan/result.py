"""What the planner answers with: a ``Plan`` of one ``Choice`` an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowmem.plan.machine import RESOURCE_NAMES, RESOURCES, Machine
from lowmem.units import short_bytes, short_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_ONLY_JUST = 0.9  # of the page cache: more than this is gone when anything else takes memory


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
        may_wait: bytes of changed moments there that Linux lets wait to be written in a long
            run, by its defaults. What a run changes beyond that is as slow as the disk.
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
    may_wait: int | None = None
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
            best = self.furthest
            if best.most == 0:
                return "Nothing fits: one step's batch alone takes more than this machine has."
            return f"Nothing fits. {best.name} goes furthest here: {short_count(best.most)} {unit}."
        others = [c for c in self.choices if c is not self.recommended]
        failing = [c.name for c in others if not c.fits]
        verb = "does" if len(failing) == 1 else "do"
        start = f"{' and '.join(failing)} {verb} not fit" if failing else "All fit here"
        take = f"{start}. Take {self._reason}."
        if len(failing) == len(others):
            take = f"Take {self.recommended.name}: {start}."
        return " ".join(part for part in (take, self.cache_sentence) if part)

    @property
    def furthest(self) -> Choice:
        """The choice that the most rows fit with."""
        return max(self.choices, key=lambda c: c.most)

    @property
    def _reason(self) -> str:
        """The recommended choice, and why not another one that fits."""
        assert self.recommended is not None
        name = self.recommended.name
        fitting = {c.name for c in self.choices if c.fits} - {name}
        if name == "DSA" and "SparseAdam" in fitting:
            if self.dtype != "float32":
                return f"DSA, since SparseAdam keeps its moments in {self.dtype}"
            return (
                "DSA for speed: with weights in RAM its step is the faster one (lowmem bench "
                "dsa), but SparseAdam needs no file"
            )
        if name == "SparseAdam" and "DSA" in fitting:
            if self.weights == "cuda":
                return (
                    "SparseAdam, which needs neither disk nor traffic to the host (DSA is not "
                    "measured against it with weights in VRAM)"
                )
            return (
                "SparseAdam, which needs no disk: DSA is the faster one only while a run changes "
                f"less than about {short_bytes(self.may_wait or 0)} of its moments; beyond, it "
                "waits for the disk to write (lowmem iocheck)"
            )
        if name == "SlimAdamW" and fitting:
            return "SlimAdamW for memory, or AdamW, which averages nothing"
        return name

    @property
    def cache_sentence(self) -> str:
        """What the page cache does for DSA; empty where that does not matter."""
        if self.recommended is None or self.recommended.name != "DSA":
            return ""
        uniform, zipf = self.cached_share["uniform"], self.cached_share["zipf"]
        moments, cache = self.recommended.bytes["disk"]["moments"], self.page_cache or 0
        if uniform >= 1 and moments <= (self.may_wait or 0):
            return "Its moments fit in the page cache, so the disk's speed will hardly matter."
        if uniform >= 1:
            only = (
                f" only just ({short_bytes(moments)} of {short_bytes(cache)})"
                if moments > _ONLY_JUST * cache
                else ""
            )
            return (
                f"Its moments fit in the page cache{only}; where a run changes more than about "
                f"{short_bytes(self.may_wait or 0)} of them, it waits for the disk to write: run "
                "lowmem iocheck."
            )
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
            "may_wait_bytes": self.may_wait,
            "cached_share": self.cached_share,
            "advice": self.sentence,
            "notes": list(self.notes),
            "code": self.code,
        }
