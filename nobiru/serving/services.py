"""What the routes share: options, the model's description, and the neighbours that do the work."""

from __future__ import annotations

from dataclasses import dataclass

from nobiru.config import SchedulingPolicy, ServerConfig
from nobiru.errors import InvalidRequestError, NotFoundError
from nobiru.folder.spec import ModelFolder
from nobiru.metrics import Metrics
from nobiru.serving.admission import Admission
from nobiru.serving.autoscaler import Autoscaler
from nobiru.serving.protocols import Engine, Pool


@dataclass(frozen=True, kw_only=True)
class Services:
    """One server's parts. `folder.max_model_len` and `embedding_dim` are the limits clients are told."""

    config: ServerConfig
    scheduling_policy: SchedulingPolicy
    folder: ModelFolder
    pool: Pool
    client: Engine
    metrics: Metrics
    admission: Admission
    autoscaler: Autoscaler | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model_names(self.folder.name)

    def check_embeds(self) -> None:
        """Raises `InvalidRequestError` when the model makes no embeddings."""
        if self.folder.task != "embed":
            raise InvalidRequestError(
                f"the model {self.model_names[0]!r} generates text and makes no embeddings; use /v1/completions or "
                "/v1/chat/completions",
                param="model",
                code="model_does_not_embed",
            )

    def check_generates(self) -> None:
        """Raises `InvalidRequestError` when the model generates no text."""
        if self.folder.task != "generate":
            raise InvalidRequestError(
                f"the model {self.model_names[0]!r} makes embeddings and generates no text; use /v1/embeddings",
                param="model",
                code="model_does_not_generate",
            )

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises `NotFoundError` for a name that is not served."""
        names = self.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise NotFoundError(
                f"the model {name[:200]!r} is not served here; available: {', '.join(names)}",
                param="model",
                code="model_not_found",
            )
        return name
