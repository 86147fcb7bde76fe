"""nobiru: an inference engine and server for embedding models and language models.

Owns the public names and the version. `import nobiru` is cheap: a name brings its module, and so torch, when it is
first used, which keeps the HTTP process and the command line light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nobiru.generation import CompletionOutput, RequestOutput, SamplingParams
    from nobiru.llm import LLM
    from nobiru.request import EmbeddingRequestOutput, PoolingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_MODULE_OF = {
    "LLM": "nobiru.llm",
    "CompletionOutput": "nobiru.generation",
    "EmbeddingRequestOutput": "nobiru.request",
    "PoolingParams": "nobiru.request",
    "RequestOutput": "nobiru.generation",
    "SamplingParams": "nobiru.generation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
