"""What only a ring manager refuses."""

from __future__ import annotations

from dualmap.core.errors import ParameterMismatch


class OlderLife(ParameterMismatch):
    """A call of an agent process that has been replaced: stop it, the newer process speaks for the instance."""

    reason = "OLDER_LIFE"

    def __init__(self, instance_id: str, known_epoch: int, asked_epoch: int) -> None:
        super().__init__("agent_epoch", known_epoch, asked_epoch)
        self.instance_id = instance_id

    @property
    def message(self) -> str:
        """What happened and what to do, on one line."""
        return str(self)

    def __str__(self) -> str:
        """The same."""
        return (
            f"agent_epoch {self.theirs} of {self.instance_id!r} is an older life than {self.ours}: "
            "a newer process speaks for it, stop this one"
        )
