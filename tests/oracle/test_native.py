"""The kernels in C against torch in float64, and what happens without a compiler."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nobiru.ops.native import compiler, library
from nobiru.ops.native.library import Kernels, load_kernels

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def avx2(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels as a processor with AVX2 only gets them; other tests take what this one gets."""
    target = tmp_path_factory.mktemp("kernels") / "avx2.so"
    options = [option for option in compiler._OPTIONS if not option.startswith("-march")]
    command = [
        "gcc",
        *options,
        "-march=haswell",
        f"-I{compiler._SOURCE.parent}",
        str(compiler._SOURCE),
        "-o",
        str(target),
        "-lm",
    ]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the compiler makes nothing for AVX2")
    return Kernels(ctypes.CDLL(str(target)))


@needs_compiler
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cascadelake", "sapphirerapids"])
def test_the_source_suits_every_processor(processor: str) -> None:
    """Each has other parts of the source: none of AVX2, AVX512 without its bfloat16, tiles."""
    command = ["gcc", f"-march={processor}", "-std=gnu11", "-fsyntax-only", "-Werror=implicit-function-declaration"]
    done = subprocess.run([*command, str(compiler._SOURCE)], capture_output=True, text=True, check=False)
    if "bad value" in done.stderr:
        pytest.skip("the compiler does not know this processor")
    assert done.returncode == 0, done.stderr


def kernels_of(kind: str, request: pytest.FixtureRequest) -> Kernels:
    if kind == "avx2":
        found: Kernels = request.getfixturevalue("avx2")
        return found
    kernels = load_kernels()
    assert kernels is not None, "there is a compiler, so there are kernels"
    return kernels


@needs_compiler
@pytest.mark.parametrize("kind", ["this", "avx2"])
@pytest.mark.parametrize("threads", [1, 2])
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 40) | st.sampled_from([63, 300]),
    num_in=st.integers(1, 70) | st.sampled_from([64, 96, 160]),  # in steps of 32 for matrix tiles
    num_out=st.integers(1, 100) | st.integers(1000, 1100),
    biased=st.booleans(),
    kinds=st.sampled_from(["float32", "halved", "pairs"]),
    gap=st.integers(0, 3),
)
def test_linear(
    kind: str,
    threads: int,
    rows: int,
    num_in: int,
    num_out: int,
    biased: bool,
    kinds: str,
    gap: int,
    request: pytest.FixtureRequest,
) -> None:
    kernels = kernels_of(kind, request)
    if kinds == "pairs" and (num_in % 2 or not kernels.multiplies_pairs):
        return
    random = torch.Generator().manual_seed(rows * num_in)
    x = torch.randn(rows, num_in + gap, generator=random)[:, :num_in]
    weight, bias = torch.randn(num_out, num_in, generator=random), torch.randn(num_out, generator=random)
    dtype = torch.bfloat16 if kinds == "pairs" else torch.float32
    if kinds != "float32":
        weight = weight.bfloat16()
    x = x.to(dtype)
    out = torch.empty(rows, num_out, dtype=dtype)
    packed = kernels.pack(weight, bias if biased else None, in_pairs=kinds == "pairs")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernels.linear(x, packed, out)
    finally:
        torch.set_num_threads(num_threads)
    expected = x.double() @ weight.double().mT + (bias.double() if biased else 0)
    tolerance = 3e-2 if kinds == "pairs" else 1e-4
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@needs_compiler
@pytest.mark.parametrize("kind", ["this", "avx2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 3, 16), (5, 4, 64), (700, 3, 32)])
def test_rows(
    kind: str, dtype: torch.dtype, tolerance: float, rows: int, heads: int, size: int, request: pytest.FixtureRequest
) -> None:
    kernels = kernels_of(kind, request)
    random = torch.Generator().manual_seed(rows)
    wide = (torch.randn(rows, heads * size + 16, generator=random) * 4).to(dtype)
    x, weight = wide[:, 16:], torch.randn(heads * size, generator=random).to(dtype)
    normed = kernels.rms_norm(x, weight, 1e-5)
    exact = x.double()
    expected = exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    assert normed is not None and normed.dtype == dtype
    torch.testing.assert_close(normed.double(), expected, atol=tolerance, rtol=tolerance)

    gate_up = x.contiguous().view(rows, heads, size)[:, :2].flatten(1).contiguous()
    product = torch.empty(rows, size, dtype=dtype)
    assert kernels.silu_product(gate_up, product)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(product.double(), gate * gate.sigmoid() * up, atol=tolerance, rtol=tolerance)

    angles = torch.rand(rows, 1, size // 2, generator=random) * 7
    turned = wide.clone()
    heads_of_x = turned[:, 16:].view(rows, heads, size)
    expected_turn = torch.view_as_complex(heads_of_x.double().view(rows, heads, -1, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    assert kernels.turn(heads_of_x, torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(
        heads_of_x.double(), torch.view_as_real(expected_turn).flatten(2).double(), atol=tolerance * 4, rtol=tolerance
    )
    assert torch.equal(turned[:, :16], wide[:, :16])


@needs_compiler
@pytest.mark.parametrize("kind", ["this", "avx2"])
def test_silu_at_the_ends_of_the_range(kind: str, request: pytest.FixtureRequest) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-3, 80, -80, 87.5, -87.5, 100, -100, 1e30, -1e30, 3e38, -3e38, 5, -5])
    gate_up = torch.stack([gate, torch.ones(16)]).view(1, 32)
    product = torch.empty(1, 16)
    assert kernels_of(kind, request).silu_product(gate_up, product)
    torch.testing.assert_close(product[0].double(), torch.nn.functional.silu(gate.double()), atol=1e-30, rtol=1e-5)


@needs_compiler
def test_what_is_not_a_number_stays_so() -> None:
    kernels = load_kernels()
    assert kernels is not None
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(2, 32, dtype=dtype)
        x[1, 3] = float("nan")
        normed = kernels.rms_norm(x, torch.ones(32, dtype=dtype), 1e-6)
        assert normed is not None and normed[0].isfinite().all() and normed[1].isnan().all()
        product = torch.empty(2, 16, dtype=dtype)
        assert kernels.silu_product(x, product)
        assert product.isnan().sum() == 1 and product[1, 3].isnan()


@needs_compiler
@pytest.mark.parametrize("kind", ["this", "avx2"])
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 70) | st.just(9000),
    values=st.sampled_from([2, 50, 10_000_000]),
    odd=st.sampled_from([(), (float("nan"),), (float("inf"), float("-inf")), (float("nan"), float("inf"))]),
    seed=st.integers(0, 1000),
)
def test_argmax(
    kind: str, rows: int, size: int, values: int, odd: tuple[float, ...], seed: int, request: pytest.FixtureRequest
) -> None:
    kernels = kernels_of(kind, request)
    random = torch.Generator().manual_seed(seed)
    x = torch.randint(-values, values, (rows, size + 3), generator=random).float()
    for value in odd:
        for place in torch.randint(0, size + 3, (3,), generator=random).tolist():
            x[torch.randint(0, rows, (1,), generator=random), place] = value
    found = kernels.argmax(x[:, 1 : size + 1])
    # torch leaves open which one of several it gives; NumPy gives the first, also of not-a-numbers.
    assert found.tolist() == np.argmax(x[:, 1 : size + 1].numpy(), axis=1).tolist()


@needs_compiler
def test_argmax_of_nothing_finite() -> None:
    kernels = load_kernels()
    assert kernels is not None
    assert kernels.argmax(torch.full((2, 40), -torch.inf)).tolist() == [0, 0]


@needs_compiler
def test_odd_shapes_are_left_to_torch() -> None:
    kernels = load_kernels()
    assert kernels is not None
    x = torch.ones(2, 3, 20)
    assert kernels.rms_norm(x[:, 0], torch.ones(20), 1e-6) is None
    assert not kernels.silu_product(x[:, 0], torch.ones(2, 10))
    assert not kernels.turn(x, torch.ones(2, 1, 10, dtype=torch.complex64))
    assert not kernels.attends(torch.float32, 20) and not kernels.attends(torch.float16, 32)


class TestLoading:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return tmp_path / "cache" / "nobiru" / "native"

    def load(self, caplog: pytest.LogCaptureFixture) -> tuple[Kernels | None, str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=library.__name__):
            kernels = load_kernels.__wrapped__()
        return kernels, caplog.text

    @needs_compiler
    def test_the_second_time_nothing_is_compiled(
        self, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.load(caplog)[0] is not None
        (compiled,) = cache.iterdir()
        assert compiled.suffix == ".so" and cache.stat().st_mode & 0o777 == 0o700
        monkeypatch.setattr(compiler, "_compile", lambda command: pytest.fail("compiled again"))
        assert self.load(caplog)[0] is not None

    @needs_compiler
    def test_a_folder_that_others_can_write_to_is_not_used(self, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
        cache.mkdir(parents=True)
        cache.chmod(0o777)
        assert self.load(caplog)[0] is not None
        assert not list(cache.iterdir())

    @needs_compiler
    def test_a_user_without_a_home(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
        assert self.load(caplog)[0] is not None

    def test_without_a_compiler(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda name: None)
        kernels, said = self.load(caplog)
        assert kernels is None and "no C compiler" in said

    def test_turned_off(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NOBIRU_NATIVE_KERNELS", "0")
        monkeypatch.setattr(library, "compiled", lambda: pytest.fail("compiled"))
        assert self.load(caplog)[0] is None

    @needs_compiler
    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("#error nothing here", "the compiler failed"),
            ("int nothing;", "undefined symbol"),
        ],
    )
    def test_a_source_that_is_no_use(
        self, source: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "kernels.c").write_text(source)
        monkeypatch.setattr(compiler, "_SOURCE", tmp_path / "kernels.c")
        kernels, text = self.load(caplog)
        assert kernels is None and said in text

    @needs_compiler
    def test_wrong_products_are_noticed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = compiler._SOURCE.read_text()
        for header in compiler._HEADERS:
            shutil.copy(header, tmp_path)
        (tmp_path / "kernels.c").write_text(text.replace("sums[r][1] += value * w1;", "sums[r][1] -= value * w1;"))
        monkeypatch.setattr(compiler, "_SOURCE", tmp_path / "kernels.c")
        kernels, said = self.load(caplog)
        assert kernels is None and "wrong product" in said

    @needs_compiler
    def test_a_compiler_that_hangs(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compiler, "_COMPILER_TIMEOUT_S", 0.01)
        kernels, said = self.load(caplog)
        assert kernels is None and "timed out" in said


@needs_compiler
def test_threads_of_several_callers_do_not_mix_up_their_work() -> None:
    """One caller at a time has the helpers; others compute alone, and nobody's parts are lost or done twice."""
    kernels = load_kernels()
    assert kernels is not None
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(900 + 50 * number, 128, generator=random) for number in range(4)]
    packed = [kernels.pack(weight, None) for weight in weights]
    inputs = [torch.randn(3, 128, generator=random) for _ in weights]

    def compute(number: int) -> float:
        torch.set_num_threads(3)
        expected, worst = inputs[number] @ weights[number].mT, 0.0
        for _ in range(300):
            out = torch.full((3, len(weights[number])), float("nan"))
            kernels.linear(inputs[number], packed[number], out)
            worst = max(worst, float((out - expected).abs().max()))
        return worst

    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(4) as callers:
            assert max(callers.map(compute, range(4), timeout=60)) < 1e-3
    finally:
        torch.set_num_threads(num_threads)


@needs_compiler
def test_helpers_that_sleep_are_woken() -> None:
    kernels = load_kernels()
    assert kernels is not None
    weight, x = torch.randn(2000, 128), torch.randn(2, 128)
    packed, out = kernels.pack(weight, None), torch.empty(2, 2000)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            time.sleep(0.01)
            kernels.linear(x, packed, out.fill_(float("nan")))
            torch.testing.assert_close(out, x @ weight.mT, atol=1e-4, rtol=1e-4)
    finally:
        torch.set_num_threads(num_threads)
