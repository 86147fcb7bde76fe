"""How similar are some sentences? Embeds them and prints a table; scripts/quickstart runs it.

python examples/similarity.py [MODEL_FOLDER]
"""

from __future__ import annotations

import sys

import numpy as np
from rich.console import Console
from rich.table import Table

from nobiru import LLM

SENTENCES = [
    "Where is my parcel?",
    "I would like to track my delivery.",
    "The shipment has not arrived yet.",
    "How do I change my password?",
    "The weather is lovely today.",
]


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    outputs = llm.embed(SENTENCES)
    vectors = np.stack([output.outputs.embedding for output in outputs])
    similarities = llm.similarity(vectors, vectors)

    table = Table(title=f"Similarity of {len(SENTENCES)} sentences ({vectors.shape[1]} values each)")
    table.add_column("")
    table.add_column("sentence")
    for number in range(len(SENTENCES)):
        table.add_column(str(number + 1), justify="right")
    for number, (sentence, row) in enumerate(zip(SENTENCES, similarities, strict=True), 1):
        cells = [f"[{'bold green' if value > 0.3 else 'dim'}]{value:.2f}[/]" for value in row]
        table.add_row(str(number), sentence, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
