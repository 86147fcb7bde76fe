"""The embedding server that many teams write first: FastAPI around `SentenceTransformer.encode`. A baseline.

It is meant to be typical, neither clever nor careless: the model is loaded once, requests are validated by pydantic,
and `encode` runs in the framework's thread pool so that the event loop stays free. It has no queue, no batching across
requests and no admission: that is what such apps look like, and what the comparison is about. Fields that it does not
know are ignored, as pydantic does by default.

    python benchmarks/home_made_server.py --model ./my-model --port 8100 --dtype bfloat16
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

BATCH_SIZE = 32


class EmbeddingsRequest(BaseModel):
    input: str | list[str]
    model: str | None = None


def create_app(model: SentenceTransformer, name: str) -> FastAPI:
    app = FastAPI()

    def encode(texts: list[str]) -> list[list[float]]:
        return model.encode(texts, batch_size=BATCH_SIZE, show_progress_bar=False).tolist()  # type: ignore[no-any-return]

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": model.max_seq_length}]}

    @app.post("/v1/embeddings")
    async def embeddings(request: EmbeddingsRequest) -> dict[str, Any]:
        texts = [request.input] if isinstance(request.input, str) else request.input
        vectors = await run_in_threadpool(encode, texts)
        data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)]
        return {"object": "list", "data": data, "model": name, "usage": {"prompt_tokens": 0, "total_tokens": 0}}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a Sentence Transformers model")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    args = parser.parse_args()
    model = SentenceTransformer(args.model, model_kwargs={"dtype": getattr(torch, args.dtype)})
    app = create_app(model, Path(args.model).resolve().name)
    uvicorn.run(app, host="127.0.0.1", port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
