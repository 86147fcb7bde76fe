"""On a CUDA device: a layer of experts, in one grouped product where torch has one, against the slow version."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nobiru.layers.activation import ACTIVATIONS
from nobiru.layers.moe import ExpertLoads, Experts, LocalDispatcher, MoeMlp
from nobiru.layers.routing import SoftmaxRouter
from nobiru.ops import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 96, 6, 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3), (torch.float32, 1e-4)])
@pytest.mark.parametrize("num_tokens", [1, 5, 300])
def test_a_layer_of_experts(dtype: torch.dtype, tolerance: float, num_tokens: int) -> None:
    cuda = torch.device("cuda")
    generator = torch.Generator().manual_seed(num_tokens)
    experts = Experts(
        num_slots=EXPERTS + 2,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        activation=ACTIVATIONS["silu"],
        compute=dtype,
        stored=dtype,
        device=cuda,
    )
    gate_up = [(torch.randn(2 * INTERMEDIATE, HIDDEN, generator=generator) / 8).to(dtype) for _ in range(EXPERTS)]
    down = [(torch.randn(HIDDEN, INTERMEDIATE, generator=generator) / 8).to(dtype) for _ in range(EXPERTS)]
    slots_S = [3, -1, 0, 5, 4, -1, 1, 2]
    for slot, expert in enumerate(slots_S):
        if expert >= 0:
            experts.write(slot, gate_up[expert], down[expert])
    gate_EC = torch.randn(EXPERTS, HIDDEN, generator=generator).to(cuda, dtype)
    router = SoftmaxRouter(gate=lambda x_TC, buffer=None: x_TC @ gate_EC.T, top_k=TOP_K, normalizes=True, rounds=True)
    loads = ExpertLoads(1, EXPERTS, cuda)
    mlp = MoeMlp(layer=0, top_k=TOP_K, router=router, experts=experts, shared=None, loads=loads)
    x_TC = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    found_TC = mlp(x_TC.cuda(), LocalDispatcher(np.array([slots_S]), EXPERTS)).cpu()
    routing = router(x_TC.cuda())
    expert_TK, weight_TK = routing.expert_TK.cpu(), routing.weight_TK.cpu()
    expected_TC = reference.experts(x_TC, expert_TK, weight_TK, gate_up, down, ACTIVATIONS["silu"].apply)
    assert found_TC.dtype == dtype
    assert float((found_TC.double() - expected_TC).abs().max()) <= tolerance * float(expected_TC.abs().max())
    assert loads.take().tolist() == [expert_TK.flatten().bincount(minlength=EXPERTS).tolist()]
    assert experts.checksum(0) != experts.checksum(1)
