"""Where a model's parameters are used: names, owners, orientation. No rules in here.

A *use* is one name of one parameter. A tied weight has several; wrappers that put
themselves into names (``torch.compile``, FSDP, checkpointing) are taken out of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Path = tuple[str, ...]

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_IN_OUT_NAMES = {"c_attn", "c_fc", "c_proj"}  # (in, out) in GPT-2's Conv1D, (out, in) in nn.Linear


def canonical(name: str) -> str:
    """A parameter's name without the components that wrappers put into it.

    >>> canonical("_orig_mod.h.0._orig_mod.attn.weight")
    'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(eq=False)
class Use:
    """One name of a parameter, with the module that owns it under that name, if known."""

    name: str
    shape: tuple[int, ...]
    path: Path  # of the owner
    leaf: str  # the parameter's own name, mostly "weight"
    key: int  # the same for all uses of one tensor
    owner: nn.Module | None = None
    parent: nn.Module | None = None
    out_axis: int | None = None  # None: unknown, or no linear map
    in_axes: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def role_path(self) -> Path:
        """The components that name what the parameter is for."""
        path = self.path if self.leaf in ("weight", "kernel") else (*self.path, self.leaf)
        while path and (path[-1].isdigit() or path[-1] == "base_layer"):
            path = path[:-1]
        return path

    @property
    def out_size(self) -> int:
        return 0 if self.out_axis is None else self.shape[self.out_axis]

    @property
    def in_size(self) -> int:
        size = 1 if self.in_axes else 0
        for axis in self.in_axes:
            size *= self.shape[axis]
        return size

    @property
    def numbered(self) -> bool:
        """Inside a numbered block, as the layers of a stack are."""
        return any(part.isdigit() for part in self.role_path)


def uses_of_model(model: nn.Module) -> list[Use]:
    """Every name of every parameter of ``model``, tied ones under each of their names."""
    modules = {canonical(name): module for name, module in _modules(model)}
    found = []
    for name, param in model.named_parameters(remove_duplicate=False):
        refuse_lazy(param, repr(name))
        path, leaf = _cut(canonical(name))
        use = Use(canonical(name), tuple(param.shape), path, leaf, id(param))
        use.owner = modules.get(".".join(path))
        use.parent = modules.get(".".join(path[:-1])) if path else None
        _orient_by_module(use)
        found.append(use)
    return found


def refuse_lazy(param: Tensor, shown: str) -> None:
    """Refuse a parameter that has no shape yet."""
    if is_lazy(param):
        raise ValueError(
            f"{shown} has no shape yet: it is of a lazy module (nn.LazyLinear and its kin), which "
            "gets its parameters in the first forward pass. Run one before making the optimizer"
        )


def uses_of_names(shapes: Mapping[str, tuple[int, ...]]) -> list[Use]:
    """Uses that only names and shapes tell of; weights are taken to be (out, in)."""
    found = []
    for key, (name, shape) in enumerate(shapes.items()):
        path, leaf = _cut(canonical(name))
        found.append(Use(canonical(name), tuple(shape), path, leaf, key))
    flipped = _conv1d_by_shapes(found)
    for use in found:
        if use.leaf != "weight" or len(use.shape) < 2:
            continue
        last = use.role_path[-1:] and use.role_path[-1]
        if last in _IN_OUT_NAMES and len(use.shape) == 2:
            if flipped is None:
                use.notes.append("names cannot tell (in, out) from (out, in): pass model=")
                continue
            _orient(use, 1 if flipped else 0)
        else:
            _orient(use, 0)
    return found


def _modules(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    # Wrappers first, so that the module they wrap, whose canonical name is the same, stays.
    return model.named_modules(remove_duplicate=False)


def _cut(name: str) -> tuple[Path, str]:
    *path, leaf = name.split(".")
    return tuple(path), leaf


def _orient(use: Use, out_axis: int) -> None:
    use.out_axis = out_axis
    use.in_axes = tuple(axis for axis in range(len(use.shape)) if axis != out_axis)


def _orient_by_module(use: Use) -> None:
    """Which axis is the output's, from the type of the module that owns the weight."""
    owner, shape = use.owner, use.shape
    if owner is None or use.leaf != "weight" or len(shape) < 2:
        return
    if is_transposed_conv(owner):
        _orient(use, 1)
    elif isinstance(owner, nn.Linear) or is_conv(owner):
        _orient(use, 0)
    elif len(shape) == 2 and is_conv1d_linear(owner, shape):
        _orient(use, 1)
    elif len(shape) == 2 and shape == (
        getattr(owner, "out_features", None),
        getattr(owner, "in_features", None),
    ):
        _orient(use, 0)


def is_conv(module: nn.Module | None) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_transposed_conv(module: nn.Module | None) -> bool:
    return isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))


def is_conv1d_linear(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """A linear layer that stores (in, out), as GPT-2's ``Conv1D`` does."""
    named = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return named and getattr(module, "nf", shape[1]) == shape[1]


def is_embedding(module: nn.Module | None, shape: tuple[int, ...]) -> bool:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    return module is not None and shape == (
        getattr(module, "num_embeddings", None),
        getattr(module, "embedding_dim", None),
    )


def is_norm(module: nn.Module | None) -> bool:
    if module is None:
        return False
    kinds = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
    return isinstance(module, kinds) or any(
        kind.__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d", "NormGated"))
        for kind in type(module).__mro__
    )


def _conv1d_by_shapes(uses: Iterable[Use]) -> bool | None:
    """True where fused and widening layers are stored (in, out); None where nothing tells."""
    votes = set()
    for use in uses:
        if len(use.shape) != 2 or use.leaf != "weight" or not use.role_path:
            continue
        rows, columns = use.shape
        if use.role_path[-1] in ("c_attn", "c_fc") and rows != columns:
            votes.add(columns > rows)
    return votes.pop() if len(votes) == 1 else None


def model_names(model: nn.Module) -> dict[int, list[str]]:
    """Every (canonical) name of each parameter, by the tensor's ``id``."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(canonical(name))
    return names
