"""MoE models against `transformers`: routers, counted loads, and experts in whatever slots."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from nobiru.errors import ModelFolderError
from nobiru.folder.read import read_folder
from nobiru.folder.spec import ModelFolder
from nobiru.layers.moe import Dispatched, LocalDispatcher
from nobiru.models.experts import StoredExperts
from nobiru.models.moe import MoeParts
from nobiru.models.registry import CausalModel, load_causal
from nobiru.models.weights import FLOAT32, Precision
from nobiru.ops.paged_layout import LayerCache, PagedLayout
from tests.real_models import stories260k
from tests.small_models import make
from tests.small_moe import MOE_ARCHITECTURES

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_TOKENS = 60

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelFolder]:
    return cache(lambda name: read_folder(make(name, tmp_path_factory.mktemp("models"))))


def parts_of(model: CausalModel) -> MoeParts:
    assert model.moe is not None
    return model.moe


def compute(model: CausalModel, token_ids_T: Tensor) -> Tensor:
    """Logits of one text [T, V], in one step."""
    num_blocks = -(-len(token_ids_T) // BLOCK_SIZE)
    shape = num_blocks, BLOCK_SIZE, model.num_kv_heads, model.head_size
    caches = [
        LayerCache(keys_NSKD=torch.zeros(shape, dtype=model.dtype), values_NSKD=torch.zeros(shape, dtype=model.dtype))
        for _ in range(model.num_layers)
    ]
    layout = PagedLayout(np.array([0]), np.array([len(token_ids_T)]), [range(num_blocks)], block_size=BLOCK_SIZE)
    with torch.inference_mode():
        return model.logits(model.forward(token_ids_T, layout, caches))


def random_text(folder: ModelFolder, num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, folder.vocab_size, num_tokens))


# ---- routing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MOE_ARCHITECTURES)
def test_routers_choose_and_weigh_as_in_transformers(
    folder: Callable[[str], ModelFolder], name: str, dtype: torch.dtype
) -> None:
    one = folder(name)
    model = load_causal(one, Precision(weights=dtype, compute=dtype), CPU)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(one.path, dtype=dtype).eval()
    theirs = [module for module in reference.modules() if type(module).__name__.lower().endswith("topkrouter")]
    mlps = parts_of(model)._mlps
    assert len(theirs) == len(mlps) > 0
    x_TC = torch.randn(200, one.hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for mlp, router in zip(mlps, theirs, strict=True):
        found = mlp.router(x_TC)
        with torch.inference_mode():
            _, weight_TK, expert_TK = router(x_TC)
        places_TK, found_places_TK = expert_TK.argsort(-1), found.expert_TK.argsort(-1)
        assert torch.equal(found.expert_TK.gather(1, found_places_TK), expert_TK.gather(1, places_TK))
        found_TK, expected_TK = found.weight_TK.gather(1, found_places_TK), weight_TK.gather(1, places_TK)
        assert found_TK.dtype == expected_TK.dtype
        assert torch.allclose(found_TK, expected_TK, rtol=1e-5, atol=0)


def test_loads_are_those_of_the_trained_model() -> None:
    shared = stories260k().parent
    expected = json.loads((shared / "expected.json").read_text())
    stories = (shared.parent / "data" / "tinystories-sample.jsonl").read_text().splitlines()[:20]
    for name in ("stories260K-moe8x-noisy", "stories260K-qwen3moe8x-noisy"):
        one = read_folder(shared / name)
        model, tokenizer = load_causal(one, FLOAT32, CPU), transformers.AutoTokenizer.from_pretrained(one.path)
        for story in stories:
            compute(model, torch.tensor(tokenizer(json.loads(story)["text"])["input_ids"][:400]))
        loads_LE = parts_of(model).take_loads()
        assert loads_LE.tolist() == expected[name]["expert_load_20_stories"]
        assert parts_of(model).take_loads().count_nonzero() == 0


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    path = make("deepseek-v3", tmp_path)
    ids_T = random_text(read_folder(path))
    expected_TV = compute(load_causal(read_folder(path), FLOAT32, CPU), ids_T)
    tensors = load_file(path / "model.safetensors")
    last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
    further = {name.replace(".layers.2.", ".layers.3."): tensor.clone() for name, tensor in last.items()}
    save_file(tensors | further, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(compute(load_causal(read_folder(path), FLOAT32, CPU), ids_T), expected_TV)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelFolderError, match="unexpected"):
        load_causal(read_folder(path), FLOAT32, CPU)


# ---- slots -----------------------------------------------------------------------------------------------------------


def spread(parts: MoeParts, num_slots: int) -> NDArray[np.int64]:
    """Every expert in a random slot, some of them twice, and empty slots."""
    generator = np.random.default_rng(5)
    slots_LS = np.full((parts.num_layers, num_slots), -1)
    for slots_S in slots_LS:
        again = generator.integers(0, parts.num_experts, 2)
        chosen = np.concatenate((np.arange(parts.num_experts), again))
        slots_S[generator.permutation(num_slots)[: len(chosen)]] = chosen
    return slots_LS


@pytest.mark.parametrize("name", ["mixtral", "mixtral-fused", "mixtral-bin", "qwen3-moe", "qwen2-moe", "deepseek-v3"])
def test_results_do_not_depend_on_slots(folder: Callable[[str], ModelFolder], name: str) -> None:
    one = folder(name)
    ids_T = random_text(one)
    plain = load_causal(one, FLOAT32, CPU)
    slots_LS = spread(parts_of(plain), 13)
    moved = load_causal(one, FLOAT32, CPU, slots=slots_LS)
    parts, plain_parts = parts_of(moved), parts_of(plain)
    assert (parts.slot_capacity, parts.num_experts) == (13, plain_parts.slot_capacity)
    assert torch.equal(compute(moved, ids_T), compute(plain, ids_T))
    for layer, slots_S in enumerate(slots_LS.tolist()):
        for slot, expert in enumerate(slots_S):
            found = parts.banks[layer].checksum(slot)
            if expert >= 0:
                assert found == plain_parts.banks[layer].checksum(expert)
            else:
                assert parts.banks[layer].memory(slot).count_nonzero() == 0


class OfTwo:
    """A dispatcher as the first of two ranks would have it: the second's experts compute when results are combined."""

    is_reentrant = False

    def __init__(self, first: MoeParts, second: MoeParts) -> None:
        self._num_slots = first.slot_capacity
        self._second = second
        self._local = LocalDispatcher(np.concatenate((first.slots_LS, second.slots_LS), 1), first.num_experts)

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        whole = self._local.dispatch(layer, x_TC, expert_TK)
        counts_S = whole.counts_S[: self._num_slots]
        rows_NC = whole.rows_NC[: sum(counts_S)]
        return Dispatched(rows_NC=rows_NC, counts_S=counts_S, origin=(layer, whole))

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        layer, whole = dispatched.origin  # type: ignore[misc]
        counts_S = whole.counts_S[self._num_slots :]
        others_NC = self._second.banks[layer].compute(whole.rows_NC[len(y_NC) :], counts_S)
        return self._local.combine(torch.cat((y_NC, others_NC)), whole, weight_TK)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-fused", "qwen2-moe"])
def test_a_rank_reads_its_own_experts_only(
    folder: Callable[[str], ModelFolder], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = folder(name)
    ids_T = random_text(one)
    whole = load_causal(one, FLOAT32, CPU)
    num_layers, num_experts = parts_of(whole).num_layers, parts_of(whole).num_experts
    read: list[int] = []
    original = StoredExperts.read
    monkeypatch.setattr(
        StoredExperts, "read", lambda self, expert, **how: read.append(expert) or original(self, expert, **how)
    )
    halves = [range(0, num_experts // 2), range(num_experts // 2, num_experts)]
    slots = [np.tile(np.array([-1, *half]), (num_layers, 1)) for half in halves]
    models = [load_causal(one, FLOAT32, CPU, slots=slots_LS) for slots_LS in slots]
    assert read == [expert for half in halves for _ in range(num_layers) for expert in half]
    first, second = (parts_of(model) for model in models)
    assert first.dispatcher is None and not models[0].is_reentrant
    first.dispatcher = OfTwo(first, second)
    assert torch.equal(compute(models[0], ids_T), compute(whole, ids_T))
    assert torch.equal(first.take_loads(), parts_of(whole).take_loads())
    assert second.take_loads().count_nonzero() == 0


def test_an_expert_read_later_is_the_one_read_at_first(folder: Callable[[str], ModelFolder]) -> None:
    one = folder("qwen3-moe")
    whole = parts_of(load_causal(one, FLOAT32, CPU))
    part = parts_of(load_causal(one, FLOAT32, CPU, slots=np.full((whole.num_layers, 2), -1)))
    assert part.expert_bytes == whole.expert_bytes == part.banks[0].slot_bytes
    for layer in range(whole.num_layers):
        part.read_expert(layer, 6, 1)
        assert part.banks[layer].checksum(1) == whole.banks[layer].checksum(6)
        assert part.banks[layer].memory(0).count_nonzero() == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_rounded_experts_take_half_the_memory(folder: Callable[[str], ModelFolder], name: str) -> None:
    """Where native kernels read bfloat16 weights for float32 arithmetic."""
    one = folder(name)
    rounded = parts_of(load_causal(one, Precision(weights=torch.bfloat16, compute=torch.float32), CPU))
    bank = rounded.banks[0]
    if bank.layout_id.startswith("panels"):
        assert 2 * rounded.expert_bytes == parts_of(load_causal(one, FLOAT32, CPU)).expert_bytes
    gate_up_AC, down_CI = parts_of(load_causal(one, FLOAT32, CPU)).banks[0].read(3)
    assert torch.equal(bank.read(3)[0].float(), gate_up_AC.bfloat16().float())
    assert torch.equal(bank.read(3)[1].float(), down_CI.bfloat16().float())


class Recorder:
    """A dispatcher of one rank that others send rows to."""

    is_reentrant = False

    def __init__(self, counts_S: list[int]) -> None:
        self.counts_S = counts_S
        self.calls: list[tuple[str, int]] = []

    def dispatch(self, layer: int, x_TC: Tensor, expert_TK: Tensor) -> Dispatched:
        assert len(x_TC) == len(expert_TK) == 0 and expert_TK.dtype == torch.int64
        self.calls.append(("dispatch", layer))
        rows_NC = torch.ones(sum(self.counts_S), x_TC.shape[1], dtype=x_TC.dtype)
        return Dispatched(rows_NC=rows_NC, counts_S=self.counts_S, origin=layer)

    def combine(self, y_NC: Tensor, dispatched: Dispatched, weight_TK: Tensor) -> Tensor:
        assert isinstance(dispatched.origin, int) and bool(y_NC.abs().sum(1).all())
        self.calls.append(("combine", dispatched.origin))
        return y_NC[:0]


def test_an_idle_rank_computes_for_others(folder: Callable[[str], ModelFolder]) -> None:
    parts = parts_of(load_causal(folder("qwen3-moe"), FLOAT32, CPU))
    recorder = Recorder([2, 0, 1, 0, 0, 0, 5, 0])
    parts.dispatcher = recorder
    parts.run_idle()
    expected = [(call, layer) for layer in range(parts.num_layers) for call in ("dispatch", "combine")]
    assert recorder.calls == expected
    assert parts.take_loads().count_nonzero() == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_slots_that_do_not_suit_the_model(folder: Callable[[str], ModelFolder]) -> None:
    one = folder("mixtral")
    for slots_LS in (np.zeros((2, 4), int), np.zeros((3, 0), int), np.full((3, 4), 4), np.full((3, 4), -2)):
        with pytest.raises(ValueError, match="slots"):
            load_causal(one, FLOAT32, CPU, slots=slots_LS)


def test_models_without_experts_have_no_slots(folder: Callable[[str], ModelFolder]) -> None:
    for name in ("llama", "gemma"):
        assert load_causal(folder(name), FLOAT32, CPU).moe is None
        with pytest.raises(ModelFolderError, match="cannot be spread over ranks"):
            load_causal(folder(name), FLOAT32, CPU, slots=np.zeros((3, 4), int))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("mixtral", "num_experts_per_tok", 5, "there are 4 experts"),
        ("mixtral", "num_local_experts", 3, "has shape"),
        ("mixtral", "num_local_experts", 6, "has shape"),
        ("qwen3-moe-fused", "num_local_experts", 4, "has shape"),
        ("qwen3-moe", "mlp_only_layers", [1], "weights lack"),
        ("qwen3-moe", "mlp_only_layers", 1, "a list of layers' numbers"),
        ("qwen3-moe", "decoder_sparse_step", 9, "no layer has experts"),
        ("olmoe-clipped", "clip_qkv", -1.0, "above 0"),
        ("deepseek-v3", "n_group", 3, "must divide"),
        ("deepseek-v3", "n_group", 8, "fewer than 3 experts"),
        ("deepseek-v3", "topk_group", 5, "there are 4 groups"),
        ("deepseek-v3", "topk_group", 1, "fewer than 3 experts"),
        ("deepseek-v3", "first_k_dense_replace", 3, "no layer has experts"),
        ("deepseek-v3", "scoring_func", "softmax", "scoring_func"),
        ("deepseek-v3", "num_key_value_heads", 2, "must be num_attention_heads"),
        ("deepseek-v3", "kv_lora_rank", 21, "an even number"),
        ("deepseek-v2", "norm_topk_prob", True, "norm_topk_prob"),
        ("qwen2-moe", "layer_types", ["full_attention", "wide", "wide"], "layer_types"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path: Path, name: str, field: str, value: object, message: str) -> None:
    path = make(name, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ModelFolderError, match=message):
        load_causal(read_folder(path), FLOAT32, CPU)
