"""How fast could this machine embed, if nothing but matrix products took time?

The limit of a set of texts is the time of all linear layers of a model at the rate that `torch.nn.functional.linear`
reaches at the model's shapes with 2,048 rows, plus the arithmetic of attention at that rate. For int8 the rate is that
of oneDNN's products of bytes (`torch.ops.onednn.qlinear_pointwise`, weights packed before). Rates are those of this
run, with as many threads as there are cores, the median of several.

    python benchmarks/embed_limit.py MODEL --lengths 14,82,253 --dtypes float32,int8

prints tokens/s for texts of so many tokens. With `--offline` it also runs `LLM.embed` on texts of these lengths, in the
same process and between two measurements of the rate, and prints what part of the limit that reached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from nobiru import LLM, machine

_ROWS = 2048
_TOKENS_OF_A_SET = 40_000


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a stack of encoder layers."""

    width: int
    inner: int
    num_layers: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear layers of one layer."""
        return [
            (self.width, 3 * self.width),
            (self.width, self.width),
            (self.width, self.inner),
            (self.inner, self.width),
        ]

    def linear_flops(self) -> int:
        """Of one token: a multiplication and an addition for each weight."""
        return self.num_layers * sum(2 * num_in * num_out for num_in, num_out in self.matrices)

    def attention_flops(self, length: int) -> int:
        """Of one token: scores with and mixture of all tokens of its text."""
        return self.num_layers * 4 * self.width * length


def read_shape(folder: Path) -> Shape:
    """The sizes in `config.json`, by the names of BERT or DistilBERT."""
    config = json.loads((folder / "config.json").read_text())
    return Shape(
        width=config.get("hidden_size") or config["dim"],
        inner=config.get("intermediate_size") or config["hidden_dim"],
        num_layers=config.get("num_hidden_layers") or config["n_layers"],
    )


def median_time_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def rate(shape: Shape, dtype: torch.dtype, repeats: int = 15) -> float:
    """Operations a second over the linear layers of one layer, each called by itself."""
    flops, total_s = 0, 0.0
    for num_in, num_out in shape.matrices:
        product = _product_of_bytes if dtype == torch.int8 else _product
        total_s += median_time_s(product(num_in, num_out, dtype), repeats)
        flops += 2 * _ROWS * num_in * num_out
    return flops / total_s


def _product(num_in: int, num_out: int, dtype: torch.dtype) -> Callable[[], object]:
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((_ROWS, num_in), (num_out, num_in), (num_out,)))
    return lambda: F.linear(x, weight, bias)


def _product_of_bytes(num_in: int, num_out: int, dtype: torch.dtype) -> Callable[[], object]:
    x = torch.randint(0, 255, (_ROWS, num_in), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (num_out, num_in), dtype=dtype)
    packed = torch.ops.onednn.qlinear_prepack(weight, [_ROWS, num_in])
    scales, zeros, bias = torch.full((num_out,), 0.01), torch.zeros(num_out, dtype=torch.int64), torch.randn(num_out)
    to_float32 = (1.0, 0, torch.float32, "none", [], "")
    return lambda: torch.ops.onednn.qlinear_pointwise(x, 0.1, 128, packed, scales, zeros, bias, *to_float32)


def limit(shape: Shape, flops_per_s: float, length: int) -> float:
    """Tokens a second for texts of `length` tokens."""
    return flops_per_s / (shape.linear_flops() + shape.attention_flops(length))


def offline(model: str, lengths: Sequence[int], repeats: int, **options: object) -> list[float]:
    """Tokens a second of `LLM.embed` for texts of each length, given as token ids."""
    llm = LLM(model=model, **options)  # type: ignore[arg-type]
    speeds = []
    for length in lengths:
        count = _TOKENS_OF_A_SET // length
        ids = torch.randint(1000, 20_000, (count, length), generator=torch.Generator().manual_seed(length)).tolist()
        elapsed_s = median_time_s(lambda texts=ids: llm.embed(texts, use_tqdm=False), repeats)  # type: ignore[misc]
        speeds.append(count * length / elapsed_s)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", default="14,82,253", help="tokens of a text (default %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,int8,float32", help="default %(default)s")
    parser.add_argument("--offline", action="store_true", help="run LLM.embed too")
    parser.add_argument("--repeats", type=int, default=3, help="of LLM.embed (default %(default)s)")
    arguments = parser.parse_args()
    lengths = [int(each) for each in arguments.lengths.split(",")]
    torch.set_num_threads(machine.default_num_threads())
    shape = read_shape(arguments.model)
    kinds = {name: getattr(torch, name) for name in arguments.dtypes.split(",")}
    print(f"{shape.linear_flops() / 1e6:.1f} MFLOP a token in linear layers, {torch.get_num_threads()} threads")
    for name, dtype in kinds.items():
        rates = [rate(shape, dtype)]
        speeds: list[float] = []
        if arguments.offline:
            options = {"dtype": "auto", "quantization": "int8"} if name == "int8" else {"dtype": name}
            speeds = offline(str(arguments.model), lengths, arguments.repeats, **options)
            torch.set_num_threads(machine.default_num_threads())
            rates.append(rate(shape, dtype))
        flops_per_s = statistics.mean(rates)
        print(f"{name}: " + ", ".join(f"{each / 1e9:.0f}" for each in rates) + " GOP/s")
        for number, length in enumerate(lengths):
            most = limit(shape, flops_per_s, length)
            reached = f", LLM.embed {speeds[number]:,.0f} ({speeds[number] / most:.0%})" if speeds else ""
            print(f"  {length} tokens: {most:,.0f} tokens/s{reached}")


if __name__ == "__main__":
    main()
