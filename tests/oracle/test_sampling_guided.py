"""Guided JSON: whatever the logits say, the text is valid JSON and conforms to its schema."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from nobiru.errors import InferenceError, InvalidRequestError, UnavailableError
from nobiru.folder.spec import GenerationSpec, ModelFolder
from nobiru.generation import GenerationInput, SampleRequest, SamplingParams
from nobiru.runner import grammar
from nobiru.runner.grammar import Grammars, read_vocabulary
from nobiru.runner.sampler import Sampler

pytest.importorskip("xgrammar")

MAX_TOKENS = 600

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", 'c"\\d']}, "minItems": 1, "maxItems": 3},
        "home": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "home"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}, "height": {"type": "number"}},
            "required": ["city"],
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "any": {},
    "object": {"type": "object"},
    "list": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 5},
    "const": {"const": {"a": [1, "\n", None]}},
    "bounded": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 40}, "maxItems": 5},
    "patterns": {"type": "array", "items": {"type": "string", "pattern": "^([ -~]|[^a])+$"}, "maxItems": 3},
    "date": {"type": "string", "format": "date"},
    "integer": {"type": "integer", "multipleOf": 7},
}


def conforms(value: Any, schema: Any, root: Any) -> bool:
    """Enough of JSON Schema for the schemas above."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(conforms(value, each, root) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    types = schema.get("type", [])
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "boolean": isinstance(value, bool),
        "null": value is None,
    }
    if types and not any(kinds[name] for name in ([types] if isinstance(types, str) else types)):
        return False
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(known) and all(
            conforms(each, known[name], root) for name, each in value.items()
        )
    if isinstance(value, list) and "items" in schema:
        return schema.get("minItems", 0) <= len(value) <= schema["maxItems"] and all(
            conforms(each, schema["items"], root) for each in value
        )
    if isinstance(value, str):
        if "\ufffd" in value:  # the library takes the bytes of half a surrogate pair for one character
            return len(value.replace("\ufffd", "")) <= schema.get("maxLength", 1000)
        return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1000)
    if isinstance(value, int) and "multipleOf" in schema:
        return value % int(schema["multipleOf"]) == 0
    return not isinstance(value, int) or schema.get("minimum", value) <= value <= schema.get("maximum", value)


def folder_of(path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> ModelFolder:
    return ModelFolder(
        path=path,
        transformer_path=path,
        config={},
        model_type="llama",
        modules=(),
        max_model_len=1024,
        hidden_size=8,
        embedding_dim=0,
        vocab_size=vocab_size,
        generation=GenerationSpec(eos_token_ids=eos_token_ids),
    )


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A byte-level BPE; the model has some more ids than the tokenizer, as models often do."""
    from small_models import byte_bpe

    path = tmp_path_factory.mktemp("byte-level")
    tokenizer = byte_bpe()
    tokenizer.save_pretrained(path)
    return folder_of(path, len(tokenizer) + 11, (tokenizer.convert_tokens_to_ids("</s>"),))


@pytest.fixture(scope="module")
def byte_fallback() -> ModelFolder:
    """The tokenizer of a small real model."""
    shared = Path(os.environ.get("NOBIRU_SHARED") or Path(__file__).parents[3] / "shared")
    path = shared / "models" / "stories260K"
    if not (path / "tokenizer.json").is_file():
        pytest.skip("the shared models are not here")
    return folder_of(path, 512, (1, 2))


@pytest.fixture(params=["byte_level", "byte_fallback"])
def folder(request: pytest.FixtureRequest) -> ModelFolder:
    found: ModelFolder = request.getfixturevalue(request.param)
    return found


def make_sampler(folder: ModelFolder) -> Sampler:
    return Sampler(folder, vocab_size=folder.vocab_size, device=torch.device("cpu"))


def text_of(folder: ModelFolder, token_ids: Sequence[int]) -> str:
    return str(Tokenizer.from_file(str(folder.path / "tokenizer.json")).decode(list(token_ids)))


def eos_of(folder: ModelFolder) -> tuple[int, ...]:
    assert folder.generation is not None
    return folder.generation.eos_token_ids


@functools.cache
def ending_tokens(path: Path, vocab_size: int) -> list[int]:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [token_id for token_id in range(vocab_size) if (tokenizer.id_to_token(token_id) or "")[:1] in set('"}]')]


def random_logits(folder: ModelFolder, generator: torch.Generator, num_rows: int) -> torch.Tensor:
    """Any token may come, those that end something more often, or texts would be long."""
    logits_BV = torch.randn(num_rows, folder.vocab_size, generator=generator) * 3
    logits_BV[:, [*ending_tokens(folder.path, folder.vocab_size), *eos_of(folder)]] += 7
    return logits_BV


def generate(folder: ModelFolder, all_params: Sequence[SamplingParams], seed: int) -> list[list[int]]:
    """The tokens of several texts, generated together, up to the end-of-text token; forbidden for 5 tokens."""
    generator = torch.Generator().manual_seed(seed)
    sampler, eos = make_sampler(folder), eos_of(folder)
    inputs = [GenerationInput(params=params) for params in all_params]
    outputs: list[list[int]] = [[] for _ in inputs]
    open_rows = list(range(len(inputs)))
    for _ in range(MAX_TOKENS):
        logits_BV = random_logits(folder, generator, len(open_rows))
        requests = [
            SampleRequest(
                input=inputs[row],
                prompt_token_ids=[5],
                output_token_ids=outputs[row],
                forbidden_token_ids=eos if len(outputs[row]) < 5 else (),
            )
            for row in open_rows
        ]
        for row, token in zip(open_rows, sampler.sample(logits_BV, requests), strict=True):
            outputs[row].append(token.token_id)
        open_rows = [row for row in open_rows if outputs[row][-1] not in eos]
        if not open_rows:
            return outputs
    raise AssertionError(f"no end in {MAX_TOKENS} tokens: {[text_of(folder, outputs[row]) for row in open_rows]}")


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_logits_give_valid_json(folder: ModelFolder, name: str) -> None:
    schema = SCHEMAS[name]
    options: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}, {"frequency_penalty": 1.0}]
    all_params = [
        SamplingParams(seed=number, json_schema=json.dumps(schema), **options[number % len(options)])
        for number in range(15)
    ]
    outputs = generate(folder, all_params, seed=len(name))
    for output in outputs:
        assert output[-1] in eos_of(folder) and not set(output[:-1]) & set(eos_of(folder))
        value = json.loads(text_of(folder, output))
        assert conforms(value, schema, schema), value
    if name not in ("const",):
        assert len({tuple(output) for output in outputs}) > 1


def test_the_checker_of_this_test_can_say_no() -> None:
    good = {"name": "x", "age": 3, "home": {"city": "Rome"}}
    assert conforms(good, PERSON, PERSON)
    for wrong in ({"age": 200}, {"name": 5}, {"home": {}}, {"tags": []}, {"more": 1}, {"tags": ["z"]}):
        assert not conforms(good | wrong, PERSON, PERSON)


# ---- one text --------------------------------------------------------------------------------------------------------


def step(
    sampler: Sampler,
    source: GenerationInput,
    output: Sequence[int],
    logits_V: torch.Tensor,
    forbidden: Sequence[int] = (),
) -> int:
    request = SampleRequest(input=source, prompt_token_ids=[5], output_token_ids=output, forbidden_token_ids=forbidden)
    return sampler.sample(logits_V[None], [request])[0].token_id


def test_state_follows_the_output(byte_level: ModelFolder) -> None:
    """Run twice, with fewer tokens, with others, with many at once: as if the state were new each time."""
    params = SamplingParams(temperature=0.0, json_schema=json.dumps(PERSON))
    first, second = generate(byte_level, [params, params], seed=3)
    source, sampler = GenerationInput(params=params), make_sampler(byte_level)
    logits_V = random_logits(byte_level, torch.Generator().manual_seed(1), 1)[0]
    for output in (
        first[:4],
        first[:4],
        first[:9],
        first[:2],
        second[:6],
        [],
        first[:-1],
        first,
        second[:7],
        first[:1],
    ):
        fresh = step(sampler, GenerationInput(params=params), output, logits_V)
        assert step(sampler, source, output, logits_V) == fresh


def test_the_end_is_forced_and_wins_over_min_tokens(folder: ModelFolder) -> None:
    eos = eos_of(folder)
    sampler = make_sampler(folder)
    source = GenerationInput(params=SamplingParams(temperature=0.0, json_schema='{"const": 1}'))
    logits_V = random_logits(folder, torch.Generator().manual_seed(1), 1)[0]
    logits_V[list(eos)] = -50.0
    output: list[int] = []
    for _ in range(5):  # behind the end, there is nothing but end-of-text tokens, for those who ignore them
        output.append(step(sampler, source, output, logits_V, forbidden=eos))
    assert text_of(folder, output[:1]) == "1"
    assert set(output[1:]) <= set(eos)


def test_forbidden_tokens_are_left_out_where_there_is_a_choice(byte_level: ModelFolder) -> None:
    sampler = make_sampler(byte_level)
    source = GenerationInput(params=SamplingParams(temperature=0.0, json_schema='{"type": "integer"}'))
    logits_V = torch.zeros(byte_level.vocab_size)
    one, two = (Tokenizer.from_file(str(byte_level.path / "tokenizer.json")).token_to_id(each) for each in "12")
    logits_V[one], logits_V[two] = 9.0, 8.0
    assert step(sampler, source, [], logits_V) == one
    assert step(sampler, source, [], logits_V, forbidden=[one]) == two
    assert step(sampler, source, [one], logits_V, forbidden=eos_of(byte_level)) == one
    logits_V[list(eos_of(byte_level))] = 10.0
    assert step(sampler, source, [one], logits_V) in eos_of(byte_level)
    assert step(sampler, source, [], logits_V) == one


def test_output_that_does_not_conform_is_an_error_each_time(byte_level: ModelFolder) -> None:
    sampler = make_sampler(byte_level)
    source = GenerationInput(params=SamplingParams(temperature=0.0, json_schema='{"const": 1}'))
    logits_V = torch.zeros(byte_level.vocab_size)
    for _ in range(2):
        with pytest.raises(InferenceError, match="json_schema does not allow"):
            step(sampler, source, [70, 71], logits_V)
    assert step(sampler, source, [], logits_V) >= 0


def test_an_error_leaves_no_trace(byte_level: ModelFolder) -> None:
    sampler = make_sampler(byte_level)
    source = GenerationInput(params=SamplingParams(temperature=0.0, json_schema='{"const": 123}'))
    tokenizer = Tokenizer.from_file(str(byte_level.path / "tokenizer.json"))
    one, two, three = (tokenizer.token_to_id(each) for each in "123")
    logits_V = torch.zeros(byte_level.vocab_size)
    logits_V[[one, two, three]] = 9.0
    assert step(sampler, source, [one], logits_V) == two
    with pytest.raises(InferenceError):
        step(sampler, source, [one, two, one], logits_V)
    assert step(sampler, source, [one], logits_V) == two
    assert step(sampler, source, [one, two], logits_V) == three


def test_other_rows_are_not_masked(byte_level: ModelFolder) -> None:
    guided = SamplingParams(temperature=0.0, json_schema='{"type": "object"}')
    free = SamplingParams(temperature=0.0)
    requests = [
        SampleRequest(input=GenerationInput(params=params), prompt_token_ids=[5], output_token_ids=[])
        for params in (free, guided, free)
    ]
    logits_BV = torch.zeros(3, byte_level.vocab_size)
    logits_BV[:, -1] = 9.0
    tokens = make_sampler(byte_level).sample(logits_BV, requests)
    assert [tokens[0].token_id, tokens[2].token_id] == [byte_level.vocab_size - 1] * 2
    assert text_of(byte_level, [tokens[1].token_id]).startswith("{")


# ---- vocabulary ------------------------------------------------------------------------------------------------------


def test_tokens_are_what_the_tokenizer_makes_of_them(folder: ModelFolder) -> None:
    """The library's reading of the vocabulary, and the tokenizer's own."""
    from xgrammar import TokenizerInfo, VocabType

    tokens, is_byte_level = read_vocabulary(folder, folder.vocab_size)
    kind = VocabType.BYTE_LEVEL if is_byte_level else VocabType.BYTE_FALLBACK
    info = TokenizerInfo(tokens, kind, vocab_size=folder.vocab_size, stop_token_ids=list(eos_of(folder)))
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    anchor = tokenizer.token_to_id("a")
    num_text = 0
    for token_id, read in enumerate(info.decoded_vocab):
        if token_id in tokenizer.get_added_tokens_decoder() or token_id >= tokenizer.get_vocab_size():
            assert token_id in (*info.special_token_ids, *eos_of(folder))
            continue
        assert tokenizer.decode([anchor, token_id])[1:] == read.decode(errors="replace")
        num_text += 1
    assert num_text > 400


def test_added_tokens_stand_for_themselves(tmp_path: Path) -> None:
    from small_models import byte_bpe

    tokenizer = byte_bpe().backend_tokenizer
    tokenizer.add_tokens(["<tool call>", "  "])
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    folder = folder_of(tmp_path, vocab_size, (2,))
    assert read_vocabulary(folder, vocab_size)[0][-3:] == ["<tool call>", "  ", ""]
    source = GenerationInput(params=SamplingParams(temperature=0.0, json_schema='{"const": "<tool call>"}'))
    logits_V = torch.zeros(vocab_size)
    logits_V[-3:] = 9.0
    output: list[int] = []
    while not output or output[-1] != 2:
        output.append(step(make_sampler(folder), source, output, logits_V))
    assert vocab_size - 3 in output
    assert json.loads(tokenizer.decode(output)) == "<tool call>"


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_schemas_that_do_not_compile_are_refused(byte_level: ModelFolder) -> None:
    sampler = make_sampler(byte_level)
    for schema, part in (
        ('{"$ref": "#/$defs/nothing"}', "nothing"),
        ("false", "cannot accept any value"),
        ('{"type": "integer", "minimum": 5, "maximum": 1}', "minimum greater than maximum"),
        ('{"not": {}}', "'not'"),
        ("{", "not valid JSON"),
    ):
        params = SamplingParams(seed=1, json_schema=schema)
        with pytest.raises(InvalidRequestError, match=part) as caught:
            sampler.check(params)
        assert caught.value.param == "json_schema"
        assert "cpp" not in caught.value.message
        with pytest.raises(InvalidRequestError, match=part):
            step(sampler, GenerationInput(params=params), [], torch.zeros(byte_level.vocab_size))


def test_models_without_end_of_text_or_with_other_tokenizers_are_refused(
    byte_level: ModelFolder, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(other / "tokenizer.json"))
    for folder, part in (
        (folder_of(byte_level.path, 500, ()), "end-of-text"),
        (folder_of(tmp_path / "nowhere", 500, (2,)), "tokenizer.json"),
        (folder_of(other, 500, (1,)), "byte-level"),
    ):
        with pytest.raises(InvalidRequestError, match=part):
            make_sampler(folder).check(SamplingParams(seed=1, json_schema="{}"))


def test_grammars_are_kept_within_bounds(byte_level: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_GRAMMARS", 3)
    grammars = Grammars(byte_level, byte_level.vocab_size)
    schemas = [f'{{"const": {number}}}' for number in range(4)]
    first, *_ = compiled = [grammars.compile(schema) for schema in schemas[:3]]
    assert grammars.compile(schemas[0]) is first
    grammars.compile(schemas[3])  # in place of the one used least recently
    assert grammars.compile(schemas[0]) is first
    assert grammars.compile(schemas[2]) is compiled[2]
    assert grammars.compile(schemas[1]) is not compiled[1]
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_BYTES", 1)
    latest = grammars.compile('{"const": "x"}')
    assert grammars.compile('{"const": "x"}') is latest
    assert grammars.compile(schemas[0]) is not first


def test_a_schema_that_takes_too_long_is_refused(byte_level: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_COMPILE_S", 0.05)
    grammars = Grammars(byte_level, byte_level.vocab_size)
    hard = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200)}, "minProperties": 100}
    with pytest.raises(InvalidRequestError, match=r"0\.05 s"):
        grammars.compile(json.dumps(hard))
    with pytest.raises(UnavailableError):
        grammars.compile("{}")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert grammars.compile("{}") is not None
            return
        except UnavailableError:
            time.sleep(0.05)
    raise AssertionError("the schema is still being compiled")
