"""A rank's memory grows with the experts it holds, while it loads too, and not with those of others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

NUM_EXPERTS, NUM_LAYERS, HIDDEN, INTERMEDIATE = 8, 2, 256, 4096  # large beside what the allocator keeps for itself
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE * 4 * NUM_LAYERS
SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np, torch
from nobiru.folder.read import read_folder
from nobiru.runner.causal import CausalRunner

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

def choose(num_layers, num_experts):
    own = np.arange(num_experts)
    return np.tile(np.where(own < int(sys.argv[2]), own, -1), (num_layers, 1))

torch.set_num_threads(1)
before = kib("RssAnon")
folder = read_folder(Path(sys.argv[1]))
runner = CausalRunner.load(folder, dtype="float32", device="cpu", max_model_len=128, slots=choose)
now, peak = kib("RssAnon"), kib("VmHWM") - kib("RssFile")  # of libraries as much is mapped as the cache happens to hold
print(json.dumps({"now": 1024 * (now - before), "peak": 1024 * (peak - before)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=NUM_EXPERTS,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is resident")
def test_memory_follows_the_experts_of_a_rank(folder: Path) -> None:
    found = {}
    for num_own in (1, 4, 8):
        command = [sys.executable, "-c", SCRIPT, str(folder), str(num_own)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        found[num_own] = json.loads(answer.stdout)
    for more, less in ((8, 4), (4, 1)):
        expected = (more - less) * EXPERT_BYTES
        assert abs(found[more]["now"] - found[less]["now"] - expected) < EXPERT_BYTES / 4, found
    # What reading needs beside the experts is a few tensors, which the allocator may not reuse at once.
    assert all(each["peak"] < each["now"] + 3 * EXPERT_BYTES for each in found.values()), found
