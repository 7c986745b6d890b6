"""The framework's settings: its three slots, and what follows from what is in them."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from ...errors import ConfigError
from ...method import Info
from ...parts.distill import Distill
from ...parts.local import Local
from ...server import Server
from ...settings import Replaceable
from .ensemble_trainers import EnsembleTrainer
from .global_trainers import GlobalTrainer
from .groups import Schedule
from .local_trainers import LocalTrainer


@dataclass(frozen=True)
class Slots:
    """Local trainer, ensemble trainer and global trainer, and how clients are grouped between them."""

    local: Local = field(default_factory=Local)
    fusion: Distill = field(default_factory=Distill)
    local_trainer: Annotated[LocalTrainer, Replaceable()] = field(default_factory=LocalTrainer)
    ensemble_trainer: Annotated[EnsembleTrainer, Replaceable()] = field(default_factory=EnsembleTrainer)
    global_trainer: Annotated[GlobalTrainer, Replaceable()] = field(default_factory=GlobalTrainer)
    K: int = 2  # global models (of each architecture), each trained by a group of clients
    group_sizes: tuple[int, ...] | None = None  # how the clients are shared out; left out: evenly
    schedule: Schedule = "random"  # groups drawn anew each round, or Fed-ensemble's strata
    pipeline: Literal["off", "strict", "eager"] = "off"  # designated only: clients train while the server distils
    secure: bool = False  # refuse what secure aggregation forbids: individual models, groups of one client
    save_ensemble: bool = False  # keep the round's client models, for inference; aggregated ones always are
    report_ensemble: bool = True  # measure the teachers' joint prediction each round (costs a pass of each)

    info: ClassVar[Info]

    def __post_init__(self) -> None:
        if self.K < 1:
            raise ConfigError(f"K = {self.K}: at least 1 global model is needed")
        if self.group_sizes is not None and (len(self.group_sizes) != self.K or min(self.group_sizes) < 1):
            raise ConfigError(f"group_sizes = {list(self.group_sizes)}: K = {self.K} sizes of at least 1 are needed")
        if self.group_sizes is not None and self.schedule == "strata":
            raise ConfigError("group_sizes: strata are of equal size; leave it out, or set schedule = 'random'")
        if self.pipeline != "off" and not self.global_trainer.designated:
            raise ConfigError(f"pipeline = {self.pipeline!r}: only designated distillation leaves groups free to train")
        if self.secure and self.curious:
            raise ConfigError(f"secure = true: {', '.join(self.curious)} needs individual client models")

    @property
    def curious(self) -> list[str]:
        """The slots that need individual client models."""
        slots = ("local_trainer", "ensemble_trainer", "global_trainer")
        return [f"method.{s}" for s in slots if getattr(self, s).needs_client_models]

    @property
    def shares(self) -> tuple[int, ...]:
        return self.group_sizes or (1,) * self.K

    @property
    def keeps_ensemble(self) -> bool:
        """Whether the ensemble stays in the state between rounds."""
        return self.save_ensemble or not self.curious

    def describe(self) -> Info:
        """`info` for these settings."""
        privacy = (
            f"individual replies (for {', '.join(self.curious)})"
            if self.curious
            else "means only (no slot needs single models)"
        )
        public = self.info.public if self.global_trainer.distils and self.fusion.steps else "none"
        return replace(self.info, public=public, state=self.local_trainer.client_state, privacy=privacy)

    def check(self, server: Server) -> None:
        """Refuse at the start what would fail in the middle."""
        self.local_trainer.check(self.local)
        self.global_trainer.check(self.fusion, server)
