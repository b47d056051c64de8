"""SlimAdamW: AdamW whose second moment is replaced by its mean where the rules allow it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowmem.slim import dispatch
from lowmem.slim.checkpoint import checked_for_loading, rules_entry, unwrapped
from lowmem.slim.checks import (
    check_hyper_parameters,
    listed,
    refuse_param,
    refuse_sparse_modules,
    refused_gradient,
    tensor_of,
)
from lowmem.slim.dispatch import Batch, Slot
from lowmem.slim.entries import Entry, Resolver, logger
from lowmem.slim.report import Report, Row
from lowmem.slim.rulesfile import Axes, Split
from lowmem.slim.state import moment_shape, moment_views


class SlimAdamW(Optimizer):
    """AdamW with a second moment that is averaged over axes where that is safe.

    ``v ← β2·v + (1 − β2)·mean_K(g²)``; the first moment and the update are AdamW's. Without
    rules it is ``torch.optim.AdamW``. The method is SlimAdam, "When Can You Get Away with
    Low Memory Adam?" (arXiv 2503.01843).

    State of a parameter: ``step``, ``exp_avg`` (the parameter's shape and dtype) and
    ``exp_avg_sq``: float32 whatever the parameter's dtype, of size 1 along averaged axes,
    and for a split parameter one flat tensor of its parts (``second_moment_parts`` gives
    them their shapes).

    Args:
        params: Parameters, named parameters, or groups of either, as ``torch.optim`` takes
            them. Rules go by names, so with rules pass ``model.named_parameters()``, or
            ``model``.
        lr: Learning rate, a number or a tensor of one element. Default 1e-3.
        betas: Decay rates of the two moments. Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled, for every parameter, as in AdamW. Default 1e-2. (The published
            code leaves vectors out; here a group with ``weight_decay=0`` does that.)
        rules: ``{parameter name: [axes] or None}`` (``lowmem.slim.rulesfile`` has the whole
            form, splits included), the path of such a JSON file, or ``"table1"`` for the
            paper's static rules by layer type. Default: none.
        model: The module that owns the parameters. It tells names, the types of layers, and
            which weights are tied; ``"table1"`` without it has only names to go by.
        rules_json_path: A rules file: the published spelling of ``rules=PATH``.
        layer_map_path: A JSON file ``{layer type: [names]}`` for static rules: the published
            spelling of ``rules="table1"`` with names of one's own. ``"layer_map.json"`` is the
            packaged map where the working directory has none.
        maximize: Go up the gradient. Default False.
        verbose: Print the report once.

    Raises:
        ValueError: hyper-parameters out of range; more than one source of rules; a rule that
            names no parameter or does not fit; rules without names; sparse embeddings
            (``lowmem.DSA`` is for those) or complex parameters.
        TypeError: an argument of a wrong type.
        OSError: a file that cannot be read.

    A NaN or infinite gradient passes into the moments as in AdamW, and where the second
    moment is averaged it spoils the whole slice, not one element: clip, or use a
    ``GradScaler``, which skips such steps.

    >>> model = nn.Linear(8, 4)
    >>> optimizer = SlimAdamW(model.named_parameters(), lr=1e-2, rules={"weight": [1]})
    >>> optimizer.report()
    <Report: 2 parameters, 77.78% of the second moment and 38.89% of the state saved>
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rules: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        model: nn.Module | None = None,
        rules_json_path: str | os.PathLike[str] | None = None,
        layer_map_path: str | os.PathLike[str] | None = None,
        maximize: bool = False,
        verbose: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        check_hyper_parameters(defaults)
        if isinstance(params, nn.Module):
            raise TypeError(
                "SlimAdamW takes parameters, not a module: pass model.named_parameters(), or "
                "model.parameters() and model=model"
            )
        self._resolver = Resolver(rules, model, rules_json_path, layer_map_path)
        self._entries: dict[Tensor, Entry] = {}
        self._slots: dict[Tensor, Slot] = {}
        groups = listed(params)
        if model is not None:
            refuse_sparse_modules(model, groups)
        self._enter(groups)
        super().__init__(groups, defaults)
        if self._resolver.ruled:
            unreached = self.report().unreached
            if unreached:
                by_name = self._resolver.static and model is None
                logger.warning(
                    "no rule reaches %d parameters that could be averaged: %s%s%s",
                    len(unreached),
                    ", ".join(unreached[:5]),
                    f" and {len(unreached) - 5} more" if len(unreached) > 5 else "",
                    "; with model= their layers' types decide, not names alone" if by_name else "",
                )
        if verbose:
            print(self.report())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; rules, names and hyper-parameters are checked as at construction."""
        if isinstance(param_group, dict) and "params" in param_group:
            (param_group,) = listed([param_group])
            check_hyper_parameters({**self.defaults, **param_group})
            fresh = [p for p in param_group["params"] if tensor_of(p) not in self._entries]
            if fresh:
                self._enter([{"params": fresh}])
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``closure`` evaluates the model again and returns the loss.

        Raises:
            ValueError: a sparse gradient; nothing has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = []
        for group in self.param_groups:
            batches: dict[Any, Batch] = {}
            counts: list[Tensor] = []
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided or grad.is_complex():
                    raise ValueError(refused_gradient(self._shown(param), grad))
                if grad.shape != param.shape:
                    raise ValueError(
                        f"{self._shown(param)} has shape {tuple(param.shape)}, its gradient "
                        f"{tuple(grad.shape)}"
                    )
                state = self.state[param]
                if not state:
                    self._start(param, state)
                counts.append(state["step"])
                if param.numel():
                    slot = self._slots.get(param)
                    if slot is None or not slot.serves(param, state):
                        slot = Slot(param, state, self._entries[param].rule)
                        self._slots[param] = slot
                    slot.add_to(batches, grad, len(counts) - 1)
            if counts:
                work.append((group, counts, batches))
        for group, counts, batches in work:
            torch._foreach_add_(counts, 1)
            beta1, beta2 = group["betas"]
            steps = [count.item() for count in counts]
            for backend, batch in batches.items():
                backend.slim_adamw_(
                    batch.params,
                    batch.grads,
                    batch.exp_avgs,
                    batch.exp_avg_sqs,
                    batch.axes,
                    [steps[place] for place in batch.places],
                    lr=float(group["lr"]),
                    beta1=float(beta1),
                    beta2=float(beta2),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    maximize=group["maximize"],
                )
        return loss

    def report(self) -> Report:
        """One row a parameter: what it is, its axes, its bytes before and after; and totals."""
        rows = []
        for number, param in enumerate(p for group in self.param_groups for p in group["params"]):
            entry, shape = self._entries[param], tuple(param.shape)
            bytes_first = math.prod(shape) * param.element_size()
            rows.append(
                Row(
                    name=entry.name or str(number),
                    shape=shape,
                    layer_type=entry.layer_type,
                    decided_by=entry.decided_by,
                    axes=entry.rule,
                    bytes_before=bytes_first,
                    bytes_after=4 * math.prod(moment_shape(entry.rule, shape)),
                    bytes_first=bytes_first,
                    reached=entry.reached,
                    note=entry.note,
                )
            )
        return Report(rows)

    def rule(self, param: Tensor) -> Axes | Split | None:
        """The rule of a parameter, in the form of ``lowmem.slim.rulesfile``."""
        return self._entries[param].rule

    def second_moment_parts(self, param: Tensor) -> list[Tensor]:
        """Views of a parameter's ``exp_avg_sq``, one a part, in the order of ``Split.runs``."""
        return moment_views(self.state[param]["exp_avg_sq"], self.rule(param), tuple(param.shape))

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the rules of each group under ``"rules"``."""
        saved = super().state_dict()
        if isinstance(saved, dict) and "param_groups" in saved:
            for packed, group in zip(saved["param_groups"], self.param_groups, strict=True):
                packed["rules"] = rules_entry([self._entries[p] for p in group["params"]])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of SlimAdamW, or of AdamW where there are no rules.

        Raises:
            ValueError: other rules, names or shapes; the first differences are in the
                message, and nothing has changed.
        """

        def check(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            return checked_for_loading(given, self.param_groups, self._entries)

        handle = self.register_load_state_dict_pre_hook(check)  # after a person's own hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_resolver": self._resolver.for_pickling(self._entries),
            "_entries": self._entries,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots = {}
        unwrapped(self.state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def _enter(self, groups: list[dict[str, Any]]) -> None:
        """Give every parameter of ``groups`` its entry."""
        named: list[tuple[Tensor, list[str]]] = []
        for group in groups:
            given = group.get("names_of_duplicates", {})
            for member in group["params"]:
                param = tensor_of(member)
                if not isinstance(param, Tensor):
                    continue  # torch refuses it in its own words
                names = [member[0]] if isinstance(member, tuple) else []
                refuse_param(param, names)
                named.append((param, [*names, *given.get(id(param), [])]))
            group.pop("names_of_duplicates", None)
        entries = self._resolver.resolve(named, list(self._entries.values()))
        self._entries.update(zip((param for param, _ in named), entries, strict=True))

    def _shown(self, param: Tensor) -> str:
        return repr(self._entries[param].name or f"a parameter of shape {tuple(param.shape)}")

    def _start(self, param: Tensor, state: dict[str, Any]) -> None:
        rule = self._entries[param].rule
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = dispatch.zero_moment(param, rule)
