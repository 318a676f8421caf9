"""Prompts in, text out: pieces that are whole characters, ends of texts, released folders and their tokenizers."""

import json

import numpy as np
import pytest
from absl import app, flags
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import experiments.generate as program
from experiments.generate import Speaker, load_released, stream_text
from experiments.tokenization import ByteTokenizer, IdTokenizer, ReleasedTokenizer
from kimi_jax import KimiLM, generate, get_config, save_hf
from tests.support import GOLDEN, golden

PROMPTS = ("ab", "c")


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A folder of two layers, with a tokenizer of single bytes whose ids are not the bytes themselves."""
    folder = tmp_path_factory.mktemp("released") / "model"
    fields = dict(hidden_size=16, num_layers=2, mla_every=2, kda_num_heads=2, kda_head_dim=8, kernel_backend="xla")
    fields |= dict(mla_num_heads=2, kv_lora_rank=8, qk_nope_dim=8, qk_rope_dim=4, v_dim=8, ffn_width=16, chunk_size=16)
    fields |= dict(vocab_size=300, residual="standard")
    model = KimiLM(get_config("tiny", **fields), rngs=nnx.Rngs(0))
    save_hf(model, folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({letter: 2 + i for i, letter in enumerate(alphabet)}, []))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.save(str(folder / "tokenizer.json"))
    return folder


def texts(*args, **kwargs):
    pieces = list(stream_text(*args, temperature=0, **kwargs))
    return ["".join(new) for new in zip(*pieces, strict=True)], pieces


def test_released_weights_speak_by_their_tokenizer(released):
    speaker = load_released(str(released))
    found, pieces = texts(speaker, PROMPTS, 20)
    assert len(pieces) == 3
    ids = [speaker.tokenizer.encode(prompt) for prompt in PROMPTS]
    padded = np.array([ids[0], [ids[1][0], 0]], np.int32)
    expected = np.asarray(generate(speaker.model, padded, 20, lengths=np.array([2, 1])))
    assert found == [speaker.tokenizer.decode(row) for row in expected]
    numbers = [" ".join(map(str, row)) for row in ids]
    said = texts(speaker._replace(tokenizer=IdTokenizer()), numbers, 20)[0]
    assert said == ["".join(f" {i}" for i in row) for row in expected]


@pytest.mark.exhaustive
def test_a_golden_model_speaks():
    arrays = golden("kimi_linear_a", "golden")
    speaker = load_released(str(GOLDEN / "kimi_linear_a"), "ids")
    prompts = [" ".join(map(str, row)) for row in arrays["generate_prompt_ids"]]
    expected = ["".join(f" {i}" for i in row) for row in arrays["generate_ids"]]
    assert texts(speaker, prompts, arrays["generate_ids"].shape[1])[0] == expected


def spoken(monkeypatch, pieces, prompts, tokens, stop_ids=(0,)):
    """What is said of given ids."""
    monkeypatch.setattr(program, "stream", lambda *args, **kwargs: map(np.asarray, pieces))
    return list(stream_text(Speaker(None, ByteTokenizer(), stop_ids), prompts, tokens, temperature=0))


def test_characters_are_said_when_they_are_whole(monkeypatch):
    first, second = "aé".encode()[:2], "é".encode()[1:] + b"b"
    pieces = [[list(first)], [list(second)], [[0xC3]]]
    assert spoken(monkeypatch, pieces, ["é"], 5) == [["a"], ["éb"], ["\N{REPLACEMENT CHARACTER}"]]
    assert spoken(monkeypatch, pieces, ["é"], 6) == [["a"], ["éb"], [""]]


def test_nothing_is_said_after_a_stop(monkeypatch):
    pieces = [[[97], [98]], [[0, 0], [99, 100]], [[0], [0]]]
    assert spoken(monkeypatch, pieces, ["x", "y"], 9) == [["a", "b"], ["", "cd"], ["", ""]]
    assert spoken(monkeypatch, pieces, ["x", "y"], 9, ())[1] == ["\0\0", "cd"]


def test_stop_ids_are_the_models(released, tmp_path):
    assert ReleasedTokenizer(released).stop_ids == ()
    (tmp_path / "tokenizer.json").write_bytes((released / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert ReleasedTokenizer(tmp_path).stop_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert ReleasedTokenizer(tmp_path).stop_ids == (5, 6)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer.json"):
        ReleasedTokenizer(tmp_path)
    (tmp_path / "tiktoken.model").write_text("")
    with pytest.raises(NotImplementedError, match="holds a tiktoken.model, which is not read here"):
        ReleasedTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizers JSON"):
        ReleasedTokenizer(tmp_path)
    with pytest.raises(ValueError, match="prompt='a 2' is not allowed with tokenizer='ids'"):
        IdTokenizer().encode("a 2")
    with pytest.raises(ValueError, match="prompt='' has no token"):
        stream_text(Speaker(None, ByteTokenizer(), ()), ["a", ""], 3, temperature=0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "either --workdir"),
        (["--workdir=a", "--weights=b"], "either --workdir"),
        (["--workdir=a", "--tokenizer=ids"], "--tokenizer goes with --weights"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments, message):
    values = flags.FlagValues()
    program.define_flags(values)
    values(["", *arguments])
    with pytest.raises(app.UsageError, match=message):
        program.speak(values)
