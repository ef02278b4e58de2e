"""The errors of Elbowroom: what was asked, what was found, what to do next.

Leaf classes that hold their numbers as fields; messages are built here, in one place.
"""

from __future__ import annotations


class ElbowroomError(Exception):
    """Base of all errors that Elbowroom raises on purpose."""


class ChangedTensorError(ElbowroomError, RuntimeError):
    """A tensor that a replay must read was changed after the forward (engine rule 7).

    Fields: ``tensor`` (its name or description), ``operator`` (the operator that would read it, or None),
    ``recorded_version`` and ``found_version`` (autograd's version counters, None where another fact decided).
    """

    def __init__(
        self,
        tensor: str,
        *,
        operator: str | None = None,
        recorded_version: int | None = None,
        found_version: int | None = None,
        cause: str | None = None,
        remedy: str,
    ) -> None:
        self.tensor = tensor
        self.operator = operator
        self.recorded_version = recorded_version
        self.found_version = found_version
        found = cause or f"it was modified in place (version {recorded_version} then, version {found_version} now)"
        reader = f", which {operator} must read again" if operator else ""
        super().__init__(
            f"{tensor}{reader}, changed between forward and backward: {found}. "
            f"Gradients computed from it would be wrong. {remedy}"
        )


class ReplayError(ElbowroomError, RuntimeError):
    """An operator failed while it was replayed (engine rule 12); the original exception is ``__cause__``.

    Fields: ``region``, ``operator``, ``shapes`` (of its tensor inputs), ``line`` (source line that first
    ran it).
    """

    def __init__(self, *, region: str, operator: str, shapes: str, line: str, cause: str) -> None:
        self.region = region
        self.operator = operator
        self.shapes = shapes
        self.line = line
        super().__init__(
            f"replaying {operator} of region {region} failed: {cause}\n  inputs: {shapes}\n  first run at: {line}"
        )


class ProofError(ElbowroomError, RuntimeError):
    """A program that had been proved replays other bits now (engine rule 9): gradients since the last
    proof are in doubt.

    Fields: ``region``, ``operator``, ``line``, ``calls_in_doubt`` (calls since the proof that last held).
    """

    def __init__(self, *, region: str, operator: str, line: str, calls_in_doubt: int) -> None:
        self.region = region
        self.operator = operator
        self.line = line
        self.calls_in_doubt = calls_in_doubt
        super().__init__(
            f"region {region}: {operator} at {line} replayed bit for bit when it was first proved, and no longer does: "
            f"something writes its result (or its inputs) behind PyTorch's back. Up to {calls_in_doubt} calls since "
            f"the last proof may have had wrong gradients. Keep its result (list the operator in keep=[...]), or run "
            f"with verify='always'."
        )


class UsageError(ElbowroomError, ValueError):
    """Something the user asked for cannot be done as asked. At the command line: one line and exit code 2."""


class InfeasibleBudgetError(ElbowroomError, ValueError):
    """No plan keeps a step under the budget. Raised before the step that would need it.

    Fields: ``budget_bytes``, ``least_bytes`` (the peak of the most frugal plan), ``where`` (the part of the step that
    needs it).
    """

    def __init__(self, budget_bytes: int, least_bytes: int, where: str) -> None:
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.where = where
        super().__init__(
            f"a budget of {budget_bytes / 2**20:,.1f} MiB ({budget_bytes} bytes) was asked for; the least that this "
            f"step can do with is {least_bytes / 2**20:,.1f} MiB ({least_bytes} bytes): {where}. Give at least "
            f"that, or make the step smaller: fewer sequences at once (with gradient accumulation), shorter "
            f"sequences, more and smaller regions, or a loss that is computed in tiles."
        )


class PlanMismatchError(ElbowroomError, ValueError):
    """A saved plan is not of this model at these input shapes. Fields: ``planned`` and ``found`` (fingerprints)."""

    def __init__(self, planned: str, found: str, what: str) -> None:
        self.planned = planned
        self.found = found
        super().__init__(
            f"the plan was made for another {what}: its fingerprint is {planned}, that of this one is {found}. Make a "
            f"new plan (fit(model, budget=...)), or give fit the model and batch that the plan was made with."
        )
