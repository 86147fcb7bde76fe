"""On a CUDA device: attention over the KV cache in blocks, decode steps as CUDA graphs, and a whole decoder against the
same decoder on the CPU.

Needs torch, numpy, safetensors and pytest only: the folder is written by hand, with random weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nobiru.folder.spec import GenerationSpec, ModelFolder
from nobiru.generation import CausalInput, GenerationInput, SampledToken, SampleRequest, SamplingParams
from nobiru.models.registry import load_causal
from nobiru.models.weights import Precision
from nobiru.ops.paged_attention import block_table_serves
from nobiru.runner.causal import CausalRunner
from tests.paged_cases import check, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
HALF = [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)]
DECODING = [(0, 1), (1, 1), (15, 1), (16, 1), (300, 1), (255, 1), (256, 1)]
MIXED = [*DECODING, (0, 2), (0, 40), (0, 40), (0, 41), (7, 9), (250, 30), (16, 16)]
HIDDEN, INTERMEDIATE, HEADS, KEY_HEADS, LAYERS, VOCAB, MAX_LEN = 128, 256, 8, 2, 3, 300, 512
LENGTHS = [5, 40, 17, 64, 1]
NUM_STEPS = 6
ASK = SampleRequest(
    input=GenerationInput(params=SamplingParams(temperature=0.0)), prompt_token_ids=[], output_token_ids=[]
)


@pytest.mark.parametrize("spans", [DECODING, MIXED])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [*HALF, (torch.float32, 1e-4)])
def test_paged_attention(
    spans: list[tuple[int, int]], block_size: int, window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    case = make_case(spans, block_size=block_size, num_heads=6, head_size=64, dtype=dtype, device=DEVICE)
    check(case, window=window, tolerance=tolerance)


@pytest.mark.parametrize("heads", [(4, 4), (8, 1)])
@pytest.mark.parametrize("head_size", [128, 20])  # 20 is not a multiple of 8: groups
def test_heads(heads: tuple[int, int], head_size: int) -> None:
    case = make_case(
        MIXED,
        block_size=16,
        num_heads=heads[0],
        key_heads=heads[1],
        head_size=head_size,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case, tolerance=3e-2)


def test_softcap() -> None:
    case = make_case(MIXED, block_size=16, head_size=32, dtype=torch.bfloat16, device=DEVICE)
    check(case, softcap=2.0, tolerance=3e-2)


class Greedy:
    """Keeps the logits it has seen; the highest wins."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def sample(self, logits_BV: Tensor, requests: Sequence[SampleRequest]) -> list[SampledToken]:
        assert logits_BV.dtype == torch.float32 and len(logits_BV) == len(requests)
        self.logits.append(logits_BV.cpu())
        return [SampledToken(token_id=token_id) for token_id in logits_BV.argmax(-1).tolist()]


def logits_of(folder: ModelFolder, dtype: torch.dtype, device: str, *, block_size: int, graphs: bool = True) -> Tensor:
    """[steps, sequences, V] of a prefill in two chunks and some decode steps, all with the same tokens."""
    sampler, place = Greedy(), torch.device(device)
    precision = Precision(weights=dtype, compute=dtype)
    with torch.inference_mode():
        model = load_causal(folder, precision, place)
    runner = CausalRunner(folder, model, sampler, precision, place, MAX_LEN)
    per_sequence = -(-MAX_LEN // block_size)
    runner.allocate_cache(per_sequence * len(LENGTHS), block_size)
    if not graphs:
        runner._graphs = None
    runner.warm_up()
    sampler.logits.clear()
    random = np.random.default_rng(0)
    texts = [random.integers(0, VOCAB, length + NUM_STEPS).astype(np.int32) for length in LENGTHS]
    blocks = np.split(random.permutation(per_sequence * len(LENGTHS)).astype(np.int32), len(LENGTHS))

    def step(starts: list[int], stops: list[int], sample: SampleRequest | None) -> None:
        runner.run(
            [
                CausalInput(seq_id=i, token_ids=text[start:stop], start=start, block_ids=own, sample=sample)
                for i, (text, own, start, stop) in enumerate(zip(texts, blocks, starts, stops, strict=True))
                if stop > start
            ]
        )

    halves = [length // 2 for length in LENGTHS]
    step([0] * len(LENGTHS), halves, None)
    step(halves, LENGTHS, ASK)
    for number in range(NUM_STEPS):
        step([length + number for length in LENGTHS], [length + number + 1 for length in LENGTHS], ASK)
    rows = [torch.empty(len(LENGTHS), VOCAB).copy_(logits) for logits in sampler.logits]
    return torch.stack(rows)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
def test_a_decoder_equals_the_cpu(dtype: torch.dtype, tolerance: float, block_size: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    expected = logits_of(folder, torch.float32, "cpu", block_size=16)
    found = logits_of(folder, dtype, DEVICE, block_size=block_size)
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("block_size", [16, 256])
def test_graphs_change_nothing(block_size: int, tmp_path: Path) -> None:
    if not block_table_serves(torch.device(DEVICE), torch.bfloat16, HIDDEN // HEADS, block_size):
        pytest.skip(f"varlen_attn takes no table of {block_size}-token blocks here, so there are no graphs")
    folder = write_folder(tmp_path)
    captured = logits_of(folder, torch.bfloat16, DEVICE, block_size=block_size)
    plain = logits_of(folder, torch.bfloat16, DEVICE, block_size=block_size, graphs=False)
    assert (captured - plain).abs().max() <= 2e-2 * plain.abs().max()


def write_folder(path: Path) -> ModelFolder:
    """A Llama of three layers with tied embeddings."""
    generator = torch.Generator().manual_seed(1)
    config = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    head_size = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        names = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEY_HEADS * head_size, HIDDEN),
            "self_attn.v_proj": (KEY_HEADS * head_size, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in names.items()}
    tensors = {
        f"model.{name}": torch.randn(shape, generator=generator) * 0.12
        if len(shape) == 2
        else torch.randn(shape, generator=generator) * 0.1 + 1
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    return ModelFolder(
        path=path,
        transformer_path=path,
        config=config,
        model_type="llama",
        modules=(),
        max_model_len=MAX_LEN,
        hidden_size=HIDDEN,
        embedding_dim=0,
        vocab_size=VOCAB,
        task="generate",
        is_causal=True,
        generation=GenerationSpec(eos_token_ids=()),
    )
